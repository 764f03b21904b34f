//! What is known at one moment, for questions: whoever asks changes nothing.

use std::time::Duration;

use crate::books::Books;
use crate::borrowers::Asked;
use crate::queue::Queue;
use crate::scores::Scores;
use crate::{Config, Ledger};

/// See the module's documentation. Its questions are where their answers are used.
#[derive(Clone, Copy)]
pub(crate) struct Sight<'a> {
    pub(super) books: &'a Books,
    pub(super) scores: &'a Scores,
    pub(super) queue: &'a Queue,
    pub(super) config: &'a Config,
    pub(super) asked: &'a Asked,
    pub(super) now: Duration,
    /// The same in seconds since 1970, if that is known.
    pub(super) unix: Option<i64>,
}

impl Ledger {
    pub(super) fn sight(&self, now: Duration) -> Sight<'_> {
        Sight {
            books: &self.books,
            scores: &self.scores,
            queue: &self.queue,
            config: &self.config,
            asked: &self.asked,
            now,
            unix: self.unix,
        }
    }
}
