use super::{Policy, Survey, cost_of};
use crate::{Mib, NodeGpus, Request};

/// Worst fit: the cost is the share of the chosen cards in use afterwards, in millionths summed
/// over the cards, so that pods have as few neighbours as possible.
#[derive(Clone, Copy, Debug)]
pub struct Spread;

impl Policy for Spread {
    fn cost(
        &self,
        node: &NodeGpus,
        survey: &Survey,
        _request: &Request,
        charges: &[(usize, Mib)],
    ) -> (i64, i64) {
        let in_use = charges.iter().map(|&(card, mib)| {
            let card = &node.cards[card];
            let used = card.capacity.minus(card.free) + mib;
            Mib(used.0.saturating_mul(1_000_000) / card.capacity.0.max(1))
        });
        (cost_of(in_use.sum()), -cost_of(survey.free))
    }
}
