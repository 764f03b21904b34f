//! The histogram of a workload's use.

use std::collections::BTreeMap;

use gpustow_pack::Mib;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Seconds in which a weight falls by half.
const HALF_LIFE: f64 = 86_400.0;
/// The upper edge of the first bucket, in MiB.
const FIRST: f64 = 64.0;
/// How much larger each next edge is. An amount is taken for its bucket's edge: too large by 2.5 % at most.
const RATIO: f64 = 1.025;
/// Numbers of a history at most. The last edge is beyond 300 GiB; what is larger counts there.
pub const BUCKETS: usize = 352;
/// Weights are scaled down before they leave the range in which sums are exact.
const MOST_HALVINGS: f64 = 64.0;
/// A checkpoint's largest weight: what is less than a part of it is forgotten.
const WHOLE: f64 = 1_000_000.0;

/// How much of a GPU a workload used in each minute, the older the less it counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Weight of each bucket that has one, relative to a sample at `reference`; empty as long as there is no sample.
    weights: BTreeMap<u16, f64>,
    reference: i64,
    first: i64,
    last: i64,
    samples: u64,
    peak: Mib,
}

/// A histogram of the GPU memory that was used in each minute: whole numbers alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// Weight of each bucket, in millionths of the heaviest, without those that weigh nothing. Bucket `n` ends at
    /// 64 MiB × 1.025ⁿ.
    #[schemars(with = "BTreeMap<String, u32>", extend("maxProperties" = BUCKETS))]
    pub buckets: BTreeMap<u16, u32>,
    /// The weight of all samples, in millionths of a sample that is added at `last`.
    pub total: u64,
    /// When the first sample was taken, in seconds since 1970.
    pub first: i64,
    /// When the last sample was taken, in seconds since 1970.
    pub last: i64,
    /// How many samples there were.
    pub samples: u64,
    /// The largest sample, in MiB.
    #[serde(rename = "peakMiB")]
    pub peak_mib: u64,
}

impl History {
    /// Adds the most that the workload used of one GPU within a minute. Samples may come late, but not twice.
    pub fn add(&mut self, peak: Mib, at: i64) {
        if self.weights.is_empty() {
            (self.reference, self.first, self.last) = (at, at, at);
        }
        if self.halvings(at) > MOST_HALVINGS {
            self.refer_to(at);
        }
        let weight = self.halvings(at).exp2();
        *self.weights.entry(bucket(peak)).or_default() += weight;
        self.first = self.first.min(at);
        self.last = self.last.max(at);
        self.samples = self.samples.saturating_add(1);
        self.peak = self.peak.max(peak);
    }

    /// The amount that the workload exceeds in no more than `1000 - permille` of a thousand minutes: the upper edge of
    /// its bucket, and no more than the largest sample. None without a sample.
    #[must_use]
    pub fn quantile(&self, permille: u32) -> Option<Mib> {
        let total: f64 = self.weights.values().sum();
        let wanted = total * f64::from(permille.min(1000)) / 1000.0;
        let mut sum = 0.0;
        let found = self.weights.iter().find(|(_, weight)| {
            sum += **weight;
            **weight > 0.0 && sum >= wanted * (1.0 - 1e-9)
        });
        found.map(|(bucket, _)| edge(*bucket).min(self.peak))
    }

    /// The largest sample.
    #[must_use]
    pub fn peak(&self) -> Mib {
        self.peak
    }

    /// How many samples there were.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// When the last sample was taken, in seconds since 1970.
    #[must_use]
    pub fn last(&self) -> i64 {
        self.last
    }

    /// Seconds between the first sample and the last.
    #[must_use]
    pub fn spans(&self) -> u64 {
        u64::try_from(self.last.saturating_sub(self.first)).unwrap_or(0)
    }

    /// The history as it is stored.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        let heaviest = self.weights.values().copied().fold(0.0, f64::max);
        let scaled = |weight: f64| (weight / heaviest * WHOLE).round() as u32;
        let all = self.weights.iter();
        let all = all.map(|(bucket, weight)| (*bucket, scaled(*weight)));
        let total: f64 = self.weights.values().sum();
        let now = self.halvings(self.last).exp2();
        Checkpoint {
            buckets: all.filter(|(_, weight)| *weight > 0).collect(),
            total: (total / now * WHOLE).round() as u64,
            first: self.first,
            last: self.last,
            samples: self.samples,
            peak_mib: self.peak.0,
        }
    }

    /// The history that was stored. What is no bucket is left out: a damaged checkpoint costs accuracy, nothing else.
    #[must_use]
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let known = checkpoint.buckets.iter();
        let known =
            known.filter(|(bucket, weight)| usize::from(**bucket) < BUCKETS && **weight > 0);
        let mut weights: BTreeMap<u16, f64> = known
            .map(|(bucket, weight)| (*bucket, f64::from(*weight)))
            .collect();
        let sum: f64 = weights.values().sum();
        if sum <= 0.0 {
            return Self::default();
        }
        let total = checkpoint.total.max(1) as f64 / WHOLE;
        weights.values_mut().for_each(|it| *it *= total / sum);
        Self {
            weights,
            reference: checkpoint.last,
            first: checkpoint.first.min(checkpoint.last),
            last: checkpoint.last,
            samples: checkpoint.samples,
            peak: Mib(checkpoint.peak_mib),
        }
    }

    /// How many half-lives after the reference.
    fn halvings(&self, at: i64) -> f64 {
        at.saturating_sub(self.reference) as f64 / HALF_LIFE
    }

    fn refer_to(&mut self, at: i64) {
        let shrink = (-self.halvings(at)).exp2();
        self.weights.values_mut().for_each(|it| *it *= shrink);
        self.weights.retain(|_, it| *it > 0.0);
        self.reference = at;
    }
}

/// The bucket of an amount: the first whose edge is not below it.
fn bucket(amount: Mib) -> u16 {
    let steps = (amount.0 as f64 / FIRST).max(1.0).ln() / RATIO.ln();
    // An edge belongs to its own bucket, however the logarithm rounds.
    ((steps - 1e-9).ceil().max(0.0) as u16).min(BUCKETS as u16 - 1)
}

/// The upper edge of a bucket.
fn edge(bucket: u16) -> Mib {
    Mib((FIRST * RATIO.powi(bucket.into())).ceil() as u64)
}
