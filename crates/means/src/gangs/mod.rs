//! Gangs: pods of a PodGroup of which kube-scheduler binds `minCount` at the same time, or none.
//!
//! kube-scheduler asks about the pods of a gang one after the other, in one *cycle*, and no call says that it has given
//! the gang up. So a cycle ends here when a pod is asked about that this cycle has had, or when too few of the gang are
//! left to reach `minCount`: then nothing is held for any of them, nor for those that it still asks about. The first call
//! of a cycle plans for all pods that are known ([`plan`]); if too few fit, it is refused, and nothing is held at all.
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
