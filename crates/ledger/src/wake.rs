//! Which waiting pods to wake when room appears.
//!
//! kube-scheduler puts a refused pod to sleep and does not see our room: it must be told, and only
//! the pods that would fit should be, in the order in which the scheduler would take them.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_pack::{NodeGpus, fit};
use hashbrown::{HashMap, HashSet};

use crate::Ledger;
use crate::node::Uid;

/// A pod that is never seen in a watch is forgotten after this long.
const UNSEEN_FOR: Duration = Duration::from_secs(60);
/// At most this many pods whose time has come are tried against the whole cluster in one call.
const SWEEP: usize = 64;

/// The pods that wait, and the nodes where room appeared since the last wake-up.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pods: HashMap<Uid, Wait>,
    gained: HashSet<Arc<str>>,
}

/// One pod's history of wake-ups.
#[derive(Clone, Copy, Debug, Default)]
struct Wait {
    /// When it may be woken without new room; `None` until the first call after it was refused.
    next: Option<Duration>,
    woken: u32,
    unseen_since: Option<Duration>,
}

impl Waiting {
    pub(crate) fn insert(&mut self, uid: Uid) {
        self.pods.entry(uid).or_default();
    }

    pub(crate) fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    pub(crate) fn room_on(&mut self, node: &str) {
        if !self.pods.is_empty() {
            self.gained.insert(node.into());
        }
    }

    pub(crate) fn contains(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }
}

impl Ledger {
    /// Number of pods that were refused, or lost their reservation, and still wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.pods.len()
    }

    /// The pods to wake now, at most `limit`: where room appeared, those that would fit in it
    /// together, in the scheduler's order; and those that have waited since their last wake-up
    /// though they would fit.
    pub fn wake(&mut self, limit: usize, now: Duration) -> Vec<Arc<PodFacts>> {
        self.expire(now);
        self.forget_unseen(now);
        if self.waiting.pods.is_empty() {
            self.waiting.gained.clear();
            return Vec::new();
        }
        let pods = self.in_order(now);
        let gained: Vec<Arc<str>> = self.waiting.gained.drain().collect();
        let mut scratch = HashMap::new();
        let mut woken = Vec::new();
        let mut sweep = SWEEP;
        for (pod, due) in pods {
            if woken.len() == limit {
                self.waiting.gained.extend(gained);
                break;
            }
            let mut fits = self.takes(&pod, gained.iter(), &mut scratch, now);
            if !fits && due && sweep > 0 {
                sweep -= 1;
                fits = self.takes(&pod, self.nodes.keys(), &mut scratch, now);
                self.postpone(&pod.uid, now);
            }
            if fits {
                self.postpone(&pod.uid, now);
                woken.push(pod);
            }
        }
        woken
    }

    fn forget_unseen(&mut self, now: Duration) {
        let pods = &self.pods;
        self.waiting.pods.retain(|uid, wait| {
            if pods.contains_key(uid) {
                wait.unseen_since = None;
                return true;
            }
            now.saturating_sub(*wait.unseen_since.get_or_insert(now)) < UNSEEN_FOR
        });
    }

    /// The waiting pods that may be bound at all, in the scheduler's order, each with whether it
    /// may be woken without new room.
    fn in_order(&mut self, now: Duration) -> Vec<(Arc<PodFacts>, bool)> {
        let first = now + self.config.wake_again_after;
        let mut order = Vec::new();
        for (uid, wait) in &mut self.waiting.pods {
            let Some(known) = self.pods.get(uid) else {
                continue;
            };
            let pod = &known.facts;
            if pod.node.is_none() && !pod.gated && !pod.deleting && pod.request.is_ok() {
                order.push((pod.clone(), *wait.next.get_or_insert(first) <= now));
            }
        }
        order.sort_unstable_by(|(a, _), (b, _)| {
            (-i64::from(a.priority), a.created, &a.uid).cmp(&(
                -i64::from(b.priority),
                b.created,
                &b.uid,
            ))
        });
        order
    }

    fn postpone(&mut self, uid: &str, now: Duration) {
        if let Some(wait) = self.waiting.pods.get_mut(uid) {
            wait.next = Some(now + self.config.wake_again_after * (1 << wait.woken.min(5)));
            wait.woken += 1;
        }
    }

    /// Takes the room for `pod` on the first of `nodes` that has it.
    fn takes<'n>(
        &self,
        pod: &PodFacts,
        mut nodes: impl Iterator<Item = &'n Arc<str>>,
        scratch: &mut HashMap<Arc<str>, NodeGpus>,
        now: Duration,
    ) -> bool {
        let Ok(request) = &pod.request else {
            return false;
        };
        nodes.any(|name| {
            let Some(node) = self.nodes.get(name) else {
                return false;
            };
            let fresh = node
                .report
                .as_ref()
                .is_some_and(|report| now.saturating_sub(report.seen) <= self.config.stale_after);
            let view = scratch.get(name).unwrap_or(&node.view);
            match fresh.then(|| fit(view, request, &gpustow_pack::policy::FirstFit)) {
                Some(Ok(choice)) => {
                    let view = scratch
                        .entry(name.clone())
                        .or_insert_with(|| node.view.clone());
                    for (card, mib) in choice.placement.charges {
                        view.cards[card].free = view.cards[card].free.minus(mib);
                    }
                    true
                }
                _ => false,
            }
        })
    }
}
