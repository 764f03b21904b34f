//! The Helm chart's refusals, and its notes: it does not render anything that the programs would not start with.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::{GpustowConfig, names};
use serde_json::Value;

use crate::helm::{chart, helm, objects, template};

/// The extender's arguments in the rendered chart.
fn arguments(made: &str) -> Result<Vec<String>> {
    let objects = objects(made)?;
    let deployment = objects
        .values()
        .find(|it| it["kind"] == "Deployment" && it["metadata"]["name"] == names::SCHEDULER)
        .context("no Deployment")?;
    let args = &deployment["spec"]["template"]["spec"]["initContainers"][0]["args"];
    Ok(serde_json::from_value(args.clone())?)
}

/// The schema of the values has the fields of the GpustowConfig, and refuses values that the API server would refuse.
#[tokio::test]
async fn chart_renders_what_the_programs_start_with_and_refuses_the_rest() -> Result<()> {
    for set in [
        "config.reclaim.action=Evict",
        "config.reserve.after=10m",
        "config.defragment.evictionsPerHour=10",
        "config.queue.mode=Always",
        "config.scheduling.policy=spread",
    ] {
        let made = template("1.36.3", &[&format!("--set={set}")]).await?;
        let words = std::iter::once("gpustow".to_owned()).chain(arguments(&made)?);
        gpustow::Args::try_parse_from(words)?.check()?;
        let config = objects(&made)?.remove(r#"GpustowConfig null "gpustow""#);
        let config: GpustowConfig = serde_json::from_value(config.context("no GpustowConfig")?)?;
        ensure!(config.spec != GpustowConfigSpec::default(), "{set}");
    }
    for (set, said) in [
        (&["--set=config.reclaim.action=evict"][..], "action"),
        (&["--set=config.reserve.maxPercent=300"], "maxPercent"),
        (&["--set=config.queue.mod=Auto"], "mod"),
        (
            &["--set=webhook.hostNetwork=true"],
            "webhook.port: the kubelet has 10250",
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
    Ok(())
}

/// The value below `path` of this object.
async fn set_to(sets: &str, object: &str, path: &str) -> Result<Value> {
    let made = objects(&template("1.36.3", &[sets]).await?)?;
    let object = made.get(object).with_context(|| format!("no {object}"))?;
    Ok(object.pointer(path).cloned().unwrap_or_default())
}

#[tokio::test]
async fn agents_and_monitors_get_what_the_values_say() -> Result<()> {
    const AGENT: &str = r#"DaemonSet "gpustow-system" "gpustow-agent""#;
    const MONITOR: &str = r#"PodMonitor "gpustow-system" "gpustow-agent""#;
    let sets = "--set=agent.toolkitLimits=true,agent.headroomMiB=256,agent.seeInstances=true";
    let container = set_to(sets, AGENT, "/spec/template/spec/containers/0").await?;
    for part in [
        "--toolkit-limits",
        "--headroom-mib=256",
        "SYS_ADMIN",
        "NVIDIA_MIG_MONITOR_DEVICES",
    ] {
        ensure!(container.to_string().contains(part), "{part}: {container}");
    }
    let words = serde_json::from_value::<Vec<String>>(container["args"].clone())?;
    let words = words.into_iter().chain(["--node-name=n".to_owned()]);
    let words = std::iter::once("gpustow-agent".to_owned()).chain(words);
    gpustow_agent::Args::try_parse_from(words)?;
    let sets = "--set=monitoring.enabled=true,monitoring.interval=15s,monitoring.labels.release=p";
    let labels = set_to(sets, MONITOR, "/metadata/labels/release").await?;
    let interval = set_to(sets, MONITOR, "/spec/podMetricsEndpoints/0/interval").await?;
    ensure!(
        (labels == "p") && (interval == "15s"),
        "{labels} {interval}"
    );
    let dashboard = r#"ConfigMap "gpustow-system" "gpustow-dashboard""#;
    let board = set_to(
        "--set=monitoring.dashboard=true",
        dashboard,
        "/data/gpustow.json",
    );
    let board = board.await?;
    let board: Value = serde_json::from_str(board.as_str().context("no text")?)?;
    ensure!(board["panels"].is_array(), "{board}");
    Ok(())
}

/// YAML 1.1, as Helm reads it, takes a bare off for false.
#[tokio::test]
async fn a_bare_off_in_a_values_file_is_off() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("values.yaml");
    let values = format!("--values={}", file.display());
    let fields = [
        ("queue", "mode"),
        ("reclaim", "action"),
        ("reserve", "after"),
    ];
    for (part, field) in fields {
        for word in ["off", "Off", "false"] {
            std::fs::write(&file, format!("config: {{{part}: {{{field}: {word}}}}}\n"))?;
            let mut made = objects(&template("1.36.3", &[&values]).await?)?;
            let config = made.remove(r#"GpustowConfig null "gpustow""#);
            let config = config.context("no GpustowConfig")?;
            ensure!(config["spec"][part][field] == "Off", "{config}");
        }
        std::fs::write(&file, format!("config: {{{part}: {{{field}: on}}}}\n"))?;
        let refused = template("1.36.3", &[&values]).await.err();
        let refused = refused.with_context(|| format!("{part}.{field}: on passes"))?;
        ensure!(refused.to_string().contains(field), "{refused}");
    }
    Ok(())
}

/// Helm's notes after an installation with these values.
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
    ensure!(plain.contains("kubectl gpustow check"), "{plain}");
    ensure!(
        plain.contains("gpustow DELETES pods of lower priority"),
        "{plain}"
    );
    for (sets, said) in [
        (
            &["--set=config.reclaim.action=Evict"][..],
            "gpustow EVICTS pods that use more than they request",
        ),
        (&["--set=config.reclaim.action=Event"], "by an Event"),
        (
            &["--set=config.defragment.evictionsPerHour=10"],
            "EVICTS at most 10 pods an hour",
        ),
        (&["--set=config.reserve.after=2m"], "have waited 2m"),
        (&["--set=config.queue.mode=Auto"], "queue.mode=Auto"),
        (
            &["--set=agent.killProcesses=true"],
            "works only with config.reclaim.action=KillProcess",
        ),
        (&["--set=disruptions=false"], "lacks the permission"),
    ] {
        let notes = notes(sets).await?;
        ensure!(notes.contains(said), "{sets:?}: {notes}");
    }
    Ok(())
}

/// The pod of the notes is the example, so that no link can be dead.
#[tokio::test]
async fn the_notes_hold_the_first_pod_with_the_resource_of_the_installation() -> Result<()> {
    let example = Path::new(&chart()).join("../examples/first-pod.yaml");
    let example = std::fs::read_to_string(example)?;
    for resource in [names::GPU_MEM, "example.com/gpu-mem"] {
        let notes = notes(&[&format!("--set=resourceName={resource}")]).await?;
        let (_, after) = notes.split_once("<<'EOF'\n").context(notes.clone())?;
        let (pod, _) = after.split_once("EOF\n").context(notes.clone())?;
        ensure!(pod == example.replace(names::GPU_MEM, resource), "{notes}");
        ensure!(!notes.contains("https://"), "{notes}");
    }
    Ok(())
}
