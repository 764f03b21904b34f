//! `top`: the table of `gpus`, live.

use std::cmp::Reverse;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use gpustow_inspect::{Cluster, Live, memory};
use gpustow_pack::Mib;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Wrap};
use tokio::sync::mpsc;

use crate::answer::Answer;
use crate::global::Global;
use crate::lists::{self, GpuRow, used};
use crate::output::{Cells, Format, Listing, Output, Screen, Value};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TopArgs {
    /// Print once, without colour or keys, and end
    #[arg(short = '1', long)]
    pub(crate) once: bool,
    /// Order of the GPUs
    #[arg(long, default_value = "node")]
    pub(crate) sort: TopSort,
    /// Only lines with this text in node, model or pod
    #[arg(long, default_value = "", value_name = "TEXT")]
    pub(crate) filter: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopSort {
    /// By node and index.
    Node,
    /// Most available memory first.
    Available,
    /// Most live use first.
    Used,
    /// Most requested and unused first.
    Idle,
}

const HELP: &str = "q quit  s sort  / filter  ↑↓ PgUp PgDn Home End move";

/// The view's picture of the cluster.
struct Picture {
    gpus: Listing<GpuRow>,
    headline: String,
}

/// The choices of the user.
struct View {
    sort: TopSort,
    filter: String,
    /// The filter is being typed.
    typing: bool,
    first: usize,
    colour: bool,
}

/// Runs until `q`, or prints once if asked to or if there is no terminal.
pub(crate) async fn run(
    global: &Global,
    args: &TopArgs,
    out: &mut (dyn Write + Send),
    screen: Screen,
) -> Result<Answer> {
    let mut view = View {
        sort: args.sort,
        filter: args.filter.clone(),
        typing: false,
        first: 0,
        colour: screen.colour,
    };
    let cluster = global.cluster_or_own(None).await?;
    let output = Output {
        format: Format::Table,
        no_headers: false,
        watch: false,
        sort_by: None,
        left_out: cluster.left_out,
    };
    if output.left_out.is_some() {
        return lists::pods(&cluster, &global.scope(&cluster)).print(&output, screen, out);
    }
    if args.once || !screen.terminal {
        let Picture { gpus, headline } = picture(&cluster, &view)?;
        writeln!(out, "{headline}")?;
        return gpus.print(&output, screen, out);
    }
    let live = Live::start(&global.source, cluster).await?;
    let mut terminal = ratatui::try_init().context("cannot use this terminal: try top -1")?;
    let ended = show(&live, &mut view, &mut terminal).await;
    ratatui::restore();
    ended.map(|()| Answer::Yes)
}

async fn show(live: &Live, view: &mut View, terminal: &mut ratatui::DefaultTerminal) -> Result<()> {
    let (send, mut keys) = mpsc::channel(16);
    // It ends with the process: reading a terminal cannot be interrupted.
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if send.blocking_send(event).is_err() {
                return;
            }
        }
    });
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    let mut shown = picture(&live.now(), view)?;
    loop {
        let (mut lines, mut height) = (0, 0);
        terminal.draw(|frame| (lines, height) = draw(frame, &shown, view))?;
        tokio::select! {
            _ = tick.tick() => {}
            event = keys.recv() => match event {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if !view.obey(key, lines, height) {
                        return Ok(());
                    }
                }
                Some(_) => {}
                None => return Ok(()),
            },
        }
        shown = picture(&live.now(), view)?;
    }
}

impl View {
    /// Executes the command of a key; false to end.
    fn obey(&mut self, key: KeyEvent, lines: usize, height: usize) -> bool {
        let last = lines.saturating_sub(height);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Enter | KeyCode::Esc if self.typing => self.typing = false,
            KeyCode::Backspace if self.typing => drop(self.filter.pop()),
            KeyCode::Char(letter) if self.typing => {
                self.filter.push(letter);
                self.first = 0;
            }
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('s') => {
                self.sort = match self.sort {
                    TopSort::Node => TopSort::Available,
                    TopSort::Available => TopSort::Used,
                    TopSort::Used => TopSort::Idle,
                    TopSort::Idle => TopSort::Node,
                };
            }
            KeyCode::Down | KeyCode::Char('j') => self.first += 1,
            KeyCode::Up | KeyCode::Char('k') => self.first = self.first.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.first += height,
            KeyCode::PageUp => self.first = self.first.saturating_sub(height),
            KeyCode::Home => self.first = 0,
            KeyCode::End => self.first = last,
            _ => {}
        }
        self.first = self.first.min(last);
        true
    }
}

