//! The GPU memory that the node should have as its capacity. It is enough for every pod that the kubelet judges again
//! when it starts. With it, kube-scheduler sees exactly the room that the present cards have.

use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_pack::Mib;

use crate::pods::NodePods;
use crate::state::MAX_CARD;

/// Cards by UUID, and the memory of each that pods may hold.
pub type Cards = BTreeMap<String, Mib>;

/// The most memory that one report can have: 256 cards of the largest size.
const MAX_CAPACITY: Mib = Mib(256 * MAX_CARD.0);

/// The node's capacity. It is the memory of `cards`, and the memory that kubelets and kube-scheduler subtract although
/// it is on none of them. A pod's assignment on other cards, or beyond a card's size, counts from its Binding on. The
/// request of a pod without an assignment counts once its kubelet has accepted the pod. No such pod counts for more
/// than the memory of the whole node. But the capacity is at least the sum of accepted requests: the kubelet would
/// otherwise reject these pods when it starts.
#[must_use]
pub fn capacity(cards: &Cards, pods: &NodePods) -> Mib {
    let (mut held, mut accepted) = (BTreeMap::<&str, Mib>::new(), Mib::ZERO);
    for pod in pods.iter().filter(|pod| !pod.facts.released) {
        for (uuid, mib) in pod.charges() {
            let held = held.entry(uuid).or_default();
            // A pod with whole cards is charged for more than others subtract for it.
            *held = *held + mib.min(pod.requested);
        }
        if pod.accepted {
            accepted = accepted + pod.requested;
        }
    }
    let beyond = held.into_iter().map(|(uuid, held)| {
        let card = cards.get(uuid).copied().unwrap_or_default();
        held.minus(card)
    });
    let hardware: Mib = beyond.chain(cards.values().copied()).sum();
    let strays = pods
        .iter()
        .filter(|pod| !pod.facts.released && pod.accepted && pod.facts.assignment.is_none());
    let strays = strays.map(|pod| pod.requested.min(hardware));
    let counted: Mib = strays.chain([hardware]).sum();
    counted.max(accepted).min(MAX_CAPACITY)
}

fn all(cards: &Cards) -> Mib {
    cards.values().copied().sum()
}

/// Decides when the capacity of the node is to be written. Fewer cards count late: a driver that is
/// loaded again shows none for a while.
#[derive(Clone, Debug)]
pub struct Capacity {
    shrink_after: Duration,
    /// The cards that count; none if the origin of the node's capacity is unknown.
    cards: Option<Cards>,
    less_since: Option<Duration>,
}

impl Capacity {
    /// Fewer cards count once they have been fewer for `shrink_after`. `before` has the cards that an earlier agent
    /// reported.
    #[must_use]
    pub fn new(shrink_after: Duration, before: Option<Cards>) -> Self {
        Self {
            shrink_after,
            cards: before,
            less_since: None,
        }
    }

    /// The capacity to write, if it must change; `present` is the node's capacity now. Before the caller writes less,
    /// it must compute [`Self::now`] with a consistent list of the node's pods.
    pub fn decide(
        &mut self,
        cards: &Cards,
        pods: &NodePods,
        present: Option<Mib>,
        now: Duration,
    ) -> Option<Mib> {
        let fewer = match &self.cards {
            Some(known) => all(cards) < all(known),
            None => present.is_some_and(|present| capacity(cards, pods) < present),
        };
        let since = fewer.then(|| *self.less_since.get_or_insert(now));
        if since.is_none_or(|since| now.saturating_sub(since) >= self.shrink_after) {
            self.less_since = None;
            self.cards = Some(cards.clone());
        }
        let wanted = self.now(pods)?;
        match present {
            // A driver that cannot be read on a node that never had cards is no reason to write.
            None if wanted == Mib::ZERO => None,
            Some(present) if present == wanted => None,
            _ => Some(wanted),
        }
    }

    /// The capacity that the node should have with these pods; none while the agent must not change it.
    #[must_use]
    pub fn now(&self, pods: &NodePods) -> Option<Mib> {
        Some(capacity(self.cards.as_ref()?, pods))
    }
}
