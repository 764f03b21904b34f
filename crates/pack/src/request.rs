//! The request of a pod.

use std::fmt;
use std::sync::Arc;

use crate::{Bytes, Card, Lending, Mib, NodeGpus, PolicyKind, Rules};

/// When a container holds its share, by Kubernetes' rule for init containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClaimKind {
    /// A regular container: holds its share for the pod's whole life.
    Main,
    /// An init container: holds its share until it ends, together with the sidecars declared before it.
    Init,
    /// An init container that restarts always: holds its share from its start on.
    Sidecar,
}

/// One container's wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// When the share is held.
    pub kind: ClaimKind,
    /// On how many cards, at least one.
    pub gpus: u32,
    /// MiB on each of them; for an exclusive request, the least capacity of each; for a percentage, the least that it
    /// comes to.
    pub mib: Mib,
    /// Hundredths of each of them; zero if MiB alone count.
    pub percentage: u8,
    /// MiB of each of them to which the driver must hold it; zero if it need not.
    pub driver_limit: Mib,
}

impl Claim {
    /// One that the driver need not hold to anything.
    #[must_use]
    pub const fn new(kind: ClaimKind, gpus: u32, mib: Mib) -> Self {
        Self {
            kind,
            gpus,
            mib,
            percentage: 0,
            driver_limit: Mib::ZERO,
        }
    }

    /// MiB on a card of this capacity, rounded down, so that hundredths never come to more than the card.
    #[must_use]
    pub fn on(&self, capacity: Mib) -> Mib {
        let part = capacity.0.saturating_mul(self.percentage.into()) / 100;
        self.mib.max(Mib(part))
    }

    /// MiB on all of its cards together.
    #[must_use]
    pub fn in_sum(&self) -> Mib {
        Mib(self.mib.0.saturating_mul(self.gpus.into()))
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.percentage, self.gpus) {
            (0, ..=1) => write!(f, "{}", self.mib),
            (0, gpus) => write!(f, "{} on each of {gpus} GPUs", self.mib),
            (part, ..=1) => write!(f, "{part} % of a GPU, at least {}", self.mib),
            (part, gpus) => write!(
                f,
                "{part} % of each of {gpus} GPUs, at least {} on each",
                self.mib
            ),
        }
    }
}

/// A pod's wish: the containers that ask for GPU memory, init containers first, both in the order
/// in which the pod declares them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Request {
    /// One entry per asking container.
    pub claims: Vec<Claim>,
    /// Whole cards: no other pod on them, and all of each is charged.
    pub exclusive: bool,
    /// A container may use more of a card than is promised to it, while that is free.
    pub bursts: bool,
    /// Hundredths of the compute of each of its cards; zero if it asks for none.
    pub compute: u8,
    /// A MIG instance of its own, which is made for it. Such a request has one claim of one card.
    pub isolated: bool,
    /// No other pod starts on its cards while it does.
    pub alone: bool,
    /// The rules for the cards that the pod may get, if it has any.
    pub rules: Option<Arc<Rules>>,
    /// The policy that the pod names, if any.
    pub policy: Option<PolicyKind>,
    /// CPU that the pod asks for, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory that the pod asks for. A policy counts the MiB that hold it.
    pub ram: Bytes,
}

impl Request {
    /// True if no container asks for GPU memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// The limit that the driver must be able to hold on every card of this request: the highest of its
    /// containers'. Zero if it need hold none.
    #[must_use]
    pub fn limit(&self) -> Mib {
        let limits = self.claims.iter().map(|claim| claim.driver_limit);
        limits.max().unwrap_or_default()
    }

    /// How much stands against these cards where nothing else does. For a pod that may use more than is promised, it is
    /// the memory that is likely to be in use. For other pods, it is the lent memory, since that has to be reclaimed
    /// should they want it.
    pub(crate) fn lending(&self, cards: &[Card], chosen: impl Iterator<Item = usize>) -> u16 {
        let of = |index: usize| {
            let Lending { used, lent } = cards[index].lending;
            u16::from(if self.bursts { used } else { lent })
        };
        chosen.map(of).fold(0, u16::saturating_add)
    }