/// Does its node, its model or a pod on it have this text?
fn has(row: &GpuRow, text: &str) -> bool {
    let owners = row.owners.iter().map(String::as_str);
    let mut texts = [&*row.node, &*row.card.model].into_iter().chain(owners);
    texts.any(|it| it.contains(text))
}

/// Sums over GPUs in words.
fn sums(rows: &[GpuRow]) -> String {
    let sum = |of: fn(&GpuRow) -> Mib| memory(rows.iter().map(of).sum());
    format!(
        "{} requested, {} used, {} unmanaged, {} available",
        sum(|row| row.card.held),
        sum(|row| used(&row.card)),
        sum(|row| row.card.unmanaged),
        sum(|row| row.room)
    )
}

fn picture(cluster: &Cluster, view: &View) -> Result<Picture> {
    let mut gpus = lists::gpus(cluster, None)?;
    let headline = format!(
        "{} GPUs on {} nodes, {} pods wait: {}",
        gpus.rows.len(),
        cluster.views().len(),
        cluster.waiting().len(),
        sums(&gpus.rows)
    );
    if !view.filter.is_empty() {
        gpus.rows.retain(|row| has(row, &view.filter));
        gpus.empty = "No node, model or pod has this text.";
    }
    match view.sort {
        TopSort::Node => {}
        TopSort::Available => gpus.sort("-AVAILABLE")?,
        TopSort::Used => gpus.sort("-USED")?,
        TopSort::Idle => gpus
            .rows
            .sort_by_key(|row| Reverse(row.card.held.minus(used(&row.card)))),
    }
    Ok(Picture { gpus, headline })
}

/// Draws, and returns the number of lines and the number of lines that fit.
fn draw(frame: &mut Frame<'_>, picture: &Picture, view: &View) -> (usize, usize) {
    let width = usize::from(frame.area().width).max(1);
    let lines = picture.headline.chars().count().div_ceil(width);
    let areas = Layout::vertical([
        Constraint::Length(u16::try_from(lines).unwrap_or(1)),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ]);
    let [headline, head, body, foot] = areas.areas(frame.area());
    let height = usize::from(body.height);
    let screen = Screen {
        terminal: true,
        colour: view.colour,
        width: Some(frame.area().width),
    };
    let (heads, rows) = picture.gpus.laid_out(false, screen);
    let bold = Style::default().add_modifier(Modifier::BOLD);
    let reversed = Style::default().add_modifier(Modifier::REVERSED);
    frame.render_widget(
        Paragraph::new(Span::styled(picture.headline.as_str(), bold)).wrap(Wrap { trim: true }),
        headline,
    );
    frame.render_widget(Paragraph::new(heads).style(reversed), head);
    let (count, shown) = (rows.len(), rows.into_iter().skip(view.first).take(height));
    let lines = shown.map(|row| line(row, view.colour));
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), body);
    let last = (view.first + height).min(count);
    let first = (view.first + 1).min(last);
    let place = format!("{first}-{last} of {count}");
    let sort = format!("{:?}", view.sort).to_lowercase();
    let status = if view.typing {
        format!("filter: {}_   (Enter to end)", view.filter)
    } else if view.filter.is_empty() {
        format!("{place}  by {sort}  {HELP}")
    } else {
        format!("{place}  by {sort}  filter: {}  {HELP}", view.filter)
    };
    frame.render_widget(Paragraph::new(status).style(reversed), foot);
    (count, height)
}

