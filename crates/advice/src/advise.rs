//! From a history to a request and a limit.

use std::fmt;

use gpustow_pack::Mib;

use crate::History;

/// Seconds of a day.
pub const DAY: u64 = 86_400;
/// What is advised unless a person wants another quantile: exceeded in one of twenty minutes.
const USUAL: u32 = 950;
/// The limit is the peak and a twentieth more.
const LIMIT_PERCENT: u64 = 105;
/// A request is rounded up to whole steps, so that advice does not change with each sample.
const STEP: u64 = 64;
/// Less than this is too little to go by, in seconds.
const ENOUGH: u64 = DAY / 2;
/// From how much of a GPU on an allocator is taken to hold everything, in percent.
const EVERYTHING_PERCENT: u64 = 85;
/// A peak that is so much above the ninety-nine of hundred minutes comes at the start alone, in percent.
const START_PERCENT: u64 = 150;

/// What a workload should request of each GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// In all but a few minutes it uses no more.
    pub request: Mib,
    /// It has never used more, and has a margin.
    pub limit: Mib,
    /// How many minutes this rests on.
    pub samples: u64,
    /// The seconds between the first and the last of them.
    pub spans: u64,
    /// What speaks against following it.
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
    /// The workload has been seen for less than half a day.
    LittleHistory,
    /// It always uses most of the GPU: its allocator takes everything, whatever the program needs.
    TakesEverything,
    /// Its peak is far above all other minutes, as at a start.
    StartPeak,
}

impl fmt::Display for Caution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LittleHistory => "less than half a day of history",
            Self::TakesEverything => {
                "uses most of the GPU all the time: bound its allocator first, then look again"
            }
            Self::StartPeak => {
                "peaks far above its usual use, as at a start: the request does not cover that"
            }
        })
    }
}

/// Advice for a workload on GPUs of this size, at the usual quantile. None without history.
#[must_use]
pub fn advise(history: &History, gpu: Mib) -> Option<Advice> {
    advise_at(history, gpu, USUAL)
}

/// The same, with a request that is exceeded in no more than `1000 - permille` of a thousand minutes.
#[must_use]
pub fn advise_at(history: &History, gpu: Mib, permille: u32) -> Option<Advice> {
    let request = history.quantile(permille)?.0.next_multiple_of(STEP);
    let usual = history.quantile(990)?;
    let half = history.quantile(500)?;
    let peak = history.peak();
    let limit = (peak.0.saturating_mul(LIMIT_PERCENT) / 100).max(request);
    let cautions = [
        (history.spans() < ENOUGH, Caution::LittleHistory),
        (
            is_part(half, EVERYTHING_PERCENT, gpu),
            Caution::TakesEverything,
        ),
        (is_part(peak, START_PERCENT, usual), Caution::StartPeak),
    ];
    let cautions = cautions.into_iter().filter(|(holds, _)| *holds);
    Some(Advice {
        request: Mib(request).min(gpu),
        limit: Mib(limit).min(gpu),
        samples: history.samples(),
        spans: history.spans(),
        cautions: cautions.map(|(_, caution)| caution).collect(),
    })
}

/// Is `amount` more than so many percent of `of`?
fn is_part(amount: Mib, percent: u64, of: Mib) -> bool {
    of > Mib::ZERO && u128::from(amount.0) * 100 > u128::from(of.0) * u128::from(percent)
}
