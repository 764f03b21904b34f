//! The parts of the ledger that decisions use, and the changes of earmarks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpustow_books::{Asked, Books, Config, Earmarks, Ended, Evidence, Known, Scores, Shown, Uid};
use gpustow_queue::Queue;

use crate::sight::Sight;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Parts {
    /// The administrator's configuration.
    pub config: Config,
    /// The facts about the cluster.
    pub books: Books,
    /// The scores that filter remembers.
    pub scores: Scores,
    /// The room that is kept for pods.
    pub earmarks: Earmarks,
    /// kube-scheduler's answers about nodes, as far as they are known.
    pub shown: Shown,
    /// The waiting pods.
    pub queue: Queue,
    /// Pods that were asked to give memory back.
    pub asked: Asked,
    /// Pods for which a search ended because it had cost enough: they get an Event.
    pub cut: Vec<Uid>,
    /// Pods that no node could hold if it were empty: they get an Event.
    pub hopeless: Vec<Uid>,
    /// The time of the last verb that changes something and knows the time.
    pub now: Duration,
    /// The time in seconds since 1970: see `Ledger::tell_time`.
    pub unix: Option<i64>,
    /// See `Ledger::work`.
    work: AtomicU64,
}

impl Parts {
    /// Empty parts.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            books: Books::new(config.stale_after, config.start_timeout, config.of_views()),
            scores: Scores::new(config.policy),
            queue: Queue::new(config.queue),
            ..Self::default()
        }
    }

    /// The known state and the waiting pods.
    #[inline]
    pub fn sight(&self) -> Sight<'_> {
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

    /// Changes the earmarks. This is the only way, because the queue follows room that is no longer kept.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut Earmarks, &Books) -> T) -> T {
        let found = change(&mut self.earmarks, &self.books);
        self.queue.gain(&mut self.earmarks);
        found
    }

    /// Ends the earmark of the pod.
    pub fn end(&mut self, uid: &str, how: Ended) {
        self.change(|earmarks, books| earmarks.end(uid, how, books));
    }

    /// Others could be disrupted for the pod where kube-scheduler's calls leave it open like this whether it would place the
    /// pod: has kube-scheduler try the pod again, unless that was so lately or is too early.
    pub(crate) fn ask_for_evidence(&mut self, uid: &Uid, evidence: Evidence) {
        if self.shown.is_to_be_asked(uid, evidence, self.now) {
            self.queue.tries_again(uid);
        }
    }

    /// The cost of all looks so far.
    pub fn work(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    /// So many pods or nodes were looked at.
    pub fn count(&self, looked_at: usize) {
        self.sight()
            .count_spent(u64::try_from(looked_at).unwrap_or(u64::MAX));
    }

    /// A look has spent so much.
    pub fn count_spent(&self, spent: u64) {
        self.sight().count_spent(spent);
    }
}
