//! Gangs that wait: which of them were found not to fit, and which were woken.

use std::time::Duration;

use gpustow_api::Group;
use gpustow_books::HashMap;

/// Gangs that are remembered.
const MOST: usize = 1024;

/// The books' clock, and that of gains of room.
type Moment = (u64, u64);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Gangs(HashMap<Group, Found>);

#[derive(Debug)]
enum Found {
    /// It did not fit then.
    Short(Moment),
    /// It was woken, and is not woken again before.
    Woken(Duration),
}

impl Gangs {
    /// May the gang fit, and was it not woken just now?
    pub(super) fn is_to_be_asked(&self, gang: &Group, moment: Moment, now: Duration) -> bool {
        match self.0.get(gang) {
            None => true,
            Some(Found::Short(then)) => *then != moment,
            Some(Found::Woken(until)) => now >= *until,
        }
    }

    pub(super) fn does_not_fit(&mut self, gang: &Group, moment: Moment) {
        self.note(gang, Found::Short(moment));
    }

    pub(super) fn is_woken(&mut self, gang: &Group, until: Duration) {
        self.note(gang, Found::Woken(until));
    }

    fn note(&mut self, gang: &Group, found: Found) {
        if self.0.len() >= MOST && !self.0.contains_key(gang) {
            self.0.clear();
        }
        self.0.insert(gang.clone(), found);
    }
}
