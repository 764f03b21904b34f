//! What is allocated, or empty, against arrivals as an SVG picture, one line per policy.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::report::Summary;

/// Size of the picture, and of the margins around the axes: left, right, top, bottom.
const SIZE: (f64, f64) = (860.0, 500.0);
const MARGIN: (f64, f64, f64, f64) = (64.0, 200.0, 48.0, 56.0);
/// Height of a line of the legend.
const LINE: f64 = 18.0;
/// Colours that people with any colour vision can tell apart (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];
/// How lines of equal colour differ.
const DASHES: [&str; 3] = ["", "7 4", "2 3"];

struct Curve<'a> {
    name: &'a str,
    points: Vec<(u32, f64)>,
    last: f64,
    colour: &'a str,
    dash: &'a str,
}

/// What is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// Percent of the cards allocated, from 70 % of arrivals on: before that nothing is turned away.
    Allocated,
    /// Nodes without a GPU pod, up to 100 % of arrivals.
    Empty,
}

impl Drawn {
    fn points(self, summary: &Summary) -> Vec<(u32, f64)> {
        match self {
            Self::Allocated => {
                let points = summary.allocation_pct.range(70..);
                points.map(|(level, mean)| (*level, mean.mean)).collect()
            }
            Self::Empty => {
                let points = summary.whole.range(..=100);
                points
                    .map(|(level, whole)| (*level, whole["empty_nodes"].mean))
                    .collect()
            }
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Allocated => "allocated, % of all GPUs",
            Self::Empty => "nodes without a GPU pod",
        }
    }
}

/// Maps percent of arrivals and what is drawn to places in the picture.
struct Axes {
    from: u32,
    to: u32,
    low: f64,
    high: f64,
    step: f64,
}

impl Axes {
    fn x(&self, level: u32) -> f64 {
        let part = f64::from(level - self.from) / f64::from((self.to - self.from).max(1));
        MARGIN.0 + part * (SIZE.0 - MARGIN.0 - MARGIN.1)
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value - self.low) / (self.high - self.low);
        SIZE.1 - MARGIN.3 - part * (SIZE.1 - MARGIN.2 - MARGIN.3)
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// The picture; `title` says what was replayed.
#[must_use]
pub fn svg<N: AsRef<str>>(title: &str, drawn: Drawn, summaries: &[(N, Summary)]) -> String {
    let mut curves: Vec<Curve<'_>> = summaries
        .iter()
        .enumerate()
        .map(|(index, (name, summary))| {
            let points = drawn.points(summary);
            Curve {
                name: name.as_ref(),
                last: points.last().map_or(0.0, |point| point.1),
                points,
                colour: COLOURS[index % COLOURS.len()],
                dash: DASHES[index / COLOURS.len() % DASHES.len()],
            }
        })
        .collect();
    curves.sort_by(|a, b| b.last.total_cmp(&a.last));
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let (low, high, step) = match drawn {
        Drawn::Allocated => {
            let lowest = all().map(|point| point.1).fold(95.0, f64::min);
            ((lowest / 5.0).floor() * 5.0, 100.0, 5.0)
        }
        Drawn::Empty => {
            let highest = all().map(|point| point.1).fold(1.0, f64::max);
            let step = 10_f64.powf(highest.log10().floor());
            (0.0, (highest / step).ceil() * step, step)
        }
    };
    let axes = Axes {
        from: all().map(|point| point.0).min().unwrap_or(0),
        to: all().map(|point| point.0).max().unwrap_or(1),
        low,
        high,
        step,
    };
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" \
         height=\"{h}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <title>{title}</title>\n<rect width=\"{w}\" height=\"{h}\" fill=\"#ffffff\"/>\n\
         <text x=\"{x}\" y=\"26\" font-size=\"15\">{title}</text>\n",
        w = SIZE.0,
        h = SIZE.1,
        x = MARGIN.0,
        title = escape(title),
    );
    grid(&mut text, &axes, drawn.label());
    for curve in curves.iter().rev() {
        let points: Vec<String> = curve
            .points
            .iter()
            .map(|&(level, allocated)| format!("{:.1},{:.1}", axes.x(level), axes.y(allocated)))
            .collect();
        let _ = writeln!(
            text,
            "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\" \
             points=\"{}\"/>",
            curve.colour,
            curve.dash,
            points.join(" ")
        );
    }
    legend(&mut text, &curves);
    text += "</svg>\n";
    text
}

fn grid(text: &mut String, axes: &Axes, label: &str) {
    let (left, right) = (MARGIN.0, SIZE.0 - MARGIN.1);
    let (top, bottom) = (MARGIN.2, SIZE.1 - MARGIN.3);
    let mut level = axes.low;
    while level <= axes.high {
        let y = axes.y(level);
        let _ = writeln!(
            text,
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{level}</text>",
            left - 8.0,
            y + 4.5
        );
        level += axes.step;
    }
    for level in (axes.from..=axes.to).filter(|level| level % 10 == 0) {
        let x = axes.x(level);
        let _ = writeln!(
            text,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#eeeeee\"/>\n\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{level}</text>",
            bottom + 20.0
        );
    }
    let _ = writeln!(
        text,
        "<rect x=\"{left}\" y=\"{top}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"none\" \
         stroke=\"#888888\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">GPUs asked for so far, % of all \
         GPUs</text>\n\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{label}\
         </text>",
        right - left,
        bottom - top,
        (left + right) / 2.0,
        SIZE.1 - 12.0,
        (top + bottom) / 2.0
    );
}

/// Names in the order of the lines' ends, with what is allocated there.
fn legend(text: &mut String, curves: &[Curve<'_>]) {
    let x = SIZE.0 - MARGIN.1 + 14.0;
    let mut y = MARGIN.2 + 10.0;
    for curve in curves {
        let _ = writeln!(
            text,
            "<line x1=\"{x}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{}\" \
             stroke-width=\"2\" stroke-dasharray=\"{}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.2}</text>",
            x + 24.0,
            curve.colour,
            curve.dash,
            x + 30.0,
            y + 4.5,
            escape(curve.name),
            SIZE.0 - 10.0,
            y + 4.5,
            curve.last
        );
        y += LINE;
    }
}

/// Writes a file whole or not at all.
///
/// # Errors
/// If it cannot be written; the error names it.
pub fn write_whole(path: &Path, text: &str) -> Result<()> {
    let mut name = path.file_name().context("no file name")?.to_owned();
    name.push(format!(".{}", std::process::id()));
    let beside = path.with_file_name(name);
    let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        // The error that counts is the first.
        let _ = fs::remove_file(&beside);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}
