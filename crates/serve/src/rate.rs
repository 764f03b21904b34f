//! How often an action may happen, and when a failed action is tried again. Nothing here reads a clock.

use std::collections::VecDeque;
use std::time::Duration;

/// The actions within a period that ends now, each with a key. Times are ages of one monotonic clock.
#[derive(Clone, Debug)]
pub struct Window<K = ()> {
    period: Duration,
    lately: VecDeque<(Duration, K)>,
}

impl<K: PartialEq> Window<K> {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(period: Duration) -> Self {
        Self {
            period,
            lately: VecDeque::new(),
        }
    }

    fn forget(&mut self, now: Duration) {
        let is_past = |(at, _): &(Duration, K)| now.saturating_sub(*at) >= self.period;
        while self.lately.front().is_some_and(is_past) {
            self.lately.pop_front();
        }
    }

    /// How many more may happen now, of at most `most` per period.
    pub fn left(&mut self, most: usize, now: Duration) -> usize {
        self.forget(now);
        most.saturating_sub(self.lately.len())
    }

    /// As [`Window::left`], but only actions with this key count.
    pub fn left_of(&mut self, key: &K, most: usize, now: Duration) -> usize {
        self.forget(now);
        let with_key = self.lately.iter().filter(|(_, it)| it == key);
        most.saturating_sub(with_key.count())
    }

    /// How long until one more may happen, of at most `most` per period.
    pub fn wait(&mut self, most: usize, now: Duration) -> Duration {
        if self.left(most, now) > 0 {
            return Duration::ZERO;
        }
        let oldest = self.lately.get(self.lately.len().saturating_sub(most));
        oldest.map_or(Duration::ZERO, |(at, _)| {
            (*at + self.period).saturating_sub(now)
        })
    }

    /// One happens now.
    pub fn note(&mut self, key: K, now: Duration) {
        self.lately.push_back((now, key));
    }
}

/// The pauses between attempts that fail: each is twice as long as the one before it, up to a bound.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    /// Begins with the pause `first`.
    #[must_use]
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { next: first, max }
    }

    /// The pause after one more failure.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.max);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn window_counts_what_happened_within_its_period() {
        let mut window = Window::new(MINUTE);
        assert_eq!(window.wait(2, at(0)), Duration::ZERO);
        window.note("a", at(0));
        window.note("b", at(20));
        assert_eq!(window.left(3, at(20)), 1);
        assert_eq!(window.left_of(&"a", 3, at(20)), 2);
        assert_eq!(window.left_of(&"c", 3, at(20)), 3);
        assert_eq!(window.left(2, at(59)), 0);
        assert_eq!(window.wait(2, at(30)), at(30));
        assert_eq!(window.wait(1, at(30)), at(50));
        assert_eq!(window.left(2, at(60)), 1);
        assert_eq!(window.left(0, at(600)), 0);
    }

    #[test]
    fn backoff_doubles_up_to_its_bound() {
        let mut backoff = Backoff::new(at(2), at(7));
        let pauses = [(); 4].map(|()| backoff.pause());
        assert_eq!(pauses, [at(2), at(4), at(7), at(7)]);
    }
}
