//! The output of `defrag` where moving would gain something.

use anyhow::{Result, ensure};
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::objects::{Files, NOW, config, holder, node, owner, report, waiting};
use crate::{golden, same};

/// On the one card of a node, with a controller; marked by its owner or not.
fn movable(name: &str, node: &str, mib: u64, evictable: &str) -> Value {
    let mut pod = holder(name, node, mib);
    pod["metadata"]["annotations"]["gpustow.dev/evictable"] = json!(evictable);
    pod["metadata"]["ownerReferences"] = owner("ReplicaSet", "web");
    pod
}

fn asks(name: &str, mib: u64) -> Value {
    let mut pod = waiting(name, "");
    pod["spec"]["containers"][0]["resources"]["limits"]["gpustow.dev/gpu-mem"] =
        json!(mib.to_string());
    pod
}

/// Two cards, each with a pod on it, two equal pods that fit on neither, and one that fits nowhere.
fn objects(evictable: &str) -> Vec<Value> {
    let mut objects = Vec::new();
    for name in ["m", "n"] {
        objects.extend([node(name, &json!({}), "24k"), report(name, NOW, &json!({}))]);
    }
    objects.extend([
        movable("web-1", "m", 8000, evictable),
        movable("web-2", "n", 6000, evictable),
        asks("big-1", 20_000),
        asks("big-2", 20_000),
        asks("huge", 90_000),
    ]);
    objects
}

#[tokio::test]
async fn the_fewest_mib_that_make_room_are_named() -> Result<()> {
    let files = Files::new("defrag", &objects("true"))?;
    for format in ["table", "wide", "json", "yaml", "csv", "name"] {
        let command = format!("defrag -o {format}");
        let (answer, printed) = files.ask(&command).await?;
        same(&format!("defrag.{format}"), &command, &printed)?;
        ensure!(answer == Answer::Yes, "{printed}");
    }
    let (answer, elsewhere) = files.ask("defrag -n team").await?;
    ensure!(
        answer == Answer::Yes && elsewhere.starts_with("no pod waits"),
        "{elsewhere}"
    );
    Ok(())
}

#[tokio::test]
async fn a_pod_for_which_no_pod_may_make_room_is_named_too() -> Result<()> {
    let files = Files::new("defrag-unmarked", &objects("false"))?;
    let (answer, printed) = files.ask("defrag").await?;
    same("defrag-none.txt", "defrag", &printed)?;
    ensure!(answer == Answer::No, "{printed}");
    golden("defrag-cluster.txt", "defrag", Answer::No).await
}

#[tokio::test]
async fn a_nearly_empty_node_is_named_where_no_pod_waits() -> Result<()> {
    let mut objects = objects("true");
    objects.retain(|it| it["spec"]["nodeName"].is_string() || it["kind"] != "Pod");
    for pod in objects.iter_mut().filter(|it| it["kind"] == "Pod") {
        pod["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    }
    let on = json!({ "defragment": { "evictionsPerHour": 10, "emptyNodes": true } });
    let off = json!({ "defragment": { "evictionsPerHour": 10 } });
    let with = |spec| {
        objects
            .iter()
            .cloned()
            .chain([config(spec)])
            .collect::<Vec<_>>()
    };
    let files = Files::new("defrag-empties", &with(on))?;
    let (answer, printed) = files.ask("defrag").await?;
    same("defrag-empties.txt", "defrag", &printed)?;
    ensure!(answer == Answer::Yes, "{printed}");
    let (_, of_other) = files.ask("defrag -n team").await?;
    ensure!(of_other.starts_with("no pod waits"), "{of_other}");
    let files = Files::new("defrag-keeps", &with(off))?;
    let (_, printed) = files.ask("defrag").await?;
    ensure!(printed.starts_with("no pod waits"), "{printed}");
    Ok(())
}
