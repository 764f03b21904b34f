//! When a workload uses more than an amount.

use std::collections::BTreeSet;
use std::fmt;

use gpustow_pack::Mib;

use crate::History;
use crate::hours::DAY;

/// A peak counts if it is above this percentage of the amount.
const NOTED_PERCENT: u64 = 120;
/// Hours that lie so near to each other are of one peak.
const RUN: usize = 6;
/// Hours of a week.
const WEEK: usize = 7 * DAY;
const WEEKDAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// Use above an amount, within the last eight days.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peaks {
    /// The most that was used.
    pub up_to: Mib,
    /// When it was.
    pub when: When,
}

/// When a workload peaks, in hours of UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// In the first hour of the history.
    Start,
    /// Each day at this hour, sustained for this number of hours.
    Daily(usize, usize),
    /// Twice, a week apart: on this weekday, counted from Thursday, at this hour, sustained for this number of hours.
    Weekly(usize, usize, usize),
    /// In the eight days but once, likewise.
    Once(usize, usize, usize),
    /// In the first number of hours, out of the second number.
    Hours(usize, usize),
}

/// An hour with a peak.
struct Above {
    /// How many hours before the last one.
    ago: usize,
    sustained: bool,
}

impl Peaks {
    /// When the workload used notably more than this.
    #[must_use]
    pub fn above(history: &History, amount: Mib) -> Option<Self> {
        let noted = |used: Mib| used.0.saturating_mul(100) > amount.0.saturating_mul(NOTED_PERCENT);
        let all = history.hours().enumerate();
        let all: Vec<Above> = all
            .filter(|(_, (_, peak))| peak.is_some_and(noted))
            .map(|(ago, (sustained, _))| Above {
                ago,
                sustained: sustained.is_some_and(noted),
            })
            .collect();
        let up_to = history.hours().filter_map(|(_, peak)| peak).max()?;
        Some(Self {
            up_to: up_to.min(history.peak()),
            when: when(history, &all)?,
        })
    }
}

/// The pattern of these hours; none if there are none.
fn when(history: &History, above: &[Above]) -> Option<When> {
    let (first, last) = (above.first()?.ago, above.last()?.ago);
    let (seen, end) = (history.hours().count(), history.last_hour());
    let sustained = above.iter().filter(|it| it.sustained).count();
    let at = |ago: usize| end.saturating_sub(ago as i64);
    let of_day = |ago: usize| at(ago).rem_euclid(DAY as i64) as usize;
    let weekday = |ago: usize| at(ago).div_euclid(DAY as i64).rem_euclid(7) as usize;
    let in_run = |it: &Above, from: usize| (from..from + RUN).contains(&it.ago);
    if last - first < RUN {
        let is_start = at(last) <= history.first_hour() && last - first < 2 && sustained < 2;
        return Some(match is_start {
            true => When::Start,
            false => When::Once(weekday(last), of_day(last), sustained),
        });
    }
    let again = (first + WEEK).saturating_sub(1);
    if above
        .iter()
        .all(|it| in_run(it, first) || in_run(it, again))
    {
        return Some(When::Weekly(weekday(last), of_day(last), sustained / 2));
    }
    let days = above.iter().map(|it| it.ago / DAY);
    let (days, all_days) = (days.collect::<BTreeSet<_>>().len(), seen.div_ceil(DAY));
    let hours: BTreeSet<usize> = above.iter().map(|it| of_day(it.ago)).collect();
    let mut begins = hours
        .iter()
        .filter(|it| !hours.contains(&((*it + DAY - 1) % DAY)));
    if let (Some(begin), None) = (begins.next(), begins.next())
        && hours.len() <= RUN
        && days > 1
        && days * 4 >= all_days * 3
    {
        return Some(When::Daily(*begin, (sustained + days / 2) / days));
    }
    let used = history.hours().filter(|(_, peak)| peak.is_some()).count();
    Some(When::Hours(above.len(), used))
}

impl fmt::Display for Peaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lasts = |hours| match hours {
            0 => "for minutes".to_owned(),
            1 => "for about an hour".to_owned(),
            _ => format!("for about {hours} hours"),
        };
        let day = |day: usize| WEEKDAYS.get(day).unwrap_or(&WEEKDAYS[0]);
        write!(f, "uses up to {} ", gib(self.up_to))?;
        match self.when {
            When::Start => f.write_str("in its first hour, as at a start"),
            When::Daily(at, hours) => write!(f, "{} each day at {at:02}:00 UTC", lasts(hours)),
            When::Weekly(on, at, hours) => {
                write!(f, "{} each {} at {at:02}:00 UTC", lasts(hours), day(on))
            }
            When::Once(on, at, hours) => {
                write!(f, "{} on {} at {at:02}:00 UTC", lasts(hours), day(on))
            }
            When::Hours(hours, of) => write!(
                f,
                "in {hours} of {of} hours, in bursts or in some of its pods"
            ),
        }?;
        f.write_str(": the request does not cover that")
    }
}

/// An amount for people.
pub(crate) fn gib(amount: Mib) -> String {
    let tenths = (amount.0.saturating_mul(10) + 512) / 1024;
    match tenths % 10 {
        0 => format!("{} GiB", tenths / 10),
        tenth => format!("{}.{tenth} GiB", tenths / 10),
    }
}
