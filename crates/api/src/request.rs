//! `&Pod` → [`Request`](gpustow_pack::Request).

use thiserror::Error;

/// A request that names a field and what to write there instead.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field}: {problem}")]
pub struct BadRequest {
    /// The path of the field in the Pod.
    pub field: String,
    /// What is wrong, and the mend.
    pub problem: String,
}
