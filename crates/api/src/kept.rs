//! The condition on a waiting pod for which room is kept, and what can be read of it after a restart.

use k8s_openapi::jiff::Timestamp;

/// Begins the message of the condition ([`KEPT_CONDITION`](crate::names::KEPT_CONDITION)); the node's name and a colon follow.
const ON: &str = "on node ";

/// The condition's message: where room is kept, and what it waits for.
#[must_use]
pub fn message(node: &str, what: &str) -> String {
    format!("{ON}{node}: {what}")
}

/// The node in such a message; none if it cannot be read.
#[must_use]
pub fn node(message: &str) -> Option<&str> {
    let (node, _) = message.strip_prefix(ON)?.split_once(": ")?;
    (!node.is_empty()).then_some(node)
}

/// Comes before the time until which it is waited for.
const UNTIL: &str = " until ";

/// What is waited for, and until when at most.
#[must_use]
pub fn until_then(what: &str, until: Timestamp) -> String {
    format!("{what}{UNTIL}{}", until.strftime("%Y-%m-%dT%H:%M:%SZ"))
}

/// Until when it is waited, in such a message; none if it does not say.
#[must_use]
pub fn until(message: &str) -> Option<&str> {
    let (_, until) = message.rsplit_once(UNTIL)?;
    until.parse::<Timestamp>().is_ok().then_some(until)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_read_as_it_was_written_and_nothing_else_is() {
        assert_eq!(
            node(&message("n1.example", "GPU-0: 5 MiB")),
            Some("n1.example")
        );
        let until_noon = until_then("5 MiB", "2026-11-01T12:00:00.5Z".parse().unwrap());
        let said = message("n1", &until_noon);
        assert_eq!(until(&said), Some("2026-11-01T12:00:00Z"));
        assert_eq!(until(&message("n1", "5 MiB until noon")), None);
        for other in ["", "on node ", "on node : x", "on node n1", "n1: x"] {
            assert_eq!(node(other), None, "{other}");
        }
    }
}
