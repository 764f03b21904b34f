//! What the node's capacity should say: enough for every pod that its kubelet would judge again when it
//! starts, and to kube-scheduler no more and no less room than the present cards have.

use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_pack::Mib;

use crate::pods::NodePods;
use crate::state::MAX_CARD;

/// Cards by UUID, and what pods may hold of each.
pub type Cards = BTreeMap<String, Mib>;

/// A report has no more cards, and no card has more memory.
const MAX_CAPACITY: Mib = Mib(256 * MAX_CARD.0);

/// The node's capacity: what `cards` hold, and what kubelets and kube-scheduler subtract from it
/// although it is on none of them. That is what pods were assigned on other cards or beyond a card's
/// size, from their Binding on, and what pods without an assignment ask for, once their kubelet has
/// accepted them. No such pod counts for more than all that the node has; but what a kubelet has
/// accepted is never too much in all, as it would reject it when it starts.
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
    /// The cards that count; none if it is unknown what the node's capacity came from.
    cards: Option<Cards>,
    less_since: Option<Duration>,
}

impl Capacity {
    /// Fewer cards count once they have been fewer for this long. `before` is what an earlier agent
    /// reported.
    #[must_use]
    pub fn new(shrink_after: Duration, before: Option<Cards>) -> Self {
        Self {
            shrink_after,
            cards: before,
            less_since: None,
        }
    }

    /// What to write, if anything: `present` is what the node says now. Before less is written, see
    /// whether [`Self::now`] says the same of a consistent list of the node's pods.
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

    /// What the capacity should be with these pods; none while it is to be left alone.
    #[must_use]
    pub fn now(&self, pods: &NodePods) -> Option<Mib> {
        Some(capacity(self.cards.as_ref()?, pods))
    }
}
