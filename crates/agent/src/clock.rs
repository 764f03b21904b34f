//! The time, twice: deadlines and ages are measured on a clock that is never set.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// A moment in the life of this agent.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// How long the agent had run: by the monotonic clock.
    pub age: Duration,
    /// The time of the host's clock, for people and for the next agent on this node.
    pub wall: Timestamp,
}

impl Now {
    /// The time since `then` by the host's clock; zero if `then` is in the future.
    #[must_use]
    pub fn since(&self, then: Timestamp) -> Duration {
        Duration::try_from(self.wall.duration_since(then)).unwrap_or_default()
    }
}

/// The clock of one life of the agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    began: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            began: Instant::now(),
        }
    }

    pub(crate) fn now(self) -> Now {
        Now {
            age: self.began.elapsed(),
            wall: Timestamp::now(),
        }
    }
}