    /// May this card take something of this request, and how much at most? For whole cards that is all of it or
    /// nothing; for an instance, the charge of the largest that can be made now.
    #[must_use]
    pub fn room(&self, card: &Card) -> Option<Mib> {
        let whole = card.free == card.capacity;
        let may = card.usable && (whole || !self.exclusive) && self.limit() <= card.limit;
        let may = may && card.compute.has(self.compute) && self.isolated == card.slices.is_some();
        let may = may && card.starts.take(self.alone);
        may.then(|| match &card.slices {
            Some(slices) => slices.largest(),
            None => card.free,
        })
    }

    /// True if a container asks for a part of its cards, whatever their size.
    #[must_use]
    pub fn is_relative(&self) -> bool {
        self.claims.iter().any(|claim| claim.percentage > 0)
    }

    /// The request as it is on cards of this capacity.
    #[must_use]
    pub fn on(&self, capacity: Mib) -> Self {
        let mut request = self.clone();
        for claim in &mut request.claims {
            (claim.mib, claim.percentage) = (claim.on(capacity), 0);
        }
        request
    }

    /// May this card take its part of this claim of the request?
    pub(crate) fn may_take(&self, card: &Card, claim: &Claim) -> bool {
        let room = self.room(card);
        room.is_some_and(|room| match &card.slices {
            Some(slices) => slices.may_hold(claim.mib),
            None => claim.on(card.capacity) <= room,
        })
    }

    /// Are there enough cards that may take their part of this claim?
    pub(crate) fn has_cards(&self, claim: &Claim, cards: impl Iterator<Item = Card>) -> bool {
        let wanted = claim.gpus as usize;
        let may = cards.filter(|card| self.may_take(card, claim));
        may.take(wanted).count() == wanted
    }

    /// The claim that wants most on one card.
    #[must_use]
    pub fn hardest(&self) -> Option<&Claim> {
        self.claims.iter().max_by_key(|claim| claim.mib)
    }

    /// MiB that it needs on one card at least; 0 for a percentage.
    #[must_use]
    pub fn least(&self) -> Mib {
        let hardest = self.hardest().map(|claim| claim.mib);
        hardest.unwrap_or_default()
    }

    /// False if this request certainly does not fit on the node, at far less cost than [`fit()`](crate::fit()).
    #[must_use]
    pub fn may_fit(&self, node: &NodeGpus) -> bool {
        let hardest = self.hardest();
        hardest.is_none_or(|claim| self.has_cards(claim, node.cards.iter().copied()))
    }

    /// The charge of a card that holds `held` of this request.
    pub(crate) fn charge(&self, card: &Card, held: Mib) -> Mib {
        match self.exclusive {
            true => card.capacity,
            false => held,
        }
    }

    /// The most MiB that a card holds at once for the claims that `on_card` selects: the sum of
    /// regular containers and sidecars, or an init container with the sidecars before it,
    /// whichever is larger.
    pub(crate) fn held(&self, on_card: impl Fn(usize) -> bool) -> Mib {
        let claims = self.claims.iter().enumerate();
        let held = claims.filter(|(index, _)| on_card(*index));
        at_once(held.map(|(_, claim)| (claim.kind, claim.mib)))
    }

    /// The GPU memory that kube-scheduler counts for it in a node's sum: for whole cards, too, the requested amount.
    #[must_use]
    pub fn in_sum(&self) -> Mib {
        at_once(self.claims.iter().map(|claim| (claim.kind, claim.in_sum())))
    }
}

/// The most that containers hold at once, by Kubernetes' rule.
fn at_once(shares: impl Iterator<Item = (ClaimKind, Mib)>) -> Mib {
    let (mut sidecars, mut mains, mut peak) = (Mib::ZERO, Mib::ZERO, Mib::ZERO);
    for (kind, mib) in shares {
        match kind {
            ClaimKind::Init => peak = peak.max(sidecars + mib),
            ClaimKind::Sidecar => sidecars = sidecars + mib,
            ClaimKind::Main => mains = mains + mib,
        }
    }
    peak.max(sidecars + mains)
}
