//! The queue in the model: the pods that are ungated, and the results.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Reason, Ungate, Victims};

use super::server::NODES;
use super::world::{World, require};

/// Seconds within which a pod that fits is let out: room promised to other pods may be kept for ten.
const LONG: u64 = 30;

impl World {
    /// Wakes the pods that must be woken; of the gates that are to be taken off, one in four stays for now.
    pub(super) fn wake(&mut self, limit: usize) -> Result<(), String> {
        let woken = self.ledger.wake(limit, self.now);
        // A gang is ungated as a whole.
        let (members, alone): (Vec<_>, Vec<_>) = woken.iter().partition(|pod| pod.group.is_some());
        let gangs: BTreeSet<_> = members.iter().map(|pod| &pod.group).collect();
        require(alone.len() + gangs.len() <= limit, || {
            "woke more than the limit".into()
        })?;
        for pod in woken {
            let reserved = self.shares().iter().any(|(uid, ..)| *uid == pod.uid);
            require(!reserved, || {
                format!("woke {}, which has its room", pod.uid)
            })?;
            let why = self.ledger.ungated_because(&pod.uid);
            require(!pod.queued || why != Ungate::Off, || {
                format!("{} is let through", pod.uid)
            })?;
            if !pod.queued {
                self.promised = self.now + self.config.wake_again_after;
            } else {
                self.lowest = self.lowest.min(pod.priority);
                let until = self.now + self.config.ungate_for;
                self.let_out.insert(pod.uid.clone(), until);
            }
            self.woken.insert(pod.uid.clone());
            let same = |other: &PodFacts| {
                other.uid == pod.uid && other.resource_version == pod.resource_version
            };
            let lost = index_of(&pod.uid).is_multiple_of(4);
            if let Some(index) = self.server.pods.iter().position(same)
                && pod.queued
                && !lost
            {
                self.server.write(index, |pod| pod.queued = false);
            }
        }
        Ok(())
    }

    /// Queued pods, as the ledger knows them, that were not ungated before. Pods that wait for other pods of their
    /// group are left out. None while room is promised to other pods, for the books do not show which. No pod of higher
    /// priority than an ungated pod counts either: room that was promised already is not taken back for it.
    fn untold(&self) -> Vec<Arc<PodFacts>> {
        if !self.config.queue || self.now <= self.promised {
            return Vec::new();
        }
        let shares = self.shares();
        let queued = self.ledger.pods().filter(|known| {
            self.ledger.queued_before(&known.uid).is_some()
                && !self.woken.contains(&known.uid)
                && known.priority <= self.lowest
                && self.is_single(known)
                && !shares.iter().any(|(uid, ..)| *uid == known.uid)
        });
        queued.cloned().collect()
    }

    /// A pod is given no room that one in the queue before it would have taken, and is kept waiting for those alone.
    pub(super) fn check_queued(
        &mut self,
        pod: &PodFacts,
        chosen: Option<&str>,
        refused: &[(&str, Reason)],
    ) -> Result<(), String> {
        if !self.config.queue {
            return Ok(());
        }
        // It is not queued any more, whatever the watch has shown so far.
        self.woken.insert(pod.uid.clone());
        let queued = |(_, reason): &(&str, Reason)| *reason == Reason::Queued;
        let waits = refused.iter().any(queued);
        require(!waits || self.ledger.queued().pods > 0, || {
            format!("no pod is queued before {}", pod.uid)
        })?;
        self.wake(64)?;
        let turn = |pod: &PodFacts| (-pod.priority, pod.created, pod.name.clone());
        // Room is kept for it since it was let out: it is not taken back for those before it which did not fit then.
        let until = self.let_out.get(&pod.uid);
        let chosen = chosen.filter(|_| until.is_none_or(|until| self.now > *until));
        let victims = [pod.uid.clone()];
        for first in self.untold().iter().filter(|it| turn(it) < turn(pod)) {
            let would_take = chosen.is_some_and(|name| {
                let (mut budget, now) = (self.ledger.budget(), self.now);
                let others = self.ledger.preempt(first, name, &victims, &mut budget, now);
                let gone = victims.iter().cloned().collect();
                others == Some(Victims::default()) && self.has_host_without(first, name, &gone)
            });
            require(!would_take, || {
                format!("{} goes before {}", pod.uid, first.uid)
            })?;
        }
        Ok(())
    }

    /// Once faults have ceased, every queued pod that fits is ungated; then the queue is closed.
    pub(super) fn empty_queue(&mut self) -> Result<(), String> {
        if !self.config.queue {
            return Ok(());
        }
        let mut left = Vec::new();
        // As long as pods wait, each round of two seconds may be another's.
        for _ in 0..LONG {
            self.now += Duration::from_secs(1);
            self.wake(64)?;
            // kube-scheduler does not know a node whose Node is gone.
            let fits = |known: &Arc<PodFacts>| {
                let on = |name: &&str| {
                    self.server.has_node(name) && self.fits_on(&self.ledger, known, name)
                };
                NODES.iter().any(on)
            };
            let fitting = self.untold().into_iter().filter(fits);
            left = fitting.map(|pod| pod.uid.clone()).collect();
            if left.is_empty() {
                break;
            }
        }
        require(left.is_empty(), || {
            format!("{left:?} fit, and are still queued")
        })?;
        for index in 0..self.server.pods.len() {
            self.server.write(index, |pod| pod.queued = false);
        }
        self.deliver_pods(usize::MAX);
        require(self.ledger.queued().pods == 0, || {
            "a pod is queued though the queue is closed".into()
        })?;
        self.now += self.config.ungate_for;
        self.ledger.expire(self.now);
        Ok(())
    }
}

fn index_of(uid: &str) -> u64 {
    uid.trim_start_matches('u').parse().unwrap_or(0)
}
