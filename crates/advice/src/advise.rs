//! From a history to a request and a limit.

use std::fmt;

use gpustow_pack::Mib;

use crate::peaks::gib;
use crate::{History, Peaks};

/// Seconds of a day.
pub const DAY: u64 = 86_400;
/// The limit is the peak and a twentieth more.
const LIMIT_PERCENT: u64 = 105;
/// A request is rounded up to whole steps, so that advice does not change with each sample.
const STEP: u64 = 64;
/// Samples over this number of seconds in a row are enough to go by.
pub const ENOUGH: u64 = 18 * 3600;
/// From how much of a GPU on an allocator is taken to hold everything, in percent.
const EVERYTHING_PERCENT: u64 = 85;

/// The request and the limit that a workload should have for each GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// It uses no more except in short peaks.
    pub request: Mib,
    /// It has not used more for eight days, and has a margin.
    pub limit: Mib,
    /// How many minutes this rests on.
    pub samples: u64,
    /// The seconds between the first and the last of them.
    pub spans: u64,
    /// Reasons against following it.
    pub cautions: Vec<Caution>,
}

impl Advice {
    /// Is there history enough to follow it?
    #[must_use]
    pub fn is_enough(&self) -> bool {
        !self.cautions.contains(&Caution::LittleHistory)
    }
}

/// Why advice may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caution {
    /// The workload was not seen in enough hours of the day.
    LittleHistory,
    /// It always uses most of the GPU: its allocator takes everything, whatever the program needs.
    TakesEverything,
    /// It uses so much more each day.
    Grows(Mib),
    /// It uses more at times.
    Peaks(Peaks),
}

impl Caution {
    /// Must advice with it not be followed?
    #[must_use]
    pub fn stops(self) -> bool {
        matches!(self, Self::LittleHistory | Self::TakesEverything)
    }
}

impl fmt::Display for Caution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LittleHistory => f.write_str("less than 18 hours of history"),
            Self::TakesEverything => f.write_str(
                "uses most of the GPU all the time: bound its allocator first, then look again",
            ),
            Self::Grows(by) => write!(f, "uses about {} more each day: look again soon", gib(*by)),
            Self::Peaks(peaks) => peaks.fmt(f),
        }
    }
}

/// Advice for a workload on GPUs of this size. The request covers the use that lasted for twelve minutes of an hour
/// within the last eight days. It also covers all but 1.2 % of the minutes, and the growth of a day. None without
/// history.
#[must_use]
pub fn advise(history: &History, gpu: Mib) -> Option<Advice> {
    let usual = history.usual()?;
    let request = usual.max(history.sustained().unwrap_or_default());
    Some(of(history, gpu, request + history.growth()))
}

/// Advice with a request that the workload exceeded in no more than `1000 - permille` of a thousand minutes.
#[must_use]
pub fn advise_at(history: &History, gpu: Mib, permille: u32) -> Option<Advice> {
    Some(of(history, gpu, history.quantile(permille)?))
}

/// Advice with this request.
fn of(history: &History, gpu: Mib, request: Mib) -> Advice {
    let request = Mib(request.0.next_multiple_of(STEP)).min(gpu);
    let growth = history.growth();
    let peak = history.peak().0.saturating_add(growth.0);
    let limit = Mib(peak.saturating_mul(LIMIT_PERCENT) / 100).max(request);
    let half = history.quantile(500).unwrap_or_default();
    let peaks = Peaks::above(history, request).map(Caution::Peaks);
    let cautions = [
        (!history.covers_a_day()).then_some(Caution::LittleHistory),
        is_part(half, EVERYTHING_PERCENT, gpu).then_some(Caution::TakesEverything),
        (growth > Mib::ZERO).then_some(Caution::Grows(growth)),
        peaks,
    ];
    Advice {
        request,
        limit: limit.min(gpu),
        samples: history.samples(),
        spans: history.spans(),
        cautions: cautions.into_iter().flatten().collect(),
    }
}

/// True if `amount` is more than `percent` percent of `of`.
fn is_part(amount: Mib, percent: u64, of: Mib) -> bool {
    of > Mib::ZERO && u128::from(amount.0) * 100 > u128::from(of.0) * u128::from(percent)
}
