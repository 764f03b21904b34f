//! Files with the objects of a cluster, and those objects.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use kubectl_gpustow::{Answer, Screen};
use serde_json::{Value, json};

use crate::output_of;

/// The files' time: that of the youngest report.
pub(crate) const NOW: &str = "2026-11-21T10:00:00Z";

/// A folder with these objects in one list.
pub(crate) struct Files(pub(crate) PathBuf);

impl Files {
    pub(crate) fn new(name: &str, objects: &[Value]) -> Result<Self> {
        // Tests that run at the same time may have files of the same name.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let own = format!("gpustow-{name}-{}-{nth}", std::process::id());
        let folder = std::env::temp_dir().join(own);
        std::fs::create_dir_all(&folder)?;
        let list = json!({ "kind": "List", "items": objects });
        std::fs::write(folder.join("list.json"), list.to_string())?;
        Ok(Self(folder))
    }

    /// A file next to the folder's list that commands do not read as a part of the cluster.
    pub(crate) fn file(&self, name: &str, object: &Value) -> Result<String> {
        let folder = self.0.join("other");
        std::fs::create_dir_all(&folder)?;
        let path = folder.join(name);
        std::fs::write(&path, object.to_string())?;
        Ok(path.display().to_string())
    }

    pub(crate) async fn ask(&self, command: &str) -> Result<(Answer, String)> {
        output_of(&self.0, command, Screen::default()).await
    }

    /// The rows of `check`, as JSON.
    pub(crate) async fn check(&self) -> Result<(Answer, Vec<Value>)> {
        let (answer, text) = self.ask("check -o json").await?;
        let list: Value = serde_json::from_str(&text)?;
        Ok((
            answer,
            list["items"].as_array().cloned().unwrap_or_default(),
        ))
    }

    /// The one row of `check` whose problem has this text.
    pub(crate) async fn finds(&self, level: &str, problem: &str, fix: &str) -> Result<Value> {
        let (answer, rows) = self.check().await?;
        let has = |row: &&Value, key: &str, text: &str| {
            row[key].as_str().is_some_and(|value| value.contains(text))
        };
        let mut found = rows.iter().filter(|row| has(row, "problem", problem));
        let row = found
            .next()
            .with_context(|| format!("no {problem:?} in {rows:#?}"))?;
        ensure!(
            found.next().is_none(),
            "{problem:?} more than once in {rows:#?}"
        );
        ensure!(has(&row, "fix", fix) && row["level"] == level, "{row:#?}");
        ensure!(
            answer
                == if level == "info" {
                    Answer::Yes
                } else {
                    Answer::No
                }
        );
        Ok(row.clone())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // A folder that stays is no failure.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn node(name: &str, labels: &Value, mib: &str) -> Value {
    json!({ "kind": "Node", "metadata": { "name": name, "labels": labels },
        "status": { "allocatable": { "cpu": "64", "memory": "512Gi", "pods": "110", "gpustow.dev/gpu-mem": mib } } })
}

pub(crate) fn report(name: &str, heartbeat: &str, gpu: &Value) -> Value {
    let mut whole = json!({ "uuid": format!("GPU-{name}"), "index": 0, "model": "NVIDIA L4", "totalMiB": 24000 });
    for (key, value) in gpu.as_object().into_iter().flatten() {
        whole[key] = value.clone();
    }
    json!({ "kind": "GpuNode", "metadata": { "name": name }, "spec": {},
        "status": { "heartbeat": heartbeat, "gpus": [whole] } })
}

/// A pod that asks for GPU memory and has waited for ten minutes.
pub(crate) fn waiting(name: &str, said: &str) -> Value {
    json!({ "kind": "Pod",
        "metadata": { "namespace": "ops", "name": name, "uid": name, "creationTimestamp": "2026-11-21T09:50:00Z" },
        "spec": { "schedulerName": "gpustow-scheduler", "containers": [
            { "name": "main", "resources": { "limits": { "gpustow.dev/gpu-mem": "2048" } } }] },
        "status": { "phase": "Pending", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said }] } })
}

/// A pod that runs and holds this much of the node's only GPU.
pub(crate) fn holder(name: &str, on: &str, mib: u64) -> Value {
    let uuid = format!("GPU-{on}");
    let assignment = json!({
        "version": 1, "gpus": [{ "uuid": uuid, "mib": mib }], "containers": { "main": [uuid] },
    });
    let mut pod = waiting(name, "");
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/assignment": assignment.to_string() });
    pod["spec"]["nodeName"] = json!(on);
    pod["spec"]["containers"][0]["resources"]["limits"]["gpustow.dev/gpu-mem"] =
        json!(mib.to_string());
    pod["status"] = json!({ "phase": "Running" });
    pod
}

/// `ownerReferences` of a pod that this controls.
pub(crate) fn owner(kind: &str, name: &str) -> Value {
    json!([{ "apiVersion": "apps/v1", "kind": kind, "name": name, "uid": name, "controller": true }])
}

/// The GpustowConfig with these fields of `spec`.
pub(crate) fn config(spec: Value) -> Value {
    json!({ "kind": "GpustowConfig", "metadata": { "name": "gpustow" }, "spec": spec })
}

/// A pod of gpustow's own.
pub(crate) fn part(name: &str, place: &str, container: &str, args: &[&str], ready: bool) -> Value {
    let statuses = if place == "containers" {
        "containerStatuses"
    } else {
        "initContainerStatuses"
    };
    let state = if ready {
        json!({})
    } else {
        json!({ "waiting": { "reason": "CrashLoopBackOff" } })
    };
    json!({ "kind": "Pod", "metadata": { "namespace": "gpustow-system", "name": name, "uid": name },
        "spec": { "nodeName": "n", "containers": [], place: [{ "name": container, "args": args }] },
        "status": { "phase": "Running", statuses: [
            { "name": container, "ready": ready, "state": state, "image": "", "imageID": "", "restartCount": 0 }] } })
}

pub(crate) fn healthy() -> [Value; 2] {
    [node("n", &json!({}), "24k"), report("n", NOW, &json!({}))]
}
