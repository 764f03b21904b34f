//! The known state and the waiting pods, for wake-ups, the means and placeholders.

use std::ops::Deref;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Known, Turn, Uid};
use gpustow_queue::Queue;

/// See the module's documentation.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// The known state.
    pub known: Known<'a>,
    /// The waiting pods.
    pub queue: &'a Queue,
}

impl<'a> Deref for Sight<'a> {
    type Target = Known<'a>;

    fn deref(&self) -> &Known<'a> {
        &self.known
    }
}

impl<'a> Sight<'a> {
    /// Of each kind that waits the first such pod for which no room is kept.
    pub(crate) fn without_room(&self, is_such: impl Fn(&str) -> bool) -> Vec<Uid> {
        let skip = |uid: &str| self.earmarks.earmark(uid).is_some() || !is_such(uid);
        self.queue.firsts(&mut None, usize::MAX, skip)
    }

    /// Of each of the next `most` kinds after `from`, the first such pod without more than a reservation to wait for.
    /// `from` is moved on, and is none at the end.
    pub(crate) fn next_without_more(
        &self,
        from: &mut Option<Turn>,
        most: usize,
        is_such: impl Fn(&str) -> bool,
    ) -> Vec<Uid> {
        let skip = |uid: &str| self.earmarks.has_more_than_reservation(uid) || !is_such(uid);
        self.queue.firsts(from, most, skip)
    }

    /// A waiting pod that may be bound at all, by a scheduler that asks us.
    pub fn asleep(&self, uid: &str) -> Option<Arc<PodFacts>> {
        self.queue.asleep(uid, self.books).cloned()
    }
}
