//! How many acts a minute there may be, on one node and in all, and how many moves an hour.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::config::Disruptions;
use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// The acts of the last minute.
#[derive(Debug, Default)]
pub(super) struct Pace {
    lately: VecDeque<(Instant, Arc<str>)>,
}

impl Pace {
    /// Takes one act on a node, if there may be one now.
    pub(super) fn may(&mut self, node: &Arc<str>, limits: &Disruptions) -> bool {
        self.at(node, limits, Instant::now())
    }

    fn at(&mut self, node: &Arc<str>, limits: &Disruptions, now: Instant) -> bool {
        let is_past = |(at, _): &(Instant, _)| now.duration_since(*at) >= MINUTE;
        while self.lately.front().is_some_and(is_past) {
            self.lately.pop_front();
        }
        let here = self.lately.iter().filter(|(_, other)| other == node);
        let below = |count: usize, most: u32| u32::try_from(count).is_ok_and(|count| count < most);
        let may = below(self.lately.len(), limits.per_minute)
            && below(here.count(), limits.per_node_per_minute);
        if may {
            self.lately.push_back((now, node.clone()));
        }
        may
    }
}

/// The moves of the last hour.
#[derive(Debug, Default)]
pub(super) struct Moves {
    lately: VecDeque<Instant>,
}

impl Moves {
    /// How many more there may be now.
    pub(super) fn left(&mut self, most: u32) -> usize {
        self.left_at(most, Instant::now())
    }

    fn left_at(&mut self, most: u32, now: Instant) -> usize {
        let is_past = |at: &Instant| now.duration_since(*at) >= HOUR;
        while self.lately.front().is_some_and(is_past) {
            self.lately.pop_front();
        }
        (most as usize).saturating_sub(self.lately.len())
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
        let mut moves = Moves::default();
        assert_eq!(moves.left(2), 2);
        moves.note();
        moves.note();
        assert_eq!(moves.left(2), 0);
        assert_eq!(moves.left_at(2, Instant::now() + HOUR), 2);
        assert_eq!(Moves::default().left(0), 0);
    }

    #[test]
    fn a_node_and_the_cluster_have_so_many_acts_a_minute_and_no_more() {
        let mut pace = Pace::default();
        let limits = Disruptions {
            per_minute: 3,
            per_node_per_minute: 2,
        };
        let [a, b]: [Arc<str>; 2] = ["a".into(), "b".into()];
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(pace.at(&a, &limits, start));
        assert!(pace.at(&a, &limits, after(1)));
        assert!(!pace.at(&a, &limits, after(2)));
        assert!(pace.at(&b, &limits, after(2)));
        assert!(!pace.at(&b, &limits, after(59)));
        assert!(pace.at(&b, &limits, after(60)));
        assert!(pace.at(&a, &limits, after(62)));
    }
}
