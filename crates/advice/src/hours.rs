//! The use of a workload in each of the last hours. It distinguishes a daily peak from a peak that came once.

use std::collections::{BTreeMap, VecDeque};

/// Hours that are kept: eight days, so that a weekly peak is among them until the next.
pub const HOURS: usize = 192;
/// Hours of a day.
pub(crate) const DAY: usize = 24;
const HOUR: i64 = 3600;
/// A window is two of these, and begins with each.
const STEP: i64 = HOUR / 2;
/// Samples of a step at least: with fewer, a step goes on.
const LEAST: u32 = 15;
/// A use is sustained if it lasts for this part of a window: for twelve minutes.
const PART: u32 = 5;

/// No bucket.
pub(crate) const NONE: i16 = -1;

/// Buckets of one hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hour {
    /// The amount that was used for twelve minutes, in the window with the most use that ended here.
    pub(crate) sustained: i16,
    /// The largest sample.
    pub(crate) peak: i16,
    /// The largest quantile that was advised.
    pub(crate) usual: i16,
}

impl Hour {
    const EMPTY: Self = Self {
        sustained: NONE,
        peak: NONE,
        usual: NONE,
    };
}

type Counts = BTreeMap<u16, u32>;

/// The last hours.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Hours {
    /// The hour of the last sample is at the end.
    all: VecDeque<Hour>,
    /// Its number, counted from 1970.
    last: i64,
    /// The step that is not over, and how often each bucket was in it and in the one before.
    step: i64,
    now: Counts,
    before: Counts,
}

impl Hours {
    /// Hours that were stored, the last one first; `at` is within that.
    pub(crate) fn of(sustained: &[i16], peaks: &[i16], usual: &[i16], at: i64) -> Self {
        let bucket = |all: &[i16], place| {
            let bucket = all.get(place).copied();
            let known = bucket.filter(|it| (0..crate::BUCKETS as i16).contains(it));
            known.unwrap_or(NONE)
        };
        let hour = |place| Hour {
            sustained: bucket(sustained, place),
            peak: bucket(peaks, place),
            usual: bucket(usual, place),
        };
        let count = sustained.len().max(peaks.len()).min(HOURS);
        Self {
            all: (0..count).rev().map(hour).collect(),
            last: at.div_euclid(HOUR),
            step: at.div_euclid(STEP),
            ..Self::default()
        }
    }

    /// So many as they are stored: a number for each, the last one first.
    pub(crate) fn stored(&self, of: fn(&Hour) -> i16, count: usize) -> Vec<i16> {
        self.iter().take(count).map(of).collect()
    }

    /// Is there nothing in the last hour's `usual` yet, or less than this?
    pub(crate) fn exceeds_usual(&self, bucket: u16) -> bool {
        let last = self.iter().next();
        last.is_some_and(|it| it.usual == NONE || it.usual < bucket as i16)
    }

    /// In the last hour this was advised.
    pub(crate) fn advise(&mut self, usual: u16) {
        if let Some(hour) = self.all.back_mut() {
            hour.usual = hour.usual.max(usual as i16);
        }
    }

    /// Adds a sample. One that comes late counts as a peak alone.
    pub(crate) fn add(&mut self, bucket: u16, at: i64) {
        let step = at.div_euclid(STEP);
        if self.all.is_empty() || step > self.step {
            self.close();
            self.step = step;
        }
        self.reach(at.div_euclid(HOUR));
        if step == self.step {
            *self.now.entry(bucket).or_default() += 1;
        }
        if let Some(hour) = self.hour(at.div_euclid(HOUR)) {
            hour.peak = hour.peak.max(bucket as i16);
        }
    }

    /// The hours, the last one first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Hour> + Clone {
        self.all.iter().rev()
    }

    /// The number of the last hour, counted from 1970.
    pub(crate) fn last(&self) -> i64 {
        self.last
    }

    /// Hours of the day in which there was a sample.
    pub(crate) fn of_day(&self) -> usize {
        let mut seen = [false; DAY];
        for (at, hour) in self.iter().enumerate() {
            seen[at % DAY] |= hour.peak != NONE;
        }
        seen.into_iter().filter(|it| *it).count()
    }

    /// The largest of each day that ends with the last hour, the last day first.
    pub(crate) fn days(&self, of: fn(&Hour) -> i16) -> Vec<i16> {
        let days = self.stored(of, HOURS);
        let days = days.chunks(DAY).map(|day| day.iter().copied().max());
        days.flatten().collect()
    }

    /// Ends the step, and records the use that was sustained in it and in the step before.
    fn close(&mut self) {
        let count = |of: &Counts| of.values().sum::<u32>();
        if count(&self.now) < LEAST {
            return;
        }
        let mut window = std::mem::take(&mut self.before);
        self.before = std::mem::take(&mut self.now);
        if window.is_empty() {
            return;
        }
        for (bucket, times) in &self.before {
            *window.entry(*bucket).or_default() += times;
        }
        let mut left = count(&window) / PART;
        let found = window.iter().rev().find(|(_, times)| {
            left = left.saturating_sub(**times);
            left == 0
        });
        let sustained = found.map_or(NONE, |(bucket, _)| *bucket as i16);
        if let Some(hour) = self.hour(self.step.div_euclid(HOUR / STEP)) {
            hour.sustained = hour.sustained.max(sustained);
        }
    }

    /// Makes this hour the last one, if it is later.
    fn reach(&mut self, hour: i64) {
        let later = match self.all.is_empty() {
            true => 1,
            false => hour.saturating_sub(self.last),
        };
        if later <= 0 {
            return;
        }
        let new = usize::try_from(later).unwrap_or(HOURS).min(HOURS);
        self.all.extend((0..new).map(|_| Hour::EMPTY));
        self.all.drain(..self.all.len().saturating_sub(HOURS));
        self.last = hour;
    }

    fn hour(&mut self, number: i64) -> Option<&mut Hour> {
        let back = usize::try_from(self.last.checked_sub(number)?).ok()?;
        let place = self.all.len().checked_sub(back.checked_add(1)?)?;
        self.all.get_mut(place)
    }
}
