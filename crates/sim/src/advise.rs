//! How good advice is the next day, on the GPU memory of real pods or on [`made`] series. The advice is learnt from the
//! past and judged on the time after it. All pods are put on GPUs by first fit with their requests. Where the programs
//! of a GPU want more than it has, an allocation fails: such a stretch of minutes is an episode.

pub mod made;
mod report;

use anyhow::{Context as _, Result, ensure};
use gpustow_advice::{ENOUGH, History, advise, advise_at};
use gpustow_pack::Mib;
use serde::Serialize;

use crate::random::Random;
use crate::report::Mean;
use crate::trace::rows;
pub use report::{Goal, advice_table, goals};

const MINUTE: i64 = 60;
/// Minutes of a day.
const DAY: usize = 1440;
/// Orders of pods for each seed.
const ORDERS: usize = 4;
/// Pods that were recorded for a smaller part of the time are left out, in percent.
const LEAST: usize = 95;

/// The memory that pods used of their GPUs, in MiB, one number for each minute.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    /// Its name in tables.
    pub name: &'static str,
    pods: Vec<Vec<u64>>,
    /// Is it a stretch of time that may begin at any minute, as a day may?
    turns: bool,
}

impl Fleet {
    /// How many pods there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pods.len()
    }

    /// Are there none?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// Minutes that are learnt from: all but a day, and no fewer than advice needs.
    fn learnt(&self) -> usize {
        let minutes = self.pods.first().map_or(0, Vec::len);
        let enough = ENOUGH as usize / MINUTE as usize;
        minutes.saturating_sub(DAY).max(enough + 1)
    }
}

/// The series in a CSV text with the columns `seconds,pod,mib`. Pods that were there for less than `LEAST` percent of
/// the time are left out.
///
/// # Errors
/// If a line cannot be read; the error names it.
pub fn recorded(text: &str) -> Result<Fleet> {
    let mut all: Vec<(String, Vec<(i64, u64)>)> = Vec::new();
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
            let used = number("mib", mib)? as u64;
            let known = all.iter().position(|(name, _)| name == pod);
            let known = known.unwrap_or_else(|| {
                all.push((pod.to_owned(), Vec::new()));
                all.len() - 1
            });
            all[known].1.push((at / MINUTE, used));
            Ok(())
        },
    )?;
    let samples = || {
        all.iter()
            .flat_map(|(_, samples)| samples)
            .map(|(at, _)| *at)
    };
    let (first, last) = samples().fold((i64::MAX, i64::MIN), |(a, b), at| (a.min(at), b.max(at)));
    let minutes = usize::try_from(last.saturating_sub(first)).map_or(0, |it| it + 1);
    let enough = ENOUGH as usize / MINUTE as usize;
    ensure!(
        (enough + 60..=366 * DAY).contains(&minutes),
        "a trace has {} hours at least, and a year at most: advice needs {} to learn from",
        enough / 60 + 1,
        enough / 60
    );
    let pods: Vec<Vec<u64>> = all
        .into_iter()
        .filter_map(|(_, samples)| each_minute(samples, first, minutes))
        .collect();
    ensure!(
        pods.len() > 1,
        "fewer than two pods were there for {LEAST} % of the time: there is nothing to judge"
    );
    Ok(Fleet {
        name: "trace",
        pods,
        turns: minutes < 2 * DAY,
    })
}

/// The largest of each minute; one without a sample is like the one before. None if most are missing.
fn each_minute(samples: Vec<(i64, u64)>, first: i64, minutes: usize) -> Option<Vec<u64>> {
    let mut all: Vec<Option<u64>> = vec![None; minutes];
    for (at, used) in samples {
        let minute = all.get_mut(usize::try_from(at - first).ok()?)?;
        *minute = (*minute).max(Some(used));
    }
    // Samples may come a little less than once a minute.
    let near = |at: usize| all[at.saturating_sub(1)..=at].iter().any(Option::is_some);
    let seen = (0..minutes).filter(|at| near(*at)).count();
    let mut last = all.iter().find_map(|it| *it)?;
    let filled = all.iter().map(|it| {
        last = it.unwrap_or(last);
        last
    });
    (seen * 100 >= minutes * LEAST).then(|| filled.collect())
}

/// The way to choose pods' requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The most that each uses in all of its time, as if that were known.
    Peak,
    /// The advice.
    Advised,
    /// The advice at this quantile, in thousandths.
    Quantile(u32),
    /// The most that was used for twelve minutes of an hour.
    Sustained,
}

impl Request {
    /// Every way that is compared.
    pub const ALL: [Self; 5] = [
        Self::Peak,
        Self::Advised,
        Self::Quantile(990),
        Self::Quantile(950),
        Self::Sustained,
    ];

