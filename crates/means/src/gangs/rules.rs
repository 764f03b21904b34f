//! Seats of pods with rules about the GPUs that they may get, and the pods with which they share a GPU.

use gpustow_api::PodFacts;
use gpustow_books::Node;
use gpustow_pack::Rules;

use super::Seat;
use crate::sight::Sight;

impl Sight<'_> {
    /// Do the rules of the pod allow its seat? For the pods of its gang the plan has seen to that.
    pub(super) fn allow(&self, rules: &Rules, seat: &Seat, pod: &PodFacts, node: &Node) -> bool {
        let group = rules.affinity.as_ref();
        if group.is_some_and(|group| self.books.is_group_elsewhere(group, &seat.node, |_| false)) {
            return false;
        }
        let of_gang = |uid: &str| self.books.pod(uid).is_some_and(|it| it.group == pod.group);
        let traits = node.traits(of_gang);
        let begun = traits.iter().any(|card| rules.shares_with(card));
        let allows = |card: usize| {
            let card = traits.get(card);
            card.is_some_and(|card| rules.selects(card) && rules.suits(card, begun))
        };
        let mut cards = seat.choice.placement.charges.iter();
        cards.all(|(card, _)| allows(*card))
    }
}
