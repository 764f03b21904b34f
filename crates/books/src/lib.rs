//! What is true of the cluster's GPUs, and what is known of its pods: the ground of the ledger. It is told what happens and
//! answers what would fit; it does not know who waits, nor how room is made.
//!
//! * [`Books`] say what is true: nodes, pods, reservations, the hard bound. Each verb returns a [`Change`].
//! * [`Scores`] hold what filter remembers and policies have learnt.
//! * [`Earmarks`] say which pod room is kept for.
//! * [`Shown`] is the evidence of kube-scheduler's calls.
//! * [`Known`] is all of it at one moment, for questions.
//! * [`Trial`] is the one what-if: nodes as they would be if some pods were gone and others had come.

mod asked;
mod books;
mod budget;
mod config;
mod earmarks;
mod evidence;
mod known;
mod maps;
mod offered;
mod reason;
mod scores;
mod trial;
mod turn;

pub use asked::Asked;
pub use books::{
    AssumedPod, Books, Change, Event, Hold, Node, Outcome, Share, Uid, asks, may_come,
};
pub use budget::Budget;
pub use config::Config;
pub use earmarks::{
    Beneficiary, Cards, Cause, Controller, Earmark, Earmarks, Ended, Holder, controller, doubled,
};
pub use evidence::{Evidence, NodeSet, Shown, Tried};
pub use known::Known;
pub use maps::{HashMap, HashSet};
pub use offered::Offered;
pub use reason::Reason;
pub use scores::{ClassId, Scores, Slot};
pub use trial::{Charges, Host, Left, Mark, Trial, left_of_new};
pub use turn::Turn;
