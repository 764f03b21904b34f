//! Which pods get into the queue and out of it: the rules of the gate, and tries to get round them.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{GpustowConfig, QueueFrom, config, names};
use gpustow_testkit::{Case, ControlPlane, Options, configure, eventually};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::{Mutex, OnceCell};

use super::tenant::tenant;
use super::{Refused, Taken, account, make, note, pods, row, run};
use crate::agent_token::{patch, send};
use crate::install::{install, try_create};
use crate::policies::asks;
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow};

/// A control plane with a line; its controllers fill the roles that tenants have.
async fn queued() -> Result<&'static ControlPlane> {
    static LINED: OnceCell<ControlPlane> = OnceCell::const_new();
    LINED
        .get_or_try_init(async || {
            let cluster = ControlPlane::start(Options {
                controllers: true,
                ..Options::default()
            })
            .await?;
            install(&cluster, "manifests/overlays/queue").await?;
            Ok(cluster)
        })
        .await
}

/// The flag is one for the whole cluster.
static ALONE: Mutex<()> = Mutex::const_new(());

fn ours() -> Value {
    json!([{ "name": names::GATE }])
}

/// Spec of a pod that asks, with these additional fields.
fn asking(more: Value) -> Value {
    let mut spec = json!({ "containers": [asks("main", "80")] });
    if let (Some(spec), Value::Object(more)) = (spec.as_object_mut(), more) {
        spec.extend(more);
    }
    spec
}

/// The names of the gates that a pod like this is created with.
async fn gates(case: &Case, meta: Value, spec: Value) -> Result<Vec<String>> {
    let mut pod = crate::policies::pod(json!({}), spec)?;
    let name = pod.metadata.name.take();
    pod.metadata = serde_json::from_value(meta)?;
    pod.metadata.name = name;
    pod.metadata.namespace = Some(case.namespace.clone());
    gates_of(&try_create(&case.client, &pod).await?)
}

fn gates_of(pod: &Pod) -> Result<Vec<String>> {
    let spec = pod.spec.as_ref().context("no spec")?;
    let gates = spec.scheduling_gates.iter().flatten();
    Ok(gates.map(|gate| gate.name.clone()).collect())
}

/// Sets the GpustowConfig's mode of the queue, and whether new pods are queued. None deletes it.
async fn flag(cluster: &ControlPlane, says: Option<(&str, bool)>) -> Result<()> {
    let says = says.map(|(mode, all)| {
        let all = all.then_some(QueueFrom::ALL);
        (mode, Vec::from_iter(all))
    });
    queue_from(cluster, says).await
}

async fn queue_from(cluster: &ControlPlane, says: Option<(&str, Vec<QueueFrom>)>) -> Result<()> {
    let gone = [
        "delete",
        "gpustowconfig",
        config::NAME,
        "--ignore-not-found",
    ];
    cluster.kubectl(&gone).await?;
    if let Some((mode, from)) = says {
        let client = cluster.admin()?;
        configure(&client, &[format!("queue: {{mode: {mode}}}")]).await?;
        let status = Patch::Merge(json!({ "status": { "queueFrom": from } }));
        let configs = Api::<GpustowConfig>::all(client);
        let params = PatchParams::default();
        configs.patch_status(config::NAME, &params, &status).await?;
    }
    Ok(())
}