    /// The name in tables.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Peak => "peak".to_owned(),
            Self::Advised => "advice".to_owned(),
            Self::Quantile(permille) => format!("advice at p{}", permille / 10),
            Self::Sustained => "window peaks".to_owned(),
        }
    }

    /// The request of a pod with this history and this peak on a GPU of this size.
    fn of(self, history: &History, peak: u64, gpu: Mib) -> u64 {
        let advice = match self {
            Self::Peak => None,
            Self::Advised => advise(history, gpu).map(|it| it.request),
            Self::Quantile(permille) => advise_at(history, gpu, permille).map(|it| it.request),
            Self::Sustained => history.sustained(),
        };
        advice.map_or(peak, |it| it.0).min(gpu.0)
    }
}

/// One way to request on GPUs of one size, over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Whose use it is.
    pub series: &'static str,
    /// How many pods share a history.
    pub replicas: usize,
    /// Size of a GPU, in MiB.
    pub gpu_mib: u64,
    /// The name of the way to request.
    pub request: String,
    /// Pods on a GPU, relative to requests at the peak.
    pub pods: Mean,
    /// Minutes in which the pods of a GPU use more than it has, in percent.
    pub over_pct: Mean,
    /// Stretches of such minutes for each GPU and day: allocations that fail.
    pub episodes: Mean,
    /// GPUs without any, in percent.
    pub without_pct: Mean,
    /// Minutes in which a pod uses more than it requests, in percent.
    pub above_pct: Mean,
    /// This percentage for the pod with the most such minutes.
    pub worst_pod_pct: Mean,
    /// How far the amount moves if the advice is read at each hour of one day, after eight like it: the largest over the
    /// smallest of the workload for which it moves most, in percent.
    pub moves_pct: Mean,
}

/// Judges every way of requesting on GPUs of these sizes, where so many pods share a history.
#[must_use]
pub fn judge(
    fleet: &Fleet,
    replicas: &[usize],
    gpus: &[Mib],
    seeds: impl Iterator<Item = u64> + Clone,
) -> Vec<Judged> {
    let mut judged = Vec::new();
    for &replicas in replicas {
        let draws: Vec<Draw> = seeds
            .clone()
            .map(|seed| Draw::new(fleet, replicas, seed))
            .collect();
        // Where the time does not turn, every seed shares histories among the same pods.
        let differ = if fleet.turns { draws.len() } else { 1 };
        let moves = draws.iter().take(differ);
        let moves: Vec<_> = moves.map(|it| moves_of(fleet, &it.shared)).collect();
        let ways = |gpu| Request::ALL.iter().enumerate().map(move |way| (gpu, way));
        for (&gpu, (way, &request)) in gpus.iter().flat_map(ways) {
            let runs: Vec<[f64; 6]> = draws.iter().map(|it| it.judge(request, gpu)).collect();
            let mean = |at: usize| Mean::of(&runs.iter().map(|it| it[at]).collect::<Vec<_>>());
            let moves: Vec<f64> = moves.iter().map(|it| it[way]).collect();
            judged.push(Judged {
                series: fleet.name,
                replicas,
                gpu_mib: gpu.0,
                request: request.name(),
                pods: mean(0),
                over_pct: mean(1),
                episodes: mean(2),
                without_pct: mean(3),
                above_pct: mean(4),
                worst_pod_pct: mean(5),
                moves_pct: Mean::of(&moves),
            });
        }
    }
    judged
}

/// The draws of one seed: when the time begins, which pods share a history, and in which orders pods come.
struct Draw {
    histories: Vec<History>,
    /// By pod, which of them it has.
    shared: Vec<usize>,
    peaks: Vec<u64>,
    later: Vec<Vec<u64>>,
    orders: Vec<Vec<usize>>,
}

impl Draw {
    fn new(fleet: &Fleet, replicas: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let pods = fleet.pods.len();
        let mut order: Vec<usize> = (0..pods).collect();
        let mut begin = 0;
        // Made pods of one workload lie side by side; which recorded ones belong together is unknown.
        if fleet.turns {
            random.shuffle(&mut order);
            begin = random.below(fleet.pods.first().map_or(0, Vec::len));
        }
        let mut shared = vec![0; pods];
        for (place, &pod) in order.iter().enumerate() {
            shared[pod] = place / replicas.max(1);
        }
        let turned = fleet.pods.iter().map(|used| {
            let (head, tail) = used.split_at(begin);
            [tail, head].concat()
        });
        let turned: Vec<Vec<u64>> = turned.collect();
        let learnt = fleet.learnt();
        let mut histories = vec![History::default(); shared.iter().max().map_or(0, |it| it + 1)];
        for minute in 0..learnt {
            for (used, &at) in turned.iter().zip(&shared) {
                histories[at].add(Mib(used[minute]), minute as i64 * MINUTE);
            }
        }
        let orders = (0..ORDERS).map(|_| {
            random.shuffle(&mut order);
            order.clone()
        });
        Self {
            orders: orders.collect(),
            peaks: turned
                .iter()
                .map(|used| used.iter().copied().max().unwrap_or(0))
                .collect(),
            later: turned
                .iter()
                .map(|used| used[learnt.min(used.len())..].to_vec())
                .collect(),
            histories,
            shared,
        }
    }

