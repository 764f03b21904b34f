//! Every output of every command, byte by byte, on one cluster that has a bit of everything; and the page's server.
//! `GPUSTOW_BLESS=1 cargo test -p kubectl-gpustow` writes the present output of the commands.

mod adopt;
mod advise;
mod auto;
mod capacity;
mod check;
mod claims;
mod compute;
mod cordons;
mod defrag;
mod docs;
mod incidents;
mod marks;
mod objects;
mod prometheus_history;
mod queue;
mod sampling;
mod settings;
mod sharers;
mod ui;
mod version;
mod watch;
mod why;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use kubectl_gpustow::{Answer, Args, Screen, run};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(path)
}

/// Runs a command on the files of `tests/cluster`.
async fn output(command: &str, screen: Screen) -> Result<(Answer, String)> {
    output_of(&here("cluster"), command, screen).await
}

async fn output_of(from: &Path, command: &str, screen: Screen) -> Result<(Answer, String)> {
    let from = from.display().to_string();
    let words = ["kubectl-gpustow", "--from", &from];
    let words = words.into_iter().chain(command.split_whitespace());
    let mut out = Vec::new();
    let answer = run(Args::try_parse_from(words)?, &mut out, screen).await?;
    Ok((answer, String::from_utf8(out)?))
}

/// Compares the output of `command` with the file `golden/NAME`.
async fn golden(name: &str, command: &str, answer: Answer) -> Result<()> {
    golden_on(Screen::default(), name, command, answer).await
}

async fn golden_on(screen: Screen, name: &str, command: &str, wanted: Answer) -> Result<()> {
    let (answer, printed) = output(command, screen).await?;
    same(name, command, &printed)?;
    ensure!(answer == wanted, "{command} answers {answer:?}");
    Ok(())
}

/// Compares the output of a command with the file `golden/NAME`.
fn same(name: &str, command: &str, printed: &str) -> Result<()> {
    let file = here("golden").join(name);
    if std::env::var_os("GPUSTOW_BLESS").is_some() {
        fs::write(&file, printed)?;
    }
    let golden = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    ensure!(
        printed == golden,
        "{command} prints\n{printed}\nand {} has\n{golden}",
        file.display()
    );
    Ok(())
}

