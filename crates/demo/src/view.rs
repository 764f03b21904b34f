//! The picture in the terminal: every card as a bar of pods, a letter and a colour per pod.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::picture::{CardPicture, NodePicture, Picture};
use super::report::{Row, clock, table};
use super::workload::SPAN;

/// Columns of cards are this wide, or wider.
const COLUMN: u16 = 46;
/// The same where there would not be room for all cards.
const NARROW: u16 = 25;
/// Backgrounds of pods on which black can be read.
const COLORS: [u8; 12] = [110, 180, 114, 175, 73, 216, 149, 183, 80, 222, 146, 209];

/// Everything that is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scene {
    pub(crate) now: Duration,
    pub(crate) picture: Picture,
    /// The shown policy first.
    pub(crate) rows: Vec<Row>,
    /// A command that shows the same.
    pub(crate) look: String,
}

/// Draws the scene, as much of it as there is room for.
pub(crate) fn draw(frame: &mut Frame<'_>, scene: &Scene) {
    let figures = u16::try_from(scene.rows.len() + 1).unwrap_or(u16::MAX);
    let header = header(scene, frame.area().width.into());
    let [head, cards, waiting, figures] = Layout::vertical([
        Constraint::Length(u16::try_from(header.len()).unwrap_or(u16::MAX)),
        Constraint::Fill(1),
        Constraint::Length(1),
        Constraint::Length(figures),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(header), head);
    columns(frame, &scene.picture, cards);
    frame.render_widget(Paragraph::new(queue(&scene.picture)), waiting);
    let lines = table(&scene.rows, figures.width.into())
        .into_iter()
        .map(Line::from);
    let lines = lines.enumerate().map(|(n, line)| match n {
        0 => line.dim(),
        1 => line.bold(),
        _ => line,
    });
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), figures);
}

/// As much as `width` has room for; the command that shows the same has a line of its own where it is long,
/// so that it can be copied.
fn header(scene: &Scene, width: usize) -> Vec<Line<'static>> {
    let Some(row) = scene.rows.first() else {
        return Vec::new();
    };
    let title = format!(
        "{}  {} of {} h  {:.1} % allocated",
        row.way,
        clock(scene.now),
        clock(SPAN),
        row.allocated * 100.0
    );
    let state = [
        format!("{} running", row.running),
        format!("{} waiting", row.waiting),
        format!("{} finished", row.tally.finished),
    ];
    let states = (1..=state.len()).rev().map(|some| state[..some].join(", "));
    let fits = |state: &String| title.len() + 2 + state.len() <= width;
    let state = states.into_iter().find(fits).unwrap_or_default();
    let gap = width.saturating_sub(title.len() + state.len());
    let line = Line::from(vec![title.bold(), " ".repeat(gap).into(), state.into()]);
    let keys = "q: stop and sum up; in a browser:";
    let look = &scene.look;
    let lines = match keys.len() + 1 + look.len() <= width {
        true => vec![format!("{keys} {look}")],
        false => vec![keys.to_owned(), format!("  {look}")],
    };
    let lines = lines.into_iter().map(|line| Line::from(line).dim());
    std::iter::once(line).chain(lines).collect()
}

/// Nodes one below the other, in as many columns as there is room for, or as all cards need.
fn columns(frame: &mut Frame<'_>, picture: &Picture, area: Rect) {
    let room = usize::from(area.height);
    let fewest = (area.width / COLUMN).clamp(1, 3);
    let most = (area.width / NARROW).max(fewest);
    let tallest = |columns: &Vec<Vec<&NodePicture>>| columns.iter().map(|it| height(it)).max();
    let mut all = (fewest..=most).map(|count| parted(picture, count.into()));
    let fits = |columns: &Vec<Vec<&NodePicture>>| tallest(columns) <= Some(room);
    let parts = all.clone().find(fits).or_else(|| all.next_back());
    let parts = parts.unwrap_or_default();
    let areas = Layout::horizontal(vec![Constraint::Fill(1); parts.len()])
        .spacing(2)
        .split(area);
    for (nodes, area) in parts.into_iter().zip(areas.iter()) {
        let mut lines = Vec::new();
        for node in nodes {
            lines.push(Line::from(title(node)).dim());
            let cards = node.cards.iter().enumerate();
            lines.extend(cards.map(|(n, card)| bar(n, card, area.width)));
        }
        if lines.len() > room && room > 0 {
            let hidden = lines.len() - (room - 1);
            lines.truncate(room - 1);
            lines.push(Line::from(format!("… {hidden} lines more")).dim());
        }
        frame.render_widget(Paragraph::new(lines), *area);
    }
}

/// The nodes in `count` columns of about one height, each in the shortest.
fn parted(picture: &Picture, count: usize) -> Vec<Vec<&NodePicture>> {
    let mut columns: Vec<Vec<&NodePicture>> = vec![Vec::new(); count];
    for node in &picture.nodes {
        if let Some(shortest) = columns.iter_mut().min_by_key(|column| height(column)) {
            shortest.push(node);
        }
    }
    columns
}

fn height(nodes: &[&NodePicture]) -> usize {
    nodes.iter().map(|node| 1 + node.cards.len()).sum()
}

/// The node and its cards by model.
fn title(node: &NodePicture) -> String {
    let mut models: Vec<(&str, usize)> = Vec::new();
    for card in &node.cards {
        match models.last_mut() {
            Some((model, count)) if *model == card.model => *count += 1,
            _ => models.push((&card.model, 1)),
        }
    }
    let models = models
        .iter()
        .map(|(model, count)| format!("{count} × {model}"));
    format!("{}  {}", node.name, models.collect::<Vec<_>>().join(", "))
}

fn bar(number: usize, card: &CardPicture, width: u16) -> Line<'static> {
    // Number and brackets before, brackets and percent behind.
    let cells = u64::from(width.saturating_sub(4 + 8));
    let total = card.total_mib.max(1);
    let mut spans = vec![format!("{number:2} [").into()];
    let (mut held, mut drawn) = (0, 0);
    for (pod, mib) in &card.pods {
        held += mib;
        let end = (held * cells + total / 2) / total;
        let len = end.min(cells).saturating_sub(drawn);
        drawn += len;
        spans.push(share(pod, usize::try_from(len).unwrap_or_default()));
    }
    let free = usize::try_from(cells - drawn).unwrap_or_default();
    spans.push(".".repeat(free).dim());
    spans.push(format!("] {:3} %", held * 100 / total).into());
    Line::from(spans)
}

/// A pod's part of a bar: its letter and its colour, by the number in its name.
fn share(pod: &str, cells: usize) -> Span<'static> {
    let number = pod
        .rsplit('-')
        .next()
        .and_then(|number| number.parse::<usize>().ok());
    let number = number.unwrap_or_default();
    let letter = char::from(b'a' + u8::try_from(number % 26).unwrap_or_default());
    let color = COLORS
        .get(number % COLORS.len())
        .copied()
        .unwrap_or_default();
    let style = Style::new().fg(Color::Black).bg(Color::Indexed(color));
    Span::styled(letter.to_string().repeat(cells), style)
}

fn queue(picture: &Picture) -> Line<'static> {
    match picture.waiting.as_slice() {
        [] => Line::from("nobody waits").dim(),
        pods => Line::from(format!("waiting: {}", pods.join(" "))),
    }
}

#[cfg(test)]
mod tests;
