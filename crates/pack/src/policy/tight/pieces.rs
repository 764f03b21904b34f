//! The use and the waste of a free piece of a card.

use super::Class;
use super::prices::{UNITS, worth};

/// How much of a piece's size counts as waste by the share of pods that cannot use it. Prices alone do not distinguish
/// a card that was opened and filled from one that was never opened.
const USELESS: f64 = 0.1;

/// The pieces of cards of one size.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pieces {
    /// MiB of a whole card.
    pub(super) capacity: u64,
    units_per_mib: f64,
    /// MiB of a piece that no pod is expected to use, by size in units.
    waste: Vec<f64>,
    /// The smallest piece that is worth something, in units.
    least: usize,
}

impl Pieces {
    pub(super) fn new(capacity: u64, mix: &[Class]) -> Self {
        let units_per_mib = UNITS as f64 / capacity.max(1) as f64;
        let unit = |mib: u64| unit(mib, units_per_mib);
        let needs = |class: &Class| match class.exclusive {
            true => UNITS,
            false => unit(class.mib.0),
        };
        let mut orders: Vec<(usize, f64)> = Vec::new();
        for class in mix.iter().filter(|class| class.mib.0 <= capacity) {
            let demand = class.pods as f64 * f64::from(class.gpus);
            match orders.iter_mut().find(|(size, _)| *size == needs(class)) {
                Some((_, sum)) => *sum += demand,
                None => orders.push((needs(class), demand)),
            }
        }
        let worth = worth(orders);
        let narrow = || mix.iter().filter(|class| class.gpus == 1);
        let pods = |of: &dyn Fn(&&Class) -> bool| -> f64 {
            narrow().filter(of).map(|class| class.pods as f64).sum()
        };
        let all = pods(&|_| true).max(1.0);
        let waste = worth.iter().enumerate().map(|(piece, worth)| {
            let size = capacity as f64 * piece as f64 / UNITS as f64;
            let useless = pods(&|class| needs(class) > piece) / all;
            size * (1.0 + USELESS * useless) - capacity as f64 * worth
        });
        Self {
            capacity,
            units_per_mib,
            waste: waste.collect(),
            least: worth.iter().position(|&worth| worth > 0.0).unwrap_or(UNITS),
        }
    }

    fn unit(&self, mib: u64) -> usize {
        unit(mib, self.units_per_mib)
    }

    /// MiB of a piece that no pod is expected to use; negative if it is worth more than its size.
    pub(super) fn waste(&self, mib: u64) -> f64 {
        self.waste[self.unit(mib)]
    }

    /// The useful part of a piece: all of it if it is worth something.
    pub(super) fn useful(&self, mib: u64) -> f64 {
        if self.unit(mib) >= self.least {
            mib as f64
        } else {
            0.0
        }
    }
}

fn unit(mib: u64, units_per_mib: f64) -> usize {
    ((mib as f64 * units_per_mib + 0.5) as usize).min(UNITS)
}
