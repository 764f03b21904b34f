//! Which pods were asked to give memory back, and which of them did not. Lost at a restart, and learnt again as the time
//! of the next demand ends.

use std::time::Duration;

use crate::books::Uid;
use crate::maps::HashMap;

/// For so long others come before a pod that was asked without result.
const SPARED_FOR: Duration = Duration::from_secs(960);

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Asked {
    /// Since when the bound pods of nodes that lend have had the condition that they are to give back.
    since: HashMap<Uid, Duration>,
    /// Until when others come before these.
    refused: HashMap<Uid, Duration>,
}

impl Asked {
    /// Since when the pod has been asked.
    pub fn since(&self, uid: &str) -> Option<Duration> {
        self.since.get(uid).copied()
    }

    /// Was the pod asked without result?
    pub fn refused(&self, uid: &str) -> bool {
        self.refused.contains_key(uid)
    }

    /// These were asked without result.
    pub fn note(&mut self, refused: Vec<Uid>, now: Duration) {
        let until = now + SPARED_FOR;
        let refused = refused.into_iter().map(|uid| (uid, until));
        self.refused.extend(refused);
    }

    /// These are asked now.
    pub fn go_on(&mut self, since: HashMap<Uid, Duration>, now: Duration) {
        self.since = since;
        self.refused.retain(|_, until| *until > now);
    }
}
