//! The memory that pods use beyond their requests in the model, and its reclaim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::config::Action;
use gpustow_api::gpunode::{Condition, GpuNodeStatus, PROCESSES_READABLE};
use gpustow_ledger::{Borrower, Reserved};

use super::world::{World, pick, require};
use crate::act::Act as _;
use crate::build::used;

pub(super) const STALE_AFTER: Duration = Duration::from_secs(100);
pub(super) const CALLED_FOR: Duration = Duration::from_secs(20);

/// A reclaim: for which pod, on which cards of which node.
type Key = (Arc<str>, Arc<str>, Vec<Arc<str>>);

/// A report: its time, and the pods that it showed over their limits of which cards.
pub(super) type Heard = (Duration, BTreeSet<(Arc<str>, String)>);

/// The records of the checks.
#[derive(Default)]
pub(super) struct Lending {
    /// Since when pods have been asked, or named, to give memory back.
    asked: BTreeMap<Arc<str>, Duration>,
    /// The changed reports of each node.
    heard: BTreeMap<&'static str, Vec<Heard>>,
    /// The reclaims under way, with the time at which each was first seen.
    begun: BTreeMap<Key, Duration>,
    /// The pods that were informed of free memory, and in which version, until a watch shows it.
    pub(super) told: BTreeMap<Arc<str>, u64>,
}

impl Lending {
    pub(super) fn forget(&mut self, name: &str) {
        self.heard.remove(name);
    }

    pub(super) fn forget_told(&mut self) {
        self.told.clear();
    }

    pub(super) fn reports(&self) -> &BTreeMap<&'static str, Vec<Heard>> {
        &self.heard
    }
}

fn key(back: &Reserved) -> Key {
    let cards = back.cards.iter().map(|(uuid, _)| uuid.clone()).collect();
    (back.pod.uid.clone(), back.node.clone(), cards)
}

impl World {
    /// The agent of a node sees the memory that one of its pods uses of a card.
    pub(super) fn uses(&mut self, name: &'static str, card: usize, pod: usize, mib: u64) {
        let pods = self.server.pods.iter();
        let here = pods.filter(|pod| pod.node.as_deref() == Some(name));
        let here: Vec<Arc<str>> = here.map(|pod| pod.uid.clone()).collect();
        let Some(mut report) = self.server.reports.get(name).cloned() else {
            return;
        };
        if let Some(pod) = pick(&here, pod)
            && let Some(card) = pick(&report.gpus, card)
        {
            // An instance does not have more memory than this.
            let own = self.server.find(&here[pod]).and_then(|index| {
                let assigned = self.server.pods[index].assignment.as_ref()?.as_ref().ok()?;
                let own = assigned.instance.as_ref().map(|_| &assigned.charges)?;
                Some(own.iter().map(|(_, mib)| mib.0).sum())
            });
            let mib = own.map_or(mib, |own| mib.min(own));
            let pods = &mut report.gpus[card].pods;
            pods.retain(|used| *used.uid != *here[pod]);
            if mib > 0 {
                pods.push(used(&here[pod], mib));
            }
            self.server.set_report(name, Some(report));
        }
    }

    /// Does the extender's work of every second. It asks no other pod in place of one that it has asked before and that
    /// could give the missing memory. That holds even if a budget protects this one.
    pub(super) fn reclaim(&mut self) -> Result<(), String> {
        let before = self.ledger.reclaims(self.now);
        self.ledger.reclaim(self.now);
        let backs = self.ledger.reclaims(self.now);
        for back in &backs {
            let uids = |back: &Reserved| -> Vec<Arc<str>> {
                back.victims.iter().map(|pod| pod.uid.clone()).collect()
            };
            let asked = before.iter().find(|it| key(it) == key(back)).map(uids);
            let asked = asked.filter(|asked| !asked.is_empty());
            require(asked.is_none_or(|asked| asked == uids(back)), || {
                format!("others are asked: {before:?}, then {back:?}")
            })?;
            let begun = self.lending.begun.get(&key(back)).copied();
            let late = begun.is_some_and(|begun| begun + CALLED_FOR < self.now);
            require(!late, || format!("does not end: {back:?}"))?;
        }
        self.announce();
        self.tell_of_memory()
    }

