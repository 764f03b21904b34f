//! Pods that finish or move for others in the model: who they are, and that it is of use.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Cause, Reserved, Victims};

use super::bystanders::unix;
use super::evidence::cpu;
use super::lending::CALLED_FOR;
use super::world::{World, pick, require};

use crate::act::Act as _;
use crate::build::protect;

/// Pods that move for one pod, at most.
const MOVES: usize = 3;
/// After victims on one node, no others for the same pod on another node for so long.
const APART: Duration = Duration::from_secs(60);

/// Where pods were deleted for another, which, and when the last of them was.
type Done = (Arc<str>, BTreeSet<Arc<str>>, Duration);

/// The disruptions so far.
#[derive(Default)]
pub(super) struct Disruptions {
    /// By the pod that it was done for.
    done: HashMap<Arc<str>, Done>,
}

impl World {
    /// Does the extender's work of every second.
    pub(super) fn disrupt(&mut self) -> Result<(), String> {
        if !self.switches.disrupts() {
            return Ok(());
        }
        let protected: Vec<_> = self.server.protected.iter().collect();
        protect(&mut self.ledger, &protected, 0);
        if self.switches.empties {
            self.ledger.tell_time(unix(self.now));
        }
        for means in [Cause::Preempt, Cause::Defragment] {
            self.ledger.look(means, MOVES, self.now);
        }
        self.check_demands()?;
        self.announce();
        Ok(())
    }

    /// Every present demand still holds.
    fn check_demands(&self) -> Result<(), String> {
        let short = self.ledger.shortages(self.now);
        let all = self.ledger.demands(short, self.now).all.into_iter();
        let mut all = all.filter(|it| it.gang.is_none());
        match all.find(|it| !self.ledger.still(it, self.now)) {
            Some(ended) => Err(format!("is demanded no more: {ended:?}")),
            None => Ok(()),
        }
    }

    /// Victims are of lower priority, or may move; room is kept for a while only.
    pub(super) fn check_disruptions(&self) -> Result<(), String> {
        if !self.switches.disrupts() {
            return Ok(());
        }
        self.check_emptying()?;
        let all = self.ledger.preemptions(self.now);
        self.check_units(&all)?;
        for it in all {
            require(it.until <= self.now + CALLED_FOR, || {
                format!("without end: {it:?}")
            })?;
            for victim in &it.victims {
                let lower = victim.priority < it.pod.priority;
                let moves = victim.evictable.is_some() && victim.priority <= it.pod.priority;
                let may = match it.cause {
                    Cause::Defragment => moves,
                    _ => lower,
                };
                require(may, || format!("{} is no victim: {it:?}", victim.uid))?;
            }
        }
        Ok(())
    }

    /// A node is emptied of all pods or of none, by fresh reports, and while no pod waits but their replacements.
    fn check_emptying(&self) -> Result<(), String> {
        let Some(it) = self.ledger.emptying(self.now) else {
            return Ok(());
        };
        let stays = |pod: &&Arc<PodFacts>| {
            let here = pod.node.as_deref() == Some(&*it.node) && !pod.released && !pod.deleting;
            here && it.moves.iter().all(|it| it.pod.uid != pod.uid)
        };
        let waits = |pod: &&Arc<PodFacts>| {
            self.ledger.is_waiting(&pod.uid) && !(pod.queued && pod.evictable.is_some())
        };
        let pods = || self.ledger.pods();
        let may = |pod: &Arc<PodFacts>| pod.evictable.is_some() && !pod.tied;
        require(
            self.switches.empties
                && pods().filter(stays).count() + pods().filter(waits).count() == 0
                && it.moves.iter().all(|it| may(&it.pod))
                && !self.ledger.lacks_report(&it.node, self.now),
            || format!("is emptied: {it:?}"),
        )
    }

    /// The extender deletes a pod that was chosen, in the copy that it knows.
    pub(super) fn displace(&mut self, number: usize) -> Result<(), String> {
        let all = self.ledger.preemptions(self.now).into_iter();
        let each = all.flat_map(|it| {
            let victims = it.victims.clone().into_iter();
            victims.map(move |victim| (it.clone(), victim))
        });
        let each: Vec<(Reserved, Arc<PodFacts>)> = each.collect();
        let Some((it, victim)) = pick(&each, number).map(|index| each[index].clone()) else {
            let moves = self.ledger.emptying(self.now).map(|it| it.moves);
            let moves = moves.unwrap_or_default();
            if let Some(index) = pick(&moves, number) {
                self.server.evict(&moves[index].pod);
            }
            return Ok(());
        };
        if let Some(gang) = &it.gang {
            self.displace_for(gang);
            return Ok(());
        }
        let victims: BTreeSet<Arc<str>> = it.victims.iter().map(|pod| pod.uid.clone()).collect();
        require(self.gains(&it.pod, &it.node, &victims), || {
            format!("{} is deleted without a gain: {it:?}", victim.uid)
        })?;
        let deleted = match it.cause {
            Cause::Defragment => self.server.evict(&victim),
            _ => self.server.delete(&victim),
        };
        if !deleted {
            return Ok(());
        }
        let done = self.disruptions.done.get(&it.pod.uid);
        let elsewhere = done.filter(|(node, ..)| *node != it.node);
        require(
            elsewhere.is_none_or(|(.., at)| *at + APART <= self.now),
            || format!("victims on two nodes: {elsewhere:?}, then {it:?}"),
        )?;
        let begun = (it.node.clone(), BTreeSet::new(), self.now);
        let done = self.disruptions.done.entry(it.pod.uid.clone());
        let done = done.or_insert(begun);
        if done.0 != it.node {
            *done = (it.node.clone(), BTreeSet::new(), self.now);
        }
        done.1.insert(victim.uid.clone());
        done.2 = self.now;
        Ok(())
    }

