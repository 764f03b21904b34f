//! How good advice is, on the recorded GPU memory of real pods: learnt from the first half of each pod's time, judged
//! on the second. Pods are put on a GPU until their requests fill it, and the minutes count in which they together use
//! more than it has.

use anyhow::{Context as _, Result, ensure};
use gpustow_advice::{History, advise_at};
use gpustow_pack::Mib;
use serde::Serialize;

use crate::random::Random;
use crate::report::Mean;
use crate::trace::rows;

/// Pods that were recorded for less are left out, in seconds.
const LEAST: i64 = 10 * 3600;
/// Draws of pods for each seed.
const DRAWS: usize = 30;

/// The memory that one pod used of its GPU, in MiB, oldest first; seconds from any zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series(Vec<(i64, Mib)>);

/// The series in a CSV text with the columns `seconds,pod,mib`, in the order in which their pods first occur. Pods with
/// less than ten hours are left out.
///
/// # Errors
/// If a line cannot be read; the error names it.
pub fn series(text: &str) -> Result<Vec<Series>> {
    let mut all: Vec<(String, Series)> = Vec::new();
    rows(
        text,
        ["seconds", "pod", "mib"],
        |line, [seconds, pod, mib]| {
            let number = |column: &str, text: &str| {
                let number = text.parse::<f64>().ok();
                let number = number.filter(|it| (0.0..1e12).contains(it));
                number.with_context(|| {
                    format!("line {line}: {column} is {text:?}, expected a number")
                })
            };
            let at = number("seconds", seconds)? as i64;
            let used = Mib(number("mib", mib)? as u64);
            let known = all.iter().position(|(name, _)| name == pod);
            let known = known.unwrap_or_else(|| {
                all.push((pod.to_owned(), Series::default()));
                all.len() - 1
            });
            all[known].1.0.push((at, used));
            Ok(())
        },
    )?;
    let mut all: Vec<Series> = all.into_iter().map(|(_, series)| series).collect();
    all.iter_mut().for_each(|series| series.0.sort_unstable());
    all.retain(|series| series.spans() >= LEAST);
    ensure!(
        all.len() > 1,
        "fewer than two pods with {} hours each: there is nothing to judge",
        LEAST / 3600
    );
    Ok(all)
}

impl Series {
    fn spans(&self) -> i64 {
        let ends = self.0.first().zip(self.0.last());
        ends.map_or(0, |((first, _), (last, _))| last - first)
    }

    fn peak(&self) -> Mib {
        self.0
            .iter()
            .map(|(_, used)| *used)
            .max()
            .unwrap_or_default()
    }

    /// The history of the first half of the time, and the samples of the second.
    fn halves(&self) -> (History, Vec<Mib>) {
        let half = self.0.first().map_or(0, |(first, _)| *first) + self.spans() / 2;
        let (first, second): (Vec<_>, Vec<_>) = self.0.iter().partition(|(at, _)| *at < half);
        let mut history = History::default();
        first
            .into_iter()
            .for_each(|(at, used)| history.add(used, at));
        (history, second.into_iter().map(|(_, used)| used).collect())
    }
}

/// What pods request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The most that each uses in all of its time, as if that were known.
    Peak,
    /// What is advised at this quantile, in thousandths.
    Advised(u32),
    /// Half of the peak: what a user guesses who hopes for neighbours.
    HalfPeak,
}

impl Request {
    /// Every way that is compared.
    pub const ALL: [Self; 4] = [
        Self::Peak,
        Self::Advised(990),
        Self::Advised(950),
        Self::HalfPeak,
    ];

    /// The name in tables.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Peak => "peak".to_owned(),
            Self::Advised(permille) => format!("advice at p{}", permille / 10),
            Self::HalfPeak => "half of peak".to_owned(),
        }
    }

    /// What a pod with this history and this peak requests on a GPU of this size.
    fn of(self, history: &History, peak: Mib, gpu: Mib) -> Mib {
        match self {
            Self::Peak => peak,
            Self::HalfPeak => Mib(peak.0 / 2),
            Self::Advised(permille) => {
                advise_at(history, gpu, permille).map_or(peak, |advice| advice.request)
            }
        }
    }
}

/// One way to request on GPUs of one size, over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// What pods request.
    pub request: String,
    /// Size of a GPU, in MiB.
    pub gpu_mib: u64,
    /// Pods on a GPU, relative to requests at the peak.
    pub pods: Mean,
    /// Minutes in which the pods of a GPU use more than it has, in percent.
    pub over_pct: Mean,
}

