//! `gpustow-sim` as its users run it.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use gpustow_sim::synthetic;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn sim(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpustow-sim"));
    command.args(args).stdin(Stdio::null());
    command
}

fn printed(output: Output) -> Result<String> {
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", output.status);
    // On a busy machine the run may be slow enough to print its progress.
    let mut other = error.lines().filter(|line| !line.ends_with(" s left"));
    ensure!(other.next().is_none(), "{error}");
    Ok(String::from_utf8(output.stdout)?)
}

/// An empty folder for one test.
fn folder(name: &str) -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The synthetic list as the files that users pass.
fn lists(folder: &Path) -> Result<[String; 2]> {
    let mut nodes = "sn,cpu_milli,memory_mib,gpu,model\n".to_owned();
    for node in synthetic::nodes(synthetic::NODES) {
        let (name, cpu, ram) = (node.name, node.cpu_milli, node.ram_mib);
        nodes += &format!("{name},{cpu},{ram},{},{}\n", node.gpus, node.model);
    }
    let mut pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n".to_owned();
    for pod in synthetic::pods() {
        let (name, cpu, ram) = (pod.name, pod.cpu_milli, pod.ram_mib);
        let models = pod.models.join("|");
        pods += &format!(
            "{name},{cpu},{ram},{},{},{models}\n",
            pod.gpus, pod.gpu_milli
        );
    }
    let write = |name: &str, text: String| -> Result<String> {
        let path = folder.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    Ok([write("nodes.csv", nodes)?, write("pods.csv", pods)?])
}

#[test]
fn a_replay_tells_what_each_policy_allocates() -> Result<()> {
    let folder = folder("replay")?;
    let [nodes, pods] = lists(&folder)?;
    let args = ["replay", "--nodes", &nodes, "--pods", &pods];
    let more = ["--policy=tight,fgd", "--seeds=42..43", "--output=json"];
    let json: Value = serde_json::from_str(&printed(sim(&args).args(more).output()?)?)?;
    assert_eq!(json["complete"], true);
    for policy in ["tight", "fgd"] {
        assert_eq!(json["policies"][policy]["runs"], 2);
        let mean = &json["policies"][policy]["allocation_pct"]["130"]["mean"];
        assert!(mean.as_f64() > Some(50.0), "{json}");
    }
    Ok(())
}

#[test]
fn a_partly_full_cluster_and_a_wave_are_shown() -> Result<()> {
    let folder = folder("partly")?;
    let [nodes, pods] = lists(&folder)?;
    let large = folder.join("large.csv").display().to_string();
    let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli";
    fs::write(&large, format!("{head}\nlarge,8000,1024,8,1000\n"))?;
    let lists = [
        "replay",
        "--nodes",
        &nodes,
        "--pods",
        &pods,
        "--output=json",
    ];
    let run = |more: &[&str]| -> Result<Value> {
        let policies = ["--policy=tight,spread", "--seeds=42..43"];
        let args = [&lists[..], &policies, more].concat();
        Ok(serde_json::from_str(&printed(sim(&args).output()?)?)?)
    };
    let mean = |json: &Value, policy: &str, of: &str| {
        let number = json["policies"][policy].pointer(of);
        number
            .and_then(Value::as_f64)
            .with_context(|| of.to_owned())
    };
    let steady = run(&[])?;
    let empty = "/whole/40/empty_large_nodes/mean";
    assert!(mean(&steady, "tight", empty)? > mean(&steady, "spread", empty)?);
    let wave = run(&["--then", &large, "--at=50"])?;
    let away = "/unplaced_pct/mean";
    assert!(mean(&wave, "tight", away)? < mean(&wave, "spread", away)?);
    let by_others = run(&["--cpu-pods=least-allocated", "--nodes-count=20"])?;
    assert_eq!(by_others["policies"]["tight"]["runs"], 2);
    Ok(())
}

#[test]
fn an_interrupted_run_prints_what_it_has() -> Result<()> {
    let folder = folder("interrupted")?;
    let [nodes, pods] = lists(&folder)?;
    let mut child = sim(&["replay", "--nodes", &nodes, "--pods", &pods])
        .args(["--seeds=1..1000000", "--output=json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // The kernel shows which signals it catches.
    let id = child.id();
    let listens = || -> Result<bool> {
        let status = fs::read_to_string(format!("/proc/{id}/status"))?;
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.context("no SigCgt")?.trim(), 16)?;
        Ok(caught & (1 << (Signal::SIGINT as u32 - 1)) != 0)
    };
    while !listens()? {
        std::thread::yield_now();
    }
    kill(Pid::from_raw(i32::try_from(id)?), Signal::SIGINT)?;
    let (mut out, mut error) = (String::new(), String::new());
    child
        .stdout
        .take()
        .context("no stdout")?
        .read_to_string(&mut out)?;
    child
        .stderr
        .take()
        .context("no stderr")?
        .read_to_string(&mut error)?;
    assert_eq!(child.wait()?.code(), Some(130), "{error}");
    assert!(error.contains("interrupted"), "{error}");
    let json: Value = serde_json::from_str(&out)?;
    assert_eq!(json["complete"], false);
    Ok(())
}

#[test]
fn pods_come_and_go_at_any_load() -> Result<()> {
    let args = [
        "churn",
        "--load=0.5,1.05",
        "--seeds=1..2",
        "--nodes-count=9",
    ];
    let more = [
        "--policy=tight,bestfit",
        "--lifetimes=log-normal",
        "--output=json",
    ];
    let json: Value = serde_json::from_str(&printed(sim(&args).args(more).output()?)?)?;
    for policy in ["tight", "bestfit"] {
        let of = |load: &str, key: &str| json["loads"][load][policy][key]["mean"].as_f64();
        assert!(of("0.5", "allocation_pct") < of("1.05", "allocation_pct"));
        assert!(of("0.5", "waiting_pct") < of("1.05", "waiting_pct"));
    }
    Ok(())
}

#[test]
fn moving_pods_is_compared_with_leaving_them() -> Result<()> {
    let args = ["churn", "--load=0.95", "--seeds=1..2", "--nodes-count=9"];
    let args = [
        &args[..],
        &["--move=off,5", "--evictable=100", "--output=json"],
    ]
    .concat();
    let json: Value = serde_json::from_str(&printed(sim(&args).output()?)?)?;
    let of = |name: &str, value: &str| json["loads"]["0.95"][name][value]["mean"].clone();
    assert_eq!(of("tight", "moves_per_hour"), 0.0);
    let moved = of("tight, move 5", "moves_per_hour").as_f64();
    assert!(moved > Some(0.0) && moved <= Some(5.0), "{moved:?}");
    assert_ne!(
        of("tight", "allocation_pct"),
        of("tight, move 5", "allocation_pct")
    );
    Ok(())
}

#[test]
fn nodes_without_pods_are_compared_with_and_without_emptying() -> Result<()> {
    let args = ["churn", "--load=0.5", "--seeds=1..2", "--nodes-count=9"];
    let args = [
        &args[..],
        &["--move=60", "--evictable=100", "--empty-nodes"],
    ]
    .concat();
    let text = printed(sim(&args).output()?)?;
    assert!(text.contains("unused GPU-h"), "{text}");
    let json = [&args[..], &["--output=json"]].concat();
    let json: Value = serde_json::from_str(&printed(sim(&json).output()?)?)?;
    let of = |name: &str| json["loads"]["0.5"][name]["unused_gpu_hours"]["mean"].as_f64();
    let (without, with) = (of("tight, move 60"), of("tight, move 60, empty"));
    assert!(without.is_some() && without < with, "{without:?}, {with:?}");
    Ok(())
}

#[test]
fn placing_those_that_wait_together_is_compared_with_each_in_its_turn() -> Result<()> {
    let args = ["churn", "--load=1.05", "--seeds=1..2", "--nodes-count=9"];
    let args = [&args[..], &["--together=off,64", "--output=json"]].concat();
    let json: Value = serde_json::from_str(&printed(sim(&args).output()?)?)?;
    let of = |name: &str| json["loads"]["1.05"][name]["allocation_pct"]["mean"].as_f64();
    assert!(of("tight").is_some() && of("tight, together 64").is_some());
    assert_ne!(of("tight"), of("tight, together 64"));
    Ok(())
}

#[test]
fn places_for_pods_that_waited_are_compared_with_none() -> Result<()> {
    let args = ["churn", "--load=1.05", "--seeds=1..2", "--nodes-count=9"];
    let args = [&args[..], &["--keep=off,2", "--keep-percent=50"]].concat();
    let text = printed(sim(&args).output()?)?;
    let of = |name: &str| {
        let rows = text.lines().filter(|row| row.contains(name));
        rows.filter(|row| row.contains("8-gpu")).count()
    };
    assert_eq!((of(" tight "), of(" tight, keep 2 ")), (1, 1), "{text}");
    let json = [&args[..], &["--output=json"]].concat();
    let json: Value = serde_json::from_str(&printed(sim(&json).output()?)?)?;
    let waits = |name: &str| json["loads"]["1.05"][name]["waits_by_kind"].clone();
    assert_ne!(waits("tight"), waits("tight, keep 2"));
    assert!(
        waits("tight")["8-gpu"]["p99"].as_f64() > Some(0.0),
        "{json}"
    );
    Ok(())
}

#[test]
fn the_mix_may_change_on_the_way() -> Result<()> {
    let folder = folder("changing")?;
    let large = folder.join("large.csv").display().to_string();
    let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli";
    fs::write(&large, format!("{head}\nlarge,8000,1024,8,1000\n"))?;
    let wait = |more: &[&str]| -> Result<f64> {
        let args = ["churn", "--load=0.8", "--seeds=1..2", "--nodes-count=9"];
        let args = [&args[..], &["--policy=tight", "--output=json"], more].concat();
        let json: Value = serde_json::from_str(&printed(sim(&args).output()?)?)?;
        let mean = &json["loads"]["0.8"]["tight"]["wait_minutes"]["mean"]["mean"];
        mean.as_f64().context("no mean")
    };
    // Of these nodes a third takes the large pods that come in the end.
    assert!(wait(&["--change-mix", &large])? > wait(&[])?);
    Ok(())
}

/// Two pods for a day: one uses 8000 MiB and now and then 30000, the other 20000 all the time.
fn recorded_use(now_and_then: usize) -> String {
    let mut text = "seconds,pod,mib\n".to_owned();
    for minute in 0..1440 {
        let first = if minute % now_and_then == 0 {
            30_000
        } else {
            8_000
        };
        text += &format!("{0},first,{first}\n{0},second,20000\n", 60 * minute);
    }
    text
}

/// The judgements that `advise` prints as JSON.
fn judged(args: &[&str]) -> Result<Value> {
    let args = [&["advise", "--output", "json"], args].concat();
    Ok(serde_json::from_str(&printed(sim(&args).output()?)?)?)
}

/// A mean of the first judgement of this series and request.
fn mean(document: &Value, series: &str, request: &str, of: &str) -> Result<f64> {
    let mut all = document["judged"].as_array().into_iter().flatten();
    let found = all.find(|it| it["series"] == series && it["request"] == request);
    let mean = found.and_then(|it| it[of]["mean"].as_f64());
    mean.with_context(|| format!("no {of} of {request} on {series}: {document}"))
}

#[test]
fn advise_counts_the_allocations_that_fail_on_time_that_it_did_not_learn_from() -> Result<()> {
    let folder = folder("advise")?;
    let trace = folder.join("use.csv");
    fs::write(&trace, recorded_use(50))?;
    let trace = trace.display().to_string();
    let document = judged(&["--trace", &trace, "--gpu", "40960", "--replicas", "1"])?;
    ensure!(document["pods"] == 2, "{document}");
    let of = |request: &str, of: &str| mean(&document, "trace", request, of);
    // The pods do not fit together at their peaks, nor at the amounts that each exceeds in one of a hundred minutes.
    for request in ["peak", "advice", "advice at p99"] {
        ensure!(of(request, "pods")? == 1.0, "{request}: {document}");
        ensure!(of(request, "episodes")? == 0.0, "{request}: {document}");
        ensure!(
            of(request, "without_pct")? == 100.0,
            "{request}: {document}"
        );
    }
    // At p95 they do: each fiftieth minute is too much, and an episode of its own.
    let p95 = |what: &str| of("advice at p95", what);
    ensure!(p95("pods")? == 2.0, "{document}");
    ensure!((1.9..2.1).contains(&p95("over_pct")?), "{document}");
    ensure!((27.0..31.0).contains(&p95("episodes")?), "{document}");
    ensure!(p95("without_pct")? == 0.0, "{document}");
    ensure!((1.9..2.1).contains(&p95("worst_pod_pct")?), "{document}");
    Ok(())
}

#[test]
fn advice_holds_the_next_day_on_each_made_series() -> Result<()> {
    let args = [
        "--made",
        "--gpu",
        "81920",
        "--replicas",
        "4",
        "--seeds",
        "3",
    ];
    let document = judged(&args)?;
    for series in ["daily", "weekly", "ramp", "leak", "roll-out", "unequal"] {
        let episodes = mean(&document, series, "advice", "episodes")?;
        ensure!(episodes <= 0.2, "{series}: {episodes}");
        let above = mean(&document, series, "advice", "worst_pod_pct")?;
        ensure!(above <= 4.0, "{series}: {above}");
    }
    // The advice is one amount at every hour; the amount at p95 depends on how long ago the peak was.
    let moves = |request: &str| mean(&document, "daily", request, "moves_pct");
    ensure!(moves("advice")? < 10.0, "{document}");
    ensure!(moves("advice at p95")? > 100.0, "{document}");
    for series in ["daily", "weekly", "ramp"] {
        let episodes = mean(&document, series, "advice at p95", "episodes")?;
        ensure!(episodes > 1.0, "{series}: {episodes}");
    }
    Ok(())
}

#[test]
fn advise_names_the_line_that_it_cannot_read() -> Result<()> {
    let folder = folder("advise-rubbish")?;
    let trace = folder.join("use.csv");
    for (text, wanted) in [
        ("", "empty file"),
        ("seconds,pod\n", "no column \"mib\""),
        ("seconds,pod,mib\n1,p,-5\n", "line 2: mib is \"-5\""),
        ("seconds,pod,mib\n1,p\n", "line 2: 2 fields, expected 3"),
        (
            "seconds,pod,mib\n1,p,5\n",
            "a trace has 19 hours at least, and a year at most",
        ),
    ] {
        fs::write(&trace, text)?;
        let output = sim(&["advise", "--trace", &trace.display().to_string()]).output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && error.contains(wanted),
            "{text:?}: {error}"
        );
    }
    Ok(())
}

#[test]
fn pods_that_start_alone_meet_no_start_and_wait_for_it_if_they_must() -> Result<()> {
    let folder = folder("starts")?;
    let write = |name: &str, text: &str| -> Result<String> {
        let path = folder.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    let nodes = write(
        "nodes.csv",
        "sn,cpu_milli,memory_mib,gpu,model\nn,64000,65536,1,T4\n",
    )?;
    let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\n";
    let pods = "a,1000,1024,1,100,0,9000\nb,1000,1024,1,100,60,9000\nc,1000,1024,1,100,500,9000\n";
    let pods = write("pods.csv", &format!("{head}{pods}"))?;
    let args = ["starts", "--nodes", &nodes, "--pods", &pods, "--lasts=180"];
    let table = printed(sim(&args).output()?)?;
    let rows: Vec<&str> = table.lines().skip(2).collect();
    // The second comes 60 s after the first, and waits for the other 120 s of its start.
    let expected = [
        "| as they come | 3 | 1 (33.3 %) | 0 s | 0.7 |",
        "| alone | 3 | 0 (0.0 %) | 120 s | 0.7 |",
    ];
    assert_eq!(rows, expected);
    let timeless = write(
        "timeless.csv",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1000,1024,1,100\n",
    )?;
    let refused = sim(&["starts", "--nodes", &nodes, "--pods", &timeless]).output()?;
    let said = String::from_utf8(refused.stderr)?;
    ensure!(
        !refused.status.success() && said.contains("no creation_time"),
        "{said}"
    );
    Ok(())
}