    /// Notes since when pods are asked: others come before a pod that was asked for as long as memory is waited for.
    pub(super) fn note_asked(&mut self) {
        let asked = self.ledger.pods().filter(|pod| pod.asked_back.is_some());
        let mut uids: Vec<Arc<str>> = asked.map(|pod| pod.uid.clone()).collect();
        let victims = self.victims().into_iter();
        uids.extend(victims.map(|(_, victim)| victim.pod.uid.clone()));
        for uid in uids {
            self.lending.asked.entry(uid).or_insert(self.now);
        }
    }

    /// May others be asked in place of this pod, which gave nothing back in time?
    pub(super) fn is_passed_over(&self, uid: &str) -> bool {
        let since = self.lending.asked.get(uid);
        since.is_some_and(|since| self.now >= *since + CALLED_FOR)
    }

    /// The pods that must give memory back, and on which node.
    pub(super) fn victims(&self) -> Vec<(Arc<str>, Borrower)> {
        let backs = self.ledger.reclaims(self.now).into_iter();
        let backs = backs.map(|back| (back.node, back.borrowers));
        let short = self.ledger.shortages(self.now).into_iter();
        let short = short.map(|short| (short.node, short.victims));
        let over = self.ledger.over_limits(self.now).into_iter();
        let over = over.map(|over| (over.node, vec![over.victim]));
        let each = backs.chain(short).chain(over).flat_map(|(node, victims)| {
            let of_node = move |victim| (node.clone(), victim);
            victims.into_iter().map(of_node)
        });
        each.collect()
    }

    /// The agent of the node reports something new.
    pub(super) fn heard(&mut self, name: &'static str) {
        let said = (self.now, self.over_limits(name));
        self.lending.heard.entry(name).or_default().push(said);
    }

    /// Did the agent of the node report lately?
    pub(super) fn is_fresh(&self, node: &str) -> bool {
        let last = self.lending.heard.get(node).and_then(|heard| heard.last());
        last.is_some_and(|(heard, _)| self.now.saturating_sub(*heard) <= STALE_AFTER)
    }

    /// The extender evicts a pod that it has asked.
    pub(super) fn evict(&mut self, pod: usize) {
        let victims = self.victims();
        if let Some(victim) = pick(&victims, pod)
            && victims[victim].1.pod.asked_back.is_some()
            && (!(self.switches.gangs || self.switches.softens)
                || self.is_evicted(&victims[victim].1.pod))
        {
            self.server.evict(&victims[victim].1.pod);
        }
    }

    /// No pod decides the action on others, and none allows more than the administrator does.
    fn check_action(&self, pod: &PodFacts) -> Result<(), String> {
        let most = self.config.action;
        let own = pod.action.filter(|_| self.config.owners_soften);
        let action = self.ledger.action_on(pod);
        let is_right = match self.is_disrupted_alone(pod) {
            true => action == own.map_or(most, |own| own.min(most)),
            false => action <= most,
        };
        require(is_right, || format!("{action:?} to {pod:?}"))
    }

    /// Does the extender evict the pod? Not without its group, unless its policy allows that.
    fn is_evicted(&mut self, pod: &PodFacts) -> bool {
        let evicts = self.ledger.action_on(pod) == Action::Evict;
        if evicts && !self.is_disrupted_alone(pod) {
            self.broken = Some(format!("{} is evicted without its group", pod.uid));
        }
        evicts
    }

