//! `top`: every GPU with its pods, live.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, Result};
use gpustow_inspect::{
    Cluster, Live, load, memory,
    owner::Owners,
    state::{self, room},
};
use gpustow_pack::Mib;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use tokio::sync::mpsc;

use crate::args::{Global, TopArgs, TopSort};
use crate::lists::used;
use crate::output::{bar, clipped, printable};
use crate::{Answer, Screen};

const HELP: &str = "q quit  s sort  / filter  ↑↓ PgUp PgDn Home End move";

struct Row {
    node: String,
    gpu: u32,
    model: String,
    held: Mib,
    used: Mib,
    /// What processes outside gpustow pods use.
    others: Mib,
    room: Mib,
    free: Mib,
    pods: String,
    /// Why it takes no pods.
    refuses: Option<String>,
}

/// What the view shows of the cluster.
struct Picture {
    rows: Vec<Row>,
    headline: String,
}

/// What the person chose.
struct View {
    sort: TopSort,
    filter: String,
    /// The filter is being typed.
    typing: bool,
    first: usize,
    colour: bool,
}

/// Runs until `q`, or prints once if asked to or if nobody is looking.
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
    if args.once || !screen.terminal {
        let picture = picture(&load(&global.source).await?, &view);
        writeln!(out, "{}", picture.headline)?;
        let widths = widths(&picture.rows, u16::MAX);
        writeln!(out, "{}", heads(&widths).trim_end())?;
        for row in &picture.rows {
            writeln!(out, "{}", plain(row, &widths).trim_end())?;
        }
        return Ok(Answer::Yes);
    }
    let live = Live::start(&global.source).await?;
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
    let mut shown = picture(&live.now(), view);
    loop {
        let mut height = 0;
        terminal.draw(|frame| height = draw(frame, &shown, view))?;
        tokio::select! {
            _ = tick.tick() => {}
            event = keys.recv() => match event {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if !view.obey(key, shown.rows.len(), height) {
                        return Ok(());
                    }
                }
                Some(_) => {}
                None => return Ok(()),
            },
        }
        shown = picture(&live.now(), view);
    }
}

impl View {
    /// Does what a key says; false to end.
    fn obey(&mut self, key: KeyEvent, rows: usize, height: usize) -> bool {
        let last = rows.saturating_sub(height);
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

fn picture(cluster: &Cluster, view: &View) -> Picture {
    let (views, owners) = (cluster.views(), Owners::of(cluster));
    let mut rows: Vec<Row> = views
        .iter()
        .flat_map(|node| node.cards.iter().map(move |card| (node, card)))
        .map(|(node, card)| Row {
            node: node.name.to_string(),
            gpu: card.index,
            model: card.model.clone(),
            held: card.held,
            used: used(card),
            others: card.unmanaged,
            room: room(node, card),
            free: card.free,
            pods: printable(&owners.on(&node.name, card).join(", ")),
            refuses: state::refuses(cluster, node, card),
        })
        .collect();
    let sum = |of: fn(&Row) -> Mib| memory(rows.iter().map(of).sum());
    let headline = format!(
        "{} nodes, {} GPUs: {} requested, {} used, {} unmanaged, {} available; {} pods wait",
        views.len(),
        rows.len(),
        sum(|row| row.held),
        sum(|row| row.used),
        sum(|row| row.others),
        sum(|row| row.room),
        cluster.waiting().len()
    );
    if !view.filter.is_empty() {
        rows.retain(|row| {
            [&row.node, &row.model, &row.pods]
                .iter()
                .any(|text| text.contains(&view.filter))
        });
    }
    let down = |amount: Mib| std::cmp::Reverse(amount);
    match view.sort {
        TopSort::Node => {}
        TopSort::Available => rows.sort_by_key(|row| down(row.room)),
        TopSort::Used => rows.sort_by_key(|row| down(row.used)),
        TopSort::Idle => rows.sort_by_key(|row| down(row.held.minus(row.used))),
    }
    Picture { rows, headline }
}

/// Widths of NODE, MODEL and the bar on a screen of this width: what is left for the pods and how much
/// room there is matter more than a model's whole name.
fn widths(rows: &[Row], screen: u16) -> (usize, usize, usize) {
    let (longest, bar) = if screen < 110 { (10, 10) } else { (40, 20) };

    let widest = |of: fn(&Row) -> &str, head: &str| {
        let width = rows
            .iter()
            .map(|row| of(row).chars().count())
            .max()
            .unwrap_or(0);
        width.max(head.len()).min(40)
    };
    (
        widest(|row| &row.node, "NODE"),
        widest(|row| &row.model, "MODEL").min(longest),
        bar,
    )
}

/// A cell of what others use, where there is room for it.
fn others(bar: usize, text: &str) -> String {
    match bar {
        0..20 => String::new(),
        _ => format!("  {text:>7}"),
    }
}

fn heads(&(node, model, bar): &(usize, usize, usize)) -> String {
    let others = others(bar, "UNMANAGED");
    format!(
        "{:node$}  GPU  {:model$}  {:bar$}  {:>9}  {:>7}{others}  {:>7}  PODS",
        "NODE", "MODEL", "", "REQUESTED", "USED", "AVAILABLE"
    )
}

/// A row's text before the bar, the bar, and what follows.
fn parts(row: &Row, &(node, model, length): &(usize, usize, usize)) -> [String; 3] {
    let state = row.refuses.as_deref().map_or_else(String::new, |why| {
        format!("(takes no pods: {}) ", printable(why))
    });
    let [held, used, others, room] = [row.held, row.used, row.others, row.room].map(memory);
    [
        format!(
            "{:node$}  {:>3}  {:model$}  ",
            clipped(&row.node, node),
            row.gpu,
            clipped(&row.model, model)
        ),
        format!(
            "{:length$}",
            bar(row.held, row.used + row.others, row.free, length as u64)
        ),
        format!(
            "  {held:>9}  {used:>7}{}  {room:>7}  {state}{}",
            self::others(length, &others),
            row.pods
        ),
    ]
}

fn plain(row: &Row, widths: &(usize, usize, usize)) -> String {
    parts(row, widths).concat()
}

/// Draws, and tells how many rows there is room for.
fn draw(frame: &mut Frame<'_>, picture: &Picture, view: &View) -> usize {
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ]);
    let [headline, head, body, foot] = areas.areas(frame.area());
    let height = usize::from(body.height);
    let widths = widths(&picture.rows, frame.area().width);
    let bold = Style::default().add_modifier(Modifier::BOLD);
    let reversed = Style::default().add_modifier(Modifier::REVERSED);
    frame.render_widget(
        Paragraph::new(Span::styled(picture.headline.as_str(), bold)),
        headline,
    );
    frame.render_widget(Paragraph::new(heads(&widths)).style(reversed), head);
    let rows = picture.rows.iter().skip(view.first).take(height);
    let lines = rows.map(|row| line(row, &widths, view.colour));
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), body);
    let last = (view.first + height).min(picture.rows.len());
    let first = (view.first + 1).min(last);
    let place = format!("{first}-{last} of {}", picture.rows.len());
    let sort = format!("{:?}", view.sort).to_lowercase();
    let status = if view.typing {
        format!("filter: {}_   (Enter to end)", view.filter)
    } else if view.filter.is_empty() {
        format!("{place}  by {sort}  {HELP}")
    } else {
        format!("{place}  by {sort}  filter: {}  {HELP}", view.filter)
    };
    frame.render_widget(Paragraph::new(status).style(reversed), foot);
    height
}

