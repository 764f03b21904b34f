//! Who was woken for which room, and what came of it.

use std::sync::Arc;
use std::time::Duration;

use super::{Bar, FLUSH, Wait, Waiting};
use crate::books::Uid;
use crate::queue::offers::End;

/// Nodes that a pod is barred from, at most; the one that was first is forgotten first.
const BARS: usize = 8;
/// So often a pod is woken for the same promise, after calls that did not name the node.
const UNSHOWN: u32 = 3;

/// What a filter call that refuses a pod says of kube-scheduler.
pub(in crate::queue) struct Call<'a> {
    /// It names only some of the nodes that passed kube-scheduler's own filters.
    pub(in crate::queue) is_sample: bool,
    /// The node that the pod was nominated to when kube-scheduler began to look.
    pub(in crate::queue) nominated: Option<&'a str>,
    /// How long a promise lasts.
    pub(in crate::queue) interval: Duration,
}

impl Waiting {
    /// A pod has its room, on this node.
    pub(in crate::queue) fn reserved(&mut self, uid: &str, node: &str) {
        let Some(wait) = self.pods.get(uid) else {
            return;
        };
        if wait.woken {
            self.offers.succeeded();
        }
        let is_it = |(promised, _): &(Arc<str>, Duration)| **promised == *node;
        let end = match wait.promised.as_ref().is_some_and(is_it) {
            true => End::Taken,
            false => End::Open,
        };
        let promised = wait.promised.clone();
        self.settle(uid, end);
        self.remove(uid);
        if let Some((node, _)) = promised {
            self.kept_offers.insert(uid.into(), node);
        }
    }

    /// A pod was refused; `asked` says of a node whether it was among the candidates. True if it is to be woken again
    /// for what it was promised.
    pub(in crate::queue) fn refused(
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
        match wait.promised.clone() {
            Some((node, _)) if asked(&node) => {
                self.settle(uid, End::Refused);
            }
            // kube-scheduler tries the node of a nomination before all others.
            Some((node, until))
                if call.is_sample && call.nominated != Some(&*node) && wait.unshown < UNSHOWN =>
            {
                wait.unshown += 1;
                let until = until.max(now + call.interval);
                wait.promised = Some((node, until));
                self.offers.lasts(uid, until);
                return true;
            }
            Some(_) => {
                self.in_vain(uid);
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

    /// The node that is promised to a pod, if kube-scheduler might not show it: it showed some alone when the pod was
    /// refused last.
    pub(in crate::queue) fn to_nominate(&self, uid: &str) -> Option<&Arc<str>> {
        let wait = self.pods.get(uid).filter(|wait| wait.sampled)?;
        wait.promised.as_ref().map(|(node, _)| node)
    }

    /// Wakes a pod for room on a node, which is promised to it for so long.
    pub(in crate::queue) fn promise(
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
        wait.promised = Some((node.clone(), now + lasts));
        wait.woken = true;
        wait.unshown = 0;
        self.offers.promise(uid, node, now + lasts);
        self.be_due(uid, due);
    }

    /// The pod was not woken after all.
    pub(in crate::queue) fn take_back(&mut self, uid: &str) {
        if self.settle(uid, End::Open) {
            self.offers.spared();
        }
    }

    /// The pod could not be ungated for what it was promised.
    pub(in crate::queue) fn ungate_failed(&mut self, uid: &str) {
        if !self.is_promised(uid) {
            return;
        }
        self.in_vain(uid);
        let wait = self.pods.get(uid);
        if let Some((id, due)) = wait.and_then(|wait| Some((wait.kind, wait.due?)))
            && let Some(kind) = self.kinds.get_mut(&id)
        {
            kind.looked = kind.looked.min(due);
        }
    }

    /// A promise ends without its pod having asked for the node.
    pub(in crate::queue) fn in_vain(&mut self, uid: &str) {
        let Some(wait) = self.pods.get_mut(uid) else {
            return;
        };
        let useless = wait.turn.useless() + 1;
        if let Some((node, _)) = &wait.promised {
            let (node, at) = (node.clone(), self.changes);
            wait.bars.retain(|bar| bar.node != node);
            if wait.bars.len() == BARS {
                wait.bars.remove(0);
            }
            wait.bars.push(Bar { node, at });
        }
        self.settle(uid, End::InVain);
        self.stand(uid, useless);
    }

    /// True if the pod was promised room.
    pub(super) fn settle(&mut self, uid: &str, end: End) -> bool {
        let promised = self.pods.get_mut(uid).and_then(|wait| wait.promised.take());
        if let Some((node, _)) = &promised {
            self.offers.settle(uid, node, end);
        }
        promised.is_some()
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
    pub(in crate::queue) fn is_sampled(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|wait| wait.sampled)
    }

    /// Is room promised to the pod?
    pub(in crate::queue) fn is_promised(&self, uid: &str) -> bool {
        let wait = self.pods.get(uid);
        wait.is_some_and(|wait| wait.promised.is_some())
    }

    /// Does what is promised to the pod last still?
    pub(crate) fn may_come(&self, uid: &str, now: Duration) -> bool {
        let promised = self.pods.get(uid).and_then(|wait| wait.promised.as_ref());
        promised.is_some_and(|(_, end)| *end > now)
    }

    /// Is room on this node offered to the pod, or about to be beyond what fits together?
    pub(crate) fn is_offered(&self, uid: &str, node: &str) -> bool {
        let wait = self.pods.get(uid);
        let promised = wait.and_then(|wait| wait.promised.as_ref());
        promised.is_some_and(|(promised, _)| **promised == *node)
            || self.extra.as_deref() == Some(uid)
            || self
                .kept_offers
                .get(uid)
                .is_some_and(|kept| **kept == *node)
    }

    /// The pod that would be offered room beyond what fits together, while that is looked at.
    pub(in crate::queue) fn set_extra(&mut self, uid: Option<&Uid>) {
        self.extra = uid.cloned();
    }

    /// Is the pod to be left alone as far as this node's room goes: promised some, or barred?
    pub(in crate::queue) fn is_spoken_for(&self, uid: &str, node: &str) -> bool {
        let promised = |wait: &Wait| wait.promised.is_some();
        self.pods.get(uid).is_none_or(promised) || self.is_barred(uid, node)
    }

    /// Is the pod barred from the node?
    pub(in crate::queue) fn is_barred(&self, uid: &str, node: &str) -> bool {
        let changed = self.changed.get(node).copied().unwrap_or(0);
        let bars = |bar: &Bar| *bar.node == *node && changed <= bar.at;
        let wait = self.pods.get(uid);
        wait.is_some_and(|wait| wait.bars.iter().any(bars))
    }
}

/// For how long a pod that has woken in vain so often is barred from where it did.
pub(super) fn pause(in_vain: u32, interval: Duration) -> Duration {
    interval.saturating_mul(2 << in_vain.min(16)).min(FLUSH)
}
