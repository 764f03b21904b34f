//! The annotation of the extender on a waiting pod while it reserves GPU memory for the pod
//! ([`RESERVATION`](crate::names::RESERVATION)). The next leader continues the reservation. The message of the pod's
//! condition is for people.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The annotation's value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// The node on which it is.
    pub node: String,
    /// MiB by GPU UUID.
    pub gpus: BTreeMap<String, u64>,
    /// When it ends at the latest, as RFC 3339 writes it.
    pub until: String,
}

impl Reservation {
    /// `until` is written to the second.
    #[must_use]
    pub fn new(node: &str, gpus: BTreeMap<String, u64>, until: Timestamp) -> Self {
        Self {
            node: node.to_owned(),
            gpus,
            until: until.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        }
    }

    /// As the annotation has it.
    #[must_use]
    pub fn encode(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// None if this version cannot read it.
    #[must_use]
    pub fn decode(text: &str) -> Option<Self> {
        let read: Self = serde_json::from_str(text).ok()?;
        (!read.node.is_empty()).then_some(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservation_is_read_as_it_was_written_and_nothing_else_is() {
        let gpus = BTreeMap::from([("GPU-0".to_owned(), 5)]);
        let written = Reservation::new(
            "n1.example",
            gpus,
            "2026-11-01T12:00:00.5Z".parse().unwrap(),
        );
        assert_eq!(written.until, "2026-11-01T12:00:00Z");
        assert_eq!(Reservation::decode(&written.encode()), Some(written));
        for other in [
            "",
            "on node n1: GPU-0",
            "{}",
            r#"{"node":"","gpus":{},"until":""}"#,
            r#"{"node":"n","gpus":{"GPU-0":"x"},"until":""}"#,
        ] {
            assert_eq!(Reservation::decode(other), None, "{other}");
        }
    }
}
