//! One list of rows in every form: a table for people; JSON, YAML, CSV and names for programs.
//! Programs get whole bytes and a version, people get units.

mod template;
mod value;

use std::io::{IsTerminal as _, Write};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use gpustow_api::names;
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use crate::answer::Answer;
use template::Template;
pub(crate) use value::{Value, printable};

/// The version of the output for programs.
pub(crate) fn api_version() -> String {
    format!("kubectl.{}/v1", names::GROUP)
}

/// How to print.
#[derive(Clone, Debug, PartialEq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// For people with a wide screen.
    Wide,
    /// Versioned, memory in bytes.
    Json,
    /// The same as YAML.
    Yaml,
    /// The same without a version.
    Csv,
    /// One name a line.
    Name,
    /// What a template picks from the JSON.
    #[value(skip)]
    JsonPath(Template),
}

const JSONPATH: &str = "jsonpath=";

/// Reads a [`Format`]: one of these names, or a JSONPath template.
#[derive(Clone)]
pub(crate) struct Formats(pub(crate) &'static [&'static str]);

/// The forms of a list.
pub(crate) const OF_LISTS: Formats = Formats(&["table", "wide", "json", "yaml", "csv", "name"]);

impl TypedValueParser for Formats {
    type Value = Format;

    fn parse_ref(
        &self,
        command: &clap::Command,
        _: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<Format, clap::Error> {
        let text = value.to_string_lossy();
        let read = match text.strip_prefix(JSONPATH) {
            Some(template) => template.parse().map(Format::JsonPath),
            None if self.0.contains(&&*text) => Format::from_str(&text, false),
            None => {
                let names = self.0.join(", ");
                Err(format!("possible values: {names}, {JSONPATH}TEMPLATE"))
            }
        };
        read.map_err(|why| {
            let message = format!("-o {text}: {why}\n");
            clap::Error::raw(ErrorKind::InvalidValue, message).with_cmd(command)
        })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(
            self.0.iter().chain(&["jsonpath"]).map(PossibleValue::new),
        ))
    }
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Output {
    /// Form of the output; jsonpath=TEMPLATE as in kubectl
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        value_parser = OF_LISTS
    )]
    pub(crate) format: Format,
    /// Print changes until you press Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// Leave the header line out
    #[arg(long)]
    pub(crate) no_headers: bool,
    /// Order by this column; -COLUMN for the largest first
    #[arg(long, value_name = "COLUMN", allow_hyphen_values = true)]
    pub(crate) sort_by: Option<String>,
    /// What the rows leave out, if the user may not see it.
    #[arg(skip)]
    pub(crate) left_out: Option<&'static str>,
}

/// The screen that shows the output.
#[derive(Clone, Copy, Debug, Default)]
pub struct Screen {
    /// A person looks at it: bars are worth their room.
    pub terminal: bool,
    /// Colours may be used.
    pub colour: bool,
    /// Columns of text, if there is a limit.
    pub width: Option<u16>,
}

impl Screen {
    /// The standard output. `NO_COLOR`, if set to anything, takes the colours away.
    #[must_use]
    pub fn stdout() -> Self {
        let terminal = std::io::stdout().is_terminal();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            terminal,
            colour: terminal && !plain,
            width: terminal
                .then(|| ratatui::crossterm::terminal::size().ok())
                .flatten()
                .map(|(width, _)| width),
        }
    }
}

/// Where a column is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Always,
    /// For a wide screen and for programs.
    Wide,
    /// For a screen that is not wide.
    Table,
    /// On a terminal, as long as there is room.
    Terminal,
}

/// One column of rows `R`.
pub(crate) struct Column<R> {
    pub(crate) head: &'static str,
    /// Name of the field for programs.
    pub(crate) key: &'static str,
    pub(crate) shown: Shown,
    pub(crate) value: fn(&R) -> Value,
}

/// A column of these rows.
pub(crate) fn column<R>(
    head: &'static str,
    key: &'static str,
    shown: Shown,
    value: fn(&R) -> Value,
) -> Column<R> {
    Column {
        head,
        key,
        shown,
        value,
    }
}

/// The cells of a line, each with its text.
pub(crate) type Cells = Vec<(Value, String)>;

/// Rows to print.
pub(crate) struct Listing<R> {
    pub(crate) kind: &'static str,
    pub(crate) columns: Vec<Column<R>>,
    pub(crate) rows: Vec<R>,
    /// Shown above the rows.
    pub(crate) total: Option<R>,
    pub(crate) name: fn(&R) -> String,
    /// The text in place of an empty table.
    pub(crate) empty: &'static str,
    pub(crate) answer: Answer,
}

