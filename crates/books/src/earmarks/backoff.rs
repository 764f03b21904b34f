//! Attempts for a pod that failed: other nodes and GPUs come first, and a pause separates two attempts.
//!
//! A pod has one [`Backoff`] for each cause. Failed nodes and GPUs are tried again once no other is left. A pause
//! precedes that, and follows each time that other pods were evicted for nothing. It doubles each time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::Earmarks;
use super::earmark::{Cause, Earmark};
use crate::books::Uid;
use crate::maps::{HashMap, HashSet};

/// The first pause, and the longest.
const PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(960);
/// After a reclaim that gave a pod nothing, others may be preempted for it for so long before the next GPU is tried.
const YIELDS: Duration = Duration::from_secs(15);

/// A pause that has doubled so many times, and is no longer than the longest.
pub fn doubled(pause: Duration, times: u32, longest: Duration) -> Duration {
    pause.saturating_mul(1 << times.min(16)).min(longest)
}

/// The failed attempts for one cause.
#[derive(Debug, Default)]
struct Backoff {
    /// GPUs by UUID, or nodes by name.
    avoid: HashSet<Arc<str>>,
    pauses: u32,
    until: Option<Duration>,
    /// Until then another means goes first.
    yields_until: Option<Duration>,
}

impl Backoff {
    fn pause(&mut self, from: Duration) {
        self.until = Some(from + doubled(PAUSE, self.pauses, LONGEST_PAUSE));
        self.pauses += 1;
    }

    fn is_paused(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| until > now)
    }

    /// Nothing is left that has not failed: after a pause all of it may be tried again.
    fn all_tried(&mut self, now: Duration) {
        match self.until {
            _ if self.avoid.is_empty() || self.is_paused(now) => {}
            Some(_) => {
                self.until = None;
                self.avoid.clear();
            }
            None => self.pause(now),
        }
    }
}

/// The failed attempts for a pod or a controller, by cause.
type Failures = BTreeMap<Cause, Backoff>;

/// A controller, by its namespace and UID. It makes a new pod, with a new UID, where one failed: the back-off is its own.
pub type Controller = (Arc<str>, Uid);

/// The controller that makes pods like this one.
pub fn controller(pod: &PodFacts) -> Option<Controller> {
    Some((pod.namespace.clone(), pod.controller.clone()?))
}

/// The failed attempts for waiting pods, and for controllers.
#[derive(Debug, Default)]
pub(super) struct Backoffs {
    pods: HashMap<Uid, Failures>,
    /// Only attempts for which other pods were evicted.
    controllers: HashMap<Controller, Failures>,
}

impl Backoffs {
    /// Notes that the earmarked room did not come, or was of no use.
    fn note(
        &mut self,
        uid: &str,
        controller: Option<Controller>,
        earmark: &Earmark,
        now: Duration,
    ) {
        let cause = earmark.cause();
        let cards = earmark.cards().iter().map(|(card, _)| card.clone());
        match cause {
            Cause::Reclaim | Cause::Reserve => {
                let of_pod = self.pods.entry(uid.into()).or_default();
                let backoff = of_pod.entry(cause).or_default();
                backoff.avoid.extend(cards);
                // Not one that ended early: pods elsewhere would end soon after others were asked here.
                if earmark.until() <= now {
                    backoff.yields_until = Some(now + YIELDS);
                }
            }
            Cause::Preempt | Cause::Defragment => {
                let of_pod = self.pods.entry(uid.into()).or_default();
                evicted_for_nothing(of_pod, earmark, now);
                if let Some(controller) = controller {
                    let of_controller = self.controllers.entry(controller).or_default();
                    evicted_for_nothing(of_controller, earmark, now);
                }
            }
            _ => {}
        }
    }

    pub(super) fn forget(&mut self, uid: &str) {
        self.pods.swap_remove(uid);
    }

    pub(super) fn retain(&mut self, is_known: impl Fn(&Uid) -> bool) {
        self.pods.retain(|uid, _| is_known(uid));
    }

    /// The failed attempts for the pod, and for earlier pods of its controller.
    fn of<'s>(&'s self, pod: &PodFacts) -> impl Iterator<Item = &'s Failures> + use<'s> {
        let earlier = controller(pod).and_then(|it| self.controllers.get(&it));
        self.pods.get(&pod.uid).into_iter().chain(earlier)
    }
}

