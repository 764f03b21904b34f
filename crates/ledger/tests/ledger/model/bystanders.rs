//! Bystanders are pods that no feature can help, or that never finish. They do not keep a feature from other pods: if a
//! feature helps a pod without them, it also helps one with them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::config::Action;
use gpustow_ledger::{Borrower, Config, Ledger, TURNS, Ungate};

use super::server::NODES;
use super::switches::Bystander;
use super::world::{World, require};
use crate::act::Act as _;
use crate::build::{ask, asking};

/// Bystanders that stand before the others: more than any feature looks at.
const MANY: u64 = 20;
/// Seconds in which the others are helped without a bystander, and with one: a pod that never finishes counts for a
/// minute.
const ALONE: u64 = 12;
const BESIDE: u64 = 100;

/// How long the other pods are waited for when there are bystanders.
fn seconds_beside(bystander: Bystander) -> u64 {
    match bystander {
        Bystander::Soft => 6 * BESIDE,
        // They are passed over at no cost.
        Bystander::Never => ALONE + 4,
        Bystander::Hopeless | Bystander::Stuck => BESIDE,
    }
}

/// A feature that does something for waiting pods.
#[derive(Clone, Copy, Debug)]
pub(super) enum Feature {
    Preempt,
    Defragment,
    Reserve,
    Reclaim,
    Queue,
}

impl World {
    /// Compares two ledgers that have seen the lists, with and without the bystanders that this history has drawn.
    pub(super) fn check_bystanders(&self) -> Result<(), String> {
        let Some(bystander) = self.switches.bystander else {
            return Ok(());
        };
        let on = self.switches;
        let features = [
            (on.preempt, Feature::Preempt),
            (on.defragment, Feature::Defragment),
            (on.reserve, Feature::Reserve),
            (on.reclaim, Feature::Reclaim),
            (on.queue, Feature::Queue),
        ];
        for (_, feature) in features.into_iter().filter(|(is_on, _)| *is_on) {
            let concerned = match (bystander, feature) {
                (Bystander::Hopeless, _) => true,
                // Room may be reserved for such pods, borrowed memory reclaimed, and other pods may move.
                (Bystander::Never, _) => matches!(feature, Feature::Preempt | Feature::Queue),
                (Bystander::Stuck, _) => true,
                (Bystander::Soft, _) => matches!(feature, Feature::Reclaim),
            };
            if !concerned || self.takes_room(feature, bystander) {
                continue;
            }
            let none = BTreeSet::new();
            let alone = self.helped(
                feature,
                &self.cast_for(feature, bystander, false),
                &none,
                ALONE,
            );
            if alone.is_empty() {
                continue;
            }
            let pods = self.cast_for(feature, bystander, true);
            let beside = self.helped(feature, &pods, &alone, seconds_beside(bystander));
            require(!beside.is_empty(), || {
                format!("{feature:?} helps {alone:?}, and no pod beside {bystander:?}")
            })?;
        }
        Ok(())
    }

    /// Does a bystander fit somewhere? Then it is none.
    fn takes_room(&self, feature: Feature, bystander: Bystander) -> bool {
        let mut pods = self.cast(bystander, true);
        if let Feature::Queue = feature {
            // They are the first in the queue.
            pods.retain(|pod| pod.node.is_some() || pod.uid.starts_with('x'));
        }
        let mut ledger = self.only(feature, &pods);
        self.ask_all(&mut ledger, &pods, self.now);
        let mut added = pods.iter().filter(|pod| pod.uid.starts_with('x'));
        added.any(|pod| ledger.reserved_because(&pod.uid).is_some())
    }

    /// As [`World::cast`], with the pods as the feature sees them.
    fn cast_for(&self, feature: Feature, bystander: Bystander, there: bool) -> Vec<PodFacts> {
        let mut pods = self.cast(bystander, there);
        for pod in &mut pods {
            pod.queued = matches!(feature, Feature::Queue) && pod.node.is_none();
        }
        pods
    }

    /// The pods as they are now, with the bystanders or without. One that never finishes is, without that, one that
    /// cannot be disrupted.
    pub(super) fn cast(&self, bystander: Bystander, there: bool) -> Vec<PodFacts> {
        let mut pods = self.server.pods.clone();
        // kube-scheduler asks about the pods of a group in cycles of their own.
        pods.retain(|pod| pod.node.is_some() || pod.group.is_none());
        for pod in &mut pods {
            pod.queued = false;
            pod.nominated = None;
            pod.reserved_on = None;
            pod.waiting = pod.node.is_none();
        }
        match bystander {
            Bystander::Stuck => {
                let bound = |pod: &&mut PodFacts| pod.node.is_some() && !pod.released;
                let some = pods.iter().any(|pod| pod.node.is_some() && pod.deleting);
                if let Some(pod) = pods.iter_mut().find(bound).filter(|_| !some) {
                    pod.deleting = true;
                }
                for pod in pods.iter_mut().filter(bound) {
                    // It was to be gone by now.
                    pod.gone_by = pod.deleting.then(|| unix(self.now));
                    if pod.deleting && !there {
                        (pod.deleting, pod.priority, pod.evictable) = (false, i32::MAX, None);
                        // Nor does it give memory back.
                        pod.gone_by = Some(0);
                    }
                }
            }
            Bystander::Soft => {
                let is_soft = |pod: &&mut PodFacts| pod.node.is_some() && pod.action.is_some();
                for pod in pods.iter_mut().filter(is_soft).filter(|_| !there) {
                    pod.gone_by = Some(0);
                }
            }
            Bystander::Hopeless | Bystander::Never if !there => {}
            Bystander::Hopeless => pods.extend((0..MANY).map(|number| {
                let gpus = 5 + u32::try_from(number).unwrap_or(0);
                first(asking(&format!("x{number}"), &[(gpus, 1)]))
            })),
            Bystander::Never => pods.extend((0..MANY).map(|number| {
                let mut pod = first(asking(&format!("x{number}"), &[(1, 10)]));
                pod.preempts = false;
                pod.asks.change(|it| it.cpu_milli = 1 + number);
                pod
            })),
        }
        pods
    }

