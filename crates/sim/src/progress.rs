//! How far a long run is, on stderr, and whether Ctrl-C has ended it.

use std::io::{self, IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// The exit code of a program that Ctrl-C has ended.
pub const INTERRUPTED: u8 = 130;
/// Parts of a run.
const PARTS: f64 = 1000.0;

static STOPPED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Lets the first Ctrl-C end runs between two decisions, and the second end the process at once.
///
/// # Errors
/// If the system does not accept the handler.
pub fn stop_at_ctrl_c() -> io::Result<()> {
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), STOPPED.clone())?;
    flag::register(SIGINT, STOPPED.clone())?;
    Ok(())
}

/// Runs that take a while, one after another: a bar on a terminal, a line now and then anywhere else.
#[derive(Debug)]
pub struct Progress {
    runs: usize,
    done: usize,
    bar: ProgressBar,
    told: Instant,
    /// Between two looks.
    period: Duration,
    plain: bool,
}

impl Progress {
    /// Progress of so many runs.
    #[must_use]
    pub fn new(runs: usize) -> Self {
        let bar = ProgressBar::new((PARTS * runs as f64) as u64);
        let style = ProgressStyle::with_template("{percent:>3} %, {msg}, about {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let plain = !stderr().is_terminal();
        let period = match plain {
            true => Duration::from_secs(10),
            false => Duration::from_millis(200),
        };
        Self {
            runs,
            done: 0,
            bar,
            told: Instant::now(),
            period,
            plain,
        }
    }

    /// Writes nothing.
    #[must_use]
    pub fn silent() -> Self {
        Self {
            bar: ProgressBar::hidden(),
            period: Duration::MAX,
            ..Self::new(1)
        }
    }

    /// The run called `what` is at `part` of its way, 0 to 1. False if it is to end now.
    pub fn goes_on(&mut self, what: impl FnOnce() -> String, part: f64) -> bool {
        if Self::stopped() {
            self.bar.finish_and_clear();
            return false;
        }
        if self.told.elapsed() >= self.period {
            self.told = Instant::now();
            let message = format!("run {} of {}: {}", self.done + 1, self.runs, what());
            self.bar.set_message(message);
            let parts = PARTS * (self.done as f64 + part);
            self.bar.set_position(parts as u64);
            if self.plain {
                let percent = parts / PARTS / self.runs.max(1) as f64 * 100.0;
                let (message, left) = (self.bar.message(), self.bar.eta().as_secs());
                // A closed stderr is no reason to stop.
                let _ = writeln!(stderr(), "{percent:3.0} %, {message}, about {left} s left");
            }
        }
        true
    }

    /// A run is over.
    pub fn done(&mut self) {
        self.done += 1;
        if self.done == self.runs {
            self.bar.finish_and_clear();
        }
    }

    /// Has Ctrl-C ended the runs?
    #[must_use]
    pub fn stopped() -> bool {
        STOPPED.load(Ordering::Relaxed)
    }
}
