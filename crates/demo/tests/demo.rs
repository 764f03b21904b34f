//! The demo as its users run it, without a terminal.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};

fn demo(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.args(args).stdin(Stdio::null());
    command
}

/// The output of the program with these arguments.
fn printed(args: &[&str]) -> Result<String> {
    let output = demo(args).output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "{text}{:?}", output.stderr);
    Ok(text)
}

#[test]
fn every_pod_is_accounted_for_in_every_row() -> Result<()> {
    for mix in ["small", "large"] {
        let text = printed(&["--nodes=2", "--pods=60", "--policies", "--workload", mix])?;
        let policies = gpustow_pack::PolicyKind::ALL.map(|policy| format!("gpustow {policy} "));
        let plugins = ["time-slicing", "whole GPUs "].map(str::to_owned);
        for way in policies.iter().chain(&plugins) {
            let row = text.lines().find(|line| line.starts_with(way));
            let row = row.with_context(|| format!("no row {way}: {text}"))?;
            let done = row.split_whitespace().rev().nth(1).context("no column")?;
            assert!(done.parse::<usize>()? > 0, "{text}");
        }
        // The demo fails if the pods of a row do not add up.
        assert!(text.contains("No GPU was over-committed, no pod was lost."));
    }
    Ok(())
}

#[test]
fn a_node_is_drawn_with_whole_gpus_and_with_gpustow() -> Result<()> {
    let text = printed(&["--nodes=1", "--pods=60"])?;
    let bars: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("GPU "))
        .collect();
    assert_eq!(bars.len(), 8, "{text}");
    let pods = |from: usize, to: usize| {
        let bars = bars.iter().filter_map(|bar| bar.get(from..to));
        bars.flat_map(str::chars)
            .filter(char::is_ascii_uppercase)
            .count()
    };
    let (whole, ours) = (pods(7, 39), pods(41, 73));
    assert!(whole <= 8 && ours > whole, "{text}");
    Ok(())
}

/// Two threads for each core, until it is dropped.
struct Load(Arc<AtomicBool>);

impl Load {
    fn of_all_cores() -> Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        for _ in 0..2 * thread::available_parallelism()?.get() {
            let ends = ends.clone();
            thread::spawn(move || {
                while !ends.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Ok(Self(ends))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn a_seed_gives_the_same_table_on_busy_cores() -> Result<()> {
    // So many pods wait that it shows which of two pods comes first.
    let run = || printed(&["--nodes=1", "--pods=200", "--seed=7"]);
    let _load = Load::of_all_cores()?;
    // The runs begin at different fractions of a second.
    let tables = thread::scope(|scope| {
        let runs = [0, 400].map(|wait| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(wait));
                run()
            })
        });
        runs.map(|run| run.join().map_err(|_| anyhow!("a run panicked"))?)
    });
    let [first, second] = tables;
    assert_eq!(first?, second?);
    Ok(())
}

#[test]
fn another_seed_gives_another_table() -> Result<()> {
    let run = |seed| printed(&["--nodes=1", "--pods=40", seed]);
    assert_ne!(run("--seed=7")?, run("--seed=8")?);
    Ok(())
}

#[test]
fn the_last_lines_are_the_factor_of_pods_that_run_and_the_next_command() -> Result<()> {
    let text = printed(&["--nodes=2", "--pods=60"])?;
    let mut last = text.lines().rev();
    let next = last.next().context("nothing")?;
    assert!(next.starts_with("Next: make "), "{text}");
    let factor = last
        .next()
        .context("no factor")?
        .strip_prefix("gpustow tight runs ")
        .context(text.clone())?;
    let (factor, _) = factor
        .split_once(" times as many pods")
        .context(text.clone())?;
    assert!(factor.parse::<f64>()? > 1.0, "{text}");
    Ok(())
}

#[test]
fn only_several_seeds_give_a_verdict() -> Result<()> {
    let text = printed(&["--nodes=1", "--pods=40", "--seeds=3", "--policies"])?;
    assert_eq!(text.matches("the spread of 3 seeds").count(), 1, "{text}");
    let last = text.lines().last().context("nothing")?;
    assert!(last.ends_with("over 3 seeds."), "{text}");
    assert!(!printed(&["--nodes=1", "--pods=40"])?.contains("spread of"));
    Ok(())
}