    /// The pods that the feature helps within this many seconds, bystanders apart. It adds pods of `wanted` that get
    /// room without help: a policy that learns of bystanders may place other pods elsewhere.
    fn helped(
        &self,
        feature: Feature,
        pods: &[PodFacts],
        wanted: &BTreeSet<Arc<str>>,
        seconds: u64,
    ) -> BTreeSet<Arc<str>> {
        let mut ledger = self.only(feature, pods);
        let begin = self.now;
        let mut helped = BTreeSet::new();
        for second in 0..seconds {
            let now = begin + Duration::from_secs(second);
            ledger.tell_time(unix(now));
            if second % 60 == 59 {
                self.report_to(&mut ledger, now);
            }
            if second % 4 == 0 {
                self.ask_all(&mut ledger, pods, now);
            }
            let by = act(&mut ledger, feature, self.config.owners_soften, now).into_iter();
            helped.extend(by.filter(|uid| !uid.starts_with('x')));
            let placed = wanted.iter();
            let placed = placed.filter(|uid| ledger.reserved_because(uid).is_some());
            helped.extend(placed.cloned());
            if !helped.is_empty() {
                break;
            }
            self.ask_back(&mut ledger, pods, now);
        }
        helped
    }

    /// Marks the pods that are to give memory back.
    fn ask_back(&self, ledger: &mut Ledger, pods: &[PodFacts], now: Duration) {
        let backs = ledger.reclaims(now);
        let victims = backs.iter().flat_map(|back| &back.borrowers);
        let asked: BTreeSet<&Arc<str>> = victims.map(|victim| &victim.pod.uid).collect();
        for pod in pods.iter().filter(|pod| pod.node.is_some()) {
            let asked_back = asked.contains(&pod.uid).then_some(Action::Event);
            if ledger
                .pod(&pod.uid)
                .is_some_and(|it| it.asked_back != asked_back)
            {
                ledger.apply_pod(PodFacts {
                    asked_back,
                    ..pod.clone()
                });
            }
        }
    }

    /// Every agent repeats its report.
    pub(super) fn report_to(&self, ledger: &mut Ledger, now: Duration) {
        for (name, report) in &self.server.reports {
            let mut report = report.clone();
            report.heartbeat = Some(format!("{now:?}"));
            ledger.apply_gpunode(name, report, now);
        }
    }

    /// kube-scheduler asks about all waiting pods without room.
    pub(super) fn ask_all(&self, ledger: &mut Ledger, pods: &[PodFacts], now: Duration) {
        let waits = |pod: &&PodFacts| {
            pod.node.is_none() && !pod.gated && !pod.queued && !pod.deleting && !pod.released
        };
        for pod in pods.iter().filter(waits) {
            if ledger.reserved_because(&pod.uid).is_none() {
                let shown = |name: &&&str| !self.is_rejected(pod, name);
                let nodes: Vec<&str> = NODES.iter().filter(shown).copied().collect();
                ledger.filter(&ask(pod), &nodes, now);
            }
        }
    }

    /// A ledger that has seen the lists, in which nothing else is turned on.
    pub(super) fn only(&self, feature: Feature, pods: &[PodFacts]) -> Ledger {
        let config = Config {
            reclaim: matches!(feature, Feature::Reclaim),
            queue: matches!(feature, Feature::Queue),
            reserve_after: matches!(feature, Feature::Reserve).then_some(Duration::ZERO),
            preempt_fragmented: matches!(feature, Feature::Preempt),
            defragment: matches!(feature, Feature::Defragment),
            // It is asked about all nodes.
            least_nodes: Config::default().least_nodes,
            ..self.config
        };
        self.rebuilt_with(config, pods)
    }
}

/// The time of day in the model.
pub(super) fn unix(now: Duration) -> i64 {
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

/// It stands before all others.
fn first(pod: PodFacts) -> PodFacts {
    PodFacts {
        priority: 3,
        created: -1,
        waiting: true,
        ..pod
    }
}

/// Does the extender's work of every second, and returns the pods that it helps.
fn act(ledger: &mut Ledger, feature: Feature, softens: bool, now: Duration) -> Vec<Arc<str>> {
    for means in TURNS {
        ledger.look(means, usize::MAX, now);
    }
    let uid = |pod: &Arc<PodFacts>| pod.uid.clone();
    match feature {
        Feature::Preempt | Feature::Defragment => {
            let all = ledger.preemptions(now);
            let all = all.iter().filter(|it| !it.victims.is_empty());
            all.map(|it| uid(&it.pod)).collect()
        }
        Feature::Reserve => ledger
            .reservations()
            .iter()
            .map(|it| uid(&it.pod))
            .collect(),
        Feature::Reclaim => {
            // Pods whose owners soften the action on them do not give memory back.
            let all = ledger.reclaims(now);
            let gives = |it: &Borrower| it.pod.action.is_none() || !softens;
            let all = all.iter().filter(|it| it.borrowers.iter().all(gives));
            all.map(|it| uid(&it.pod)).collect()
        }
        Feature::Queue => {
            let woken = ledger.wake(10, now).into_iter();
            let has_room = |pod: &Arc<PodFacts>| ledger.ungated_because(&pod.uid) == Ungate::Room;
            let woken: Vec<_> = woken.filter(|pod| pod.queued && has_room(pod)).collect();
            woken.iter().map(uid).collect()
        }
    }
}
