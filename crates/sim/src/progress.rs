//! How far a long run is, on stderr, and whether Ctrl-C has ended it.

use std::io::{self, IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// The exit code of a program that Ctrl-C has ended.
pub const INTERRUPTED: u8 = 130;
/// How often a terminal is told, and anything else.
const EVERY: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

static STOPPED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Lets the first Ctrl-C end runs between two decisions, and the second end the process at once.
///
/// # Errors
/// If the system takes no handler.
pub fn stop_at_ctrl_c() -> io::Result<()> {
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), STOPPED.clone())?;
    flag::register(SIGINT, STOPPED.clone())?;
    Ok(())
}

/// Runs that take a while, one after another.
#[derive(Debug)]
pub struct Progress {
    runs: usize,
    done: usize,
    begun: Instant,
    told: Instant,
    terminal: bool,
    silent: bool,
}

impl Progress {
    /// Progress of so many runs.
    #[must_use]
    pub fn new(runs: usize) -> Self {
        Self {
            runs,
            done: 0,
            begun: Instant::now(),
            told: Instant::now(),
            terminal: stderr().is_terminal(),
            silent: false,
        }
    }

    /// Nobody is told.
    #[must_use]
    pub fn silent() -> Self {
        Self {
            silent: true,
            ..Self::new(1)
        }
    }

    /// The run called `what` is at `part` of its way, 0 to 1. False if it is to end now.
    pub fn goes_on(&mut self, what: impl FnOnce() -> String, part: f64) -> bool {
        if self.told.elapsed() >= EVERY[usize::from(!self.terminal)] && !self.silent {
            self.told = Instant::now();
            let part = (self.done as f64 + part) / self.runs.max(1) as f64;
            let seconds = self.begun.elapsed().as_secs_f64();
            let left = seconds * (1.0 - part) / part.max(1e-3);
            let line = format!(
                "{:3.0} %, run {} of {}: {}, about {left:.0} s left",
                100.0 * part,
                self.done + 1,
                self.runs,
                what(),
            );
            let (start, end) = if self.terminal {
                ("\r\x1b[K", "")
            } else {
                ("", "\n")
            };
            // A closed stderr is no reason to stop.
            let _ = write!(stderr(), "{start}{line}{end}");
        }
        !Self::stopped()
    }

    /// A run is over.
    pub fn done(&mut self) {
        self.done += 1;
        if self.terminal && !self.silent {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }

    /// Has Ctrl-C ended the runs?
    #[must_use]
    pub fn stopped() -> bool {
        STOPPED.load(Ordering::Relaxed)
    }
}
