//! The refused pods, each with the field, its value and the advice in its refusal.

use anyhow::Result;
use gpustow_admission::template;
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::{Site, asks, of, pod, with};

/// Requests that are wrong in the extender's own words, by their annotations and the MiB of container `a`.
fn wrong() -> Vec<(Value, &'static str)> {
    let long = "A".repeat(1025);
    vec![
        (json!({ names::GPU_COUNT: "3" }), "8192"),
        (json!({}), "8192Mi"),
        (json!({ names::GPU_COUNT: "2" }), "3000001"),
        (json!({ names::GPU_COUNT: "0" }), "1"),
        (json!({ names::GPU_COUNT: "65" }), "1"),
        (json!({ names::GPU_COUNT: "+2" }), "2"),
        (json!({ names::GPU_COUNT: "99999999999999999999" }), "2"),
        (json!({ names::GPU_COUNT: "" }), "2"),
        (json!({ "gpu-count.gpustow.dev/a": "two" }), "1"),
        (json!({ "gpu-count.gpustow.dev/b": "1" }), "1"),
        (json!({ names::GPU_MEM_PERCENTAGE: "0" }), "1"),
        (json!({ names::GPU_MEM_PERCENTAGE: "101" }), "1"),
        (json!({ names::GPU_MEM_PERCENTAGE: "25%" }), "1"),
        (json!({ names::GPU_MEM_PERCENTAGE: "025" }), "1"),
        (json!({ "gpu-mem-percentage.gpustow.dev/b": "25" }), "1"),
        (
            json!({ names::GPU_MEM_PERCENTAGE: "25", names::EXCLUSIVE: "true" }),
            "1",
        ),
        (
            json!({ names::GPU_MEM_PERCENTAGE: "25", names::ENFORCE: "driver" }),
            "1",
        ),
        (
            json!({ names::GPU_MEM_PERCENTAGE: "25", names::MEM_LIMIT: "max" }),
            "1",
        ),
        (json!({ names::COMPUTE_PERCENT: "0" }), "1"),
        (
            json!({ names::COMPUTE_PERCENT: "30", names::EXCLUSIVE: "true" }),
            "1",
        ),
        (
            json!({ names::COMPUTE_PERCENT: "30", names::MEM_LIMIT: "max" }),
            "1",
        ),
        (json!({ names::ISOLATION: "mps" }), "1"),
        (
            json!({ names::ISOLATION: "mig", names::COMPUTE_PERCENT: "30" }),
            "1",
        ),
        (
            json!({ names::ISOLATION: "mig", names::GPU_COUNT: "2" }),
            "2",
        ),
        (
            json!({ names::ISOLATION: "mig", names::ENFORCE: "driver" }),
            "1024",
        ),
        (json!({ names::EXCLUSIVE: "yes" }), "1"),
        (json!({ names::GPU_MODELS: "A100,,H100" }), "1"),
        (json!({ names::GPU_MODELS: long }), "1"),
        (json!({ names::NOT_GPU_MODELS: "-A100" }), "1"),
        (json!({ names::GPU_UUIDS: "*" }), "1"),
        (json!({ names::GPU_AFFINITY: "a/b" }), "1"),
        (json!({ names::GPU_ANTI_AFFINITY: "a-" }), "1"),
        (json!({ names::POLICY: "best" }), "1"),
        (json!({ names::ENFORCE: "on" }), "4096"),
        (json!({ names::MEM_LIMIT: "8Gi" }), "4096"),
        (json!({ names::MEM_LIMIT: "1" }), "4096"),
    ]
}

#[test]
fn wrong_request_is_refused_in_the_extenders_words() -> Result<()> {
    for (notes, mib) in wrong() {
        let asked = pod(notes, json!([asks("a", mib)]));
        let typed: Pod = serde_json::from_value(asked.clone())?;
        let expected = gpustow_api::request(&typed, names::GPU_MEM).err();
        let expected = expected.map(|it| it.to_string());
        assert_eq!(Some(Site::default().refusal(&asked)?), expected);
    }
    Ok(())
}

