//! What is known at one moment, for questions: whoever asks changes nothing.

use std::time::Duration;

use gpustow_api::PodFacts;

use crate::books::{Books, Uid};
use crate::borrowers::Asked;
use crate::earmarks::{Cause, Earmarks};
use crate::evidence::Shown;
use crate::queue::{Queue, Turn};
use crate::scores::Scores;
use crate::{Config, Ledger};

/// See the module's documentation. Its questions are where their answers are used.
#[derive(Clone, Copy)]
pub(crate) struct Sight<'a> {
    pub(super) books: &'a Books,
    pub(super) scores: &'a Scores,
    pub(super) earmarks: &'a Earmarks,
    pub(super) shown: &'a Shown,
    pub(super) queue: &'a Queue,
    pub(super) config: &'a Config,
    pub(super) asked: &'a Asked,
    pub(super) now: Duration,
    /// The same in seconds since 1970, if that is known.
    pub(super) unix: Option<i64>,
}

/// The queue and what is earmarked, with what must be known to decide which pods are woken.
pub(crate) struct Waking<'a> {
    pub(super) queue: &'a mut Queue,
    pub(super) earmarks: &'a mut Earmarks,
    pub(super) shown: &'a mut Shown,
    pub(super) books: &'a Books,
    pub(super) scores: &'a Scores,
    pub(super) config: &'a Config,
    pub(super) asked: &'a Asked,
    pub(super) now: Duration,
    pub(super) unix: Option<i64>,
}

impl Waking<'_> {
    pub(super) fn sight(&self) -> Sight<'_> {
        Sight {
            books: self.books,
            scores: self.scores,
            earmarks: self.earmarks,
            shown: self.shown,
            queue: self.queue,
            config: self.config,
            asked: self.asked,
            now: self.now,
            unix: self.unix,
        }
    }
}

impl Ledger {
    pub(super) fn waking(&mut self, now: Duration) -> Waking<'_> {
        Waking {
            queue: &mut self.queue,
            earmarks: &mut self.earmarks,
            shown: &mut self.shown,
            books: &self.books,
            scores: &self.scores,
            config: &self.config,
            asked: &self.asked,
            now,
            unix: self.unix,
        }
    }

    pub(super) fn sight(&self, now: Duration) -> Sight<'_> {
        Sight {
            books: &self.books,
            scores: &self.scores,
            earmarks: &self.earmarks,
            shown: &self.shown,
            queue: &self.queue,
            config: &self.config,
            asked: &self.asked,
            now,
            unix: self.unix,
        }
    }
}

impl Sight<'_> {
    /// Of each kind that waits the first such pod for which no room is kept.
    pub(crate) fn without_room(&self, is_such: impl Fn(&str) -> bool) -> Vec<Uid> {
        let skip = |uid: &str| self.earmarks.earmark(uid).is_some() || !is_such(uid);
        self.queue.firsts(&mut None, usize::MAX, skip)
    }

    /// The first such pod, that has no more than a place to wait for, of the next kind: the one after `from`, which is moved
    /// on, and is none at the end.
    pub(crate) fn next_without_more(
        &self,
        from: &mut Option<Turn>,
        is_such: impl Fn(&str) -> bool,
    ) -> Option<Uid> {
        let skip = |uid: &str| self.earmarks.has_more_than_reservation(uid) || !is_such(uid);
        self.queue.firsts(from, 1, skip).pop()
    }

    /// Is room on this node earmarked for the pod, and more than a reservation, so that no queued pod goes before it there? One
    /// of higher priority does, unless the pod was ungated for the room.
    pub(crate) fn goes_first(&self, pod: &PodFacts, node: &str) -> bool {
        let earmark = self.earmarks.earmark(&pod.uid);
        let earmark = earmark.filter(|it| **it.node() == *node);
        earmark.is_some_and(|it| match it.cause() {
            Cause::Reserve => false,
            Cause::Ungated => true,
            _ => !self.queue.gated().has_higher(pod.priority),
        })
    }

    /// Pods that were woken for room on this node and may still ask for it, without those for which it is earmarked.
    pub(crate) fn woken_for(&self, node: &str) -> impl Iterator<Item = &Uid> {
        let waiting = self.queue.waiting();
        let promised = waiting.promised_on(node).iter();
        promised
            .filter(move |uid| waiting.may_come(uid, self.now) && !self.earmarks.is_for(uid, node))
    }
}
