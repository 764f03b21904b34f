//! Requests to the API server, each with an end.

use std::time::Duration;

use kube::core::Status;
use thiserror::Error;
use tokio::time::timeout;

/// A request that was not answered as hoped.
#[derive(Debug, Error)]
pub(crate) enum AskError {
    /// The API server said no.
    #[error("the API server refused: {} (status {})", .0.message, .0.code)]
    Refused(Box<Status>),
    /// The answer did not come, or cannot be read.
    #[error("no answer from the API server: {0}")]
    Broken(#[source] Box<kube::Error>),
    /// It did not come in time.
    #[error("no answer from the API server in time")]
    Timeout,
}

impl From<kube::Error> for AskError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Refused(status),
            other => Self::Broken(Box::new(other)),
        }
    }
}

impl AskError {
    /// The status with which the API server refused, if it did.
    #[must_use]
    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Refused(status) => Some(status.code),
            _ => None,
        }
    }

    /// Would the same request be refused again, however often it is sent?
    #[must_use]
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.status(), Some(status @ 400..500) if ![401, 408, 429].contains(&status))
    }
}

/// The request's answer, awaited no longer than `limit`.
///
/// # Errors
/// [`AskError::Timeout`] after `limit`: a write may still arrive.
pub(crate) async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, AskError> {
    match timeout(limit, request).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(AskError::Timeout),
    }
}
