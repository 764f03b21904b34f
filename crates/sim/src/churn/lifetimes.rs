//! How long pods run.

use std::f64::consts::TAU;

use clap::ValueEnum;

use crate::random::Random;

/// The mean run time in milliseconds. Waiting times scale with it.
pub(super) const MEAN_MS: u64 = 3_600_000;
/// Of the logarithm, for the log-normal distribution: three pods in a hundred run for more than four
/// times the mean.
const SIGMA: f64 = 1.0;

/// The distribution of run times, all with the mean of an hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Lifetimes {
    /// What is running ends at the same rate whatever its age
    #[default]
    Exponential,
    /// Many short ones and a few very long ones
    LogNormal,
}

impl Lifetimes {
    /// Milliseconds that a pod runs for.
    pub fn whole(self, random: &mut Random) -> u64 {
        milliseconds(match self {
            Self::Exponential => random.exponential(),
            Self::LogNormal => (SIGMA * normal(random) - SIGMA * SIGMA / 2.0).exp(),
        })
    }

    /// Milliseconds that a pod which is found running at any moment still runs for.
    pub fn rest(self, random: &mut Random) -> u64 {
        milliseconds(match self {
            Self::Exponential => random.exponential(),
            // Long ones are found more often, in the measure of their length.
            Self::LogNormal => random.unit() * (SIGMA * normal(random) + SIGMA * SIGMA / 2.0).exp(),
        })
    }
}

fn milliseconds(means: f64) -> u64 {
    (means * MEAN_MS as f64).round().max(1.0) as u64
}

fn normal(random: &mut Random) -> f64 {
    (2.0 * random.exponential()).sqrt() * (TAU * random.unit()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Means over many draws: an hour for a whole life, and for the rest of one that is found
    /// running half the mean square over the mean.
    #[test]
    fn means_are_as_announced() {
        let mean = |of: &dyn Fn(&mut Random) -> u64| {
            let mut random = Random::new(1);
            let draws = 200_000_u32;
            let sum: f64 = (0..draws).map(|_| of(&mut random) as f64).sum();
            sum / f64::from(draws) / MEAN_MS as f64
        };
        for lifetimes in [Lifetimes::Exponential, Lifetimes::LogNormal] {
            let whole = mean(&|random| lifetimes.whole(random));
            assert!((whole - 1.0).abs() < 0.02, "{lifetimes:?} {whole}");
        }
        let rest = mean(&|random| Lifetimes::Exponential.rest(random));
        assert!((rest - 1.0).abs() < 0.02, "{rest}");
        let rest = mean(&|random| Lifetimes::LogNormal.rest(random));
        assert!((rest - 1.0_f64.exp() / 2.0).abs() < 0.04, "{rest}");
    }
}
