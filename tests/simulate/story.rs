//! The events of a world, for people.

use std::io;
use std::sync::{Arc, Mutex};

use tokio::time::Instant;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

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

/// The program's log lines are lines too, as far as `RUST_LOG` selects them.
impl Story {
    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::from_default_env())
            .with_writer(self.clone())
            .without_time()
            .with_ansi(false)
            .finish();
        tracing::subscriber::set_default(subscriber)
    }
}

impl MakeWriter<'_> for Story {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl io::Write for Story {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.tell(String::from_utf8_lossy(line).trim_end());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
