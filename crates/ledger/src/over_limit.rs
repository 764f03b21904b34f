//! Pods that use more of a card than their limit, and have done so for longer than they may.
//!
//! A program counts its own allocations, and neither what CUDA rounds up nor what a report does: a hundredth more than
//! the limit is none of its doing ([`tolerance`]).
//!
//! A limit that the driver holds, or that is not to be held, is nobody's offence; one that cannot be read is none.
//! A controller makes a new pod for one that ended for this, and the next may do the same: each is given twice as long as
//! the one before, up to [`LONGEST`].
//!
//! For how long is counted between reports: two that lie so far apart, and all between them, must say it. What came
//! before a time in which the agent was silent does not count.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_api::limit::{Enforce, Support};
use gpustow_pack::Mib;

use crate::Ledger;
use crate::books::{Event, Node, Uid};
use crate::earmarks::{Controller, controller};
use crate::maps::HashMap;
use crate::reclaim::Borrower;

/// A pod that has been over its limit of a card for too long.
#[derive(Clone, Debug)]
pub struct OverLimit {
    /// Where.
    pub node: Arc<str>,
    /// The pod, which is to give back.
    pub victim: Borrower,
    /// What it may use there.
    pub limit: Mib,
}

/// A pod of a controller may be over its limit for no longer than this, however many before it ended for that.
const LONGEST: Duration = Duration::from_secs(960);
/// What pods of a controller did is forgotten when none ended for so long.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// What reports said, by node, and who ended for it.
#[derive(Debug, Default)]
pub(crate) struct Seen {
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

/// Reports in a row that say that a pod is over its limit of a card.
#[derive(Debug)]
struct Run {
    uid: Uid,
    uuid: Box<str>,
    first: Duration,
    last: Duration,
}

impl Seen {
    /// The node's agent says nothing any more.
    pub(crate) fn forget(&mut self, name: &str) {
        self.runs.swap_remove(name);
    }

    /// Something has changed in the books: a pod that has been over its limit for too long, and was asked to give back,
    /// may have ended. Its controller makes another, which is given more time.
    pub(crate) fn follow(&mut self, event: &Event, limit: Duration) {
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
}

impl Ledger {
    /// The pods that have been over their limits for too long, where memory is reclaimed at all.
    #[must_use]
    pub fn over_limits(&self, now: Duration) -> Vec<OverLimit> {
        let nodes = self
            .over
            .runs
            .keys()
            .filter(|name| self.sight(now).check(name).is_ok());
        let nodes = nodes.filter_map(|name| self.parts.books.named_node(name));
        let each = nodes.flat_map(|(name, node)| self.over_on(name, node));
        let mut all: Vec<OverLimit> = each.filter(|over| self.is_long(over, now)).collect();
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

    /// Has it lasted? Whoever was asked already goes on being asked after a restart.
    fn is_long(&self, over: &OverLimit, now: Duration) -> bool {
        let Borrower { pod, uuid, .. } = &over.victim;
        let run = self.over.find(&over.node, &pod.uid, uuid);
        run.is_some_and(|run| {
            let patience = self
                .over
                .patience(pod, now, self.parts.config.over_limit_for);
            pod.asked_back.is_some() || run.last - run.first >= patience
        })
    }

    /// A report came that says something new.
    pub(crate) fn note_over_limits(&mut self, name: &str, now: Duration) {
        let forgotten = |it: &Ended| now.saturating_sub(it.last) >= FORGOTTEN_AFTER;
        self.over.ended.retain(|_, it| !forgotten(it));
        let Some((name, node)) = self.parts.books.named_node(name) else {
            return;
        };
        let run = |over: OverLimit| {
            let Borrower { pod, uuid, .. } = over.victim;
            let before = self.over.find(name, &pod.uid, &uuid);
            let before =
                before.filter(|run| now.saturating_sub(run.last) <= self.parts.config.stale_after);
            Run {
                uid: pod.uid.clone(),
                first: before.map_or(now, |run| run.first),
                last: now,
                uuid,
            }
        };
        let (name, runs) = (
            name.clone(),
            self.over_on(name, node).map(run).collect::<Vec<_>>(),
        );
        match runs.is_empty() {
            true => self.over.forget(&name),
            false => drop(self.over.runs.insert(name, runs)),
        }
    }

    /// Who is over its limit on the cards of a node by its last report.
    fn over_on<'s>(
        &'s self,
        name: &'s Arc<str>,
        node: &'s Node,
    ) -> impl Iterator<Item = OverLimit> + 's {
        let cards = node.gpus().iter().filter(|gpu| gpu.healthy && !gpu.missing);
        let each = cards.flat_map(|gpu| node.borrowers(gpu).map(move |it| (gpu, it)));
        each.filter_map(move |(gpu, (uid, held, used))| {
            let pod = self.parts.books.pod(uid).filter(|pod| !pod.deleting)?;
            let limit = watched_limit(pod, gpu, held);
            let limit = limit.filter(|limit| used > *limit + tolerance(*limit))?;
            Some(OverLimit {
                node: name.clone(),
                limit,
                victim: Borrower {
                    pod: pod.clone(),
                    uuid: gpu.uuid.as_str().into(),
                    held,
                    used,
                },
            })
        })
    }
}

/// What the pod may use of a card where it holds so much, if nobody else sees to it: where the driver should, only
/// if the card's report says that a limit is missing.
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
