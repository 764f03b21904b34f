//! `advise`: how good advice from recorded use is.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use gpustow_pack::Mib;
use gpustow_sim::advise::{advice_table, goals, judge, series};
use gpustow_sim::trace;
use serde_json::json;

use crate::{Output, seeds};

/// Learn what each pod should request from the first half of its time, and judge it on the second: how many pods
/// share a GPU, and in how many minutes they use more than it has.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Recorded use: CSV with seconds,pod,mib, a line for each minute of each pod
    #[arg(long, value_name = "CSV")]
    trace: PathBuf,
    /// Sizes of the GPU in MiB, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "81920,144384,184320", value_parser = clap::value_parser!(u64).range(1..=16_777_216))]
    gpu: Vec<u64>,
    /// Seeds of 30 draws each: one, or the first and last of a range
    #[arg(long, default_value = "1..10", value_parser = seeds)]
    seeds: (u64, u64),
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let text = trace::read(&args.trace)?;
    let all = series(&text).with_context(|| args.trace.display().to_string())?;
    let gpus: Vec<Mib> = args.gpu.iter().copied().map(Mib).collect();
    let judged = judge(&all, &gpus, args.seeds.0..=args.seeds.1);
    match args.output {
        Output::Table => {
            println!(
                "{} pods, learnt from half of their time, judged on the rest",
                all.len()
            );
            print!("{}", advice_table(&judged));
        }
        Output::Json => {
            let goals = goals(&judged);
            let document =
                json!({"pods": all.len(), "seeds": args.seeds, "judged": judged, "goals": goals});
            println!("{}", serde_json::to_string_pretty(&document)?);
        }
    }
    Ok(())
}