fn line(row: Cells, colour: bool) -> Line<'static> {
    let style = |letter| match letter {
        '#' => Color::Green,
        '=' => Color::Yellow,
        '+' => Color::Red,
        _ => Color::DarkGray,
    };
    let mut spans: Vec<Span<'static>> = Vec::new();
    for (value, text) in row {
        if !spans.is_empty() {
            spans.push("  ".into());
        }
        match value {
            Value::Bar(..) if colour => {
                let cells = text.chars();
                spans.extend(cells.map(|it| Span::styled(it.to_string(), style(it))));
            }
            Value::Bad(_) if colour => spans.push(Span::styled(text, Color::Red)),
            Value::Good(_) if colour => spans.push(Span::styled(text, Color::Green)),
            _ => spans.push(text.into()),
        }
    }
    Line::from(spans)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use gpustow_inspect::load;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::Args;

    async fn cluster() -> Result<Cluster> {
        let files = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster");
        let args = Args::try_parse_from(["kubectl-gpustow", "--from", files, "nodes"])?;
        Ok(load(&args.global.source).await?)
    }

    fn drawn(picture: &Picture, view: &View) -> Result<String> {
        drawn_on(120, 8, picture, view)
    }

    fn drawn_on(width: u16, height: u16, picture: &Picture, view: &View) -> Result<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height))?;
        terminal.draw(|frame| _ = draw(frame, picture, view))?;
        Ok(terminal.backend().to_string())
    }

    fn all_by_node() -> View {
        View {
            sort: TopSort::Node,
            filter: String::new(),
            typing: false,
            first: 0,
            colour: false,
        }
    }

    #[tokio::test]
    async fn table_is_that_of_gpus() -> Result<()> {
        let (cluster, view) = (cluster().await?, all_by_node());
        for width in [80, 120, 200] {
            let shown = drawn_on(width, 24, &picture(&cluster, &view)?, &view)?;
            let mut printed = Vec::new();
            let screen = Screen {
                terminal: true,
                colour: false,
                width: Some(width),
            };
            let output = Output {
                format: Format::Table,
                no_headers: false,
                watch: false,
                sort_by: None,
                left_out: None,
            };
            lists::gpus(&cluster, None)?.print(&output, screen, &mut printed)?;
            for line in String::from_utf8(printed)?.lines().take(20) {
                assert!(shown.contains(line), "{shown}\n{line}");
            }
        }
        Ok(())
    }

    #[tokio::test]
    async fn eighty_columns_show_how_many_pods_wait() -> Result<()> {
        let view = all_by_node();
        let screen = drawn_on(80, 24, &picture(&cluster().await?, &view)?, &view)?;
        let first = screen.lines().next().unwrap_or_default();
        assert!(first.contains(" pods wait: "), "{screen}");
        Ok(())
    }

    #[tokio::test]
    async fn keys_move_sort_and_filter() -> Result<()> {
        let cluster = cluster().await?;
        let mut view = all_by_node();
        let press =
            |view: &mut View, code| view.obey(KeyEvent::new(code, KeyModifiers::NONE), 19, 5);
        assert!(press(&mut view, KeyCode::End));
        let end = drawn(&picture(&cluster, &view)?, &view)?;
        assert!(end.contains("t4-0") && !end.contains("a100-0 "), "{end}");
        assert!(end.contains("15-19 of 19  by node"), "{end}");

        press(&mut view, KeyCode::Home);
        press(&mut view, KeyCode::Char('s'));
        let by_room = drawn(&picture(&cluster, &view)?, &view)?;
        let first = by_room.lines().nth(2).unwrap_or_default();
        assert!(
            first.contains("a100-1") && first.contains("79.5Gi"),
            "{by_room}"
        );

        for letter in "/camera".chars() {
            press(&mut view, KeyCode::Char(letter));
        }
        press(&mut view, KeyCode::Enter);
        let camera = drawn(&picture(&cluster, &view)?, &view)?;
        assert!(
            camera.contains("1-1 of 1  by available  filter: camera"),
            "{camera}"
        );
        assert!(camera.contains("#######=............"), "{camera}");
        assert!(!press(&mut view, KeyCode::Char('q')));
        Ok(())
    }
}