impl<R> Listing<R> {
    /// Prints and hands back the answer.
    pub(crate) fn print(
        mut self,
        output: &Output,
        screen: Screen,
        out: &mut dyn Write,
    ) -> Result<Answer> {
        if let Some(column) = &output.sort_by {
            self.sort(column)?;
        }
        match &output.format {
            Format::Table | Format::Wide => {
                self.table(output, screen, out)?;
                if let Some(left_out) = output.left_out {
                    writeln!(out, "\nLeft out: {left_out}")?;
                }
            }
            format @ (Format::Json | Format::Yaml | Format::JsonPath(_)) => {
                let mut list = self.json();
                if let Some(left_out) = output.left_out {
                    list["leftOut"] = json!(left_out);
                }
                write_value(&list, format, out)?;
            }
            Format::Csv => self.csv(output.no_headers, out)?,
            Format::Name => {
                self.rows
                    .iter()
                    .try_for_each(|row| writeln!(out, "{}", (self.name)(row)))?;
            }
        }
        Ok(self.answer)
    }

    pub(crate) fn sort(&mut self, wanted: &str) -> Result<()> {
        let (name, down) = match wanted.strip_prefix('-') {
            Some(name) => (name, true),
            None => (wanted, false),
        };
        let same = |column: &&Column<R>| {
            column.head.eq_ignore_ascii_case(name) || column.key.eq_ignore_ascii_case(name)
        };
        let Some(Column { value, .. }) = self.columns.iter().find(same) else {
            let mut heads: Vec<_> = self.columns.iter().map(|column| column.head).collect();
            // Some columns have two forms with one heading, and the heading of the bar is empty.
            heads.dedup();
            heads.retain(|head| !head.is_empty());
            bail!(
                "--sort-by {wanted}: no such column; there are {}",
                heads.join(", ")
            );
        };
        let by = |a: &R, b: &R| value(a).order(&value(b));
        self.rows
            .sort_by(|a, b| if down { by(b, a) } else { by(a, b) });
        Ok(())
    }

