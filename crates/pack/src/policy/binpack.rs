use super::{Policy, Survey, cost_of};
use crate::{Mib, NodeGpus, Request};

/// Best fit: the cost is what stays free on the chosen cards, so that full cards get fuller and
/// empty ones stay whole for large requests.
#[derive(Clone, Copy, Debug)]
pub struct Binpack;

impl Policy for Binpack {
    fn cost(
        &self,
        node: &NodeGpus,
        survey: &Survey,
        _request: &Request,
        charges: &[(usize, Mib)],
    ) -> (i64, i64) {
        let left = charges
            .iter()
            .map(|&(card, mib)| node.cards[card].free.minus(mib))
            .sum();
        (cost_of(left), cost_of(survey.free))
    }
}
