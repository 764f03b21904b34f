//! Pods that use more of a card than their limit, and have done so for longer than they may.
//!
//! A program counts its own allocations, but not the rounding of CUDA or of a report. A hundredth more than the limit
//! is therefore not its fault ([`tolerance`]).
//!
//! A pod does not violate a limit that the driver holds, or that is not to be held. A limit that cannot be read does
//! not count. A controller makes a new pod for a pod that ended for this, and the new pod may violate the limit again.
//! Each new pod gets twice as much time as the one before, up to [`LONGEST`].
//!
//! The time over the limit is counted between reports: the first report, the last and all between them must show it.
//! Reports before a time in which the agent was silent do not count.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_api::limit::{Enforce, Support};
use gpustow_books::{Controller, Event, HashMap, Uid, controller};
use gpustow_pack::Mib;

use crate::demand::Borrower;
use crate::sight::Sight;

/// A pod that has been over its limit of a card for too long.
#[derive(Clone, Debug)]
pub struct OverLimit {
    /// Where.
    pub node: Arc<str>,
    /// The pod, which is to give back.
    pub victim: Borrower,
    /// The memory that the pod may use there.
    pub limit: Mib,
}

/// A pod of a controller may be over its limit for no longer than this, however many before it ended for that.
const LONGEST: Duration = Duration::from_secs(960);
/// The time after which ended pods of a controller are forgotten, if no other pod of it ended since.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// Reports of pods over their limits, by node, and ended pods, by controller.
#[derive(Debug, Default)]
pub struct Limits {
    runs: HashMap<Arc<str>, Vec<Run>>,
    ended: HashMap<Controller, Ended>,
}

/// Pods of one controller that ended after they were asked to give back.
#[derive(Debug)]
struct Ended {
    pods: u32,
    /// When the last of them was seen to be over its limit.
    last: Duration,
}

/// Consecutive reports that show a pod over its limit of a card.
#[derive(Debug)]
struct Run {
    uid: Uid,
    uuid: Box<str>,
    first: Duration,
    last: Duration,
}

impl Limits {
    /// Forgets the reports of a node: its GpuNode is gone, or no pod there is over a limit.
    pub fn forget(&mut self, name: &str) {
        self.runs.swap_remove(name);
    }

    /// Something has changed in the books: a pod that has been over its limit for too long, and was asked to give back,
    /// may have ended. Its controller makes another, which is given more time.
    pub fn follow(&mut self, event: &Event, limit: Duration) {
        let Event::Pod { uid, old, new } = event else {
            return;
        };
        let is_there = |pod: &&Arc<PodFacts>| !pod.deleting && !pod.released;
        let old = old.as_ref().filter(is_there);
        let ended = new.as_ref().filter(is_there).is_none();
        let Some(pod) = old.filter(|pod| ended && pod.asked_back.is_some()) else {
            return;
        };
        let runs = pod.node.as_ref().and_then(|node| self.runs.get(node));
        let its = runs.into_iter().flatten().filter(|run| run.uid == *uid);
        let long = its.filter(|run| run.last - run.first >= self.patience(pod, run.last, limit));
        let last = long.map(|run| run.last).max();
        if let Some((last, controller)) = last.zip(controller(pod)) {
            let pods = self.ended(&controller, last) + 1;
            self.ended.insert(controller, Ended { pods, last });
        }
    }

    /// How many pods of the controller have ended lately.
    fn ended(&self, controller: &Controller, now: Duration) -> u32 {
        let ended = self.ended.get(controller);
        let ended = ended.filter(|it| now.saturating_sub(it.last) < FORGOTTEN_AFTER);
        ended.map_or(0, |it| it.pods)
    }

    /// For how long the pod may be over its limit: twice as long for each pod of its controller that ended.
    fn patience(&self, pod: &PodFacts, now: Duration, limit: Duration) -> Duration {
        let ended = controller(pod).map_or(0, |it| self.ended(&it, now));
        let longer = limit.saturating_mul(1 << ended.min(16));
        longer.min(LONGEST.max(limit))
    }

    fn find(&self, name: &str, uid: &str, uuid: &str) -> Option<&Run> {
        let mut runs = self.runs.get(name)?.iter();
        runs.find(|run| *run.uid == *uid && *run.uuid == *uuid)
    }

