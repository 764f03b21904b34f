use super::{Policy, Survey, cost_of};
use crate::{Mib, NodeGpus, Request};

/// Best fit: the cost is the memory that stays free on the chosen cards. Full cards get fuller, and empty ones stay
/// whole for large requests.
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
