//! Where the demo shows itself: a terminal, or lines if standard output is none.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};

use super::picture::Picture;
use super::report::{Row, clock as hours};
use super::view::{Scene, draw};
use super::world::{Clock, World};

/// Between two lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// The terminal is as it was when this is dropped.
pub(crate) enum Screen {
    Terminal(Box<DefaultTerminal>),
    /// When the next line is due.
    Lines(Instant),
}

impl Screen {
    /// Takes the terminal over, if there is one, to show `worlds`.
    ///
    /// # Errors
    /// If it does not do what is asked of it.
    pub(crate) fn open(worlds: &[Arc<World>]) -> Result<Self> {
        if !std::io::stdout().is_terminal() {
            if let Some(first) = worlds.first() {
                eprintln!("In a browser, until the end: {}", look(first));
            }
            return Ok(Self::Lines(Instant::now()));
        }
        let terminal = ratatui::try_init().context("cannot draw on this terminal")?;
        Ok(Self::Terminal(Box::new(terminal)))
    }

    /// Shows the first world in full and the others by their figures. True if the user wants to
    /// stop.
    ///
    /// # Errors
    /// If the terminal or standard output is gone.
    pub(crate) fn show(&mut self, worlds: &[Arc<World>], clock: Clock) -> Result<bool> {
        let Some(first) = worlds.first() else {
            return Ok(true);
        };
        let now = clock.now();
        match self {
            Self::Lines(due) => {
                if Instant::now() >= *due {
                    *due += LINE_EVERY;
                    let row = Row::of(first, now);
                    writeln!(
                        std::io::stdout(),
                        "{}  {}: {:5.1} % allocated, {} running, {} waiting, {} finished",
                        hours(now),
                        row.policy,
                        row.allocated * 100.0,
                        row.running,
                        row.waiting,
                        row.tally.finished
                    )?;
                }
                Ok(false)
            }
            Self::Terminal(terminal) => {
                let scene = Scene {
                    now,
                    picture: Picture::of(&first.store),
                    rows: worlds.iter().map(|world| Row::of(world, now)).collect(),
                    look: look(first),
                };
                terminal.draw(|frame| draw(frame, &scene))?;
                while event::poll(Duration::ZERO)? {
                    if let Event::Key(key) = event::read()? {
                        let control = key.modifiers.contains(KeyModifiers::CONTROL);
                        match key.code {
                            KeyCode::Char('q') | KeyCode::Esc => return Ok(true),
                            KeyCode::Char('c') if control => return Ok(true),
                            _ => {}
                        }
                    }
                }
                Ok(false)
            }
        }
    }
}

fn look(world: &World) -> String {
    let kubeconfig = world.kubeconfig();
    format!("kubectl gpustow --kubeconfig {} ui", kubeconfig.display())
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Self::Terminal(_) = self {
            ratatui::restore();
        }
    }
}
