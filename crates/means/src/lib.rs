//! The means by which room is made for a pod that waits: reclaim, reserve, preempt and defragment. Gangs are placed here too.
//!
//! Each means has a folder and a line in [`Registry`]. It is a value behind one trait, with a state of its own. It
//! looks for plans in its own way and compares them by a rank of its own. A plan is pursued in one way: an earmark. A
//! means changes the [`Parts`] and asks [`Sight`] for the known state and the waiting pods.

mod defragment;
mod demand;
mod gangs;
mod late;
mod means;
mod parts;
mod preempt;
mod reclaim;
mod reserve;
mod round;
mod sight;
mod victims;

use gpustow_books::Cause;

pub use defragment::{Defragment, Emptying, Move, Moves};
pub use demand::{Action, Borrower, Demand, Demands, Purpose, Reserved, Shortage};
pub use gangs::{Cycles, Extent, GangView, MOST_PODS, Member, Seat, Shortfall, Standing};
pub use means::{Means, NotNow, Plan};
pub use parts::Parts;
pub use preempt::Preempt;
pub use reclaim::{OverLimit, Reclaim};
pub use reserve::Reserve;
pub use sight::Sight;
pub use victims::Victims;

/// The means.
#[derive(Debug, Default)]
pub struct Registry {
    /// Borrowed memory is given back.
    pub reclaim: Reclaim,
    reserve: Reserve,
    preempt: Preempt,
    /// Pods move for others.
    pub defragment: Defragment,
}

/// The order in which the means have their turns in a look.
pub const TURNS: [Cause; 4] = [
    Cause::Reclaim,
    Cause::Reserve,
    Cause::Preempt,
    Cause::Defragment,
];

impl Registry {
    /// Each of them, in the order of their turns.
    pub fn all(&self) -> [&dyn Means; 4] {
        [
            &self.reclaim,
            &self.reserve,
            &self.preempt,
            &self.defragment,
        ]
    }

    /// The means with this cause.
    pub fn find(&self, cause: Cause) -> Option<&dyn Means> {
        self.all().into_iter().find(|it| it.cause() == cause)
    }

    /// The means with this cause, to be changed.
    pub fn find_mut(&mut self, cause: Cause) -> Option<&mut dyn Means> {
        let all: [&mut dyn Means; 4] = [
            &mut self.reclaim,
            &mut self.reserve,
            &mut self.preempt,
            &mut self.defragment,
        ];
        all.into_iter().find(|it| it.cause() == cause)
    }
}
