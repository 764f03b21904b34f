//! What the Helm chart refuses, and what it says: it renders nothing that the programs would not start with.

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow_api::names;

use crate::helm::{chart, helm, objects, template};

/// The extender's arguments in what the chart made.
fn arguments(made: &str) -> Result<Vec<String>> {
    let objects = objects(made)?;
    let deployment = objects
        .values()
        .find(|it| it["kind"] == "Deployment" && it["metadata"]["name"] == names::SCHEDULER)
        .context("no Deployment")?;
    let args = &deployment["spec"]["template"]["spec"]["initContainers"][0]["args"];
    Ok(serde_json::from_value(args.clone())?)
}

/// The chart stops whatever the extender would not start with, and nothing else.
#[tokio::test]
async fn the_chart_renders_what_the_extender_starts_with_and_refuses_the_rest() -> Result<()> {
    let (mut made, mut refused) = (0, 0);
    for act in ["", "event", "kill-process", "evict"] {
        for call_back in [false, true] {
            for keep in [0, 120] {
                for marks in [false, true] {
                    let sets = [
                        format!("--set=extender.act={act}"),
                        format!("--set=extender.callBack={call_back}"),
                        format!("--set=extender.keep={keep}"),
                        format!("--set=extender.keepMarks={marks}"),
                    ];
                    let sets = sets.each_ref().map(String::as_str);
                    let contradicts = ["kill-process", "evict"].contains(&act) && !call_back
                        || marks && keep == 0;
                    let rendered = template("1.36.3", &sets).await;
                    let Ok(rendered) = rendered else {
                        let error = rendered.err().context("an error")?.to_string();
                        ensure!(
                            contradicts && error.contains("extender."),
                            "{sets:?}: {error}"
                        );
                        refused += 1;
                        continue;
                    };
                    ensure!(!contradicts, "{sets:?} renders");
                    let args = arguments(&rendered)?;
                    let words = std::iter::once("gpustow".to_owned()).chain(args);
                    gpustow::Args::try_parse_from(words)?.check()?;
                    made += 1;
                }
            }
        }
    }
    ensure!(made > 0 && refused > 0, "{made} made, {refused} refused");
    for (set, said) in [
        (
            &["--set=extender.act=evict"][..],
            "set extender.callBack=true",
        ),
        (
            &["--set=extender.keepMarks=true"],
            "set extender.keep to seconds",
        ),
        (
            &[
                "--set=extender.callBack=true",
                "--set=extender.extraArgs={--call-back}",
            ],
            "extender.extraArgs: --call-back is set twice",
        ),
        (
            &["--set=extender.extraArgs={--listen=127.0.0.1:1}"],
            "extender.extraArgs: --listen is set twice",
        ),
        (
            &[
                "--set=agent.setLimits=true",
                "--set=agent.extraArgs={--set-limits}",
            ],
            "agent.extraArgs: --set-limits is set twice",
        ),
    ] {
        let refused = template("1.36.3", set).await.err();
        let refused = refused.with_context(|| format!("{set:?} renders"))?;
        ensure!(refused.to_string().contains(said), "{set:?}: {refused}");
    }
    // One may come from a value and the other from an argument.
    let both = [
        "--set=extender.act=evict",
        "--set=extender.extraArgs={--call-back}",
    ];
    let args = arguments(&template("1.36.3", &both).await?)?;
    ensure!(
        args.ends_with(&["--act=evict".to_owned(), "--call-back".to_owned()]),
        "{args:?}"
    );
    Ok(())
}

/// YAML 1.1, as Helm reads it, takes a bare off for false.
#[tokio::test]
async fn a_bare_off_in_a_values_file_is_off() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("values.yaml");
    std::fs::write(&file, "extender: {line: off}\n")?;
    let values = format!("--values={}", file.display());
    let off = template("1.36.3", &[&values]).await?;
    ensure!(objects(&off)? == objects(&template("1.36.3", &[]).await?)?);
    std::fs::write(&file, "extender: {line: on}\n")?;
    let refused = template("1.36.3", &[&values])
        .await
        .err()
        .context("on passes")?;
    ensure!(refused.to_string().contains("always"), "{refused}");
    Ok(())
}

/// What Helm prints after an installation with these values.
async fn notes(args: &[&str]) -> Result<String> {
    let chart = chart();
    let dry = ["install", "gpustow", &chart, "--dry-run=client"];
    let printed = helm(&[&dry[..], args].concat(), None).await?;
    let (_, notes) = printed.split_once("NOTES:").context(printed.clone())?;
    Ok(notes.to_owned())
}

#[tokio::test]
async fn the_notes_say_which_switches_are_on_and_what_they_may_do() -> Result<()> {
    let plain = notes(&[]).await?;
    let example = format!(
        "gpustow/v{}/manifests/examples/inference-pod.yaml",
        env!("CARGO_PKG_VERSION")
    );
    for part in ["kubectl gpustow check", &example] {
        ensure!(plain.contains(part), "{plain}");
    }
    ensure!(!plain.contains("switches are on"), "{plain}");
    for (sets, said) in [
        (
            &["--set=extender.callBack=true", "--set=extender.act=evict"][..],
            "gpustow EVICTS pods that use more than they request",
        ),
        (&["--set=extender.callBack=true"], "It ends none"),
        (
            &["--set=extender.preemptScattered=true"],
            "gpustow DELETES pods of lower priority",
        ),
        (
            &["--set=extender.move=10"],
            "EVICTS at most 10 pods an hour",
        ),
        (&["--set=extender.keep=120"], "have waited for 120 s"),
        (&["--set=extender.line=auto"], "extender.line=auto"),
        (
            &["--set=agent.killProcesses=true"],
            "no effect until extender.callBack=true",
        ),
    ] {
        let notes = notes(sets).await?;
        ensure!(
            notes.contains("switches are on") && notes.contains(said),
            "{sets:?}: {notes}"
        );
    }
    Ok(())
}