async fn waits(case: &Case, with: &[&str]) -> Result<()> {
    eventually(SOON, "the flag is seen", async || {
        let gates = gates(case, json!({}), asking(json!({}))).await?;
        ensure!(gates == with, "{gates:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn pods_are_queued_while_the_status_says_so_and_some_never() -> Result<()> {
    let cluster = queued().await?;
    let _alone = ALONE.lock().await;
    some_stand_and_some_never(cluster).await
}

async fn some_stand_and_some_never(cluster: &ControlPlane) -> Result<()> {
    let case = Case::new(cluster, "gating").await?;
    as_large_ones_stand(cluster, &case).await?;
    let on = Some(("Auto", true));
    for off in [None, Some((r#""Off""#, true)), Some(("Always", false))] {
        flag(cluster, on).await?;
        waits(&case, &[names::GATE]).await?;
        flag(cluster, off).await?;
        waits(&case, &[]).await?;
    }
    flag(cluster, on).await?;
    waits(&case, &[names::GATE]).await?;

    let idle = json!({ "containers": [{ "name": "a" }] });
    let daemon = json!([{ "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true }]);
    for (what, meta, spec) in [
        ("asks for nothing", json!({}), idle),
        (
            "a DaemonSet's",
            json!({ "ownerReferences": daemon }),
            asking(json!({})),
        ),
        (
            "critical",
            json!({}),
            asking(json!({ "priorityClassName": "system-cluster-critical" })),
        ),
    ] {
        let gates = gates(&case, meta, spec).await?;
        ensure!(gates.is_empty(), "{what}: {gates:?}");
    }
    // Kubelets show their static pods like this: the API server refuses pods with both a node and a gate.
    let mirror = crate::policies::pod(json!({}), asking(json!({ "nodeName": "n" })))?;
    let made = try_create(&cluster.kubelet("n")?, &mirror).await?;
    ensure!(gates_of(&made)?.is_empty());
    let others = asking(json!({ "schedulingGates": [{ "name": "x.y/z" }] }));
    ensure!(gates(&case, json!({}), others).await? == ["x.y/z", names::GATE]);
    let own = asking(json!({ "schedulingGates": ours() }));
    ensure!(gates(&case, json!({}), own).await? == [names::GATE]);

    let label = format!("{}=off", names::QUEUE_LABEL);
    cluster
        .kubectl(&["label", "namespace", &case.namespace, &label])
        .await?;
    waits(&case, &[]).await?;
    flag(cluster, None).await
}

/// Two GPUs of 5000 MiB are waited for at priority 0, and one of 8000 at 5.
async fn as_large_ones_stand(cluster: &ControlPlane, case: &Case) -> Result<()> {
    let name = format!("{}-high", case.namespace);
    let high = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": name }, "value": 5,
    });
    cluster.apply(&high.to_string()).await?;
    let from = |priority, mib_per_gpu, gpus| QueueFrom {
        priority,
        mib_per_gpu,
        gpus,
    };
    let from = vec![from(0, 5000, 2), from(5, 8000, 1)];
    queue_from(cluster, Some(("Auto", from))).await?;
    let pod = |containers: &[(&str, &str)], notes: Value, class: &str| {
        let all: Vec<Value> = containers
            .iter()
            .map(|(name, mib)| asks(name, mib))
            .collect();
        let spec = json!({ "containers": all, "priorityClassName": class });
        (json!({ "annotations": notes }), spec)
    };
    let count = |gpus: &str| json!({ names::GPU_COUNT: gpus });
    let own_count = json!({ format!("{}main", names::GPU_COUNT_OF): "1" });
    let part = json!({ names::GPU_MEM_PERCENTAGE: "5" });
    let own_part = json!({ format!("{}main", names::GPU_MEM_PERCENTAGE_OF): "5" });
    let whole = json!({ names::EXCLUSIVE: "true" });
    let one = |mib: &'static str| [("main", mib)];
    let two = [("main", "100"), ("beside", "100")];
    let mut rows = Vec::new();
    for (is_queued, what, (meta, spec)) in [
        (true, "two GPUs", pod(&one("10000"), count("2"), "")),
        (true, "three GPUs", pod(&one("15000"), count("3"), "")),
        (false, "two smaller GPUs", pod(&one("9998"), count("2"), "")),
        (false, "one GPU", pod(&one("7999"), json!({}), "")),
        (true, "a large GPU", pod(&one("8000"), json!({}), "")),
        (
            true,
            "a large GPU, high",
            pod(&one("8000"), json!({}), &name),
        ),
        (
            false,
            "two GPUs, high",
            pod(&one("10000"), count("2"), &name),
        ),
        (true, "two containers", pod(&two, json!({}), "")),
        (true, "two containers, high", pod(&two, json!({}), &name)),
        (true, "its own number", pod(&one("100"), own_count, "")),
        (true, "a part of a GPU", pod(&one("100"), part, "")),
        (true, "its own part", pod(&one("100"), own_part, "")),
        (true, "whole GPUs", pod(&one("100"), whole, "")),
    ] {
        rows.push((is_queued, what, meta, spec));
    }
    eventually(SOON, "those that are as large are queued", async || {
        for (is_queued, what, meta, spec) in &rows {
            let gates = gates(case, meta.clone(), spec.clone()).await?;
            ensure!(gates.is_empty() != *is_queued, "{what}: {gates:?}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_gate_comes_off_in_turn_or_by_who_has_the_right() -> Result<()> {
    let cluster = queued().await?;
    let _alone = ALONE.lock().await;
    let (case, edit) = tenant(cluster, "queue", false).await?;
    flag(cluster, None).await?;
    waits(&case, &[]).await?;
    let both = json!([{ "name": names::GATE }, { "name": "x.y/z" }]);
    for (name, gates) in [("waits", ours()), ("both", both)] {
        let spec = asking(json!({ "schedulingGates": gates }));
        make(&case, name, json!({}), spec, None).await?;
    }
    make(&case, "bound", json!({}), asking(json!({})), Some("n")).await?;
    let idle = json!({ "schedulingGates": ours(), "containers": [{ "name": "a" }] });
    let mut copied = serde_json::to_value(crate::policies::pod(json!({}), idle.clone())?)?;
    copied["metadata"]["name"] = json!("copied");
    let change = |name: &str, change: Value, verdict| {
        let path = pods(&case, &format!("/{name}"));
        row(format!("{name} {change}"), "PATCH", path, change, verdict)
    };
    let ungate = || json!({ "spec": { "schedulingGates": [] } });
    let left = || json!({ "spec": { "schedulingGates": [{ "name": "x.y/z" }] } });
    let with = |mut change: Value, pointer: &str, value: Value| {
        change[pointer] = value;
        change
    };
    const TURN: &str = "gpustow removes the gate in turn";
    let rows = vec![
        change("waits", ungate(), Refused(TURN)),
        change("both", left(), Refused(TURN)),
        change(
            "both",
            json!({ "spec": { "schedulingGates": ours() } }),
            Taken,
        ),
        row(
            "a copied gate",
            "POST",
            pods(&case, ""),
            copied.clone(),
            Refused("remove the gate"),
        ),
    ];
    run("edit", &edit, rows).await?;

    const NOT: &str = "a pod is not the extender's to change";
    let extender = account(cluster, SYSTEM, ACCOUNT).await?;
    let pod = Api::<Pod>::namespaced(case.client.clone(), &case.namespace)
        .get("waits")
        .await?;
    let mut spec = serde_json::to_value(&pod)?["spec"].take();
    let mut image = spec["containers"].take();
    image[0]["image"] = json!("evil");
    let mut evil = ungate();
    evil["spec"]["containers"] = image.clone();
    let mut tolerant = ungate();
    let mut tolerations = spec["tolerations"].as_array().cloned().unwrap_or_default();
    tolerations.push(json!({ "key": "x", "operator": "Exists" }));
    tolerant["spec"]["tolerations"] = json!(tolerations);
    let rows = vec![
        change("waits", ungate(), Taken),
        change("both", left(), Taken),
        change("both", ungate(), Refused(NOT)),
        change(
            "both",
            json!({ "spec": { "schedulingGates": ours() } }),
            Refused(NOT),
        ),
        change("waits", evil, Refused("not the extender's to write")),
        change("waits", tolerant, Refused("not the extender's to write")),
        change(
            "waits",
            json!({ "spec": { "containers": image } }),
            Refused(NOT),
        ),
        change(
            "bound",
            json!({ "metadata": { "labels": { "a": "b" } } }),
            Refused("not the extender's"),
        ),
        change(
            "waits",
            with(ungate(), "metadata", json!({ "labels": { "a": "b" } })),
            Refused("not the extender's"),
        ),
        change(
            "waits",
            with(
                ungate(),
                "metadata",
                note("example.com/own", "x")["metadata"].clone(),
            ),
            Refused("not the extender's"),
        ),
        change(
            "waits",
            with(
                ungate(),
                "metadata",
                note(names::EPOCH, "7")["metadata"].clone(),
            ),
            Taken,
        ),
    ];
    run("the extender", &extender, rows).await?;
    let ungater = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "ungater"},
        "rules": [{"apiGroups": ["gpustow.dev"], "resources": ["queues"], "verbs": ["ungate"]}],
    });
    cluster.apply(&ungater.to_string()).await?;
    let role = "--clusterrole=ungater";
    let namespace = format!("--namespace={}", case.namespace);
    let user = format!("--serviceaccount={}:edit", case.namespace);
    cluster
        .kubectl(&["create", "rolebinding", "lifts", role, &namespace, &user])
        .await?;
    let path = pods(&case, "/waits");
    eventually(SOON, "a user that has the right may ungate", async || {
        let refused = send(&edit, "PATCH", &path, &ungate()).await?;
        ensure!(refused.is_none(), "{refused:?}");
        Ok(())
    })
    .await?;
    cluster
        .kubectl(&["delete", "rolebinding", "lifts", &namespace])
        .await?;

    // In a namespace whose pods are never queued no user is kept from anything.
    let label = format!("{}=off", names::QUEUE_LABEL);
    cluster
        .kubectl(&["label", "namespace", &case.namespace, &label])
        .await?;
    eventually(SOON, "the namespace is out of the queue", async || {
        let refused = send(&edit, "PATCH", &path, &ungate()).await?;
        ensure!(refused.is_none(), "{refused:?}");
        let refused = send(&edit, "POST", &pods(&case, ""), &copied).await?;
        ensure!(refused.is_none(), "{refused:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn before_gpustow_goes_one_command_takes_every_gate_off() -> Result<()> {
    let cluster = queued().await?;
    let _alone = ALONE.lock().await;
    let case = Case::new(cluster, "leaving").await?;
    flag(cluster, None).await?;
    waits(&case, &[]).await?;
    let both = json!([{ "name": "x.y/z" }, { "name": names::GATE }]);
    for (name, gates) in [("a", ours()), ("b", ours()), ("c", both)] {
        let spec = asking(json!({ "schedulingGates": gates }));
        make(&case, name, json!({}), spec, None).await?;
    }
    let ungate_all = async |account: &str| -> Result<(bool, String)> {
        let kubeconfig = cluster.kubeconfig(SYSTEM, account, None).await?;
        let mut command = Command::new(gpustow());
        command
            .arg("--ungate-all")
            .arg("--kubeconfig")
            .arg(kubeconfig);
        let output = command.output().await?;
        let said = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8(said)?))
    };
    let (well, said) = ungate_all("gpustow-agent").await?;
    ensure!(
        !well && said.contains("ClusterRole gpustow-queue"),
        "{said}"
    );
    let (well, said) = ungate_all(ACCOUNT).await?;
    ensure!(well && said.contains("no pod has it"), "{said}");
    let pods = Api::<Pod>::namespaced(case.client.clone(), &case.namespace);
    for (name, left) in [("a", &[][..]), ("b", &[]), ("c", &["x.y/z"])] {
        ensure!(gates_of(&pods.get(name).await?)? == left, "{name}");
    }
    // Twice is as good as once.
    let (well, said) = ungate_all(ACCOUNT).await?;
    ensure!(well && said.contains("from 0 pods"), "{said}");

    // One that it may not touch, as it asks for nothing, keeps no other in the queue, and is named.
    let free = Case::new(cluster, "left-out").await?;
    let label = format!("{}=off", names::QUEUE_LABEL);
    cluster
        .kubectl(&["label", "namespace", &free.namespace, &label])
        .await?;
    let idle = json!({ "schedulingGates": ours(), "containers": [{ "name": "a" }] });
    eventually(SOON, "the namespace is out of the queue", async || {
        make(&free, "copied", json!({}), idle.clone(), None).await
    })
    .await?;
    let spec = asking(json!({ "schedulingGates": ours() }));
    make(&case, "d", json!({}), spec, None).await?;
    let (well, said) = ungate_all(ACCOUNT).await?;
    let named = format!("stays on {}/copied:", free.namespace);
    ensure!(!well && said.contains(&named), "{said}");
    ensure!(gates_of(&pods.get("d").await?)?.is_empty());
    patch(
        &case.client,
        &super::pods(&free, "/copied"),
        &json!({ "spec": { "schedulingGates": [] } }),
    )
    .await?;
    let (well, said) = ungate_all(ACCOUNT).await?;
    ensure!(well && said.contains("no pod has it"), "{said}");
    patch(
        &case.client,
        &super::pods(&case, "/c"),
        &json!({ "spec": { "schedulingGates": [] } }),
    )
    .await
}
