//! Gangs that wait, between two looks for others that could finish for them.

use std::time::Duration;

use gpustow_api::Group;

use super::victims::Hunt;
use crate::books::Uid;
use crate::maps::HashMap;

/// What is known of gangs that wait, between two looks.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub(super) gangs: HashMap<Group, Wait>,
    /// Where the next look goes on among the groups.
    pub(super) next: usize,
    /// The search whether others could finish for a gang.
    pub(super) first: Option<Hunt>,
    /// The same with what disruption budgets allow, and when it was gone on with last.
    pub(super) second: Option<(Hunt, Duration)>,
    /// Pods for which a search ended because it had cost enough: they are to be told.
    pub(super) cut: Vec<Uid>,
}

impl Waits {
    /// Searches for others to finish for these pods ended because they had cost enough.
    pub(crate) fn note_cut(&mut self, uids: &mut Vec<Uid>) {
        self.cut.append(uids);
    }

    /// The pods that are to be told so.
    pub(crate) fn take_cut(&mut self) -> Vec<Uid> {
        std::mem::take(&mut self.cut)
    }
}

#[derive(Debug)]
pub(super) struct Wait {
    pub(super) since: Duration,
    pub(super) seen: Duration,
    /// When a plan was looked for last.
    pub(super) tried: Option<Duration>,
    /// No plan is looked for before: disruption budgets allowed none.
    pub(super) rests: Duration,
}
