//! Memory that other GPU sharers promised to pods of the node counts as taken.

use fake_nvml::Gpu;
use gpustow_agent::metrics::Metrics;
use gpustow_agent::pods::{NodePod, NodePods};
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::names;
use gpustow_api::sharers::{Promise, volcano_unit};
use k8s_openapi::api::core::v1::Pod;
use prometheus::proto::LabelPair;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Host, UID, at, cgroup_of, h100, machine, process, state, status_of};

const TOTAL: u64 = 81_559;

/// A running pod with these limits and annotations.
fn pod(limits: &Value, annotations: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "team", "uid": UID, "annotations": annotations },
        "spec": { "nodeName": "n", "containers": [{ "name": "main", "resources": { "limits": limits } }] },
        "status": { "phase": "Running" },
    }))
    .unwrap()
}

/// MiB that count as taken on each of two GPUs, on which the pod uses `used` MiB of the first.
fn taken(pod: &Pod, used: u64) -> (GpuNodeStatus, [u64; 2]) {
    taken_in(pod, used, None)
}

/// The same where a unit of Volcano's is so many MiB.
fn taken_in(pod: &Pod, used: u64, unit: Option<u64>) -> (GpuNodeStatus, [u64; 2]) {
    let processes = match used {
        0 => vec![],
        _ => vec![process(1, used)],
    };
    let first = Gpu {
        processes,
        used_mib: Some(used),
        ..h100(0)
    };
    let host = Host::new(&machine(vec![first, h100(1)]));
    host.process(1, &cgroup_of(UID));
    let mut pods = NodePods::new(NodePod::from_pod(pod, names::GPU_MEM));
    pods.volcano_unit = unit;
    let mut state = state();
    host.sample(&mut state, &pods, at(0));
    let status = status_of(&state, &pods);
    let taken = [0, 1].map(|index: usize| status.gpus[index].unmanaged_mib);
    (status, taken)
}

fn gpushare(index: &str) -> Pod {
    let limits = json!({ names::GPUSHARE_MEM: "10" });
    let annotations = json!({
        "ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": "10", "ALIYUN_COM_GPU_MEM_DEV": "79",
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    });
    pod(&limits, &annotations)
}

fn hami(limits: &Value, devices: &str) -> Pod {
    pod(
        limits,
        &json!({ "hami.io/vgpu-devices-allocated": devices, "hami.io/vgpu-node": "n" }),
    )
}