/// Others were evicted, or should have been, for nothing.
fn evicted_for_nothing(failures: &mut Failures, earmark: &Earmark, from: Duration) {
    let backoff = failures.entry(earmark.cause()).or_default();
    backoff.avoid.insert(earmark.node().clone());
    backoff.pause(from);
}

impl Earmarks {
    /// The earmarked room did not come, or was of no use to the pod. Other GPUs or nodes are tried first. If other pods
    /// were evicted for it, a pause precedes the next eviction, also for the controller's next pod.
    pub(super) fn back_off(&mut self, uid: &str, pod: Option<&PodFacts>, earmark: &Earmark) {
        let controller = pod.and_then(controller);
        self.backoffs.note(uid, controller, earmark, self.now);
    }

    /// A pod is gone, or is being deleted, before it had the room that others were to leave to it: its controller may
    /// make another at once, for which others would be evicted, and so on.
    pub(super) fn beneficiary_lost(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let is_lost = new.is_none_or(|pod| pod.released || pod.deleting);
        let Some(old) = old.filter(|old| is_lost && old.node.is_none()) else {
            return;
        };
        if let Some(earmark) = self.eviction_for(&old.uid)
            && let Some(controller) = controller(old)
        {
            let earmark = earmark.clone();
            let of_controller = self.backoffs.controllers.entry(controller).or_default();
            evicted_for_nothing(of_controller, &earmark, earmark.until());
        }
    }

    /// Forgets controllers whose pauses have been over for as long as a pause may be.
    pub fn forget_controllers(&mut self, now: Duration) {
        let lasts = |it: &Backoff| it.until.is_some_and(|until| until + LONGEST_PAUSE > now);
        let controllers = &mut self.backoffs.controllers;
        controllers.retain(|_, failures| failures.values().any(lasts));
    }

    /// Were others evicted on this node for the pod without success?
    pub fn avoids_node(&self, pod: &PodFacts, node: &str) -> bool {
        let mut failures = self.backoffs.of(pod).flat_map(BTreeMap::values);
        failures.any(|it| it.avoid.contains(node))
    }

    /// Were others evicted for the pod without success so lately that no other is now?
    pub fn pauses_evictions(&self, pod: &PodFacts, now: Duration) -> bool {
        let evicts = |(cause, it): (&Cause, &Backoff)| cause.evicts() && it.is_paused(now);
        self.backoffs.of(pod).flatten().any(evicts)
    }

    /// Until when nothing is tried for the pod by this cause. Causes that evict pods pause together.
    pub fn backs_off(&self, pod: &PodFacts, cause: Cause, now: Duration) -> Option<Duration> {
        let pauses = |it: &Cause| *it == cause || it.evicts() && cause.evicts();
        let failures = self.backoffs.of(pod).flatten();
        let paused = failures.filter(|(it, backoff)| pauses(it) && backoff.is_paused(now));
        paused.filter_map(|(_, backoff)| backoff.until).max()
    }

    /// Has a reclaim for the pod failed so lately that others may be preempted for it before the next one?
    pub fn yields_reclaim(&self, uid: &str, now: Duration) -> bool {
        let of_pod = self.backoffs.pods.get(uid);
        let backoff = of_pod.and_then(|failures| failures.get(&Cause::Reclaim));
        let until = backoff.and_then(|it| it.yields_until);
        until.is_some_and(|until| until > now)
    }

    /// Was this GPU awaited for the pod without success?
    pub fn avoids_card(&self, uid: &str, cause: Cause, card: &str) -> bool {
        let of_pod = self.backoffs.pods.get(uid);
        let backoff = of_pod.and_then(|failures| failures.get(&cause));
        backoff.is_some_and(|it| it.avoid.contains(card))
    }

    /// All GPUs or nodes were tried for the pod. They may be tried again after a pause. During the pause, nothing is
    /// earmarked for the pod by this cause, and other pods may take the free room.
    pub fn all_tried(&mut self, pod: &PodFacts, cause: Cause, now: Duration) {
        let controller = controller(pod);
        let of_controller = controller.and_then(|it| self.backoffs.controllers.get_mut(&it));
        let of_pod = self.backoffs.pods.get_mut(&pod.uid);
        let failures = of_pod.into_iter().chain(of_controller);
        for backoff in failures.filter_map(|it| it.get_mut(&cause)) {
            backoff.all_tried(now);
        }
    }
}
