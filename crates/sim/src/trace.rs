//! Node and pod lists in the format of Alibaba's openb trace. The module does not know the use of the lists.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use csv::{Position, ReaderBuilder, StringRecord, Trim};

/// A line of a node list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceNode {
    /// Its name.
    pub name: String,
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory in MiB.
    pub ram_mib: u64,
    /// Number of cards.
    pub gpus: usize,
    /// Model of all of them.
    pub model: String,
}

/// A line of a pod list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePod {
    /// Its name.
    pub name: String,
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory in MiB.
    pub ram_mib: u64,
    /// Number of cards; zero for a pod without.
    pub gpus: usize,
    /// Thousandths of each card.
    pub gpu_milli: u64,
    /// The models that it may run on; empty for any.
    pub models: Vec<String>,
    /// When it was created and when it was deleted, in seconds, if the list has the times.
    pub lived: Option<(u64, u64)>,
}

impl TracePod {
    /// Thousandths of cards that it asks for in all.
    #[must_use]
    pub fn demand(&self) -> u64 {
        self.gpus as u64 * self.gpu_milli
    }
}

/// The results of `each` for the rows of a CSV text, one per row. Its arguments are the line's number and the fields in
/// the order of `columns`. A column whose name ends in `?` may be missing.
pub(crate) fn rows<T, const N: usize>(
    text: &str,
    columns: [&str; N],
    mut each: impl FnMut(u64, [&str; N]) -> Result<T>,
) -> Result<Vec<T>> {
    let mut reader = ReaderBuilder::new()
        .trim(Trim::All)
        .flexible(true)
        .from_reader(text.as_bytes());
    let head = reader.headers()?.clone();
    ensure!(!head.is_empty(), "empty file");
    let mut places = [None; N];
    for (place, column) in places.iter_mut().zip(columns) {
        let name = column.trim_end_matches('?');
        *place = head.iter().position(|head| head == name);
        if place.is_none() && name == column {
            bail!("line 1: no column {name:?}");
        }
    }
    let row = |row: csv::Result<StringRecord>| {
        let row = row?;
        let line = row.position().map_or(0, Position::line);
        if row.len() != head.len() {
            bail!("line {line}: {} fields, expected {}", row.len(), head.len());
        }
        let field = |place: Option<usize>| place.and_then(|at| row.get(at)).unwrap_or_default();
        each(line, places.map(field))
    };
    reader.records().map(row).collect()
}

fn number(line: u64, column: &str, text: &str) -> Result<u64> {
    let number = text.parse();
    number.with_context(|| format!("line {line}: {column} is {text:?}, expected a whole number"))
}

/// The nodes of a CSV text with the columns `sn,cpu_milli,memory_mib,gpu,model`.
///
/// # Errors
/// If a line cannot be read; the error names it.
pub fn nodes(text: &str) -> Result<Vec<TraceNode>> {
    let columns = ["sn", "cpu_milli", "memory_mib", "gpu", "model"];
    rows(text, columns, |line, [name, cpu, ram, gpus, model]| {
        Ok(TraceNode {
            name: name.to_owned(),
            cpu_milli: number(line, "cpu_milli", cpu)?,
            ram_mib: number(line, "memory_mib", ram)?,
            gpus: number(line, "gpu", gpus)?.min(256) as usize,
            model: model.to_owned(),
        })
    })
}

/// The pods of a CSV text with the columns `name,cpu_milli,memory_mib,num_gpu,gpu_milli` and,
/// if there, `gpu_spec`: models separated by `|`.
///
/// # Errors
/// If a line cannot be read; the error names it.
pub fn pods(text: &str) -> Result<Vec<TracePod>> {
    let columns = [
        "name",
        "cpu_milli",
        "memory_mib",
        "num_gpu",
        "gpu_milli",
        "gpu_spec?",
        "creation_time?",
        "deletion_time?",
    ];
    rows(
        text,
        columns,
        |line, [name, cpu, ram, gpus, milli, models, from, to]| {
            let (gpus, milli) = (
                number(line, "num_gpu", gpus)?,
                number(line, "gpu_milli", milli)?,
            );
            if milli > 1000 || gpus > 64 || gpus > 1 && milli != 1000 || gpus > 0 && milli == 0 {
                bail!("line {line}: {gpus} x {milli} is not a share of one GPU nor whole GPUs");
            }
            Ok(TracePod {
                name: name.to_owned(),
                cpu_milli: number(line, "cpu_milli", cpu)?,
                ram_mib: number(line, "memory_mib", ram)?,
                gpus: gpus as usize,
                gpu_milli: milli,
                models: models
                    .split('|')
                    .filter(|model| !model.is_empty())
                    .map(str::to_owned)
                    .collect(),
                lived: match (from, to) {
                    ("", _) | (_, "") => None,
                    _ => Some((
                        number(line, "creation_time", from)?,
                        number(line, "deletion_time", to)?,
                    )),
                },
            })
        },
    )
}

/// The text of a file.
///
/// # Errors
/// If it cannot be read; the error names it.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> Result<Vec<(u64, String)>> {
        rows(text, ["name"], |line, [name]| Ok((line, name.to_owned())))
    }

    #[test]
    fn quotes_hold_separators_and_lines() -> Result<()> {
        let text = "size,name\n1,\"a, \"\"b\"\"\"\n2,\"c\nd\"\n3 , e\n\n";
        let expected = [(2, "a, \"b\""), (3, "c\nd"), (5, "e")];
        let expected = expected.map(|(line, name)| (line, name.to_owned()));
        assert_eq!(named(text)?, expected);
        Ok(())
    }

    #[test]
    fn errors_name_the_line() {
        let error = |text| format!("{:#}", named(text).unwrap_err());
        assert_eq!(error(""), "empty file");
        assert_eq!(error("size\n1\n"), "line 1: no column \"name\"");
        assert_eq!(error("size,name\n1,a\n2\n"), "line 3: 1 fields, expected 2");
    }
}