fn line(row: &Row, widths: &(usize, usize, usize), colour: bool) -> Line<'static> {
    let [before, bar, after] = parts(row, widths);
    if !colour {
        return Line::from(before + &bar + &after);
    }
    let style = |letter| match letter {
        '#' => Style::default().fg(Color::Green),
        '=' => Style::default().fg(Color::Yellow),
        '+' => Style::default().fg(Color::Red),
        _ => Style::default().fg(Color::DarkGray),
    };
    let text = if row.refuses.is_none() {
        Style::default()
    } else {
        Style::default().fg(Color::Red)
    };
    let mut spans = vec![Span::styled(before, text)];
    spans.extend(
        bar.chars()
            .map(|letter| Span::styled(letter.to_string(), style(letter))),
    );
    spans.push(Span::styled(after, text));
    Line::from(spans)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
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
    async fn eighty_columns_have_room_pods_and_what_takes_none() -> Result<()> {
        let view = all_by_node();
        let screen = drawn_on(80, 24, &picture(&cluster().await?, &view), &view)?;
        assert!(screen.contains("AVAILABLE  PODS"), "{screen}");
        let has = |gpu: &str, text: &str| {
            let mut lines = screen.lines();
            lines.any(|line| line.contains(gpu) && line.contains(text))
        };
        assert!(has("a100-0    0", "19.5Gi  team-a/llm-0"), "{screen}");
        assert!(has("l4-0      3", "0  (takes no pods"), "{screen}");
        assert!(has("l4-1      0", "0  (takes no pods"), "{screen}");
        Ok(())
    }

    #[tokio::test]
    async fn keys_move_sort_and_filter() -> Result<()> {
        let cluster = cluster().await?;
        let mut view = all_by_node();
        let press =
            |view: &mut View, code| view.obey(KeyEvent::new(code, KeyModifiers::NONE), 11, 5);
        assert!(press(&mut view, KeyCode::End));
        let end = drawn(&picture(&cluster, &view), &view)?;
        assert!(end.contains("t4-0") && !end.contains("a100-0 "), "{end}");
        assert!(end.contains("7-11 of 11  by node"), "{end}");

        press(&mut view, KeyCode::Home);
        press(&mut view, KeyCode::Char('s'));
        let by_room = drawn(&picture(&cluster, &view), &view)?;
        let first = by_room.lines().nth(2).unwrap_or_default();
        assert!(
            first.contains("a100-1") && first.contains("79.5Gi"),
            "{by_room}"
        );

        for letter in "/camera".chars() {
            press(&mut view, KeyCode::Char(letter));
        }
        press(&mut view, KeyCode::Enter);
        let camera = drawn(&picture(&cluster, &view), &view)?;
        assert!(
            camera.contains("1-1 of 1  by available  filter: camera"),
            "{camera}"
        );
        assert!(camera.contains("#######=............"), "{camera}");
        assert!(!press(&mut view, KeyCode::Char('q')));
        Ok(())
    }
}
