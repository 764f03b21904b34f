use crate::{Mib, ModelId, Request};

/// Requests of one kind, and how many pods make them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// Cards.
    pub gpus: u32,
    /// MiB on each; for whole cards the least size.
    pub mib: Mib,
    /// Whole cards.
    pub exclusive: bool,
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory.
    pub ram: Mib,
    /// The models that the pods are bound to; empty for any.
    pub models: Vec<ModelId>,
    /// Number of pods.
    pub pods: usize,
}

impl Class {
    /// The class of `request`, whose pods are bound to `models` unless that is empty. Containers
    /// that run together count as one on each card.
    #[must_use]
    pub fn of(request: &Request, models: Vec<ModelId>, pods: usize) -> Self {
        let gpus = request.claims.iter().map(|claim| claim.gpus);
        Self {
            gpus: gpus.max().unwrap_or(0),
            mib: request.held(|_| true),
            exclusive: request.exclusive,
            cpu_milli: request.cpu_milli,
            ram: request.ram.mib_rounded_up(),
            models,
            pods,
        }
    }

    /// MiB that its pods ask for in all, where a whole card has `whole` MiB on average.
    pub(super) fn asked(&self, whole: f64) -> f64 {
        let mib = self.mib.0 as f64;
        let each = if self.exclusive { mib.max(whole) } else { mib };
        each * f64::from(self.gpus) * self.pods as f64
    }
}