    /// The pods that have been over their limits for too long, where memory is reclaimed at all.
    pub fn over(&self, known: &Sight<'_>) -> Vec<OverLimit> {
        let nodes = self.runs.keys().filter(|name| known.check(name).is_ok());
        let each = nodes.flat_map(|name| known.over_on(name));
        let mut all: Vec<OverLimit> = each.filter(|over| self.is_long(over, known)).collect();
        let key = |over: &OverLimit| {
            (
                over.node.clone(),
                over.victim.uuid.clone(),
                over.victim.pod.uid.clone(),
            )
        };
        all.sort_by_key(key);
        all
    }

    /// Is the pod over a limit on this node, and was it for too long?
    pub(super) fn is_over(&self, pod: &PodFacts, node: &str, known: &Sight<'_>) -> bool {
        let over = known.over_on(node);
        let is_its = |it: &OverLimit| it.victim.pod.uid == pod.uid && self.is_long(it, known);
        known.check(node).is_ok() && over.iter().any(is_its)
    }

    /// Has it lasted? A pod that was asked already goes on being asked after a restart.
    fn is_long(&self, over: &OverLimit, known: &Sight<'_>) -> bool {
        let Borrower { pod, uuid, .. } = &over.victim;
        let run = self.find(&over.node, &pod.uid, uuid);
        run.is_some_and(|run| {
            let patience = self.patience(pod, known.now, known.config.over_limit_for);
            pod.asked_back.is_some() || run.last - run.first >= patience
        })
    }

    /// A report with new content came.
    pub fn note(&mut self, name: &str, known: &Sight<'_>) {
        let now = known.now;
        let forgotten = |it: &Ended| now.saturating_sub(it.last) >= FORGOTTEN_AFTER;
        self.ended.retain(|_, it| !forgotten(it));
        let Some((name, _)) = known.books.named_node(name) else {
            return;
        };
        let run = |over: OverLimit| {
            let Borrower { pod, uuid, .. } = over.victim;
            let before = self.find(name, &pod.uid, &uuid);
            let before =
                before.filter(|run| now.saturating_sub(run.last) <= known.config.stale_after);
            Run {
                uid: pod.uid.clone(),
                first: before.map_or(now, |run| run.first),
                last: now,
                uuid,
            }
        };
        let runs: Vec<Run> = known.over_on(name).into_iter().map(run).collect();
        match runs.is_empty() {
            true => self.forget(name),
            false => drop(self.runs.insert(name.clone(), runs)),
        }
    }
}

impl Sight<'_> {
    /// Which pods are over their limits on the GPUs of a node by its last report.
    fn over_on(&self, name: &str) -> Vec<OverLimit> {
        let Some((name, node)) = self.books.named_node(name) else {
            return Vec::new();
        };
        let cards = node.gpus().iter().filter(|gpu| gpu.healthy && !gpu.missing);
        let each = cards.flat_map(|gpu| node.borrowers(gpu).map(move |it| (gpu, it)));
        let over = each.filter_map(|(gpu, (uid, held, used))| {
            let victim = self.borrower(gpu, (uid, held, used))?;
            let limit = watched_limit(&victim.pod, gpu, held);
            let limit = limit.filter(|limit| used > *limit + tolerance(*limit))?;
            Some(OverLimit {
                node: name.clone(),
                limit,
                victim,
            })
        });
        over.collect()
    }
}

/// The memory that the pod may use of a card where it holds `held`, if no other component enforces the limit. Where the
/// driver should enforce it, the limit counts only if the card's report shows that it is missing.
fn watched_limit(pod: &PodFacts, gpu: &Gpu, held: Mib) -> Option<Mib> {
    let request = pod.asks.readable().ok()?;
    let missing: &str = Support::Missing.into();
    let watched = match pod.enforce {
        Enforce::Watch => true,
        Enforce::Driver => gpu.memory_limit.as_deref() == Some(missing),
        Enforce::None => false,
    };
    let is_known = matches!(pod.assignment, Some(Ok(_)));
    (watched && is_known && !request.exclusive).then(|| {
        pod.limit_on(&gpu.uuid)
            .map_or(held, |limit| limit.max(held))
    })
}

/// How much more than its limit a pod may use: a hundredth, and at least the MiB by which a report may round use up.
fn tolerance(limit: Mib) -> Mib {
    Mib((limit.0 / 100).max(1))
}
