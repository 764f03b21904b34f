//! How many acts a minute there may be, on one node and in all, and how many moves an hour.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// The acts of the last minute.
#[derive(Debug)]
pub(super) struct Pace {
    of_all: usize,
    of_node: usize,
    lately: VecDeque<(Instant, Arc<str>)>,
}

impl Pace {
    pub(super) fn new(of_all: u32, of_node: u32) -> Self {
        Self {
            of_all: of_all as usize,
            of_node: of_node as usize,
            lately: VecDeque::new(),
        }
    }

    /// Takes one act on a node, if there may be one now.
    pub(super) fn may(&mut self, node: &Arc<str>) -> bool {
        self.at(node, Instant::now())
    }

    fn at(&mut self, node: &Arc<str>, now: Instant) -> bool {
        let is_past = |(at, _): &(Instant, _)| now.duration_since(*at) >= MINUTE;
        while self.lately.front().is_some_and(is_past) {
            self.lately.pop_front();
        }
        let here = self.lately.iter().filter(|(_, other)| other == node);
        let may = self.lately.len() < self.of_all && here.count() < self.of_node;
        if may {
            self.lately.push_back((now, node.clone()));
        }
        may
    }
}

/// The moves of the last hour.
#[derive(Debug)]
pub(super) struct Moves {
    most: usize,
    lately: VecDeque<Instant>,
}

impl Moves {
    pub(super) fn new(most: u32) -> Self {
        Self {
            most: most as usize,
            lately: VecDeque::new(),
        }
    }

    /// How many more there may be now.
    pub(super) fn left(&mut self) -> usize {
        self.left_at(Instant::now())
    }

    fn left_at(&mut self, now: Instant) -> usize {
        let is_past = |at: &Instant| now.duration_since(*at) >= HOUR;
        while self.lately.front().is_some_and(is_past) {
            self.lately.pop_front();
        }
        self.most.saturating_sub(self.lately.len())
    }

    /// One is made.
    pub(super) fn note(&mut self) {
        self.lately.push_back(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_has_so_many_moves_and_no_more() {
        let mut moves = Moves::new(2);
        assert_eq!(moves.left(), 2);
        moves.note();
        moves.note();
        assert_eq!(moves.left(), 0);
        assert_eq!(moves.left_at(Instant::now() + HOUR), 2);
        assert_eq!(Moves::new(0).left(), 0);
    }

    #[test]
    fn a_node_and_the_cluster_have_so_many_acts_a_minute_and_no_more() {
        let mut pace = Pace::new(3, 2);
        let [a, b]: [Arc<str>; 2] = ["a".into(), "b".into()];
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(pace.at(&a, start));
        assert!(pace.at(&a, after(1)));
        assert!(!pace.at(&a, after(2)));
        assert!(pace.at(&b, after(2)));
        assert!(!pace.at(&b, after(59)));
        assert!(pace.at(&b, after(60)));
        assert!(pace.at(&a, after(62)));
    }
}
