//! A request that cannot be honoured, and how its annotations are read.

use std::collections::BTreeMap;

use thiserror::Error;

/// The most MiB that a container may request of each of its GPUs. No GPU has as much memory. An amount in bytes, or
/// with the suffix `Mi`, would be larger.
pub const MAX_MIB_PER_GPU: u64 = (1 << 20) - 1;

/// An invalid request: the name of a field and its fix.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field}: {problem}")]
pub struct BadRequest {
    /// The path of the field in the Pod.
    pub field: String,
    /// The error and its fix.
    pub problem: String,
}

/// The annotation `key` as `read` understands it, if it is set.
pub(crate) fn annotation<T>(
    annotations: &BTreeMap<String, String>,
    key: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, BadRequest> {
    let Some(value) = annotations.get(key) else {
        return Ok(None);
    };
    read(value).map(Some).map_err(|problem| BadRequest {
        field: field_of(key),
        problem,
    })
}

pub(crate) fn field_of(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}