    fn table(&self, output: &Output, screen: Screen, out: &mut dyn Write) -> Result<()> {
        if self.rows.is_empty() {
            return Ok(writeln!(out, "{}", self.empty)?);
        }
        let (heads, lines) = self.laid_out(output.format == Format::Wide, screen);
        if !output.no_headers {
            writeln!(out, "{}", heads.trim_end())?;
        }
        for line in lines {
            let cells = line.into_iter().map(|(value, text)| match value {
                Value::Bad(_) if screen.colour => format!("\x1b[31;1m{text}\x1b[0m"),
                Value::Good(_) if screen.colour => format!("\x1b[32m{text}\x1b[0m"),
                _ => text,
            });
            writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }

    /// The heading, and the cells of each line with their text as wide as their column. Texts that are too wide for
    /// this screen come below their row, on lines of their own.
    pub(crate) fn laid_out(&self, wide: bool, screen: Screen) -> (String, Vec<Cells>) {
        let shown = |column: &&Column<R>| match column.shown {
            Shown::Always => true,
            Shown::Wide => wide,
            Shown::Table => !wide,
            Shown::Terminal => screen.terminal,
        };
        let columns: Vec<_> = self.columns.iter().filter(shown).collect();
        let cells = |row: &R| columns.iter().map(|column| (column.value)(row)).collect();
        let lines: Vec<Vec<Value>> = self.total.iter().chain(&self.rows).map(cells).collect();
        let width = |index: usize| {
            let cells = lines.iter().map(|line| line[index].shown().chars().count());
            cells.chain([columns[index].head.len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns.len()).map(width).collect();
        let limit = screen.width.filter(|_| !wide).map(usize::from);
        let split = split(&columns, &lines, &widths, limit.unwrap_or(usize::MAX));
        let number = |index: usize| lines.iter().any(|line| line[index].is_number());
        let heads = split.beside.iter();
        let heads = heads.map(|&it| pad(columns[it].head, widths[it], number(it)));
        let heads = heads.collect::<Vec<_>>().join("  ");
        let longest = split.below.iter().map(|&it| columns[it].head.len()).max();
        let lines = lines.into_iter().flat_map(|line| {
            let beside = split.beside.iter().map(|&it| {
                let text = pad(&line[it].shown(), widths[it], line[it].is_number());
                (line[it].clone(), text)
            });
            let beside: Cells = beside.collect();
            let below = split.below.iter().filter(|it| line[**it].says_something());
            let below = below.flat_map(|&it| {
                let indent = longest.unwrap_or(0) + 4;
                let text = wrapped(
                    &line[it].shown(),
                    limit.unwrap_or(usize::MAX).saturating_sub(indent),
                );
                let heads = std::iter::once(columns[it].head).chain(std::iter::repeat(""));
                let texts = heads
                    .zip(text)
                    .map(|(head, text)| format!("  {head:<0$}  {text}", indent - 4));
                texts
                    .map(|text| vec![(line[it].clone(), text)])
                    .collect::<Vec<Cells>>()
            });
            let below: Vec<Cells> = below.collect();
            std::iter::once(beside).chain(below)
        });
        (heads, lines.collect())
    }

    fn fields(&self) -> impl Iterator<Item = &Column<R>> {
        self.columns
            .iter()
            .filter(|column| !matches!(column.shown, Shown::Terminal | Shown::Table))
    }

    fn json(&self) -> Json {
        let object = |row: &R| -> Json {
            let fields = self
                .fields()
                .map(|it| (it.key.to_owned(), (it.value)(row).json()));
            Json::Object(fields.collect())
        };
        let mut list = Map::new();
        list.insert("apiVersion".to_owned(), json!(api_version()));
        list.insert("kind".to_owned(), json!(self.kind));
        if let Some(total) = &self.total {
            list.insert("total".to_owned(), object(total));
        }
        list.insert("items".to_owned(), self.rows.iter().map(object).collect());
        Json::Object(list)
    }

    fn csv(&self, no_headers: bool, out: &mut dyn Write) -> Result<()> {
        if !no_headers {
            let keys: Vec<_> = self.fields().map(|column| column.key).collect();
            writeln!(out, "{}", keys.join(","))?;
        }
        for row in &self.rows {
            let cells: Vec<_> = self
                .fields()
                .map(|column| (column.value)(row).csv())
                .collect();
            writeln!(out, "{}", cells.join(","))?;
        }
        Ok(())
    }
}

/// Prints a value that is not a list as JSON or YAML.
pub(crate) fn write_value(
    value: &impl Serialize,
    format: &Format,
    out: &mut dyn Write,
) -> Result<()> {
    let text = match format {
        Format::Json => serde_json::to_string_pretty(value)? + "\n",
        Format::Yaml => serde_yaml::to_string(value)?,
        Format::JsonPath(template) => template.of(&serde_json::to_value(value)?),
        _ => bail!("-o: this command prints text, wide, json or yaml"),
    };
    out.write_all(text.as_bytes()).context("cannot write")
}

/// The columns in a row, and the columns below it.
struct Split {
    beside: Vec<usize>,
    below: Vec<usize>,
}

/// Leaves out bars and the use of others where a table is wider than `limit`. Then its texts come below the row, the
/// last ones first; names of rows stay.
fn split<R>(columns: &[&Column<R>], lines: &[Vec<Value>], widths: &[usize], limit: usize) -> Split {
    let mut beside: Vec<usize> = (0..columns.len()).collect();
    let is_over = |beside: &[usize]| {
        let sum: usize = beside.iter().map(|it| widths[*it] + 2).sum();
        sum.saturating_sub(2) > limit
    };
    let optional: [fn(&Column<R>) -> bool; 2] = [
        |it| it.shown == Shown::Terminal,
        |it| it.head == "UNMANAGED",
    ];
    for is_optional in optional {
        if is_over(&beside) {
            beside.retain(|it| !is_optional(columns[*it]));
        }
    }
    let mut below = Vec::new();
    while is_over(&beside) {
        let is_text = |it: &usize| *it > 1 && !lines.iter().any(|line| line[*it].is_number());
        let Some(at) = beside.iter().rposition(is_text) else {
            break;
        };
        below.insert(0, beside.remove(at));
    }
    Split { beside, below }
}

/// The text in lines of at most so many letters, between words where that is possible.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last().map_or(0, |line| line.chars().count());
        match lines.last_mut() {
            Some(line) if last == 0 => line.push_str(word),
            Some(line) if last + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn pad(text: &str, width: usize, right: bool) -> String {
    let gap = " ".repeat(width.saturating_sub(text.chars().count()));
    if right {
        gap + text
    } else {
        text.to_owned() + &gap
    }
}