/// Judges every way of requesting on GPUs of these sizes.
#[must_use]
pub fn judge(
    all: &[Series],
    gpus: &[Mib],
    seeds: impl Iterator<Item = u64> + Clone,
) -> Vec<Judged> {
    let halves: Vec<_> = all.iter().map(Series::halves).collect();
    let later: Vec<&[Mib]> = halves.iter().map(|(_, second)| &second[..]).collect();
    let peaks: Vec<Mib> = all.iter().map(Series::peak).collect();
    let ways = gpus
        .iter()
        .flat_map(|gpu| Request::ALL.map(|request| (*gpu, request)));
    ways.map(|(gpu, request)| {
        let requests: Vec<Mib> = halves
            .iter()
            .zip(&peaks)
            .map(|((history, _), peak)| request.of(history, *peak, gpu))
            .collect();
        let runs: Vec<(f64, f64)> = seeds
            .clone()
            .map(|seed| draws(&requests, &peaks, &later, gpu, seed))
            .collect();
        let (pods, over): (Vec<f64>, Vec<f64>) = runs.into_iter().unzip();
        Judged {
            request: request.name(),
            gpu_mib: gpu.0,
            pods: Mean::of(&pods),
            over_pct: Mean::of(&over),
        }
    })
    .collect()
}

/// Pods relative to those at the peak, and the percentage of minutes over the GPU's size, of one seed's draws.
fn draws(requests: &[Mib], peaks: &[Mib], later: &[&[Mib]], gpu: Mib, seed: u64) -> (f64, f64) {
    let mut random = Random::new(seed);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    let (mut pods, mut at_peak, mut minutes, mut over) = (0, 0, 0, 0);
    for _ in 0..DRAWS {
        random.shuffle(&mut order);
        let there = that_fit(&order, requests, gpu);
        pods += there;
        at_peak += that_fit(&order, peaks, gpu);
        let there: Vec<&[Mib]> = order.iter().take(there).map(|&pod| later[pod]).collect();
        let last = there.iter().map(|uses| uses.len()).min().unwrap_or(0);
        let used = |minute: usize| {
            there
                .iter()
                .filter_map(|uses| uses.get(minute))
                .copied()
                .sum()
        };
        minutes += last;
        over += (0..last).map(used).filter(|used: &Mib| *used > gpu).count();
    }
    let part = |part: f64, of: f64| part / of.max(1.0);
    (
        part(pods as f64, at_peak as f64),
        100.0 * part(over as f64, minutes as f64),
    )
}

/// How many of the pods, taken in this order, fill the GPU.
fn that_fit(order: &[usize], requests: &[Mib], gpu: Mib) -> usize {
    let sums = order.iter().scan(Mib::ZERO, |sum, &pod| {
        *sum = *sum + requests[pod];
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= gpu).count()
}

/// What advice is to come to on GPUs of any size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goal {
    /// What pods request.
    pub request: String,
    /// Minutes over the GPU's size at most, in percent.
    pub most_over_pct: f64,
    /// Pods at least, relative to requests at the peak.
    pub least_pods: f64,
    /// Is it so on GPUs of every size that was judged?
    pub met: bool,
}

/// The goals, and whether these judgements meet them.
#[must_use]
pub fn goals(judged: &[Judged]) -> Vec<Goal> {
    let goal = |permille, most_over_pct, least_pods| {
        let request = Request::Advised(permille).name();
        let mut of_it = judged.iter().filter(|it| it.request == request);
        let met = of_it.all(|it| it.over_pct.mean <= most_over_pct && it.pods.mean >= least_pods);
        Goal {
            request,
            most_over_pct,
            least_pods,
            met,
        }
    };
    vec![goal(990, 0.1, 1.1), goal(950, 2.0, 1.3)]
}

/// The judgements as a table, and which goals they meet.
#[must_use]
pub fn advice_table(judged: &[Judged]) -> String {
    let mut text = format!(
        "{:>8}  {:<14}{:>16}{:>20}\n",
        "GPU MiB", "request", "pods", "minutes over, %"
    );
    for it in judged {
        let (pods, over) = (&it.pods, &it.over_pct);
        text += &format!(
            "{:>8}  {:<14}{:>16}{:>20}\n",
            it.gpu_mib,
            it.request,
            format!("{:.2} ±{:.2}", pods.mean, pods.ci95),
            format!("{:.3} ±{:.3}", over.mean, over.ci95),
        );
    }
    for it in goals(judged) {
        let met = if it.met { "met" } else { "missed" };
        text += &format!(
            "goal {met}: {}, at most {} % of minutes over and at least {} times the pods\n",
            it.request, it.most_over_pct, it.least_pods
        );
    }
    text
}