/// A pod, and a part of its refusal.
fn others() -> Vec<(Value, &'static str)> {
    let one = |notes: Value, container: Value| pod(notes, json!([container]));
    let env = |name: &str, value: &str| json!([{ "name": name, "value": value }]);
    let own = |value: &str| with(asks("a", "1"), "env", env(names::VISIBLE_DEVICES, value));
    let other =
        json!({ "fieldRef": { "fieldPath": "metadata.annotations['devices.gpustow.dev/b']" } });
    let other = json!([{ "name": names::VISIBLE_DEVICES, "valueFrom": other }]);
    let privileged = with(
        asks("a", "1"),
        "securityContext",
        json!({ "privileged": true }),
    );
    let mig = of(
        "a",
        json!({ names::GPU_MEM: "1", "nvidia.com/mig-1g.10gb": "1" }),
    );
    let in_spec = |key: &str, value: Value| {
        let mut pod = one(json!({}), asks("a", "1"));
        pod["spec"][key] = value;
        pod
    };
    let mut gated = pod(json!({}), json!([{ "name": "a" }]));
    gated["spec"]["schedulingGates"] = json!([{ "name": names::GATE }]);
    let shares = json!({ names::COMPUTE_PERCENT: "30" });
    let many: Vec<_> = (0..257)
        .map(|it| json!({ "name": format!("c{it}") }))
        .collect();
    vec![
        (
            in_spec("schedulerName", json!("other")),
            "spec.schedulerName: other does not use gpustow: write gpustow-scheduler",
        ),
        (
            in_spec("nodeName", json!("n")),
            "matchFields: metadata.name In [n]",
        ),
        (
            one(json!({}), privileged),
            "spec.containers[0].securityContext.privileged: a privileged container sees every",
        ),
        (
            one(json!({}), own("all")),
            "spec.containers[0].env: NVIDIA_VISIBLE_DEVICES is gpustow's to set: remove it",
        ),
        (
            one(json!({}), own("void")),
            "NVIDIA_VISIBLE_DEVICES is gpustow's to set",
        ),
        (
            one(json!({}), with(asks("a", "1"), "env", other)),
            "NVIDIA_VISIBLE_DEVICES is gpustow's to set",
        ),
        (
            one(json!({}), mig),
            "spec.containers[0].resources.limits[nvidia.com/mig-1g.10gb]: a container asks either",
        ),
        (
            one(
                json!({}),
                with(asks("a", "1"), "env", env(names::MEMORY_LIMIT, "1")),
            ),
            "are gpustow's to set: remove them",
        ),
        (
            one(
                shares.clone(),
                with(asks("a", "1"), "env", env(names::MPS_THREADS, "90")),
            ),
            "the variables CUDA_MPS_*",
        ),
        (
            one(
                shares,
                with(
                    asks("a", "1"),
                    "volumeMounts",
                    json!([{ "name": "own", "mountPath": "/dev/shm" }]),
                ),
            ),
            "gpustow's to mount",
        ),
        (
            gated,
            "the pod requests no GPU memory and is not queued: remove the gate",
        ),
        (pod(json!({}), json!(many)), "more than 256 of all kinds"),
        (
            one(json!({ names::RECLAIM_ACTION: "Kill" }), asks("a", "1")),
            "is none of Event, KillProcess, Evict",
        ),
        (
            one(json!({ names::EVICTABLE: "yes" }), asks("a", "1")),
            "is neither \"true\" nor \"false\"",
        ),
        (
            one(json!({ "gpustow.dev/gpu-counts": "2" }), asks("a", "2")),
            "there is no such annotation: write gpustow.dev/gpu-count",
        ),
        (
            one(json!({ names::GPU_MEM: "2" }), asks("a", "2")),
            "this is no annotation: write it into resources.limits",
        ),
        (
            one(
                json!({}),
                of("a", json!({ "gpustow.dev/gpu-memory": "8000" })),
            ),
            "no node has such a resource: write gpustow.dev/gpu-mem",
        ),
        (
            one(json!({}), of("a", json!({ names::EXCLUSIVE: "1" }))),
            "write gpustow.dev/exclusive into metadata.annotations",
        ),
        (
            one(json!({ names::GPU_MEM: "auto" }), json!({ "name": "a" })),
            "the namespace does not allow it",
        ),
    ]
}

