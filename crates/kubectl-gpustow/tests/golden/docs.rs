//! The documentation has the texts that people see and search for: every Event and error of the extender, and the
//! numbers of GPU errors.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{events, faults};
use kubectl_gpustow::Screen;

use crate::{here, output_of};

fn read(path: &str) -> Result<String> {
    Ok(fs::read_to_string(here("../../..").join(path))?)
}

/// The string literals of a source, as they read.
fn literals(source: &str) -> Vec<String> {
    let code: Vec<_> = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n").replace("\\\"", "'");
    let texts = code.split('"').skip(1).step_by(2);
    // A line that goes on.
    texts
        .map(|text| {
            text.split("\\\n")
                .map(str::trim_start)
                .collect::<Vec<_>>()
                .concat()
        })
        .collect()
}

/// `GpuFailed`, but neither `Binding` nor `gpustow`.
fn is_reason(text: &str) -> bool {
    let capitals = text.bytes().filter(u8::is_ascii_uppercase).count();
    capitals > 1 && text.bytes().all(|it| it.is_ascii_alphabetic()) && text != "PodScheduled"
}

#[test]
fn every_event_is_explained() -> Result<()> {
    let agent = read("crates/agent/src/notices.rs")? + &read("crates/agent/src/agent.rs")?;
    let mut found: BTreeSet<String> = literals(&agent)
        .into_iter()
        .filter(|text| is_reason(text))
        .collect();
    let extender = read("src/events.rs")?;
    let kinds = extender.split_once("enum Kind {").context("no Kind")?.1;
    let kinds = kinds.lines().map(str::trim).take_while(|line| *line != "}");
    found.extend(kinds.filter_map(|line| Some(format!("Gpu{}", line.strip_suffix(',')?))));
    ensure!(
        found.contains("GpuAssigned") && found.contains("NoGpuProcess"),
        "{found:?}"
    );
    for reason in found {
        let is_explained = events::ALL.iter().any(|known| known.reason == reason);
        ensure!(is_explained, "crates/api/src/events.rs: {reason}");
    }
    Ok(())
}

#[test]
fn every_error_that_kube_scheduler_quotes_is_explained() -> Result<()> {
    let page = read("docs/reference/messages.md")?;
    let mut found = 0;
    for path in [
        "src/epoch.rs",
        "src/bind.rs",
        "src/ask.rs",
        "crates/ledger/src/bind.rs",
    ] {
        let source = read(path)?;
        for error in source.split("#[error(").skip(1) {
            let error = error.split(")]").next().unwrap_or_default();
            let Some(text) = literals(error).into_iter().next() else {
                continue;
            };
            // The text before the first number or name.
            let fixed = text.split('{').next().unwrap_or_default().trim();
            let fixed = if fixed.len() < 9 {
                text.rsplit('}').next().unwrap_or_default().trim()
            } else {
                fixed
            };
            let fixed = fixed.split(';').next().unwrap_or_default();
            ensure!(page.contains(fixed), "{path}: {fixed:?} is not explained");
            found += 1;
        }
    }
    ensure!(found > 12, "{found}");
    Ok(())
}

#[test]
fn every_number_of_an_error_is_explained() -> Result<()> {
    let page = read("docs/reference/messages.md")?;
    let table = page.lines().filter(|line| line.starts_with("| XID"));
    let known: BTreeSet<u64> = table
        .filter_map(|line| line.split('|').nth(1))
        .flat_map(|cell| cell.split(|it: char| !it.is_ascii_digit()))
        .filter_map(|number| number.parse().ok())
        .collect();
    ensure!(
        known == faults::XIDS.iter().map(|(number, _)| *number).collect(),
        "{known:?}"
    );
    for (number, _) in faults::NVML {
        ensure!(
            page.contains(&format!("| `NVML's error {number}` |")),
            "{number} is not explained"
        );
    }
    Ok(())
}

/// The examples in README equal the output of the commands for such a cluster.
#[tokio::test]
async fn readme_shows_what_is_printed() -> Result<()> {
    let page = read("README.md")?;
    for command in ["gpus", "check"] {
        let (_, printed) = output_of(&here("readme"), command, Screen::default()).await?;
        let shown = format!("$ kubectl gpustow {command}\n{printed}```");
        ensure!(page.contains(&shown), "README should have\n{shown}");
    }
    let why = read("crates/kubectl-gpustow/tests/golden/why-team-a-large.txt")?;
    let (why, _) = why.split_once("\n\nTo make room").context("no end")?;
    let shown = format!("$ kubectl gpustow why POD\n{why}\n```");
    ensure!(page.contains(&shown), "README should have\n{shown}");
    Ok(())
}
