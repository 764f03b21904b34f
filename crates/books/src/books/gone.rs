//! Pods that are gone, remembered for a while: an answer that is late must not bring them back.

use std::collections::VecDeque;

use super::Uid;
use crate::maps::HashMap;

/// The number of remembered pods: the last pods that ended. At a hundred deletions a second they last for minutes.
const REMEMBERED: usize = 1 << 14;

/// The UIDs of pods that ended, and when on the ledger's own clock (`Ledger::copies`).
#[derive(Debug, Default)]
pub(super) struct Gone {
    when: HashMap<Uid, u64>,
    order: VecDeque<(Uid, u64)>,
}

impl Gone {
    /// A pod has ended.
    pub(super) fn note(&mut self, uid: Uid, when: u64) {
        self.when.insert(uid.clone(), when);
        self.order.push_back((uid, when));
        while self.order.len() > REMEMBERED {
            if let Some((uid, when)) = self.order.pop_front()
                && self.when.get(&uid) == Some(&when)
            {
                self.when.swap_remove(&uid);
            }
        }
    }

    /// When this pod ended, if it did.
    pub(super) fn when(&self, uid: &str) -> Option<u64> {
        self.when.get(uid).copied()
    }

    /// It is there after all.
    pub(super) fn is_back(&mut self, uid: &str) {
        self.when.swap_remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_end_are_remembered_and_no_more_than_the_bound() {
        let mut gone = Gone::default();
        let uid = |number: usize| Uid::from(number.to_string());
        gone.note(uid(0), 0);
        gone.is_back("0");
        for number in 0..2 * REMEMBERED {
            gone.note(uid(number), number as u64);
        }
        assert_eq!(gone.when("0"), None);
        assert_eq!(gone.when(&uid(REMEMBERED)), Some(REMEMBERED as u64));
        assert_eq!(
            (gone.when.len(), gone.order.len()),
            (REMEMBERED, REMEMBERED)
        );
    }
}
