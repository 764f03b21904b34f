//! How many acts a minute there may be, on one node and in all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);

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

#[cfg(test)]
mod tests {
    use super::*;

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
