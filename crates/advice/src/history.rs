//! The histogram of a workload's use.

use std::collections::BTreeMap;

use gpustow_pack::Mib;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hours::{DAY, HOURS, Hours};

/// Seconds in which a weight falls by half.
const HALF_LIFE: f64 = 86_400.0;
/// The upper edge of the first bucket, in MiB.
const FIRST: f64 = 64.0;
/// How much larger each next edge is. An amount is taken for its bucket's edge: too large by 2.5 % at most.
const RATIO: f64 = 1.025;
/// The most buckets of a history. The last edge is beyond 300 GiB; larger amounts count there.
pub const BUCKETS: usize = 352;
/// Weights are scaled down before they leave the range in which sums are exact.
const MOST_HALVINGS: f64 = 64.0;
/// A checkpoint's largest weight. The checkpoint leaves out weights that round to zero next to it.
const WHOLE: f64 = 1_000_000.0;
/// The quantile of the advice, if nothing larger is sustained. The workload exceeds it in no more than 1.2 % of all
/// minutes. A daily peak that is too short to count as sustained stays within these 1.2 %, however much the last day
/// counts.
const USUAL: u32 = 988;
/// Hours of the day that are to be seen before advice is followed: they have two hours of any working day at least.
const ENOUGH_HOURS: usize = 18;
/// A workload that runs at some hours only is known after these two days, in seconds.
const DAYS: u64 = 2 * 86_400;
/// Buckets between the first of four days and the last, from which on use grows: a tenth.
const GROWTH: i16 = 4;

/// How much of a GPU a workload used in each minute, the older the less it counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Weight of each bucket that has one, relative to a sample at `reference`; empty as long as there is no sample.
    weights: BTreeMap<u16, f64>,
    reference: i64,
    first: i64,
    last: i64,
    samples: u64,
    /// The largest sample since the first.
    peak: Mib,
    hours: Hours,
}

/// A histogram of the GPU memory that was used in each minute: whole numbers alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// Weight of each bucket, in millionths of the heaviest, without buckets of zero weight. Bucket `n` ends at
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
    /// The largest sample of the last eight days, in MiB.
    #[serde(rename = "peakMiB")]
    pub peak_mib: u64,
    /// Buckets of the amount used for twelve minutes, the hour of `last` first; -1 if there is none.
    #[schemars(with = "Vec<i32>", length(max = HOURS), inner(range(min = -1, max = BUCKETS - 1)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sustained: Vec<i16>,
    /// Buckets of the largest sample of each hour, likewise.
    #[schemars(with = "Vec<i32>", length(max = HOURS), inner(range(min = -1, max = BUCKETS - 1)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peaks: Vec<i16>,
    /// Buckets of the most that 1.2 % of the minutes exceeded in each hour of the last day, likewise.
    #[schemars(with = "Vec<i32>", length(max = DAY), inner(range(min = -1, max = BUCKETS - 1)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub usual: Vec<i16>,
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
        self.hours.add(bucket(peak), at);
        // It rises with such samples alone.
        if self.hours.exceeds_usual(bucket(peak)) && self.covers_a_day() {
            let usual = self.quantile_bucket(USUAL);
            usual.into_iter().for_each(|it| self.hours.advise(it));
        }
    }

    /// The amount that the workload exceeds in no more than `1000 - permille` of a thousand minutes: the upper edge of
    /// its bucket, and no more than the largest sample. None without a sample.
    #[must_use]
    pub fn quantile(&self, permille: u32) -> Option<Mib> {
        Some(edge(self.quantile_bucket(permille)?).min(self.peak))
    }

    fn quantile_bucket(&self, permille: u32) -> Option<u16> {
        let total: f64 = self.weights.values().sum();
        let wanted = total * f64::from(permille.min(1000)) / 1000.0;
        let mut sum = 0.0;
        let found = self.weights.iter().find(|(_, weight)| {
            sum += **weight;
            **weight > 0.0 && sum >= wanted * (1.0 - 1e-9)
        });
        found.map(|(bucket, _)| *bucket)
    }

    /// The largest sample of the last eight days: once a larger one is forgotten, the upper edge of its bucket.
    #[must_use]
    pub fn peak(&self) -> Mib {
        let known = self.hours().filter_map(|(_, peak)| peak).max();
        known.map_or(self.peak, |it| it.min(self.peak))
    }

    /// For each of the last hours, the last one first: the amount that was used for twelve minutes, and the largest
    /// amount.
    pub(crate) fn hours(&self) -> impl Iterator<Item = (Option<Mib>, Option<Mib>)> {
        let all = self.hours.iter();
        all.map(|it| (known(it.sustained), known(it.peak)))
    }

    /// The largest amount that was used for twelve minutes of an hour, within the last eight days.
    #[must_use]
    pub fn sustained(&self) -> Option<Mib> {
        let largest = self.hours().filter_map(|(sustained, _)| sustained).max();
        Some(largest?.min(self.peak))
    }

    /// The amount that only few minutes exceed: the present one, or a larger one that was advised within the last day.
    /// Weights change with each hour.
    pub(crate) fn usual(&self) -> Option<Mib> {
        let day = self.hours.iter().take(DAY);
        let largest = day.filter_map(|it| known(it.usual)).max();
        let largest = largest.unwrap_or_default().min(self.peak);
        Some(self.quantile(USUAL)?.max(largest))
    }

    /// By how much more is used each day, if that is so for three days.
    pub(crate) fn growth(&self) -> Mib {
        let days = self.hours.days(|it| it.sustained);
        let [last, third, second, first, ..] = days[..] else {
            return Mib::ZERO;
        };
        let grows = last > third && third > second && second > first && last - first >= GROWTH;
        match (known(last), known(first)) {
            (Some(last), Some(first)) if grows => Mib(last.minus(first).0 / 3),
            _ => Mib::ZERO,
        }
    }

    /// Are there samples of enough hours of the day, or of several days?
    pub(crate) fn covers_a_day(&self) -> bool {
        self.spans() >= DAYS || self.hours.of_day() >= ENOUGH_HOURS
    }

    /// The number of the hour of the first sample, counted from 1970.
    pub(crate) fn first_hour(&self) -> i64 {
        self.first.div_euclid(3600)
    }

    /// The number of the last hour.
    pub(crate) fn last_hour(&self) -> i64 {
        self.hours.last()
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
            peak_mib: self.peak().0,
            sustained: self.hours.stored(|it| it.sustained, HOURS),
            peaks: self.hours.stored(|it| it.peak, HOURS),
            usual: self.hours.stored(|it| it.usual, DAY),
        }
    }

    /// The history that was stored. Invalid buckets are left out: a damaged checkpoint costs accuracy, nothing else. In
    /// a checkpoint without hours, the peak counts as the peak of the last hour.
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
        let peak = Mib(checkpoint.peak_mib);
        let peaks = match checkpoint.peaks.is_empty() {
            true => &[bucket(peak) as i16][..],
            false => &checkpoint.peaks,
        };
        Self {
            hours: Hours::of(
                &checkpoint.sustained,
                peaks,
                &checkpoint.usual,
                checkpoint.last,
            ),
            weights,
            reference: checkpoint.last,
            first: checkpoint.first.min(checkpoint.last),
            last: checkpoint.last,
            samples: checkpoint.samples,
            peak,
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

/// The upper edge of a bucket, if there is one.
fn known(bucket: i16) -> Option<Mib> {
    u16::try_from(bucket).ok().map(edge)
}

/// The upper edge of a bucket.
fn edge(bucket: u16) -> Mib {
    Mib((FIRST * RATIO.powi(bucket.into())).ceil() as u64)
}
