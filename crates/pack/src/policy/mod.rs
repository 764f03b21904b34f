//! Where a pod should go among the places where it fits: one small file per policy.

mod binpack;
mod first_fit;
mod spread;
mod tight;

use std::fmt;
use std::str::FromStr;

use crate::{Mib, NodeGpus, Request};

pub use binpack::Binpack;
pub use first_fit::FirstFit;
pub use spread::Spread;
pub use tight::{Class, Tight};

/// The cost of a placement: the lowest wins, on a node and between nodes. Fewer cards come first, then the cost of the
/// policy, then the closeness of the cards, then the lent memory there. The card index, then the node name, decides
/// between equal costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Cards that the pod uses: its containers share a card where they fit.
    pub cards: u16,
    /// The cost of the policy; the second number breaks ties of the first.
    pub policy: (i64, i64),
    /// How far the pod's cards are from each other, from [`crate::Links`]; 0 for one card.
    pub apart: u32,
    /// The pods' use of the memory of these cards: see [`crate::Lending`].
    pub lending: u16,
}

/// A policy's view of a node before anything is put there: one view for all placements on it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Survey {
    /// Free MiB on all usable cards.
    free: Mib,
    tight: tight::Before,
}

/// A rule that rates a placement.
pub trait Policy {
    /// Looks at a node once, for all the placements on it that are to be compared.
    fn survey(&self, node: &NodeGpus) -> Survey {
        Survey {
            free: node.free(),
            tight: tight::Before::default(),
        }
    }

    /// The cost of putting `charges` (card index, MiB; ascending, each card once) on `node`, which
    /// [`Policy::survey`] saw.
    fn cost(
        &self,
        node: &NodeGpus,
        survey: &Survey,
        request: &Request,
        charges: &[(usize, Mib)],
    ) -> (i64, i64);

    /// Whether links, and lent memory, decide where this rule leaves a choice.
    fn breaks_ties(&self) -> bool {
        true
    }
}

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKind {
    /// The least loss of resources that other pods could use.
    #[default]
    Tight,
    /// Least memory left over on the chosen cards.
    Binpack,
    /// Least share of the chosen cards in use.
    Spread,
    /// The first node by name and the first cards by index.
    FirstFit,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Tight, Self::Binpack, Self::Spread, Self::FirstFit];

    /// The name that flags and annotations use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tight => "tight",
            Self::Binpack => "binpack",
            Self::Spread => "spread",
            Self::FirstFit => "first-fit",
        }
    }

    /// Its criterion, in a few words.
    #[must_use]
    pub fn rule(self) -> &'static str {
        match self {
            Self::Tight => "waste the least memory",
            Self::Binpack => "leave the least free",
            Self::Spread => "have the fewest neighbours",
            Self::FirstFit => "the first with room",
        }
    }

    /// The policy; `tight` has the learnt values of [`Tight`].
    #[must_use]
    pub fn with(self, tight: &Tight) -> &dyn Policy {
        match self {
            Self::Tight => tight,
            Self::Binpack => &Binpack,
            Self::Spread => &Spread,
            Self::FirstFit => &FirstFit,
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no policy has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPolicy(pub String);

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown policy {:?}: use one of", self.0)?;
        PolicyKind::ALL
            .iter()
            .try_for_each(|policy| write!(f, " {policy}"))
    }
}

impl std::error::Error for UnknownPolicy {}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// A MiB amount on the cost scale.
pub(crate) fn cost_of(mib: Mib) -> i64 {
    i64::try_from(mib.0).unwrap_or(i64::MAX)
}