#[test]
fn promises_of_each_sharer_are_taken_before_they_are_used() {
    let tenth = (TOTAL * 10).div_ceil(79);
    let in_mib = json!({ names::GPUSHARE_MEM: "4000" });
    let mib = json!({
        "ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "4000", "ALIYUN_COM_GPU_MEM_DEV": TOTAL.to_string(),
    });
    let several =
        json!({ "scheduler.framework.gpushare.allocation": r#"{"0":{"0":2,"1":3},"1":{"1":1}}"# });
    let memory = json!({ "nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000" });
    let volcano = json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1126" });
    let ids = json!({ "volcano.sh/vgpu-ids-new": "GPU-1,NVIDIA,1126,0:;" });
    for (pod, expected) in [
        (gpushare("1"), [0, tenth]),
        (pod(&in_mib, &mib), [0, 4000]),
        (
            pod(&json!({ names::GPUSHARE_MEM: "6" }), &several),
            [2048, 4096],
        ),
        (
            hami(&memory, "GPU-0,NVIDIA,3000,30:GPU-1,NVIDIA,3000,30:;"),
            [3000, 3000],
        ),
        (
            hami(&json!({ "nvidia.com/gpumem": "5" }), "GPU-1,NVIDIA,5,0:;;"),
            [0, 5],
        ),
        (pod(&volcano, &ids), [0, 1126]),
    ] {
        let (status, taken) = taken(&pod, 0);
        assert_eq!(taken, expected, "{:?}", pod.metadata.annotations);
        assert!(
            status
                .conditions
                .iter()
                .all(|it| it.r#type != "OtherSharersReadable")
        );
    }
}

/// MiB by the sharer that gave them out, from the metrics of a GPU.
fn held(pod: &Pod, used: u64) -> Vec<(String, u64)> {
    let host = Host::new(&machine(vec![Gpu {
        processes: vec![process(1, used)],
        used_mib: Some(used),
        ..h100(0)
    }]));
    host.process(1, &cgroup_of(UID));
    let pods = NodePods::new(NodePod::from_pod(pod, names::GPU_MEM));
    let mut state = state();
    host.sample(&mut state, &pods, at(0));
    let metrics = Metrics::new("n").unwrap();
    metrics.sampled(None, &state, &pods);
    let families = metrics.gather().unwrap();
    let family = families
        .iter()
        .find(|it| it.name() == "gpustow_gpu_memory_held_bytes");
    let series = family.iter().flat_map(|family| family.get_metric());
    let owner = |labels: &[LabelPair]| {
        let label = labels.iter().find(|label| label.name() == "owner");
        label
            .map(|label| label.value().to_owned())
            .unwrap_or_default()
    };
    series
        .map(|it| {
            (
                owner(it.get_label()),
                it.get_gauge().get_value() as u64 >> 20,
            )
        })
        .collect()
}

#[test]
fn metrics_name_who_gave_out_the_memory_of_each_gpu() {
    let memory = json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000" });
    let hamis = hami(&memory, "GPU-0,NVIDIA,3000,0:;");
    let held_by = |owner: &str, mib| (owner.to_owned(), mib);
    assert_eq!(held(&hamis, 1000), [held_by("hami", 3000)]);
    assert_eq!(
        held(&hamis, 5000),
        [held_by("hami", 3000), held_by("unmanaged", 2000)]
    );
    let limits = json!({ names::GPU_MEM: "7000" });
    let assignment =
        r#"{"version":1,"gpus":[{"uuid":"GPU-0","mib":7000}],"containers":{"main":["GPU-0"]}}"#;
    let ours = pod(&limits, &json!({ names::ASSIGNMENT: assignment }));
    assert_eq!(held(&ours, 1000), [held_by("gpustow", 7000)]);
    assert_eq!(
        held(&pod(&json!({}), &json!({})), 900),
        [held_by("unmanaged", 900)]
    );
}

#[test]
fn larger_of_promise_and_use_counts_until_the_pod_has_finished() {
    let memory = json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000" });
    let mut pod = hami(&memory, "GPU-0,NVIDIA,3000,0:;");
    assert_eq!(taken(&pod, 1000).1, [3000, 0]);
    let (status, more) = taken(&pod, 5000);
    assert_eq!(more, [5000, 0]);
    assert_eq!(status.gpus[0].other_pods_mib, 5000);
    for phase in ["Succeeded", "Failed"] {
        pod.status.as_mut().unwrap().phase = Some(phase.to_owned());
        assert_eq!(taken(&pod, 0).1, [0, 0]);
    }
}

#[test]
fn promise_that_cannot_be_read_counts_on_every_gpu_and_is_reported() {
    let bad = hami(
        &json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000" }),
        "GPU-0;3000",
    );
    let none = pod(&json!({ names::GPUSHARE_MEM: "3" }), &json!({}));
    let more = hami(
        &json!({ "nvidia.com/gpumem": "7" }),
        "GPU-0,NVIDIA,7,0:GPU-1,NVIDIA,7,0:;",
    );
    for (pod, each) in [
        (bad, 3000),
        (gpushare("x"), 10_240),
        (none, 3072),
        (more, 7),
    ] {
        let (status, taken) = taken(&pod, 0);
        assert_eq!(taken, [each, each], "{:?}", pod.metadata.annotations);
        let condition = status
            .conditions
            .iter()
            .find(|it| it.r#type == "OtherSharersReadable");
        assert!(
            condition
                .unwrap()
                .message
                .ends_with("counts on every GPU: team/p")
        );
    }
}

#[test]
fn annotation_of_a_sharer_counts_only_on_a_pod_that_requests_its_resource() {
    let plain = hami(&json!({}), "GPU-0,NVIDIA,80000,0:;");
    let of_the_plugin = hami(
        &json!({ "nvidia.com/gpu": "1" }),
        "GPU-0,NVIDIA,1,0:GPU-1,NVIDIA,80000,0:;",
    );
    for pod in [plain, of_the_plugin] {
        assert_eq!(taken(&pod, 0).1, [0, 0]);
    }
}

#[test]
fn unit_of_volcano_is_that_of_its_capacity_on_the_node() {
    let amounts = |units: &str| {
        let all = json!({ names::VOLCANO_MEMORY: units });
        serde_json::from_value(all).unwrap()
    };
    for (units, unit) in [
        ("163118", Some(1)),
        ("16310", Some(10)),
        ("1630", Some(100)),
        // More than there is.
        ("326236", Some(1)),
        ("0", None),
        ("many", None),
        ("18446744073709551615", Some(1)),
    ] {
        assert_eq!(
            volcano_unit(Some(&amounts(units)), 2 * TOTAL),
            unit,
            "{units}"
        );
        assert_eq!(volcano_unit(Some(&amounts(units)), 0), None);
    }
    let volcano = json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000" });
    let ids = json!({ "volcano.sh/vgpu-ids-new": "GPU-1,NVIDIA,3000,0:;" });
    for (pod, expected) in [
        (pod(&volcano, &ids), [0, 30_000]),
        (pod(&volcano, &json!({})), [30_000, 30_000]),
    ] {
        assert_eq!(taken_in(&pod, 0, Some(10)).1, expected);
    }
}

proptest! {
    #[test]
    fn whatever_annotations_say_no_more_than_the_gpu_counts(
        index in any::<String>(),
        list in "[GPU,:;0-9a-z-]{0,40}",
        amount in any::<u64>(),
        total in 0..u64::MAX,
        unit in any::<u64>(),
    ) {
        let limits = json!({
            names::GPUSHARE_MEM: amount.to_string(), "nvidia.com/gpumem": amount.to_string(),
            "nvidia.com/gpu": "3", "volcano.sh/vgpu-number": "2",
        });
        let annotations = json!({
            "ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": amount.to_string(),
            "ALIYUN_COM_GPU_MEM_DEV": index, "scheduler.framework.gpushare.allocation": list,
            "hami.io/vgpu-devices-allocated": list, "volcano.sh/vgpu-ids-new": list,
        });
        for key in [names::GPUSHARE_MEM, "volcano.sh/vgpu-number", "nvidia.com/gpumem"] {
            let mut limits = limits.clone();
            if let Some(limits) = limits.as_object_mut() {
                limits.retain(|it, _| it == key || it == "nvidia.com/gpu");
            }
            let promise = Promise::of(&pod(&limits, &annotations));
            prop_assert!(promise.is_none_or(|it| it.on("GPU-0", 0, total, unit) <= total));
        }
    }
}