#[test]
fn way_around_the_assignment_is_refused_and_named() -> Result<()> {
    for (asked, expected) in others() {
        let said = Site::default().refusal(&asked)?;
        assert!(said.contains(expected), "{said}\nexpected {expected}");
    }
    for key in [
        names::ASSIGNMENT,
        names::EPOCH,
        names::FENCE,
        names::RESERVATION,
        names::CONFIRMED,
        names::PLACEHOLDER_FOR,
        "devices.gpustow.dev/a",
        "mib.gpustow.dev/a",
        "share.gpustow.dev/a",
        "mps.gpustow.dev/a",
        "nvidia.cdi.k8s.io/container.a",
        "nvidia.cdi.k8s.io/pod",
        names::CDI_DOMAIN,
    ] {
        let said = Site::default().refusal(&pod(json!({ key: "x" }), json!([asks("a", "1")])))?;
        assert!(
            said.starts_with(&format!("metadata.annotations[{key}]: only gpustow's ")),
            "{said}"
        );
    }
    Ok(())
}

#[test]
fn request_below_the_least_is_refused_and_a_percentage_counts_as_its_share() -> Result<()> {
    let least = json!({ "leastMiBPerGpu": 512, "leastMiBPerExclusiveGpu": 81920 });
    let site = Site::with(json!({ "requests": least }))?;
    for (notes, mib, least) in [
        (json!({}), "511", "ask for 512"),
        (json!({ names::GPU_COUNT: "4" }), "1024", "ask for 2048"),
        (
            json!({ names::EXCLUSIVE: "true" }),
            "1024",
            "ask for 81920, or remove gpustow.dev/exclusive",
        ),
        (
            json!({ names::GPU_MEM_PERCENTAGE: "100" }),
            "1024",
            "ask for 81920",
        ),
        (
            json!({ names::GPU_MEM_PERCENTAGE: "25", names::GPU_COUNT: "2" }),
            "1024",
            "ask for 40960",
        ),
    ] {
        let said = site.refusal(&pod(notes, json!([asks("a", mib)])))?;
        assert!(said.contains(least), "{said}");
    }
    for (notes, mib) in [
        (json!({}), "512"),
        (json!({ names::GPU_MEM_PERCENTAGE: "25" }), "20480"),
        (json!({ names::EXCLUSIVE: "true" }), "81920"),
    ] {
        site.create(&pod(notes, json!([asks("a", mib)])))?;
    }
    Ok(())
}

#[test]
fn label_of_our_group_is_warned_of() -> Result<()> {
    let mut asked = pod(json!({}), json!([asks("a", "1")]));
    asked["metadata"]["labels"] = json!({ names::EXCLUSIVE: "true", "gpustow.dev/x": "y" });
    let said = Site::default().create(&asked)?.warnings;
    assert!(
        said[0].contains("write gpustow.dev/exclusive into metadata.annotations"),
        "{said:?}"
    );
    assert!(
        said[1].contains("gpustow reads no such label of a pod: remove it"),
        "{said:?}"
    );
    Ok(())
}

#[test]
fn author_of_a_template_is_warned_of_what_its_pods_are_refused_for() -> Result<()> {
    let site = Site::default();
    let cluster = gpustow_admission::Cluster {
        resource: names::GPU_MEM,
        spec: &site.spec,
        queue_from: &[],
    };
    let template = pod(json!({ names::GPU_COUNT: "0" }), json!([asks("a", "1")]));
    let of = |object: Value| template::warnings(&object, cluster, &site.namespace);
    let said = of(json!({ "kind": "Deployment", "spec": { "template": template } }));
    let expected = "spec.template.metadata.annotations[gpustow.dev/gpu-count]: \"0\" is not a number of GPUs: write 1 to 64";
    assert_eq!(said, [expected]);
    let said = of(
        json!({ "kind": "CronJob", "spec": { "jobTemplate": { "spec": { "template": template } } } }),
    );
    assert!(
        said[0].starts_with("spec.jobTemplate.spec.template.metadata."),
        "{said:?}"
    );
    assert!(of(json!({ "kind": "Deployment" })).is_empty());
    let good = pod(json!({}), json!([asks("a", "1")]));
    assert!(of(json!({ "spec": { "template": good } })).is_empty());
    Ok(())
}
