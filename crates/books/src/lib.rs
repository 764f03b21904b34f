//! The ground of the ledger: the facts about the cluster's GPUs and pods. This crate receives events and answers which
//! pods would fit. It does not know the waiting pods, nor the means that make room.
//!
//! * [`Books`] hold the facts: nodes, pods, reservations, the hard bound. Each verb returns a [`Change`].
//! * [`Scores`] hold the remembered answers of filter and the lessons of policies.
//! * [`Earmarks`] record for which pod room is kept.
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
