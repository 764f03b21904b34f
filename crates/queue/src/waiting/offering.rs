//! The pods that were woken for room, and the results.

use std::sync::Arc;
use std::time::Duration;

use gpustow_books::Uid;

use super::{Bar, FLUSH, Waiting};
use crate::offers::End;

/// Nodes that a pod is barred from, at most; the one that was first is forgotten first.
const BARS: usize = 8;
/// So often a pod is woken for the same offer, after calls that did not name the node.
const UNSHOWN: u32 = 3;

/// The facts about kube-scheduler in a filter call that refuses a pod.
pub(crate) struct Call<'a> {
    /// It names only some of the nodes that passed kube-scheduler's own filters.
    pub is_sample: bool,
    /// The node that the pod was nominated to when kube-scheduler began to look.
    pub nominated: Option<&'a str>,
    /// How long an offer lasts.
    pub interval: Duration,
}

impl Waiting {
    /// A pod has its room, on this node.
    pub fn reserved(&mut self, uid: &str, node: &str) {
        let Some(wait) = self.pods.get(uid) else {
            return;
        };
        if wait.woken {
            self.offers.succeeded();
        }
        let offered = self.offered.to(uid).map(|(offered, _)| offered.clone());
        let end = match offered.as_deref() == Some(node) {
            true => End::Taken,
            false => End::Open,
        };
        self.settle(uid, end);
        self.remove(uid);
        if let Some(node) = offered {
            self.offered.keep(uid, node);
        }
    }

    /// A pod was refused; `asked` is true for a node that was among the candidates. True if the pod is to be woken
    /// again for its offer.
    pub(crate) fn refused(
        &mut self,
        uid: &str,
        asked: impl Fn(&str) -> bool,
        call: &Call<'_>,
        now: Duration,
    ) -> bool {
        let Some(wait) = self.pods.get_mut(uid) else {
            return false;
        };
        wait.sampled = call.is_sample;
        match self.offered.to(uid).cloned() {
            Some((node, _)) if asked(&node) => {
                self.settle(uid, End::Refused);
            }
            // kube-scheduler tries the node of a nomination before all others.
            Some((node, until))
                if call.is_sample && call.nominated != Some(&*node) && wait.unshown < UNSHOWN =>
            {
                wait.unshown += 1;
                let until = until.max(now + call.interval);
                self.offered.lasts(uid, until);
                self.offers.lasts(uid, until);
                return true;
            }
            Some(_) => {
                self.is_useless(uid);
                if call.is_sample {
                    self.look_for_others(uid, now);
                }
            }
            // It was only slow.
            None if wait.bars.iter().any(|bar| asked(&bar.node)) => {
                wait.bars.retain(|bar| !asked(&bar.node));
                self.stand(uid, 0);
            }
            None => {}
        }
        false
    }

    /// kube-scheduler has not shown every node: another one may do for a pod that it keeps off this one.
    fn look_for_others(&mut self, uid: &str, now: Duration) {
        let wait = self.pods.get_mut(uid);
        let Some(wait) = wait.filter(|wait| (wait.turn.useless() as usize) < BARS) else {
            return;
        };
        wait.keeps_bars = true;
        if let Some(kind) = self.kinds.get_mut(&wait.kind) {
            kind.looked = kind.looked.min(now);
        }
        self.be_due(uid, now);
    }

    /// The node that is offered to a pod, if kube-scheduler might not show it: it showed some alone when the pod was
    /// refused last.
    pub(crate) fn to_nominate(&self, uid: &str) -> Option<&Arc<str>> {
        self.is_sampled(uid).then_some(())?;
        self.offered.to(uid).map(|(node, _)| node)
    }

    /// Wakes a pod for room on a node, which is offered to it for so long.
    pub fn offer(
        &mut self,
        uid: &Uid,
        node: &Arc<str>,
        now: Duration,
        interval: Duration,
        lasts: Duration,
    ) {
        let Some(wait) = self.pods.get_mut(uid) else {
            return;
        };
        let due = now + pause(wait.turn.useless(), interval);
        wait.woken = true;
        wait.unshown = 0;
        self.offered.put(uid, node, now + lasts);
        self.offers.begin(uid, node, now + lasts);
        self.be_due(uid, due);
    }

    /// The pod was not woken after all.
    pub(crate) fn take_back(&mut self, uid: &str) {
        if self.settle(uid, End::Open) {
            self.offers.spared();
        }
    }

    /// The pod could not be ungated for its offer.
    pub fn ungate_failed(&mut self, uid: &str) {
        if !self.has_offer(uid) {
            return;
        }
        self.is_useless(uid);
        let wait = self.pods.get(uid);
        if let Some((id, due)) = wait.and_then(|wait| Some((wait.kind, wait.due?)))
            && let Some(kind) = self.kinds.get_mut(&id)
        {
            kind.looked = kind.looked.min(due);
        }
    }

    /// An offer ends without its pod having asked for the node.
    pub(crate) fn is_useless(&mut self, uid: &str) {
        let Some(wait) = self.pods.get_mut(uid) else {
            return;
        };
        let useless = wait.turn.useless() + 1;
        if let Some((node, _)) = self.offered.to(uid) {
            let (node, at) = (node.clone(), self.changes);
            wait.bars.retain(|bar| bar.node != node);
            if wait.bars.len() == BARS {
                wait.bars.remove(0);
            }
            wait.bars.push(Bar { node, at });
        }
        self.settle(uid, End::Useless);
        self.stand(uid, useless);
    }

    /// True if room was offered to the pod.
    pub(super) fn settle(&mut self, uid: &str, end: End) -> bool {
        let Some(node) = self.offered.end(uid) else {
            return false;
        };
        let is_last = self.offered.on(&node).is_empty();
        self.offers.settle(&node, end, is_last);
        true
    }

    fn stand(&mut self, uid: &str, useless: u32) {
        if let Some(wait) = self.pods.get_mut(uid)
            && wait.turn.useless() != useless
        {
            let turn = wait.turn.after(useless);
            let (kind, old) = (wait.kind, std::mem::replace(&mut wait.turn, turn.clone()));
            self.leave(kind, &old);
            self.enter(kind, turn);
        }
    }

    /// Did kube-scheduler show only some of the nodes that passed its own filters when the pod was refused last?
    pub(crate) fn is_sampled(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|wait| wait.sampled)
    }

    /// Is room offered to the pod?
    pub fn has_offer(&self, uid: &str) -> bool {
        self.offered.to(uid).is_some()
    }

    /// Sets the pod that may get an extra offer, beyond the pods that fit together, while the ledger examines it.
    pub fn set_extra(&mut self, uid: Option<&Uid>) {
        self.offered.set_extra(uid);
    }

    /// Is the pod to be left alone as far as this node's room goes: is it offered some, or barred?
    pub fn is_spoken_for(&self, uid: &str, node: &str) -> bool {
        !self.pods.contains_key(uid) || self.has_offer(uid) || self.is_barred(uid, node)
    }

    /// Is the pod barred from the node?
    pub fn is_barred(&self, uid: &str, node: &str) -> bool {
        let changed = self.changed.get(node).copied().unwrap_or(0);
        let bars = |bar: &Bar| *bar.node == *node && changed <= bar.at;
        let wait = self.pods.get(uid);
        wait.is_some_and(|wait| wait.bars.iter().any(bars))
    }
}

/// For how long a pod that has woken so often without result is barred from that node.
pub(super) fn pause(wake_ups: u32, interval: Duration) -> Duration {
    interval.saturating_mul(2 << wake_ups.min(16)).min(FLUSH)
}
