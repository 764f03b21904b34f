//! Gangs: pods of a PodGroup of which kube-scheduler binds `minCount` at the same time, or none.
//!
//! kube-scheduler asks about the pods of a gang one after the other, in one *cycle*. No call reports that it has given
//! the gang up. So a cycle ends here when kube-scheduler asks again about a pod of this cycle. It also ends when too
//! few pods of the gang are left to reach `minCount`. Then the extender holds no room for any of them, nor for pods
//! that kube-scheduler still asks about. The first call of a cycle plans for all known pods ([`plan`]). If too few pods
//! fit, the call is refused, and no room is held.
//!
//! kube-scheduler's preemption for a gang calls no extender: [the crate](crate) chooses the victims.

mod cycle;
mod plan;
mod roll;
mod rules;
mod search;
mod shortfall;
mod view;

use std::time::Duration;

pub use cycle::Cycles;
pub(crate) use plan::Seats;
pub use plan::{Member, Seat};
pub(crate) use roll::Roll;
pub use shortfall::{Extent, MOST_PODS, Shortfall};
pub use view::{GangView, Standing};

/// A cycle is forgotten when nothing was heard of its gang for so long, and a gang that was not seen to wait.
pub(crate) const FORGOTTEN: Duration = Duration::from_secs(60);
