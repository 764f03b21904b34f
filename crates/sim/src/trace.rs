//! Node and pod lists in the format of Alibaba's openb trace. It does not know what is done with
//! them.

use std::path::Path;

use anyhow::{Context, Result, bail};

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
}

impl TracePod {
    /// Thousandths of cards that it asks for in all.
    #[must_use]
    pub fn demand(&self) -> u64 {
        self.gpus as u64 * self.gpu_milli
    }
}

/// The rows of a CSV text as (line number, fields in the order of `columns`); a column whose name
/// ends in `?` may be missing.
pub(crate) fn rows<'a, const N: usize>(
    text: &'a str,
    columns: [&str; N],
) -> Result<Vec<(usize, [&'a str; N])>> {
    let mut lines = text.lines().enumerate();
    let (_, head) = lines.next().context("empty file")?;
    let head: Vec<&str> = head.split(',').map(str::trim).collect();
    let mut places = [None; N];
    for (place, column) in places.iter_mut().zip(columns) {
        let name = column.trim_end_matches('?');
        *place = head.iter().position(|head| *head == name);
        if place.is_none() && name == column {
            bail!("line 1: no column {name:?}");
        }
    }
    let row = |(line, text): (usize, &'a str)| {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        if fields.len() != head.len() {
            bail!(
                "line {}: {} fields, expected {}",
                line + 1,
                fields.len(),
                head.len()
            );
        }
        Ok((
            line + 1,
            places.map(|place| place.map_or("", |place| fields[place])),
        ))
    };
    lines
        .filter(|(_, text)| !text.is_empty())
        .map(row)
        .collect()
}

fn number(line: usize, column: &str, text: &str) -> Result<u64> {
    let number = text.parse();
    number.with_context(|| format!("line {line}: {column} is {text:?}, expected a whole number"))
}

/// The nodes of a CSV text with the columns `sn,cpu_milli,memory_mib,gpu,model`.
///
/// # Errors
/// If a line cannot be read; the error names it.
pub fn nodes(text: &str) -> Result<Vec<TraceNode>> {
    rows(text, ["sn", "cpu_milli", "memory_mib", "gpu", "model"])?
        .into_iter()
        .map(|(line, [name, cpu, ram, gpus, model])| {
            Ok(TraceNode {
                name: name.to_owned(),
                cpu_milli: number(line, "cpu_milli", cpu)?,
                ram_mib: number(line, "memory_mib", ram)?,
                gpus: number(line, "gpu", gpus)?.min(256) as usize,
                model: model.to_owned(),
            })
        })
        .collect()
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
    ];
    rows(text, columns)?
        .into_iter()
        .map(|(line, [name, cpu, ram, gpus, milli, models])| {
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
            })
        })
        .collect()
}

/// The text of a file.
///
/// # Errors
/// If it cannot be read; the error names it.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
