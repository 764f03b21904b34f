//! What happened in a world, for people.

use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use crate::net::locked;

/// Lines, each with the seconds since the world began.
#[derive(Clone)]
pub(crate) struct Story {
    began: Instant,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Story {
    /// Of a world that begins now.
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            lines: Arc::default(),
        }
    }

    pub(crate) fn tell(&self, text: impl Into<String>) {
        let at = self.began.elapsed().as_secs_f64();
        locked(&self.lines).push(format!("{at:9.3} {}", text.into()));
    }

    pub(crate) fn text(&self) -> String {
        locked(&self.lines).join("\n")
    }
}
