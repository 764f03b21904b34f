//! An animated picture (SVG) of the same pods with whole GPUs and with gpustow, for the README.

use std::fmt::Write as _;

use super::device_plugin::Cluster;
use super::picture::{CardPicture, Frame};
use super::report::clock;
use super::workload::SPAN;
use super::world::FRAME;

/// Seconds that one round takes.
const ROUND: f64 = 16.0;
/// Pixels: of a panel, between panels and around them, of a GPU's bar with its gap, above the bars.
const WIDTH: u64 = 400;
const GAP: u64 = 24;
const BAR: u64 = 9;
const STEP: u64 = 12;
const HEAD: u64 = 58;
/// Colours on which no text stands, by pod.
const COLORS: [&str; 8] = [
    "#5b8ff9", "#61d9a5", "#f6bd16", "#e8684a", "#6dc8ec", "#9270ca", "#ff9d4d", "#269a99",
];

/// Pictures of a device plugin's cluster, at the times of [`super::world::World::frames`].
pub(crate) fn frames(cluster: &mut Cluster<'_>) -> Vec<Frame> {
    let mut frames = Vec::new();
    let mut at = FRAME;
    while at <= SPAN {
        cluster.live(at);
        frames.push(Frame {
            at,
            picture: cluster.picture(),
        });
        at += FRAME;
    }
    frames
}

/// Both clusters side by side, frame after frame.
pub(crate) fn svg(ours: &[Frame], whole: &[Frame]) -> String {
    let count = ours.len().min(whole.len()).max(1);
    let cards = ours
        .first()
        .map_or(0, |frame| frame.picture.cards().count()) as u64;
    let (width, height) = (2 * WIDTH + 3 * GAP, HEAD + cards * STEP + GAP);
    let share = 100.0 / count as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         font-family=\"sans-serif\">\n\
         <title>The same pods on the same GPUs for twelve hours: with whole GPUs, and with gpustow</title>\n\
         <style>.f{{visibility:hidden;animation:f {ROUND}s infinite step-end}}.f:last-of-type{{visibility:visible}}\
         @keyframes f{{0%{{visibility:visible}}{share:.3}%{{visibility:hidden}}}}\
         @media(prefers-reduced-motion:reduce){{.f{{animation:none}}}}</style>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for panel in 0..2 {
        let x = left(panel);
        for (card, top) in (0..cards).map(|card| (card, HEAD + card * STEP)) {
            let size = if card + 1 == cards { "\n" } else { "" };
            let _ = write!(
                text,
                "<rect x=\"{x}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{BAR}\" fill=\"#eceff3\"/>{size}"
            );
        }
    }
    for (number, (ours, whole)) in ours.iter().zip(whole).enumerate() {
        let delay = number as f64 * ROUND / count as f64 - ROUND;
        let _ = writeln!(
            text,
            "<g class=\"f\" style=\"animation-delay:{delay:.2}s\">"
        );
        text += &panel(0, "whole GPUs", whole, true);
        text += &panel(1, "gpustow", ours, false);
        text += "</g>\n";
    }
    text + "</svg>\n"
}

fn left(panel: u64) -> u64 {
    GAP + panel * (WIDTH + GAP)
}

/// One cluster: its name and counts, and a bar per GPU with the shares of its pods. With `whole`, the rest of a GPU
/// with a pod is marked as out of reach.
fn panel(number: u64, name: &str, frame: &Frame, whole: bool) -> String {
    let x = left(number);
    let picture = &frame.picture;
    let mut text = format!(
        "<text x=\"{x}\" y=\"24\" font-size=\"17\" font-weight=\"bold\" fill=\"#1b1f24\">{name}: {} pods run</text>\
         <text x=\"{x}\" y=\"44\" font-size=\"13\" fill=\"#57606a\">{} h, {:.0} % of GPU memory requested</text>\n",
        picture.running,
        clock(frame.at),
        100.0 * picture.allocated()
    );
    let mut paths = vec![String::new(); COLORS.len()];
    let mut lost = String::new();
    for (card, top) in picture.cards().zip((HEAD..).step_by(12)) {
        let mut held = 0;
        for (pod, mib) in &card.pods {
            let (from, to) = (x + along(card, held), x + along(card, held + mib));
            held += mib;
            // A gap of a pixel between pods.
            let length = to.saturating_sub(from + 1).max(1);
            if let Some(path) = paths.get_mut(color(pod)) {
                let _ = write!(path, "M{from} {top}h{length}v{BAR}h-{length}z");
            }
        }
        if whole && !card.pods.is_empty() {
            let from = x + along(card, held);
            let length = (x + WIDTH).saturating_sub(from);
            let _ = write!(lost, "M{from} {top}h{length}v{BAR}h-{length}z");
        }
    }
    for (path, color) in paths
        .iter()
        .zip(COLORS)
        .filter(|(path, _)| !path.is_empty())
    {
        let _ = write!(text, "<path fill=\"{color}\" d=\"{path}\"/>");
    }
    if !lost.is_empty() {
        let _ = write!(text, "<path fill=\"#afb8c1\" d=\"{lost}\"/>");
    }
    text + "\n"
}

/// Pixels that so many MiB take of the GPU's bar.
fn along(card: &CardPicture, mib: u64) -> u64 {
    (mib * WIDTH / card.total_mib.max(1)).min(WIDTH)
}

/// A pod keeps its colour, by the number in its name.
fn color(pod: &str) -> usize {
    let number = pod
        .rsplit('-')
        .next()
        .and_then(|number| number.parse().ok());
    number.unwrap_or(0) % COLORS.len()
}
