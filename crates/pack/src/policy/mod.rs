//! Where a pod should go among the places where it fits: one small file per policy.

mod binpack;
mod first_fit;
mod spread;

use std::fmt;
use std::str::FromStr;

use crate::{Mib, NodeGpus};

pub use binpack::Binpack;
pub use first_fit::FirstFit;
pub use spread::Spread;

/// What a placement costs: the lowest wins, on a node and between nodes. The second number breaks
/// ties of the first; what is still equal is decided by card index, then by node name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(pub i64, pub i64);

/// A rule that says how good a placement is.
pub trait Policy {
    /// The cost of putting `charges` (card index, MiB; ascending, each card once) on `node`.
    fn cost(&self, node: &NodeGpus, charges: &[(usize, Mib)]) -> Cost;
}

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKind {
    /// Least memory left over on the chosen cards.
    #[default]
    Binpack,
    /// Least share of the chosen cards in use.
    Spread,
    /// The first node by name and the first cards by index.
    FirstFit,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Binpack, Self::Spread, Self::FirstFit];

    /// The name that flags and annotations use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Binpack => "binpack",
            Self::Spread => "spread",
            Self::FirstFit => "first-fit",
        }
    }
}

impl Policy for PolicyKind {
    fn cost(&self, node: &NodeGpus, charges: &[(usize, Mib)]) -> Cost {
        match self {
            Self::Binpack => Binpack.cost(node, charges),
            Self::Spread => Spread.cost(node, charges),
            Self::FirstFit => FirstFit.cost(node, charges),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A policy name that nobody has.
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
fn cost_of(mib: Mib) -> i64 {
    i64::try_from(mib.0).unwrap_or(i64::MAX)
}
