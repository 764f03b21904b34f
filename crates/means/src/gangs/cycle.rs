//! kube-scheduler's cycles: in each it asks about the pods of one gang.

use std::collections::BTreeSet;
use std::time::Duration;

use gpustow_api::Group;
use gpustow_books::{HashMap, Uid};

use super::plan::{Seat, Seats};
use super::{FORGOTTEN, Shortfall};

/// For the next call about a gang, or its first bind: kube-scheduler takes some milliseconds.
const HOLD: Duration = Duration::from_secs(2);
/// The hold after a cycle that ended without a bind: a check outside the extender refused the gang.
const HOLD_AGAIN: Duration = Duration::from_millis(500);
/// Cycles that are remembered before old ones are looked for.
const CYCLES: usize = 256;

/// The last cycle of each gang.
#[derive(Debug, Default)]
pub struct Cycles(HashMap<Group, Cycle>);

/// One cycle, or the last one.
#[derive(Debug, Default)]
struct Cycle {
    /// The pods that were asked about.
    asked: BTreeSet<Uid>,
    /// Where the others are to go.
    seats: HashMap<Uid, Seat>,
    /// kube-scheduler has begun to bind.
    binds: bool,
    /// Cycles that ended without a bind, one after the other.
    failed: bool,
    /// Too few can fit. kube-scheduler may still ask about others in this cycle.
    given_up: Option<Shortfall>,
    heard: Duration,
}

impl Cycles {
    /// kube-scheduler asks about a pod of the gang. True if a cycle begins with this pod and the cycle before ended
    /// without a bind. The room that the earlier pods hold is then free.
    pub fn ask(&mut self, gang: &Group, uid: &Uid, now: Duration) -> bool {
        if self.0.len() >= CYCLES {
            self.0
                .retain(|_, cycle| now.saturating_sub(cycle.heard) < FORGOTTEN);
        }
        let cycle = self.0.entry(gang.clone()).or_default();
        let lasts = match cycle.given_up {
            Some(_) => HOLD_AGAIN,
            None => HOLD,
        };
        let goes_on = now.saturating_sub(cycle.heard) < lasts;
        cycle.heard = now;
        if goes_on && cycle.asked.insert(uid.clone()) {
            return false;
        }
        *cycle = Cycle {
            asked: [uid.clone()].into(),
            failed: !cycle.binds,
            heard: now,
            ..Cycle::default()
        };
        cycle.failed
    }

    /// The pods that this cycle has asked about.
    pub fn asked(&self, gang: &Group) -> Option<&BTreeSet<Uid>> {
        self.0.get(gang).map(|cycle| &cycle.asked)
    }

    /// Why the gang is given up, if it is.
    pub fn given_up(&self, gang: &Group) -> Option<&Shortfall> {
        self.0.get(gang)?.given_up.as_ref()
    }

    /// Where the pod is to go, by the plan that was made for another one.
    pub fn take_seat(&mut self, gang: &Group, uid: &str) -> Option<Seat> {
        self.0.get_mut(gang)?.seats.swap_remove(uid)
    }

    /// These seats are kept for the gang's next calls.
    pub fn keep_seats(&mut self, gang: &Group, seats: Seats) {
        if let Some(cycle) = self.0.get_mut(gang) {
            cycle.seats = seats.seats;
        }
    }

    /// The gang is given up for this cycle.
    pub fn give_up(&mut self, gang: &Group, shortfall: Option<Shortfall>) {
        if let Some(cycle) = self.0.get_mut(gang) {
            cycle.given_up = cycle.given_up.take().or(shortfall);
            cycle.seats.clear();
        }
    }

    /// How long its pods hold their room.
    pub fn hold(&self, gang: &Group) -> Duration {
        match self.0.get(gang) {
            Some(cycle) if cycle.failed => HOLD_AGAIN,
            _ => HOLD,
        }
    }

    /// A pod of the gang is bound. True if it is the first in this cycle.
    pub fn bind(&mut self, gang: &Group) -> bool {
        let Some(cycle) = self.0.get_mut(gang).filter(|cycle| !cycle.binds) else {
            return false;
        };
        (cycle.binds, cycle.failed) = (true, false);
        true
    }
}