#[test]
fn the_picture_shows_both_clusters_at_each_time() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("demo.svg");
    printed(&[
        "--nodes=1",
        "--pods=40",
        "--picture",
        file.to_str().context("path")?,
    ])?;
    let picture = std::fs::read_to_string(file)?;
    assert_eq!(picture.matches("<g class=\"f\"").count(), 48);
    assert_eq!(picture.matches("whole GPUs: ").count(), 48);
    assert_eq!(picture.matches("gpustow: ").count(), 48);
    assert!(picture.trim_end().ends_with("</svg>"));
    Ok(())
}

#[test]
fn progress_is_told_from_the_start_on() -> Result<()> {
    let output = demo(&["--nodes=1", "--pods=40"]).output()?;
    let error = String::from_utf8(output.stderr)?;
    let first = error.lines().next().context("nothing")?;
    let expected = "simulated of 12:00 h: tight 00:00";
    assert_eq!(first, expected);
    let text = String::from_utf8(output.stdout)?;
    let mut lines = text.lines();
    let heading = "12:00 h with 40 pods on 1 nodes with 8 GPUs, seed 42";
    assert_eq!(lines.next(), Some(heading));
    let pods = lines.next().context("no pods")?;
    assert!(
        pods.starts_with("GPUs: 8 H100 80 GiB. Pods: 22 % embed 3 to 6 GiB, "),
        "{pods}"
    );
    Ok(())
}

/// A list in the form of openb: a pod per minute, one without a GPU, one of 8 GPUs, and others with a part of a GPU.
fn list() -> String {
    let row = |number: u32| {
        let (gpus, milli) = match number {
            0 => (0, 0),
            1 => (8, 1000),
            _ => (1, 250),
        };
        let (from, to) = (60 * number, 60 * number + 600);
        format!("pod-{number},1000,1024,{gpus},{milli},,{from},{to}\n")
    };
    let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n";
    std::iter::once(head.to_owned())
        .chain((0..61).map(row))
        .collect()
}

#[test]
fn pods_of_a_trace_are_scaled_to_the_span_and_to_the_gpus() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("openb_pod_list_default.csv");
    std::fs::write(&file, list())?;
    let run = |path: &Path, pods| {
        let path = path.to_str().context("path")?;
        printed(&["--nodes=2", "--workload=openb", pods, "--openb", path])
    };
    let text = run(&file, "--pods=100")?;
    let mut lines = text.lines();
    let heading = "12:00 h with 60 pods on 2 nodes with 16 GPUs, seed 42";
    assert_eq!(lines.next(), Some(heading));
    let description = "GPUs: 16 H100 80 GiB. Pods: 60 consecutive ones of 60 GPU pods in the list, 98 % of them with a \
        part of a GPU. Their 1.0 h are scaled to 12 h, 1000 gpu_milli to 80 GiB. Run times are scaled to request \
        105 % of the GPUs' memory, 12 h at most.";
    assert_eq!(lines.next(), Some(description));
    assert!(text.contains("No GPU was over-committed, no pod was lost."));
    assert_eq!(text, run(folder.path(), "--pods=100")?);
    let text = run(&file, "--pods=20")?;
    assert!(
        text.contains("20 consecutive ones of 60 GPU pods"),
        "{text}"
    );
    Ok(())
}

#[test]
fn demo_without_the_trace_names_its_source_and_the_flag() -> Result<()> {
    for (args, said) in [
        (
            &["--workload=openb"][..],
            "https://github.com/alibaba/clusterdata",
        ),
        (&["--workload=openb"], "add --openb FILE"),
        (
            &["--workload=openb", "--openb=/no/list.csv"],
            "cannot read /no/list.csv",
        ),
        (&["--openb=list.csv"], "--openb needs --workload openb"),
    ] {
        let output = demo(args).output()?;
        let error = String::from_utf8(output.stderr)?;
        assert!(!output.status.success() && error.contains(said), "{error}");
    }
    Ok(())
}
