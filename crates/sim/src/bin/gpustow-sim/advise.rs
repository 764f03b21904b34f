//! `advise`: how good advice from recorded use is.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use gpustow_pack::Mib;
use gpustow_sim::advise::{Judged, advice_table, goals, judge, made, recorded};
use gpustow_sim::trace;
use serde_json::json;

use crate::{Output, seeds};

/// Learn what pods should request from their past, and judge it on what follows: how many pods share a GPU, and how
/// often their allocations fail.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("series").required(true))]
pub(crate) struct Args {
    /// Recorded use: CSV with seconds,pod,mib, a line for each minute of each pod. The last day is judged; a shorter
    /// trace repeats, and begins at another minute with each seed
    #[arg(long, value_name = "CSV", group = "series")]
    trace: Option<PathBuf>,
    /// Series that are drawn: daily and weekly peaks, ramps, leaks, roll-outs, and replicas that differ
    #[arg(long, group = "series")]
    made: bool,
    /// How many pods share a history, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u16).range(1..=1000))]
    replicas: Vec<u16>,
    /// Sizes of the GPU in MiB, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "49152,81920,144384,184320", value_parser = clap::value_parser!(u64).range(1..=16_777_216))]
    gpu: Vec<u64>,
    /// Seeds of 4 orders each: one, or the first and last of a range
    #[arg(long, default_value = "1..100", value_parser = seeds)]
    seeds: (u64, u64),
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fleets = match &args.trace {
        Some(file) => {
            let text = trace::read(file)?;
            vec![recorded(&text).with_context(|| file.display().to_string())?]
        }
        None => made::fleets(args.seeds.0),
    };
    let gpus: Vec<Mib> = args.gpu.iter().copied().map(Mib).collect();
    let replicas: Vec<usize> = args.replicas.iter().copied().map(usize::from).collect();
    let seeds = args.seeds.0..=args.seeds.1;
    let judged = fleets
        .iter()
        .flat_map(|fleet| judge(fleet, &replicas, &gpus, seeds.clone()));
    let judged: Vec<Judged> = judged.collect();
    let pods: usize = fleets.iter().map(|it| it.len()).sum();
    match args.output {
        Output::Table => {
            println!("{pods} pods");
            print!("{}", advice_table(&judged));
        }
        Output::Json => {
            let goals = goals(&judged);
            let document =
                json!({"pods": pods, "seeds": args.seeds, "judged": judged, "goals": goals});
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
