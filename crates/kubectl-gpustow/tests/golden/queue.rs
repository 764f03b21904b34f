//! The output of `check` and `why` for pods in the queue.

use anyhow::{Result, ensure};
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::objects::{Files, config, healthy, part, waiting};

/// It is queued for ten minutes.
fn standing(name: &str, mib: &str) -> Value {
    let mut pod = waiting(name, "");
    pod["spec"]["schedulingGates"] = json!([{ "name": "gpustow.dev/queued" }]);
    pod["spec"]["containers"][0]["resources"]["limits"]["gpustow.dev/gpu-mem"] = json!(mib);
    pod["status"]["conditions"][0]["reason"] = json!("SchedulingGated");
    pod
}

#[tokio::test]
async fn why_says_the_position_and_what_the_pod_waits_for() -> Result<()> {
    let mut holder = waiting("holder", "");
    holder["metadata"]["annotations"] = json!({ "gpustow.dev/assignment":
        r#"{"version":1,"gpus":[{"uuid":"GPU-n","mib":16000}],"containers":{"main":["GPU-n"]}}"# });
    holder["spec"]["nodeName"] = json!("n");
    holder["status"] = json!({ "phase": "Running" });
    let mut objects = healthy().to_vec();
    objects.push(config(json!({ "queue": { "mode": "Auto" } })));
    objects.extend([holder, standing("b", "20000"), standing("a", "16000")]);
    let files = Files::new("in-line", &objects)?;
    for (pod, place) in [("a", "1 of 2"), ("b", "2 of 2")] {
        let (answer, said) = files.ask(&format!("why ops/{pod}")).await?;
        let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(answer == Answer::No && words.contains("Gated"), "{said}");
        let line = format!("Queued at position {place}: the extender removes its scheduling gate");
        ensure!(words.contains(&line), "{said}");
        ensure!(words.contains("It fits on none of 1 GPU node"), "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn check_finds_an_autoscaler_that_sees_no_queued_pod() -> Result<()> {
    let pod = |label: &str, image: &str| {
        json!({ "kind": "Pod",
            "metadata": { "namespace": "kube-system", "name": "scales", "uid": "s", "labels": { "app.kubernetes.io/name": label } },
            "spec": { "containers": [{ "name": "a", "image": image }] }, "status": { "phase": "Running" } })
    };
    let image = "registry.k8s.io/autoscaling/cluster-autoscaler:v1.36.0";
    let problem = "it looks like an autoscaler";
    let spec =
        |mode: &str, max: u32| json!({ "queue": { "mode": mode }, "provision": { "max": max } });
    for (label, image, spec, found) in [
        ("aws-cluster-autoscaler", "x", spec("Auto", 0), true),
        ("karpenter", "x@sha256:00", spec("Always", 0), true),
        ("other", image, spec("Auto", 0), true),
        ("karpenter", image, spec("Auto", 20), false),
        ("karpenter", image, spec("Off", 0), false),
        (
            "other",
            "example.com/karpenter-exporter:1",
            spec("Auto", 0),
            false,
        ),
    ] {
        let mut objects = healthy().to_vec();
        objects.push(config(spec.clone()));
        objects.push(pod(label, image));
        let files = Files::new("autoscaler", &objects)?;
        let (_, rows) = files.check().await?;
        let is_there = json!(rows).to_string().contains(problem);
        ensure!(is_there == found, "{label} {image} {spec}: {rows:#?}");
        if found {
            let row = files
                .finds("warning", problem, "spec.provision.max")
                .await?;
            ensure!(row["object"] == "pod/kube-system/scales", "{row:#?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn gates_that_no_extender_removes_are_one_finding() -> Result<()> {
    let mut objects = healthy().to_vec();
    for number in 0..30 {
        let mut gated = waiting(&format!("gated-{number:02}"), "");
        gated["spec"]["schedulingGates"] = json!([{ "name": "gpustow.dev/queued" }]);
        objects.push(gated);
    }
    let problem = "no extender runs in gpustow-system";
    let row = Files::new("gate-for-good", &objects)?;
    let row = row.finds("error", problem, "gpustow --ungate-all").await?;
    ensure!(
        row["objects"].as_array().map(Vec::len) == Some(30),
        "{row:#?}"
    );
    ensure!(row["object"] == "pod/ops/gated-00 and 29 more", "{row:#?}");
    // An extender ungates them, whatever the mode is.
    objects.push(part("e", "initContainers", "extender", &[], true));
    let (_, rows) = Files::new("gate-in-turn", &objects)?.check().await?;
    ensure!(!json!(rows).to_string().contains(problem), "{rows:#?}");
    Ok(())
}
