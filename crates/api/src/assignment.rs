//! The assignment: which cards a pod holds and how much of each, as annotations.

use gpustow_pack::Mib;
use thiserror::Error;

/// What a bound pod holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// GPU UUID and the MiB charged on it, each GPU once.
    pub charges: Vec<(Box<str>, Mib)>,
    /// Container name and the GPU UUIDs that it sees.
    pub containers: Vec<(Box<str>, Vec<Box<str>>)>,
}

/// An assignment annotation that this version cannot use. The pod is accounted for on every card
/// of its node.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("annotation gpustow.dev/assignment: {0}")]
pub struct BrokenAssignment(pub String);
