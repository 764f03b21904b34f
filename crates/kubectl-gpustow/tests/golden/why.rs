//! The output of `why` for pods that no end of a single pod helps: of several GPUs, too large, or held to a limit.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use serde_json::{Value, json};

use crate::objects::{Files, NOW, config, node, waiting};

/// A node with so many GPUs of 24,000 MiB, each held whole by two pods, of which the driver may or may not limit memory.
fn full(name: &str, gpus: usize, limit: &str) -> Vec<Value> {
    let uuid = |gpu: usize| format!("GPU-{name}-{gpu}");
    let cards: Vec<_> = (0..gpus)
        .map(|gpu| {
            json!({ "uuid": uuid(gpu), "index": gpu, "model": "NVIDIA L4", "totalMiB": 24_000,
                "memoryLimit": limit })
        })
        .collect();
    let mut objects = vec![
        node(name, &json!({}), &format!("{}", gpus * 24_000)),
        json!({ "kind": "GpuNode", "metadata": { "name": name }, "spec": {},
            "status": { "heartbeat": NOW, "gpus": cards } }),
    ];
    for gpu in 0..gpus {
        for half in ["a", "b"] {
            let assignment = json!({ "version": 1, "gpus": [{ "uuid": uuid(gpu), "mib": 12_000 }],
                "containers": { "main": [uuid(gpu)] } });
            let mut pod = waiting(&format!("{name}-{gpu}{half}"), "");
            pod["metadata"]["annotations"] =
                json!({ "gpustow.dev/assignment": assignment.to_string() });
            pod["spec"]["nodeName"] = json!(name);
            pod["spec"]["containers"][0]["resources"]["limits"]["gpustow.dev/gpu-mem"] =
                json!("12000");
            pod["status"] = json!({ "phase": "Running" });
            objects.push(pod);
        }
    }
    objects
}

fn asks(mib: u64, notes: &Value) -> Value {
    let mut pod = waiting(
        "asks",
        "0/2 nodes are available: 2 not enough wholly free GPUs.",
    );
    pod["metadata"]["annotations"] = notes.clone();
    pod["spec"]["containers"][0]["resources"]["limits"]["gpustow.dev/gpu-mem"] =
        json!(mib.to_string());
    pod
}

/// The output of `why` for the pod next to these objects, in one line and as printed.
async fn why(mut objects: Vec<Value>, pod: Value) -> Result<(String, String)> {
    objects.push(pod);
    let files = Files::new("why", &objects)?;
    let (_, said) = files.ask("why ops/asks").await?;
    Ok((said.split_whitespace().collect::<Vec<_>>().join(" "), said))
}

fn both(limit: &str) -> Vec<Value> {
    let mut objects = full("four", 4, limit);
    objects.extend(full("two", 2, limit));
    objects
}

