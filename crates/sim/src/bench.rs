//! gpustow's policy against the others on every pod list of the openb trace, and the others against
//! what the FGD paper's authors published.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::baselines::Choice;
use crate::protocol::{Mode, Workload};
use crate::replay::replay;
use crate::report::{Summary, table};
use crate::trace;
use gpustow_pack::PolicyKind;

/// Points of allocation by which a mean may differ from the published one.
const TOLERANCE: f64 = 0.7;
/// The same on the list that everything was calibrated on.
const DEFAULT_TOLERANCE: f64 = 0.4;
const DEFAULT_LIST: &str = "default";
const PREFIX: &str = "openb_pod_list_";

const POLICIES: [Choice; 9] = [
    Choice::Random,
    Choice::DotProd,
    Choice::Clustering,
    Choice::Packing,
    Choice::BestFit,
    Choice::Fgd,
    Choice::FullestNode,
    Choice::Own(PolicyKind::FirstFit),
    Choice::Own(PolicyKind::Tight),
];

/// A published mean: list, policy, percent of arrivals, percent allocated.
struct Published {
    list: String,
    policy: Choice,
    level: u32,
    allocated: f64,
}

/// Runs every pod list in `folder`, prints a table for each, and compares with the published means.
///
/// # Errors
/// If a file cannot be read, or a policy is off its published mean by more than the tolerance.
pub fn bench(folder: &Path, seeds: (u64, u64)) -> Result<()> {
    let path = folder.join("fgd_published_means.csv");
    let published = published(&trace::read(&path)?).with_context(|| path.display().to_string())?;
    let nodes = trace::nodes(&trace::read(&folder.join("openb_node_list_gpu_node.csv"))?)?;
    let mut off = Vec::new();
    for path in lists(folder)? {
        let list = list_name(&path);
        let pods = trace::pods(&trace::read(&path)?).with_context(|| path.display().to_string())?;
        let workload = Workload::new(nodes.clone(), pods, Mode::Units)?;
        let mut summaries = Vec::new();
        for policy in POLICIES {
            let runs = (seeds.0..=seeds.1).map(|seed| replay(&workload, policy, seed));
            let summary = Summary::of(&runs.collect::<Result<Vec<_>>>()?);
            for known in published
                .iter()
                .filter(|p| p.list == list && p.policy == policy)
            {
                let ours = summary
                    .allocation_pct
                    .get(&known.level)
                    .map_or(0.0, |mean| mean.mean);
                let bound = if list == DEFAULT_LIST {
                    DEFAULT_TOLERANCE
                } else {
                    TOLERANCE
                };
                if (ours - known.allocated).abs() > bound {
                    let Published {
                        level, allocated, ..
                    } = known;
                    off.push(format!(
                        "{list}: {policy}@{level}: {ours:.2}, published {allocated}"
                    ));
                }
            }
            summaries.push((policy.name(), summary));
        }
        println!("{list}\n{}", table(&summaries));
    }
    ensure!(off.is_empty(), "not calibrated:\n{}", off.join("\n"));
    Ok(())
}

/// The pod lists in a folder, by name.
fn lists(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut lists = Vec::new();
    let read = || format!("cannot read {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(read)? {
        let path = entry.with_context(read)?.path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
        {
            lists.push(path);
        }
    }
    lists.sort();
    if lists.is_empty() {
        bail!("no {PREFIX}*.csv in {}", folder.display());
    }
    Ok(lists)
}

fn list_name(path: &Path) -> String {
    let stem = path
        .file_stem()
        .map_or_else(Default::default, |stem| stem.to_string_lossy());
    stem.trim_start_matches(PREFIX).to_owned()
}

fn published(text: &str) -> Result<Vec<Published>> {
    let columns = ["workload", "policy", "alloc100_mean", "alloc130_mean"];
    let mut published = Vec::new();
    for (line, [list, policy, at_100, at_130]) in trace::rows(text, columns)? {
        let policy = match policy {
            "01-Random" => Choice::Random,
            "02-DotProd" => Choice::DotProd,
            "03-GpuClustering" => Choice::Clustering,
            "04-GpuPacking" => Choice::Packing,
            "05-BestFit" => Choice::BestFit,
            "06-FGD" => Choice::Fgd,
            other => bail!("line {line}: unknown policy {other:?}"),
        };
        for (level, text) in [(100, at_100), (130, at_130)] {
            let allocated = text
                .parse()
                .with_context(|| format!("line {line}: {text:?}"))?;
            published.push(Published {
                list: list.to_owned(),
                policy,
                level,
                allocated,
            });
        }
    }
    Ok(published)
}
