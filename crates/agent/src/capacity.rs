//! What the node's capacity should say. Too little of it kills running pods when their kubelet
//! restarts, so it grows at once and shrinks late.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// Decides when the capacity of the node is to be written.
#[derive(Clone, Debug)]
pub struct Capacity {
    shrink_after: Duration,
    less_since: Option<Timestamp>,
}

impl Capacity {
    /// Less is written once it has been less for this long.
    #[must_use]
    pub fn new(shrink_after: Duration) -> Self {
        Self {
            shrink_after,
            less_since: None,
        }
    }

    /// The MiB to write, if any: `cards` is what the cards hold, `bound` what pods hold of it,
    /// `present` what the node says now.
    pub fn decide(
        &mut self,
        cards: u64,
        bound: u64,
        present: Option<u64>,
        now: Timestamp,
    ) -> Option<u64> {
        let wanted = cards.max(bound);
        match present {
            None if wanted == 0 => None,
            Some(present) if present == wanted => {
                self.less_since = None;
                None
            }
            Some(present) if present > wanted => {
                let since = *self.less_since.get_or_insert(now);
                let late = now.duration_since(since).unsigned_abs() >= self.shrink_after;
                if late {
                    self.less_since = None;
                }
                late.then_some(wanted)
            }
            _ => {
                self.less_since = None;
                Some(wanted)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn it_grows_at_once_and_shrinks_late_and_never_below_what_is_bound() {
        let mut capacity = Capacity::new(Duration::from_secs(60));
        let steps = [
            // second, cards, bound, present, written
            (0, 0, 0, None, None, "a node without cards is left alone"),
            (0, 100, 0, None, Some(100), "new cards"),
            (1, 100, 0, Some(100), None, "nothing to do"),
            (2, 150, 0, Some(100), Some(150), "more cards"),
            (3, 150, 0, Some(0), Some(150), "the kubelet zeroed it"),
            (4, 100, 0, Some(150), None, "less, but only now"),
            (63, 100, 0, Some(150), None, "less, not yet a minute"),
            (
                63,
                150,
                0,
                Some(150),
                None,
                "it is back: the minute starts anew",
            ),
            (64, 100, 0, Some(150), None, "less again"),
            (123, 100, 0, Some(150), None, "not yet"),
            (
                124,
                100,
                120,
                Some(150),
                Some(120),
                "a minute: down to what is bound",
            ),
            (125, 100, 120, Some(120), None, "and no further"),
            (126, 100, 110, Some(120), None, "a pod ended: wait again"),
            (186, 100, 90, Some(120), Some(100), "down to the cards"),
            (187, 0, 0, Some(100), None, "all cards gone"),
            (247, 0, 0, Some(100), Some(0), "for a minute"),
            (248, 0, 50, Some(0), Some(50), "below what is bound: never"),
        ];
        for (second, cards, bound, present, written, why) in steps {
            assert_eq!(
                capacity.decide(cards, bound, present, at(second)),
                written,
                "{second}: {why}"
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn it_never_writes_less_than_is_bound(steps in proptest::collection::vec((0i64..100, 0u64..9, 0u64..9), 1..40)) {
            let mut capacity = Capacity::new(Duration::from_secs(60));
            let (mut present, mut second) = (None, 0);
            for (later, cards, bound) in steps {
                second += later;
                if let Some(written) = capacity.decide(cards, bound, present, at(second)) {
                    proptest::prop_assert_eq!(written, cards.max(bound));
                    present = Some(written);
                }
                // The kubelet would reject running pods otherwise.
                proptest::prop_assert!(present.unwrap_or(0) >= bound);
            }
        }
    }
}
