//! Where the demo shows itself: a terminal, or lines if standard output is none.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};

use super::picture::Picture;
use super::report::{Row, clock as hours};
use super::view::{Scene, draw};
use super::world::World;

/// Between two lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// The terminal is as it was when this is dropped.
pub(crate) enum Screen {
    /// And a command that shows the same.
    Terminal(Box<DefaultTerminal>, String),
    /// When the next line is due.
    Lines(Instant),
}

impl Screen {
    /// Takes the terminal over, if there is one. `look` is a command that shows the same.
    ///
    /// # Errors
    /// If it does not do what is asked of it.
    pub(crate) fn open(look: String) -> Result<Self> {
        if !std::io::stdout().is_terminal() {
            eprintln!("In a browser, until the end: {look}");
            return Ok(Self::Lines(Instant::now()));
        }
        let terminal = ratatui::try_init().context("cannot draw on this terminal")?;
        Ok(Self::Terminal(Box::new(terminal), look))
    }

    /// Shows the world, whose row comes first, in full and the others by their rows. True if the user wants to stop.
    ///
    /// # Errors
    /// If the terminal or standard output is gone.
    pub(crate) fn show(&mut self, world: &World, rows: Vec<Row>, now: Duration) -> Result<bool> {
        let Some(row) = rows.first() else {
            return Ok(true);
        };
        match self {
            Self::Lines(due) => {
                if Instant::now() >= *due {
                    *due += LINE_EVERY;
                    writeln!(
                        std::io::stdout(),
                        "{}  {}: {:5.1} % allocated, {} running, {} waiting, {} finished",
                        hours(now),
                        row.way,
                        row.allocated * 100.0,
                        row.running,
                        row.waiting,
                        row.tally.finished
                    )?;
                }
                Ok(false)
            }
            Self::Terminal(terminal, look) => {
                let scene = Scene {
                    now,
                    picture: Picture::of(&world.server),
                    rows,
                    look: look.clone(),
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

impl Drop for Screen {
    fn drop(&mut self) {
        if let Self::Terminal(..) = self {
            ratatui::restore();
        }
    }
}
