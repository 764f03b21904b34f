//! Series that are drawn: nine days of pods whose use has a pattern. The last day is judged.

use super::{DAY, Fleet};
use crate::random::Random;

/// Workloads of one fleet, with so many pods each.
const WORKLOADS: usize = 8;
const REPLICAS: usize = 4;
const DAYS: usize = 9;

/// The memory that a pod uses in each minute, relative to its usual use.
type Pattern = fn(&Drawn, minute: usize) -> f64;

/// The values drawn for a workload.
struct Drawn {
    /// A minute of the day, and how many minutes a peak lasts.
    begin: usize,
    lasts: usize,
    /// How much more than usual.
    more: f64,
    /// Of the pod among its workload's.
    number: usize,
}

impl Drawn {
    fn peaks(&self, minute: usize) -> f64 {
        let of_day = minute % DAY;
        match (self.begin..self.begin + self.lasts).contains(&of_day) {
            true => 1.0 + self.more,
            false => 1.0,
        }
    }
}

const PATTERNS: [(&str, Pattern); 6] = [
    // 10 to 90 minutes each day.
    ("daily", Drawn::peaks),
    // As above, on two days that are a week apart.
    ("weekly", |it, minute| match minute / DAY % 7 {
        1 => it.peaks(minute),
        _ => 1.0,
    }),
    // 3 to 9 % more each day.
    ("ramp", |it, minute| {
        1.0 + 0.03 * it.more * minute as f64 / DAY as f64
    }),
    // Grows by half or more between restarts, one or two a day.
    ("leak", |it, minute| {
        let life = 720 + 8 * it.lasts;
        1.0 + 0.5 * it.more * ((minute + it.begin) % life) as f64 / life as f64
    }),
    // A version that needs a third more or twice as much, two days before the judged one.
    ("roll-out", |it, minute| match minute / DAY {
        0..=5 => 1.0,
        _ => 1.0 + it.more / 3.0,
    }),
    // One replica of four needs twice to four times as much.
    ("unequal", |it, _| match it.number {
        0 => 1.0 + it.more,
        _ => 1.0,
    }),
];

/// A fleet of each pattern.
#[must_use]
pub fn fleets(seed: u64) -> Vec<Fleet> {
    let mut random = Random::new(seed);
    let made = PATTERNS.iter().map(|(name, pattern)| {
        let mut pods = Vec::new();
        for _ in 0..WORKLOADS {
            let usual = 4096.0 + random.unit() * 8192.0;
            let (begin, lasts) = (random.below(DAY - 90), 10 + random.below(81));
            let more = 1.0 + 2.0 * random.unit();
            for number in 0..REPLICAS {
                let drawn = Drawn {
                    begin,
                    lasts,
                    more,
                    number,
                };
                let used = (0..DAYS * DAY).map(|minute| {
                    let noise = 0.97 + 0.06 * random.unit();
                    (usual * pattern(&drawn, minute) * noise) as u64
                });
                pods.push(used.collect());
            }
        }
        Fleet {
            name,
            pods,
            turns: false,
        }
    });
    made.collect()
}
