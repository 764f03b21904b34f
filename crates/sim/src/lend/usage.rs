//! How much of a card a program uses, from one moment to the next: as recorded ([`Recorded`]), or drawn. What is drawn
//! is assumed: a level that the program always holds, and bursts above it.

use std::sync::Arc;

use crate::advise::Series;
use crate::random::Random;

/// The level, in parts of what the pod may use at most: even between these.
const LEVEL: (f64, f64) = (0.15, 0.45);
/// The height of a burst, likewise.
const BURST: (f64, f64) = (0.45, 1.0);
/// Milliseconds from the end of one burst to the next, and that one lasts: means of exponential distributions.
const APART_MS: f64 = 1_800_000.0;
const LASTS_MS: f64 = 300_000.0;
/// Milliseconds between two samples of a recorded program.
const SAMPLE_MS: u64 = 60_000;

/// The use of real pods, relative to the peak of each.
#[derive(Clone, Debug)]
pub struct Recorded(Arc<[Shape]>);

/// One of them, in millionths of its peak.
#[derive(Debug)]
struct Shape {
    uses: Vec<u64>,
    /// What advice from all of it says at p95.
    advised: u64,
}

impl Recorded {
    /// The shapes of these series.
    #[must_use]
    pub fn of(all: &[Series]) -> Self {
        let shapes = all.iter().map(|series| Shape {
            uses: series.shape(),
            advised: series.advised(),
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
        let sum: u64 = self.0.iter().map(|shape| shape.advised).sum();
        sum as f64 / (self.0.len().max(1) as f64 * 1e6)
    }
}

/// What one program does. It is the same whatever the cluster makes of it.
#[derive(Clone, Debug)]
pub(super) struct Program {
    most: u64,
    does: Does,
}

#[derive(Clone, Debug)]
enum Does {
    /// A level and bursts above it.
    Bursts {
        random: Random,
        level: u64,
        bursts: bool,
    },
    /// What one of the recorded pods did, from some minute on, again and again.
    Repeats {
        all: Recorded,
        which: usize,
        at: usize,
    },
}

impl Program {
    /// The program of this seed, which uses `most` units at most: drawn, or one of those recorded.
    pub(super) fn new(seed: u64, most: u64, recorded: Option<&Recorded>) -> Self {
        let mut random = Random::new(seed);
        let does = match recorded.filter(|all| !all.0.is_empty()) {
            None => Does::Bursts {
                level: part(between(LEVEL, &mut random), most),
                random,
                bursts: false,
            },
            Some(all) => {
                let which = random.below(all.0.len());
                Does::Repeats {
                    at: random.below(all.0[which].uses.len()),
                    all: all.clone(),
                    which,
                }
            }
        };
        Self { most, does }
    }

    /// Which recorded pod it repeats, and what is advised for it.
    pub(super) fn advised(&self) -> Option<(usize, u64)> {
        match &self.does {
            Does::Bursts { .. } => None,
            Does::Repeats { all, which, .. } => {
                Some((*which, self.of_most(all.0[*which].advised).max(1)))
            }
        }
    }

    /// What it holds when it starts, and again when it has given back.
    pub(super) fn level(&self) -> u64 {
        match &self.does {
            Does::Bursts { level, .. } => *level,
            Does::Repeats { all, which, at } => {
                let shape = &all.0[*which];
                self.of_most(shape.uses[*at].min(shape.advised))
            }
        }
    }

    /// Milliseconds until it wants another amount.
    pub(super) fn waits(&mut self) -> u64 {
        match &mut self.does {
            Does::Bursts { random, bursts, .. } => {
                let mean = if *bursts { LASTS_MS } else { APART_MS };
                (mean * random.exponential()).round().max(1.0) as u64
            }
            Does::Repeats { .. } => SAMPLE_MS,
        }
    }

    /// What it wants from now on.
    pub(super) fn wants(&mut self) -> u64 {
        match &mut self.does {
            Does::Bursts {
                random,
                level,
                bursts,
            } => {
                *bursts = !*bursts;
                match bursts {
                    true => part(between(BURST, random), self.most),
                    false => *level,
                }
            }
            Does::Repeats { all, which, at } => {
                let uses = &all.0[*which].uses;
                *at = (*at + 1) % uses.len();
                let wants = uses[*at];
                self.of_most(wants)
            }
        }
    }

    fn of_most(&self, millionths: u64) -> u64 {
        (u128::from(self.most) * u128::from(millionths) / 1_000_000) as u64
    }
}

fn between((low, high): (f64, f64), random: &mut Random) -> f64 {
    low + (high - low) * random.unit()
}

fn part(part: f64, of: u64) -> u64 {
    (part * of as f64).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_never_wants_more_than_its_most_and_comes_back_to_its_level() {
        for seed in 0..1000 {
            let mut program = Program::new(seed, 800, None);
            assert!((120..=360).contains(&program.level()), "{program:?}");
            for _ in 0..10 {
                let burst = program.wants();
                assert!((360..=800).contains(&burst), "{burst}");
                assert_eq!(program.wants(), program.level());
            }
        }
    }
}
