//! How much of a card a program uses, from one minute to the next, as a pod was recorded to use it.

use std::sync::Arc;

use crate::advise::{Request, Series};
use crate::random::Random;

/// Milliseconds between two samples.
const SAMPLE_MS: u64 = 60_000;

/// The use of pods, relative to the peak of each.
#[derive(Clone, Debug)]
pub struct Recorded(Arc<[Shape]>);

/// One of them, in millionths of its peak.
#[derive(Debug)]
struct Shape {
    uses: Vec<u64>,
    request: u64,
}

impl Recorded {
    /// The shapes of these series, each of which requests this.
    #[must_use]
    pub fn of(all: &[Series], request: Request) -> Self {
        let shapes = all.iter().map(|series| Shape {
            uses: series.shape(),
            request: series.request(request),
        });
        Self(shapes.collect())
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// What pods request on average, in parts of their peak.
    #[must_use]
    pub fn request(&self) -> f64 {
        let sum: u64 = self.0.iter().map(|shape| shape.request).sum();
        sum as f64 / (self.0.len().max(1) as f64 * 1e6)
    }
}

/// What one program does: what one of the recorded pods did, from some minute on, again and again. It is the same
/// whatever the cluster makes of it.
#[derive(Clone, Debug)]
pub(super) struct Program {
    most: u64,
    all: Recorded,
    which: usize,
    at: usize,
}

impl Program {
    /// The program of this seed, which uses `most` units at most.
    pub(super) fn new(seed: u64, most: u64, all: &Recorded) -> Self {
        let mut random = Random::new(seed);
        let which = random.below(all.0.len());
        Self {
            most,
            at: random.below(all.0[which].uses.len()),
            all: all.clone(),
            which,
        }
    }

    /// Which recorded pod it repeats.
    pub(super) fn which(&self) -> usize {
        self.which
    }

    /// What it requests.
    pub(super) fn request(&self) -> u64 {
        self.of_most(self.shape().request).max(1)
    }

    /// What it holds when it starts, and again when it has given back.
    pub(super) fn level(&self) -> u64 {
        let shape = self.shape();
        self.of_most(shape.uses[self.at].min(shape.request))
    }

    /// Milliseconds until it wants another amount.
    pub(super) fn waits(&self) -> u64 {
        SAMPLE_MS
    }

    /// What it wants from now on.
    pub(super) fn wants(&mut self) -> u64 {
        self.at = (self.at + 1) % self.shape().uses.len();
        self.of_most(self.shape().uses[self.at])
    }

    fn shape(&self) -> &Shape {
        &self.all.0[self.which]
    }

    fn of_most(&self, millionths: u64) -> u64 {
        (u128::from(self.most) * u128::from(millionths) / 1_000_000) as u64
    }
}
