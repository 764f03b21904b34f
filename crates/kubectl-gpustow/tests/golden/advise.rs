//! The output of `advise` for workloads of every sort.

use anyhow::{Result, ensure};
use gpustow_advice::History;
use gpustow_api::owner::Owner;
use gpustow_api::workload::{ContainerHistory, name_of};
use gpustow_pack::Mib;
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::objects::{Files, NOW, holder, node, owner, report};
use crate::same;

const GPU: u64 = 24_000;
const DAY: u64 = 1440;

/// A pod with these MiB on the GPU of a node, of a controller of this kind and name.
fn held(kind: &str, name: &str, number: u64, on: &str, mib: u64) -> Value {
    let mut pod = holder(&format!("{name}-{number}"), on, mib);
    pod["metadata"]["ownerReferences"] = owner(kind, name);
    pod["spec"]["containers"][0]["image"] = json!("app:1");
    pod
}

/// A history of these MiB, one a minute.
pub(crate) fn workload(kind: &str, name: &str, minutes: u64, mib: impl Fn(u64) -> u64) -> Value {
    let mut history = History::default();
    for minute in 0..minutes {
        history.add(Mib(mib(minute)), 60 * minute as i64);
    }
    let owner = Owner {
        kind: kind.to_owned(),
        name: name.to_owned(),
    };
    let container = ContainerHistory::new("main", "app:1", Mib(GPU), &history);
    json!({ "apiVersion": "gpustow.dev/v1alpha1", "kind": "GpuWorkload",
        "metadata": { "namespace": "ops", "name": name_of(&owner) },
        "spec": { "targetRef": { "kind": kind, "name": name }, "containers": [container] } })
}

fn objects() -> Vec<Value> {
    let mut objects = Vec::new();
    for name in ["m", "n", "o", "p", "q"] {
        objects.push(node(name, &json!({}), "24k"));
    }
    let used = |uids: &[&str]| -> Value {
        let uses = uids
            .iter()
            .map(|uid| json!({ "uid": uid, "usedMiB": 4000 }));
        json!({ "pods": uses.collect::<Vec<_>>() })
    };
    let mut mps = used(&["shared-1"]);
    mps["pods"][0]["mps"] = json!(true);
    let mut unread = report("q", NOW, &json!({}));
    unread["status"]["conditions"] = json!([{
        "type": "ProcessesReadable", "status": "False", "reason": "NotMeasured", "message": "",
    }]);
    objects.push(unread);
    objects.extend([
        report("m", NOW, &used(&["web-1", "web-2"])),
        report("n", NOW, &used(&["web-3", "greedy-1"])),
        report("o", NOW, &used(&["train-1", "young-1"])),
        report("p", NOW, &mps),
    ]);
    objects.extend([
        held("StatefulSet", "web", 1, "m", 10_000),
        held("StatefulSet", "web", 2, "m", 10_000),
        held("StatefulSet", "web", 3, "n", 10_000),
        held("StatefulSet", "greedy", 1, "n", 12_000),
        held("Job", "train", 1, "o", 8000),
        held("StatefulSet", "young", 1, "o", 8000),
        held("StatefulSet", "shared", 1, "p", 4000),
        held("StatefulSet", "unseen", 1, "q", 4000),
        workload("StatefulSet", "web", 3 * DAY, |it| {
            if it % 90 == 0 { 7000 } else { 4000 }
        }),
        workload("StatefulSet", "greedy", 2 * DAY, |_| 22_000),
        workload("Job", "train", DAY, |it| if it < 3 { 7500 } else { 3000 }),
        workload("StatefulSet", "young", 60, |_| 2000),
        workload("StatefulSet", "shared", DAY, |_| 2000),
        workload("CronJob", "nightly", DAY, |_| 5000),
    ]);
    objects
}

#[tokio::test]
async fn advice_is_printed_in_every_form() -> Result<()> {
    let files = Files::new("advise", &objects())?;
    for format in ["table", "wide", "json", "yaml", "csv", "name"] {
        let command = format!("advise -o {format}");
        let (answer, printed) = files.ask(&command).await?;
        same(&format!("advise.{format}"), &command, &printed)?;
        ensure!(answer == Answer::Yes, "{printed}");
    }
    Ok(())
}

#[tokio::test]
async fn one_workload_is_advised_with_the_gpus_that_it_frees() -> Result<()> {
    let files = Files::new("advise-one", &objects())?;
    let (_, printed) = files.ask("advise sts/web --quantile p99").await?;
    same("advise-one.txt", "advise sts/web --quantile p99", &printed)?;
    let (_, elsewhere) = files.ask("advise -n team").await?;
    ensure!(elsewhere.starts_with("No history"), "{elsewhere}");
    let refused = files.ask("advise web").await;
    ensure!(refused.is_err_and(|error| error.to_string().contains("KIND/NAME")));
    Ok(())
}

/// The patch that `advise` prints for a workload with this history, and its notes.
async fn patched(name: &str, histories: &[Value]) -> Result<(bool, Value)> {
    let mut objects = vec![node("m", &json!({}), "24k"), report("m", NOW, &json!({}))];
    objects.push(held("StatefulSet", name, 1, "m", 20_000));
    let mut object = workload("StatefulSet", name, 1, |_| 1);
    object["spec"]["containers"] = json!(histories);
    objects.push(object);
    let files = Files::new(&format!("advise-{name}"), &objects)?;
    let (_, printed) = files.ask(&format!("advise sts/{name} -o json")).await?;
    let row = serde_json::from_str::<Value>(&printed)?["items"][0].clone();
    Ok((row["patch"].is_string(), row["notes"].clone()))
}

/// A history of these MiB in each minute of a day, with this image, on GPUs of this size.
fn used(image: &str, gpu: u64, mib: u64) -> Value {
    let mut history = History::default();
    for minute in 0..DAY as i64 {
        history.add(Mib(mib), 60 * minute);
    }
    json!(ContainerHistory::new("main", image, Mib(gpu), &history))
}

#[tokio::test]
async fn advice_tells_sizes_of_gpus_apart_and_starts_with_the_earlier_image() -> Result<()> {
    let idle = "no process of it is on its GPU";
    let both = [used("app:1", GPU, 9000), used("app:1", 12_000, 6000)];
    let notes = json!([
        idle,
        "needs 6016 MiB of 12000 MiB and 9024 MiB of 24000 MiB"
    ]);
    ensure!(patched("both", &both).await? == (true, notes));
    // A server that takes everything does so on the smaller GPUs, too.
    let greedy = [used("app:1", GPU, 9000), used("app:1", 12_000, 11_000)];
    ensure!(!patched("greedy", &greedy).await?.0);
    let earlier = [used("app:0", GPU, 9000)];
    let (patch, notes) = patched("earlier", &earlier).await?;
    let expected = "advised by an earlier image: this one has too little history";
    ensure!(patch && notes == json!([idle, expected]), "{notes}");
    let mut mps = used("app:1", GPU, 9000);
    mps["advice"]["against"] = json!(["MPS"]);
    ensure!(!patched("mps", &[mps]).await?.0);
    Ok(())
}