    /// As far as the ledger knows, can the pod run on the node without these victims and without leaving pods? CPU
    /// counts.
    fn gains(&self, pod: &PodFacts, node: &str, victims: &BTreeSet<Arc<str>>) -> bool {
        let here = |it: &PodFacts| it.node.as_deref() == Some(node) && !it.released;
        let leaving = self.ledger.pods().filter(|it| here(it) && it.deleting);
        let gone = leaving.map(|it| it.uid.clone());
        let gone: BTreeSet<Arc<str>> = gone.chain(victims.iter().cloned()).collect();
        let uids: Vec<Arc<str>> = gone.iter().cloned().collect();
        let mut budget = self.ledger.budget();
        let fits = self.ledger.preempt(pod, node, &uids, &mut budget, self.now);
        fits == Some(Victims::default()) && self.has_host_without(pod, node, &gone)
    }

    /// As far as the ledger knows, has the node enough CPU and a slot for the pod once these pods are gone?
    pub(super) fn has_host_without(
        &self,
        pod: &PodFacts,
        node: &str,
        gone: &BTreeSet<Arc<str>>,
    ) -> bool {
        let here = |it: &PodFacts| it.node.as_deref() == Some(node) && !it.released;
        let mut stay: HashMap<Arc<str>, u64> = HashMap::new();
        for it in self.ledger.pods().filter(|it| here(it)) {
            stay.insert(it.uid.clone(), cpu(it));
        }
        for (uid, ..) in self.shares().iter().filter(|(_, it, ..)| **it == *node) {
            if let Some(it) = self.ledger.pod(uid) {
                stay.insert(uid.clone(), cpu(&it));
            }
        }
        stay.retain(|uid, _| *uid != pod.uid && !gone.contains(uid));
        let pods = stay.len() as u64;
        stay.values().sum::<u64>() + cpu(pod) <= self.cpu()
            && self.slots().is_none_or(|slots| pods < slots)
    }

    /// Pods for which others have been deleted and that will run, as far as is known, unless room is given to others.
    pub(super) fn gaining(&mut self) -> Vec<Reserved> {
        if !self.switches.disrupts() || self.disruptions.done.is_empty() {
            return Vec::new();
        }
        self.ledger.expire(self.now);
        let all = self.ledger.preemptions(self.now).into_iter();
        let gaining = all.filter(|it| it.gang.is_none()).filter(|it| {
            let done = self.disruptions.done.get(&it.pod.uid);
            done.is_some_and(|(node, victims, _)| {
                *node == it.node && self.gains(&it.pod, node, victims)
            })
        });
        gaining.collect()
    }

    /// They will still, after the pod was given room whose priority is not higher.
    pub(super) fn check_gains(&self, gaining: &[Reserved], taker: &PodFacts) -> Result<(), String> {
        for it in gaining {
            let other = it.pod.uid != taker.uid && taker.priority <= it.pod.priority;
            let done = self.disruptions.done.get(&it.pod.uid);
            let gains = done.is_some_and(|(node, victims, _)| self.gains(&it.pod, node, victims));
            require(!other || gains, || {
                format!("{} takes what {done:?} were deleted for: {it:?}", taker.uid)
            })?;
        }
        Ok(())
    }

    /// Marks each pod that must give memory back, and writes on each pod where room is kept for it.
    pub(super) fn announce(&mut self) {
        let victims = self.victims();
        let backs = self.ledger.reclaims(self.now);
        let ends = self.ledger.preemptions(self.now);
        let asked = |uid: &str| {
            let is_one = victims.iter().any(|(_, victim)| *victim.pod.uid == *uid);
            is_one.then_some(gpustow_api::config::Action::Event)
        };
        let kept = |uid: &str| {
            let back = backs.iter().map(|it| (&it.pod, &it.node));
            let mut all = back.chain(ends.iter().map(|it| (&it.pod, &it.node)));
            let its = all.find(|(pod, _)| *pod.uid == *uid);
            its.map(|(_, node)| node.clone())
        };
        for index in 0..self.server.pods.len() {
            let pod = &self.server.pods[index];
            let now = (asked(&pod.uid), kept(&pod.uid));
            if now != (pod.asked_back, pod.reserved_on.clone()) {
                self.server
                    .write(index, |pod| (pod.asked_back, pod.reserved_on) = now);
            }
        }
    }
}
