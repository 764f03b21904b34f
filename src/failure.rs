//! Calls of kube-scheduler that were not served, as metrics count them.

use strum::{IntoStaticStr, VariantNames};

use crate::ask::AskError;
use crate::epoch::EpochError;

/// Why a call was not served; as a string, the `error` label. That a pod fits nowhere is an answer, not one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum ErrorKind {
    /// The call cannot be read.
    Decode,
    /// Something did not come in time.
    Timeout,
    /// The API server refused or did not answer.
    Api,
    /// This replica is not ready, or not the one that decides.
    Internal,
}

/// An answer with an error in it.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// None if it is the pod's own affair, as when it is gone.
    pub(crate) kind: Option<ErrorKind>,
    /// For kube-scheduler, and so for the user.
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self {
            kind: Some(kind),
            text: text.into(),
        }
    }

    /// The pod's own affair.
    pub(crate) fn of_pod(text: impl Into<String>) -> Self {
        Self {
            kind: None,
            text: text.into(),
        }
    }
}

impl From<&AskError> for ErrorKind {
    fn from(error: &AskError) -> Self {
        match error {
            AskError::Timeout => Self::Timeout,
            AskError::Refused(_) | AskError::Broken(_) => Self::Api,
        }
    }
}

impl From<&EpochError> for ErrorKind {
    fn from(error: &EpochError) -> Self {
        match error {
            EpochError::NotOurs { .. } | EpochError::Leaving => Self::Internal,
            EpochError::Ask(error) => error.into(),
            EpochError::TakingOver => Self::Timeout,
        }
    }
}