    /// The agent of a node cannot match processes to pods, or can again.
    pub(super) fn agent_restarts(&mut self, name: &'static str) {
        if let Some(mut report) = self.server.reports.get(name).cloned() {
            report.conditions = match report.is_readable() {
                true => vec![Condition {
                    r#type: PROCESSES_READABLE.to_owned(),
                    status: "False".to_owned(),
                    ..Condition::default()
                }],
                false => Vec::new(),
            };
            self.server.set_report(name, Some(report));
        }
    }

    /// Does the agent of the node match processes to pods?
    pub(super) fn is_readable(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(GpuNodeStatus::is_readable)
    }

    /// A victim uses no more than it asked for.
    pub(super) fn gives_back(&mut self, pod: usize) {
        let victims = self.victims();
        let Some(victim) = pick(&victims, pod) else {
            return;
        };
        let (node, victim) = victims[victim].clone();
        let name = super::server::NODES.iter().find(|name| ***name == *node);
        let report = name.and_then(|name| Some((*name, self.server.reports.get(name)?.clone())));
        let Some((name, mut report)) = report else {
            return;
        };
        let gpus = report.gpus.iter_mut();
        for gpu in gpus.filter(|gpu| *gpu.uuid == *victim.uuid) {
            let pods = gpu.pods.iter_mut();
            let its = pods.filter(|used| *used.uid == *victim.pod.uid);
            its.for_each(|used| used.used_mib = victim.held.0);
        }
        self.server.set_report(name, Some(report));
    }

    /// A pod that is asked uses more than it holds, by a report that is not stale; of one card's memory one pod
    /// has some reclaimed at a time.
    pub(super) fn check_reclaims(&mut self) -> Result<(), String> {
        let backs = self.ledger.reclaims(self.now);
        let under_way: BTreeSet<Key> = backs.iter().map(key).collect();
        self.lending.begun.retain(|key, _| under_way.contains(key));
        for key in under_way {
            self.lending.begun.entry(key).or_insert(self.now);
        }
        let mut cards = BTreeSet::new();
        for back in &backs {
            for (uuid, _) in &back.cards {
                require(cards.insert(uuid.clone()), || {
                    format!("{uuid} is reclaimed for two pods: {backs:?}")
                })?;
            }
            let speaks = self.is_fresh(&back.node) && self.is_readable(&back.node);
            require(back.borrowers.is_empty() || speaks, || {
                format!("by a report that is stale or half: {back:?}")
            })?;
            for victim in &back.borrowers {
                self.check_action(&victim.pod)?;
                let shares = self.shares();
                let held = shares.iter().filter(|(uid, node, card, _)| {
                    *uid == victim.pod.uid && *node == back.node && **card == *victim.uuid
                });
                let held: u64 = held.map(|(.., mib)| mib).sum();
                let report = self.known.get(&*back.node);
                let gpu = report.and_then(|report| {
                    let mut gpus = report.gpus.iter();
                    gpus.find(|gpu| *gpu.uuid == *victim.uuid)
                });
                let used = gpu.and_then(|gpu| {
                    let mut pods = gpu.pods.iter();
                    pods.find(|used| *used.uid == *victim.pod.uid)
                });
                let used = used.map_or(0, |used| used.used_mib);
                let borrows = held > 0 && used > held && victim.pod.uid != back.pod.uid;
                require(borrows, || {
                    format!("uses {used} of {held} and is a victim: {victim:?}")
                })?;
            }
        }
        Ok(())
    }

    /// With time alone.
    pub(super) fn check_reclaims_end(&mut self) -> Result<(), String> {
        // Hours have passed, so the present reclaims have begun since.
        self.lending.begun.clear();
        self.reclaim()?;
        self.deliver_pods(usize::MAX);
        self.check_reclaims()?;
        self.now += CALLED_FOR;
        self.ledger.expire(self.now);
        let left = self.ledger.reclaims(self.now);
        require(left.is_empty(), || format!("does not end: {left:?}"))?;
        self.check_sleepers_end()
    }
}