    /// Pods, minutes over, episodes, GPUs without episodes, minutes above the request, and such minutes of the worst
    /// pod.
    fn judge(&self, request: Request, gpu: Mib) -> [f64; 6] {
        let pods = self.peaks.iter().zip(&self.shared);
        let requests: Vec<u64> = pods
            .map(|(&peak, &at)| request.of(&self.histories[at], peak, gpu))
            .collect();
        let (mut at_peak, mut gpus, mut minutes) = (0, 0, 0);
        let (mut over, mut episodes, mut without) = (0, 0, 0);
        for order in &self.orders {
            at_peak += first_fit(order, &self.peaks, gpu.0).len();
            for there in first_fit(order, &requests, gpu.0) {
                let used = self.over(&there, gpu.0);
                let begins = used
                    .iter()
                    .enumerate()
                    .filter(|(at, is)| **is && (*at == 0 || !used[at - 1]));
                let begins = begins.count();
                gpus += 1;
                minutes += used.len();
                over += used.iter().filter(|it| **it).count();
                episodes += begins;
                without += usize::from(begins == 0);
            }
        }
        let above = requests.iter().zip(&self.later).map(|(request, later)| {
            let above = later.iter().filter(|used| *used > request).count();
            percent(above, later.len())
        });
        let above: Vec<f64> = above.collect();
        [
            percent(at_peak, gpus) / 100.0,
            percent(over, minutes),
            percent(episodes * DAY, minutes) / 100.0,
            percent(without, gpus),
            above.iter().sum::<f64>() / above.len().max(1) as f64,
            above.iter().copied().fold(0.0, f64::max),
        ]
    }

    /// Of each minute, whether these pods use more than that.
    fn over(&self, pods: &[usize], gpu: u64) -> Vec<bool> {
        let minutes = self.later.first().map_or(0, Vec::len);
        let used = |minute: usize| pods.iter().map(|&pod| self.later[pod][minute]).sum::<u64>();
        (0..minutes).map(|minute| used(minute) > gpu).collect()
    }
}

/// How far the amount of each way moves within the last of nine days, in percent. A shorter recording is repeated.
fn moves_of(fleet: &Fleet, shared: &[usize]) -> [f64; Request::ALL.len()] {
    let mut histories = vec![History::default(); shared.iter().max().map_or(0, |it| it + 1)];
    let mut ranges = vec![[(u64::MAX, 0); Request::ALL.len()]; histories.len()];
    for minute in 0..9 * DAY {
        for (used, &at) in fleet.pods.iter().zip(shared) {
            histories[at].add(Mib(used[minute % used.len()]), minute as i64 * MINUTE);
        }
        if minute < 8 * DAY || minute % 60 > 0 {
            continue;
        }
        for (history, ranges) in histories.iter().zip(&mut ranges) {
            for ((least, most), request) in ranges.iter_mut().zip(Request::ALL) {
                let amount = request.of(history, 1, Mib(u64::from(u32::MAX)));
                (*least, *most) = (amount.min(*least), amount.max(*most));
            }
        }
    }
    std::array::from_fn(|way| {
        let of_each = ranges.iter().map(|it| {
            let (least, most) = it[way];
            100.0 * most.saturating_sub(least) as f64 / least.max(1) as f64
        });
        of_each.fold(0.0, f64::max)
    })
}

fn percent(part: usize, of: usize) -> f64 {
    100.0 * part as f64 / of.max(1) as f64
}

/// The pods of each GPU.
fn first_fit(order: &[usize], requests: &[u64], gpu: u64) -> Vec<Vec<usize>> {
    let mut gpus: Vec<(u64, Vec<usize>)> = Vec::new();
    for &pod in order {
        let wanted = requests[pod];
        match gpus.iter_mut().find(|(held, _)| held + wanted <= gpu) {
            Some((held, pods)) => {
                *held += wanted;
                pods.push(pod);
            }
            None => gpus.push((wanted, vec![pod])),
        }
    }
    gpus.into_iter().map(|(_, pods)| pods).collect()
}