#[tokio::test]
async fn a_pod_of_several_gpus_is_told_how_many_pods_must_finish_on_which_node() -> Result<()> {
    let notes = json!({ "gpustow.dev/gpu-count": "2" });
    let (words, said) = why(both("holds"), asks(48_000, &notes)).await?;
    ensure!(
        !words.contains("fits once"),
        "no single pod suffices: {said}"
    );
    let text =
        "GPU memory suffices on four once 4 pods finish, the fewest of all nodes: ops/four-0a, ";
    ensure!(
        words.contains(text) && words.contains("and 1 more"),
        "{said}"
    );
    // Of one GPU it is as before.
    let (words, said) = why(both("holds"), asks(12_000, &json!({}))).await?;
    ensure!(
        words.contains("fits once ops/four-0a (11.7Gi) ends"),
        "{said}"
    );
    ensure!(!words.contains("GPU memory suffices"), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_place_that_the_extender_keeps_is_quoted_from_its_event() -> Result<()> {
    let event = |uid: &str, reason: &str, time: &str, message: &str| {
        json!({ "kind": "Event", "metadata": { "namespace": "ops", "name": message }, "reason": reason,
            "involvedObject": { "kind": "Pod", "uid": uid }, "eventTime": time, "message": message })
    };
    let mut objects = both("holds");
    objects.push(config(json!({ "reserve": { "after": "60s" } })));
    objects.extend([
        event(
            "asks",
            "GpuMemoryReserved",
            "2026-11-21T09:40:00.000000Z",
            "on node two",
        ),
        event(
            "asks",
            "GpuMemoryReserved",
            "2026-11-21T09:57:00.000000Z",
            "on node four",
        ),
        event(
            "asks",
            "GpuPodQueued",
            "2026-11-21T09:58:00.000000Z",
            "something else",
        ),
        event(
            "other",
            "GpuMemoryReserved",
            "2026-11-21T09:59:00.000000Z",
            "another pod",
        ),
    ]);
    let notes = json!({ "gpustow.dev/gpu-count": "2" });
    let (words, said) = why(objects, asks(48_000, &notes)).await?;
    ensure!(
        words.contains("Event GpuMemoryReserved, 3m ago: on node four"),
        "{said}"
    );
    for other in ["on node two", "something else", "another pod"] {
        ensure!(!words.contains(other), "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn a_pod_that_no_node_can_hold_is_told_what_to_change() -> Result<()> {
    let count = |gpus: &str| json!({ "gpustow.dev/gpu-count": gpus });
    let driver = json!({ "gpustow.dev/enforce": "driver" });
    let mut limited = asks(20_000, &driver);
    limited["spec"]["containers"][0]["env"] = json!([
        { "name": names::MEMORY_LIMIT, "value": "20000" }, { "name": names::MEMORY_REQUEST, "value": "0" }]);
    for (limit, pod, advice) in [
        (
            "holds",
            asks(70_000, &json!({})),
            "No GPU that it may use has 68.4Gi; the largest has 23.4Gi. To fix it, split it with gpustow.dev/gpu-count: \"3\" and \
             gpustow.dev/gpu-mem: 70002, or request at most 24000 per GPU.",
        ),
        (
            "holds",
            asks(200_000, &json!({})),
            "No GPU that it may use has 195.3Gi; the largest has 23.4Gi. To fix it, request at most 24000 per GPU.",
        ),
        (
            "holds",
            asks(16_000, &count("16")),
            "No node that it may use has 16 GPUs of 1000Mi; the largest has 4. Set gpustow.dev/gpu-count to at most 4.",
        ),
        // Followed, the advice on the amount alone would lead to that on the number.
        (
            "holds",
            asks(16 * 200_000, &count("16")),
            "No node that it may use has 16 GPUs of 23.4Gi; the largest has 4. Set gpustow.dev/gpu-count to at most 4, and request \
             at most 24000 per GPU.",
        ),
        (
            "driver",
            limited,
            "No GPU that it may use can hold the pod to its limit. Set gpustow.dev/enforce: watch, unless the driver must hold it.",
        ),
    ] {
        let (words, said) = why(both(limit), pod).await?;
        ensure!(words.contains(advice), "{advice}: {said}");
        // The output gives an equal cause only once.
        let lines = said
            .lines()
            .filter(|line| line.contains(" GPU 0 ") || line.contains(" GPU 1 "));
        ensure!(lines.count() <= 1, "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn what_makes_room_is_named_only_to_a_pod_that_room_would_help() -> Result<()> {
    let created = |mut pod: Value| {
        pod["metadata"]["creationTimestamp"] = json!(NOW);
        pod
    };
    let (_, said) = why(both("holds"), created(asks(20_000, &json!({})))).await?;
    ensure!(said.contains("To make room for it:"), "{said}");
    let (_, said) = why(both("holds"), created(asks(200_000, &json!({})))).await?;
    ensure!(!said.contains("To make room for it:"), "{said}");
    let mut selects = created(asks(20_000, &json!({})));
    selects["spec"]["nodeSelector"] = json!({ "no": "such-node" });
    let (_, said) = why(both("holds"), selects).await?;
    ensure!(!said.contains("To make room for it:"), "{said}");
    Ok(())
}

/// The names of pods, and how many MiB each requests.
type Pods<'a> = &'a [(&'a str, u64)];

/// Two GPUs of 15,000 MiB, and a PodGroup of these pods, of which `min_count` must be placed.
fn gang(min_count: Option<usize>, pods: Pods<'_>) -> Vec<Value> {
    let cards: Vec<_> = (0..2)
        .map(|gpu| {
            json!({ "uuid": format!("GPU-{gpu}"), "index": gpu, "model": "NVIDIA L4", "totalMiB": 15_000 })
        })
        .collect();
    let mut objects = vec![
        node("two", &json!({}), "30k"),
        json!({ "kind": "GpuNode", "metadata": { "name": "two" }, "spec": {},
            "status": { "heartbeat": NOW, "gpus": cards } }),
    ];
    objects.extend(min_count.map(|min_count| {
        json!({ "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup",
            "metadata": { "namespace": "ops", "name": "training", "uid": "training" },
            "spec": { "schedulingPolicy": { "gang": { "minCount": min_count } } } })
    }));
    let member = |(name, mib): &(&str, u64)| {
        let mut pod = waiting(name, "");
        pod["spec"]["schedulingGroup"] = json!({ "podGroupName": "training" });
        pod["spec"]["containers"][0]["resources"]["limits"] = match mib {
            0 => json!({}),
            mib => json!({ names::GPU_MEM: mib.to_string() }),
        };
        pod
    };
    objects.extend(pods.iter().map(member));
    objects
}

#[tokio::test]
async fn pod_of_a_gang_is_told_which_of_it_fit_and_what_the_others_need() -> Result<()> {
    let three = [("one", 10_000), ("other", 10_000)];
    let small = [("one", 1_000), ("other", 9_000), ("driver", 0)];
    let huge = [("one", 70_000), ("other", 20_000)];
    let cases: [(Option<usize>, Pods<'_>, u64, &[&str]); 7] = [
        (
            Some(3),
            &three,
            10_000,
            &[
                "but only 2 of the 3 pods that its group ops/training needs fit at the same time.",
                "Group ops/training needs 3 pods at the same time; 2 fit: 2 fit on two: ops/",
                "1 need main: 9.8Gi: the others leave no GPU for it: ops/",
            ],
        ),
        // The pod itself does not fit, and the others do.
        (
            Some(4),
            &small,
            20_000,
            &[
                "It fits on none of 1 GPU nodes.",
                "Group ops/training needs 4 pods at the same time; 3 fit: 2 fit on two: ops/one, ops/other",
                "1 need main: 19.5Gi: no GPU as large as the pod asks for: ops/asks",
                "1 request no GPU memory: ops/driver",
            ],
        ),
        // None does.
        (
            Some(3),
            &huge,
            20_000,
            &[
                "Group ops/training needs 3 pods at the same time; 0 fit:",
                "2 need main: 19.5Gi: no GPU as large as the pod asks for: ops/asks, ops/other",
                "1 need main: 68.4Gi: no GPU as large as the pod asks for: ops/one",
            ],
        ),
        // One more than is needed does not fit.
        (
            Some(2),
            &three,
            10_000,
            &["on 1 of 1 GPU nodes; the best is two, but kube-scheduler reports"],
        ),
        (
            Some(9),
            &three[..1],
            10_000,
            &["but kube-scheduler waits until its group ops/training has 9 pods, and it has 2."],
        ),
        (
            None,
            &three,
            10_000,
            &["but there is no PodGroup ops/training, and kube-scheduler waits for it."],
        ),
        // All that are needed fit.
        (
            Some(2),
            &three[..1],
            10_000,
            &[
                "Group ops/training needs 2 pods at the same time; 2 fit: 2 fit on two: ops/asks, ops/one",
            ],
        ),
    ];
    for (min_count, others, mib, says) in cases {
        let mut objects = gang(min_count, &[others, &[("asks", mib)]].concat());
        let asks = objects.pop().context("the pod")?;
        let (words, said) = why(objects, asks).await?;
        for text in says {
            ensure!(words.contains(text), "{text}: {said}");
        }
    }
    let mut objects = gang(Some(1), &[("asks", 10_000)]);
    let asks = objects.pop().context("the pod")?;
    let group = objects.last_mut().context("the PodGroup")?;
    group["spec"]["parentCompositePodGroupName"] = json!("all");
    let (words, said) = why(objects, asks).await?;
    let text = "but kube-scheduler places all groups of the CompositePodGroup all or none, and gpustow preempts for no part of it.";
    ensure!(words.contains(text), "{said}");
    Ok(())
}

#[tokio::test]
async fn percentage_is_of_each_gpu_that_is_named() -> Result<()> {
    let notes = json!({ names::GPU_MEM_PERCENTAGE: "25" });
    let (said, text) = why(full("n", 1, "Holds"), asks(1_024, &notes)).await?;
    ensure!(
        said.contains("asks for main: 25 % of a GPU, at least 1Gi"),
        "{text}"
    );
    // A quarter of 24,000 MiB.
    ensure!(said.contains(": 0 free, 5.9Gi short; fits once"), "{text}");
    Ok(())
}

#[tokio::test]
async fn misspelt_annotation_of_a_pod_that_cannot_be_read_is_named() -> Result<()> {
    let mut pod = waiting("p", "0/1 nodes are available: 1 gpu-count is no number.");
    pod["metadata"]["annotations"] =
        json!({ "gpustow.dev/gpu-count": "two", "gpustow.dev/exlusive": "true" });
    let files = Files::new("misspelt", &[pod])?;
    let (_, printed) = files.ask("why -n ops p").await?;
    for text in [
        "gpustow.dev/gpu-count",
        "gpustow.dev/exlusive",
        "gpustow.dev/exclusive",
    ] {
        ensure!(printed.contains(text), "no {text}:\n{printed}");
    }
    Ok(())
}
