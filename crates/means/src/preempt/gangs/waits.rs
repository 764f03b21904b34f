//! Gangs that wait, between two looks for others that could finish for them.

use std::time::Duration;

use gpustow_api::Group;
use gpustow_books::HashMap;

use super::victims::Hunt;

/// The state of waiting gangs between two looks.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub(super) gangs: HashMap<Group, Wait>,
    /// Where the next look goes on among the groups.
    pub(super) next: usize,
    /// The search whether others could finish for a gang.
    pub(super) hunt: Option<Hunt>,
}

#[derive(Debug)]
pub(super) struct Wait {
    pub(super) since: Duration,
    pub(super) seen: Duration,
    /// When a plan was looked for last.
    pub(super) tried: Option<Duration>,
}
