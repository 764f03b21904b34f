//! How much of a card a program uses, from one moment to the next. No published trace has that for cards which
//! pods share, so the numbers here are assumed: a level that it always holds, and bursts above it.

use crate::random::Random;

/// The level, in parts of what the pod may use at most: even between these.
const LEVEL: (f64, f64) = (0.15, 0.45);
/// The height of a burst, likewise.
const BURST: (f64, f64) = (0.45, 1.0);
/// Milliseconds from the end of one burst to the next, and that one lasts: means of exponential distributions.
const APART_MS: f64 = 1_800_000.0;
const LASTS_MS: f64 = 300_000.0;

/// What one program does. It is the same whatever the cluster makes of it.
#[derive(Clone, Debug)]
pub(super) struct Program {
    random: Random,
    most: u64,
    level: u64,
    bursts: bool,
}

impl Program {
    /// The program of this seed, which uses `most` units at most.
    pub(super) fn new(seed: u64, most: u64) -> Self {
        let mut random = Random::new(seed);
        let level = part(between(LEVEL, &mut random), most);
        Self {
            random,
            most,
            level,
            bursts: false,
        }
    }

    /// What it holds between bursts.
    pub(super) fn level(&self) -> u64 {
        self.level
    }

    /// Milliseconds until it wants another amount.
    pub(super) fn waits(&mut self) -> u64 {
        let mean = if self.bursts { LASTS_MS } else { APART_MS };
        (mean * self.random.exponential()).round().max(1.0) as u64
    }

    /// What it wants from now on.
    pub(super) fn wants(&mut self) -> u64 {
        self.bursts = !self.bursts;
        match self.bursts {
            true => part(between(BURST, &mut self.random), self.most),
            false => self.level,
        }
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
            let mut program = Program::new(seed, 800);
            assert!((120..=360).contains(&program.level()), "{program:?}");
            for _ in 0..10 {
                let burst = program.wants();
                assert!((360..=800).contains(&burst), "{burst}");
                assert_eq!(program.wants(), program.level());
            }
        }
    }
}
