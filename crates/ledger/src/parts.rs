//! The parts of the ledger that decisions rest on, and how what is earmarked changes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::asked::Asked;
use crate::books::{Books, Uid};
use crate::config::Config;
use crate::earmarks::{Earmarks, Ended};
use crate::evidence::{Evidence, Shown};
use crate::known::Known;
use crate::queue::Queue;
use crate::scores::Scores;
use crate::sight::Sight;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(super) config: Config,
    pub(super) books: Books,
    pub(super) scores: Scores,
    pub(super) earmarks: Earmarks,
    pub(super) shown: Shown,
    pub(super) queue: Queue,
    pub(super) asked: Asked,
    /// Pods for which a search ended because it had cost enough: they are to be told.
    pub(super) cut: Vec<Uid>,
    /// Pods that no node could hold if it were empty: they are to be told.
    pub(super) hopeless: Vec<Uid>,
    /// What time it is, as the last verb with a time that changes something said.
    pub(super) now: Duration,
    /// The same in seconds since 1970: see [`crate::Ledger::tell_time`].
    pub(super) unix: Option<i64>,
    /// See [`crate::Ledger::work`].
    work: AtomicU64,
}

impl Parts {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            books: Books::new(config.stale_after, config.start_timeout, config.of_views()),
            scores: Scores::new(config.policy),
            queue: Queue::new(config.queue),
            ..Self::default()
        }
    }

    pub(crate) fn sight(&self) -> Sight<'_> {
        let known = Known {
            books: &self.books,
            scores: &self.scores,
            earmarks: &self.earmarks,
            shown: &self.shown,
            offered: self.queue.offered(),
            queued: self.queue.gated().highest(),
            config: &self.config,
            work: &self.work,
            asked: &self.asked,
            now: self.now,
            unix: self.unix,
        };
        Sight {
            known,
            queue: &self.queue,
        }
    }

    /// Changes what is earmarked: the one way, for the queue follows what is kept no more.
    pub(crate) fn change<T>(&mut self, change: impl FnOnce(&mut Earmarks, &Books) -> T) -> T {
        let found = change(&mut self.earmarks, &self.books);
        self.queue.gain(&mut self.earmarks);
        found
    }

    /// What was earmarked for the pod ends.
    pub(crate) fn end(&mut self, uid: &str, how: Ended) {
        self.change(|earmarks, books| earmarks.end(uid, how, books));
    }

    /// Others could be disrupted for the pod where kube-scheduler's calls leave it open like this whether it would place the
    /// pod: has kube-scheduler try the pod again, unless that was so lately or is too early.
    pub(crate) fn ask_for_evidence(&mut self, uid: &Uid, evidence: Evidence) {
        if self.shown.is_to_be_asked(uid, evidence, self.now) {
            self.queue.tries_again(uid);
        }
    }

    /// What looks have cost so far.
    pub(crate) fn work(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    /// So many pods or nodes were looked at.
    pub(crate) fn count(&self, looked_at: usize) {
        self.sight()
            .count_spent(u64::try_from(looked_at).unwrap_or(u64::MAX));
    }

    /// A look has spent so much.
    pub(crate) fn count_spent(&self, spent: u64) {
        self.sight().count_spent(spent);
    }
}
