use super::{Policy, Survey};
use crate::{Mib, NodeGpus, Request};

/// Every place has an equal cost: the order of names and indices decides.
#[derive(Clone, Copy, Debug)]
pub struct FirstFit;

impl Policy for FirstFit {
    fn cost(
        &self,
        _node: &NodeGpus,
        _survey: &Survey,
        _request: &Request,
        _charges: &[(usize, Mib)],
    ) -> (i64, i64) {
        (0, 0)
    }

    fn breaks_ties(&self) -> bool {
        false
    }
}