#[tokio::test]
async fn lists_are_printed_in_every_form() -> Result<()> {
    for (command, plain) in [
        ("nodes", Answer::Yes),
        ("gpus", Answer::Yes),
        ("pods -A", Answer::Yes),
        ("report", Answer::Yes),
        ("check", Answer::No),
    ] {
        for format in ["table", "wide", "json", "yaml", "csv", "name"] {
            let name = command.split(' ').next().unwrap_or_default();
            golden(
                &format!("{name}.{format}"),
                &format!("{command} -o {format}"),
                plain,
            )
            .await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn template_picks_fields_of_lists_and_answers() -> Result<()> {
    for (command, wanted) in [
        ("gpus l4-0 -o jsonpath={.items[*].gpu}", "0 1 2 3"),
        ("why team-a/llm-0 -o jsonpath={.kind}", "Why"),
    ] {
        let (_, printed) = output(command, Screen::default()).await?;
        ensure!(printed == wanted, "{command}: {printed}");
    }
    let refused = output("gpus -o jsonpath={.items", Screen::default()).await;
    let refused = refused.map_or_else(|error| error.to_string(), |it| it.1);
    ensure!(refused.contains("a { without }"), "{refused}");
    Ok(())
}

#[tokio::test]
async fn lists_can_be_narrowed_and_ordered() -> Result<()> {
    golden("gpus-of-node.txt", "gpus l4-0", Answer::Yes).await?;
    let screen = Screen {
        terminal: true,
        width: Some(80),
        ..Screen::default()
    };
    golden_on(screen, "gpus-80.txt", "gpus", Answer::Yes).await?;
    golden_on(screen, "check-80.txt", "check", Answer::No).await?;
    for command in ["gpus", "check"] {
        let (_, narrow) = output(command, screen).await?;
        ensure!(
            narrow.lines().all(|line| line.chars().count() <= 80) && !narrow.contains('…'),
            "{narrow}"
        );
    }
    golden(
        "pods-of-namespace.txt",
        "pods -n team-b --no-headers",
        Answer::Yes,
    )
    .await?;
    golden(
        "pods-of-label.txt",
        "pods -A -l team=vision,team!=search",
        Answer::Yes,
    )
    .await?;
    golden(
        "nodes-by-available.txt",
        "nodes --sort-by -available",
        Answer::Yes,
    )
    .await?;
    golden("gpus-by-used.txt", "gpus --sort-by usedBytes", Answer::Yes).await?;
    golden("report-by-label.txt", "report --by team", Answer::Yes).await?;
    golden("pods-none.txt", "pods -n absent", Answer::Yes).await
}

#[tokio::test]
async fn why_explains_pods_in_every_state() -> Result<()> {
    for (pod, answer) in [
        ("team-a/llm-0", Answer::Yes),
        ("team-b/train", Answer::Yes),
        ("team-a/large", Answer::No),
        ("team-a/edge", Answer::No),
        ("team-b/fits", Answer::Yes),
        ("team-b/gated", Answer::No),
        ("team-b/bad", Answer::No),
        ("team-c/by-hand", Answer::No),
    ] {
        let name = pod.replace('/', "-");
        golden(&format!("why-{name}.txt"), &format!("why {pod}"), answer).await?;
    }
    golden("why.wide", "why team-a/llm-0 -o wide", Answer::Yes).await?;
    golden("why.json", "why large -n team-a -o json", Answer::No).await?;
    golden("why.yaml", "why large -o yaml", Answer::No).await
}

/// The cluster of the other tests, with the faults of the worst moments.
#[tokio::test]
async fn why_never_says_fits_of_a_pod_that_the_cluster_will_not_place() -> Result<()> {
    let both = std::env::temp_dir().join(format!("gpustow-incidents-{}", std::process::id()));
    fs::create_dir_all(&both)?;
    for folder in ["cluster", "incidents"] {
        for entry in fs::read_dir(here(folder))? {
            let path = entry?.path();
            fs::copy(&path, both.join(path.file_name().context("no name")?))?;
        }
    }
    for (pod, answer, texts) in [
        (
            "ops/silent",
            Answer::No,
            ["the gpustow agent does not report", "Waiting"],
        ),
        (
            "ops/silent",
            Answer::No,
            [
                "Note: metadata.annotations[gpustow.dev/gpu_count]: there is no such annotation",
                "write gpustow.dev/gpu-count",
            ],
        ),
        (
            "ops/unreached",
            Answer::No,
            ["does not reach gpustow's extender", "Waiting"],
        ),
        (
            "ops/apart",
            Answer::No,
            ["4 node(s) didn't match pod anti-affinity", "Waiting"],
        ),
        (
            "ops/bytes",
            Answer::No,
            ["the unit is MiB already, write 8192", "Invalid"],
        ),
        (
            "deploy/web -n ops",
            Answer::No,
            ["web-5f9474c99c-aaaaa", "Waiting"],
        ),
        (
            "replicaset/web-5f9474c99c -A",
            Answer::No,
            ["web-5f9474c99c-aaaaa", "Waiting"],
        ),
    ] {
        let (said, printed) = output_of(&both, &format!("why {pod}"), Screen::default()).await?;
        for text in texts {
            ensure!(printed.contains(text), "why {pod} has no {text}: {printed}");
        }
        ensure!(!printed.contains("Fits") && said == answer, "{printed}");
    }
    fs::remove_dir_all(&both)?;
    Ok(())
}

#[tokio::test]
async fn a_cluster_is_placed_again() -> Result<()> {
    for (name, more) in [
        ("whatif.txt", "--policy=tight,binpack,spread"),
        ("whatif.json", "--output=json"),
        ("whatif.name", "--policy=tight,spread --output=name"),
        ("whatif.wide", "--output=wide"),
        ("whatif-more.txt", "--add-nodes=1:l4-1 --add-nodes=1"),
        (
            "whatif-fewer.txt",
            "--remove-nodes=1 --policy=tight,binpack",
        ),
    ] {
        golden(name, &format!("whatif {more}"), Answer::Yes).await?;
    }
    for (change, wanted) in [
        ("--add-nodes=2:absent", "no GPU node absent"),
        ("--remove-nodes=9", "no GPU node would be left"),
        ("--add-nodes=many", "neither N nor N:NODE"),
    ] {
        let refused = output(&format!("whatif {change}"), Screen::default()).await;
        let error = format!("{:#}", refused.err().context(change)?);
        ensure!(error.contains(wanted), "{change}: {error}");
    }
    Ok(())
}

#[tokio::test]
async fn fit_answers_before_anything_is_created() -> Result<()> {
    for (file, answer) in [
        ("small", Answer::Yes),
        ("job", Answer::Yes),
        ("huge", Answer::No),
        ("bytes", Answer::No),
        ("no-limit", Answer::No),
        ("misspelt", Answer::No),
        ("unknown", Answer::No),
        ("ahead", Answer::Yes),
        ("limited", Answer::Yes),
        ("limited-on-l4", Answer::No),
    ] {
        let path = here(&format!("pods/{file}.yaml"));
        let command = format!("fit -f {}", path.display());
        golden(&format!("fit-{file}.txt"), &command, answer).await?;
        golden(
            &format!("fit-{file}.json"),
            &format!("{command} -o json"),
            answer,
        )
        .await?;
    }
    for (file, said) in [
        (
            "no-gpu",
            "no-gpu: no container asks for gpustow.dev/gpu-mem, so kube-scheduler alone",
        ),
        (
            "annotated",
            "annotated: metadata.annotations[gpustow.dev/gpu-count]: no container asks for \
             gpustow.dev/gpu-mem, so the pod gets no GPU from gpustow: write the MiB that it needs into \
             resources.limits of a container, as gpustow.dev/gpu-mem: 8192",
        ),
    ] {
        let path = here(&format!("pods/{file}.yaml"));
        let error = output(&format!("fit -f {}", path.display()), Screen::default()).await;
        let error = error
            .err()
            .context("a pod without a request has no answer")?;
        assert!(error.to_string().contains(said), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn a_terminal_gets_bars_and_colours() -> Result<()> {
    let colour = Screen {
        terminal: true,
        colour: true,
        ..Screen::default()
    };
    golden_on(colour, "gpus-colour.txt", "gpus", Answer::Yes).await?;
    let plain = Screen {
        terminal: true,
        colour: false,
        ..Screen::default()
    };
    golden_on(plain, "gpus-bars.txt", "gpus", Answer::Yes).await
}

#[tokio::test]
async fn top_prints_once_without_a_terminal() -> Result<()> {
    golden("top.txt", "top -1", Answer::Yes).await?;
    golden("top-idle.txt", "top --sort idle --filter a100", Answer::Yes).await
}

#[tokio::test]
async fn words_are_completed_as_kubectl_reads_them() -> Result<()> {
    golden("complete-command.txt", "__complete -- no", Answer::Yes).await?;
    golden("complete-node.txt", "__complete -- gpus l4", Answer::Yes).await?;
    golden("complete-pod.txt", "__complete -- why inf", Answer::Yes).await?;
    golden("complete-flag.txt", "__complete -- pods --s", Answer::Yes).await?;
    golden(
        "complete-format.txt",
        "__complete -- pods -o w",
        Answer::Yes,
    )
    .await
}

#[tokio::test]
async fn completion_is_installed_where_kubectl_looks() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("gpustow-completion-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let command = format!("completion install --dir {}", folder.display());
    let (_, path) = output(&command, Screen::default()).await?;
    let script = fs::read_to_string(path.trim())?;
    fs::remove_dir_all(&folder)?;
    assert_eq!(
        script,
        "#!/bin/sh\nexec kubectl-gpustow __complete -- \"$@\"\n"
    );
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_answered_says_the_mend() -> Result<()> {
    for (command, text) in [
        ("gpus nowhere", "no GPU node nowhere"),
        ("why absent", "no pod absent"),
        ("why job/absent", "no pod of job/absent"),
        (
            "nodes --sort-by colour",
            "no such column; there are NODE, MODEL",
        ),
        ("fit -f /nowhere.yaml", "/nowhere.yaml"),
        (
            "why team-a/large -o csv",
            "possible values: table, wide, json, yaml",
        ),
    ] {
        let error = output(command, Screen::default()).await.err();
        let error = format!(
            "{:#}",
            error.with_context(|| format!("{command} has an answer"))?
        );
        assert!(error.contains(text), "{command}: {error}");
    }
    Ok(())
}

/// The index refuses longer ones, and names that are not kebab case.
#[test]
fn krews_entry_keeps_the_rules_of_its_index() -> Result<()> {
    let text = fs::read_to_string(here("../../../.krew.yaml"))?;
    let text = text.lines().filter(|line| !line.contains("addURIAndSha"));
    let entry: serde_json::Value = serde_yaml::from_str(&text.collect::<Vec<_>>().join("\n"))?;
    let short = entry["spec"]["shortDescription"]
        .as_str()
        .context("no shortDescription")?;
    ensure!(short.len() <= 50 && !short.ends_with('.'), "{short}");
    assert_eq!(entry["metadata"]["name"], "gpustow");
    let platforms = entry["spec"]["platforms"]
        .as_array()
        .context("no platforms")?;
    ensure!(platforms.iter().all(|it| it["bin"] == "kubectl-gpustow"));
    Ok(())
}
