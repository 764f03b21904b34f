//! The condition on a waiting pod for which room is kept, and what can be read of it after a restart.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_read_as_it_was_written_and_nothing_else_is() {
        assert_eq!(
            node(&message("n1.example", "GPU-0: 5 MiB")),
            Some("n1.example")
        );
        for other in ["", "on node ", "on node : x", "on node n1", "n1: x"] {
            assert_eq!(node(other), None, "{other}");
        }
    }
}
