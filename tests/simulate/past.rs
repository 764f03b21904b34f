//! Past objects of the API server. Programs with a late view may still act on them.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::server::Objects;

/// Between two that are remembered, at least.
const STEP: Duration = Duration::from_millis(100);
/// As long as a message may be late, a process frozen, and a watch behind.
const LASTS: Duration = Duration::from_secs(200);

#[derive(Default)]
pub(crate) struct Past(VecDeque<(Instant, Objects)>);

impl Past {
    /// Remembers the objects before they change.
    pub(crate) fn keep(&mut self, objects: &Objects) {
        let now = Instant::now();
        if self.0.back().is_some_and(|(at, _)| at.elapsed() < STEP) {
            return;
        }
        self.0.push_back((now, objects.clone()));
        while self.0.front().is_some_and(|(at, _)| *at + LASTS < now) {
            self.0.pop_front();
        }
    }

    /// The objects in the last period of this length, and at its begin.
    pub(crate) fn within(&self, age: Duration) -> impl Iterator<Item = &Objects> {
        let since = Instant::now().checked_sub(age);
        let is_older = |(at, _): &(Instant, Objects)| since.is_none_or(|since| *at <= since);
        let older = self.0.partition_point(is_older);
        self.0.range(older.saturating_sub(1)..).map(|(_, it)| it)
    }
}
