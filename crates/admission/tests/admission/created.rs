//! The changes of pods that request GPU memory; other pods stay as they are.

use anyhow::Result;
use gpustow_admission::Act;
use gpustow_api::{QueueFrom, names};
use serde_json::{Value, json};

use crate::{Site, asks, env, note, of, pod, with};

fn devices(name: &str) -> String {
    format!(
        "{}=metadata.annotations['devices.gpustow.dev/{name}']",
        names::VISIBLE_DEVICES
    )
}

fn told(name: &str) -> [String; 3] {
    let variable = |(variable, key)| {
        format!("GPUSTOW_MEM_{variable}=metadata.annotations['{key}.gpustow.dev/{name}']")
    };
    [("MIB", "mib"), ("BYTES", "bytes"), ("SHARE", "share")].map(variable)
}

#[test]
fn pod_that_requests_memory_gets_scheduler_label_and_variables() -> Result<()> {
    let mut asked = pod(
        json!({}),
        json!([
            with(asks("main", "8Ki"), "env", json!([{ "name": "A", "value": "$(GPUSTOW_MEM_MIB)" }])),
            with(asks("own", "1"), "env", json!([{ "name": names::MEM_SHARE, "value": "0.5" }])),
            asks("zero", "0"),
            of("nic", json!({ "nvidia.com/mlnxnics": "1" })),
            { "name": "none", "env": [{ "name": names::VISIBLE_DEVICES, "value": "none" }] },
        ]),
    );
    asked["spec"]["initContainers"] = json!([
        asks("init", "1"),
        with(asks("sidecar", "16"), "restartPolicy", json!("Always")),
        of("whole", json!({ names::NVIDIA_GPU: "1" })),
    ]);
    let made = Site::default().create(&asked)?;
    assert_eq!(made.warnings, Vec::<String>::new());
    let spec = &made.pod["spec"];
    assert_eq!(spec["schedulerName"], names::SCHEDULER);
    assert_eq!(made.pod["metadata"]["labels"][names::MANAGED_LABEL], "true");
    let all = |name: &str| [&told(name)[..], &[devices(name)]].concat();
    let void = vec![format!("{}=void", names::VISIBLE_DEVICES)];
    let [mib, bytes, share] = told("main");
    let named = "A=$(GPUSTOW_MEM_MIB)".to_owned();
    let own = vec![
        told("own")[0].clone(),
        told("own")[1].clone(),
        "GPUSTOW_MEM_SHARE=0.5".to_owned(),
        devices("own"),
    ];
    let none = vec![format!("{}=none", names::VISIBLE_DEVICES)];
    let expected = [
        vec![mib, bytes, share, named, devices("main")],
        own,
        void.clone(),
        void,
        none,
    ];
    for (index, expected) in expected.into_iter().enumerate() {
        assert_eq!(env(&spec["containers"][index]), expected);
    }
    let expected = [all("init"), all("sidecar"), Vec::new()];
    for (index, expected) in expected.into_iter().enumerate() {
        assert_eq!(env(&spec["initContainers"][index]), expected);
    }
    Ok(())
}

#[test]
fn patch_makes_the_pod_of_the_one_that_came_and_leaves_unknown_fields() -> Result<()> {
    let later = with(asks("a", "1"), "fieldOfALaterVersion", json!({ "x": [1] }));
    let mut asked = pod(json!({}), json!([later, { "name": "b" }]));
    asked["spec"]["alsoLater"] = json!(true);
    let made = Site::default().create(&asked)?;
    let container = &made.pod["spec"]["containers"][0];
    assert_eq!(container["fieldOfALaterVersion"], json!({ "x": [1] }));
    assert_eq!(made.pod["spec"]["alsoLater"], true);
    let paths: Vec<_> = made.patch.iter().map(|it| it["path"].clone()).collect();
    let expected = [
        "/metadata/labels",
        "/metadata/labels/gpustow.dev~1managed",
        "/spec/schedulerName",
        "/spec/containers/0/env",
        "/spec/containers/0/env/0",
        "/spec/containers/0/env/0",
        "/spec/containers/0/env/0",
        "/spec/containers/0/env/-",
        "/spec/containers/1/env",
        "/spec/containers/1/env/-",
    ];
    assert_eq!(paths, expected);
    Ok(())
}

#[test]
fn pod_that_requests_nothing_is_left_as_it_is() -> Result<()> {
    for container in [
        json!({ "name": "a", "securityContext": { "privileged": true },
            "env": [{ "name": names::VISIBLE_DEVICES, "value": "all" }] }),
        asks("a", "0"),
        of("a", json!({ names::NVIDIA_GPU: "1" })),
    ] {
        let asked = pod(
            json!({ "nvidia.cdi.k8s.io/container.a": "x" }),
            json!([container]),
        );
        let made = Site::default().create(&asked)?;
        assert_eq!(
            (made.pod, made.patch, made.warnings),
            (asked, Vec::new(), Vec::new())
        );
    }
    // The author of the pod learns that the annotation does nothing; a controller's author has been warned before.
    let mut asked = pod(json!({ names::GPU_COUNT: "?" }), json!([{ "name": "a" }]));
    let made = Site::default().create(&asked)?;
    assert!(made.warnings[0].contains("no container asks for gpustow.dev/gpu-mem"));
    asked["metadata"]["ownerReferences"] = json!([{ "kind": "ReplicaSet", "controller": true }]);
    assert_eq!(
        Site::default().create(&asked)?.warnings,
        Vec::<String>::new()
    );
    Ok(())
}

#[test]
fn pod_gets_what_the_administrator_has_and_it_does_not_say() -> Result<()> {
    let requests = json!({ "runtimeClassName": "nvidia", "driverCapabilities": "compute", "enforce": "driver" });
    let site = Site::with(json!({ "requests": requests }))?;
    let own = json!([{ "name": names::DRIVER_CAPABILITIES, "value": "all" }]);
    let containers =
        json!([with(asks("a", "8192"), "env", own), asks("b", "4096"), { "name": "idle" }]);
    let made = site
        .create(&pod(json!({ names::GPU_COUNT: "2" }), containers))?
        .pod;
    assert_eq!(made["spec"]["runtimeClassName"], "nvidia");
    assert_eq!(note(&made, names::ENFORCE), Some("driver"));
    let has = |index: usize, variable: &str| {
        let all = env(&made["spec"]["containers"][index]);
        all.contains(&variable.to_owned())
    };
    assert!(
        has(0, "NVIDIA_DRIVER_CAPABILITIES=all") && has(1, "NVIDIA_DRIVER_CAPABILITIES=compute")
    );
    assert!(has(0, "NVIDIA_GPU_MEMORY_LIMIT=4096") && has(0, "NVIDIA_GPU_MEMORY_REQUEST=0"));
    assert!(has(1, "NVIDIA_GPU_MEMORY_LIMIT=2048"));
    assert_eq!(env(&made["spec"]["containers"][2]).len(), 1);
    // The driver does not limit a percentage or whole GPUs.
    for notes in [
        json!({ names::GPU_MEM_PERCENTAGE: "25" }),
        json!({ names::EXCLUSIVE: "true" }),
    ] {
        let made = site.create(&pod(notes, json!([asks("a", "1")])))?.pod;
        assert_eq!(note(&made, names::ENFORCE), None);
    }
    Ok(())
}

#[test]
fn pod_with_a_share_of_compute_gets_what_mps_reads() -> Result<()> {
    let notes = json!({ names::COMPUTE_PERCENT: "30" });
    let made = Site::default()
        .create(&pod(notes, json!([asks("a", "4096"), { "name": "idle" }])))?
        .pod;
    let all = env(&made["spec"]["containers"][0]);
    for variable in [
        "CUDA_MPS_PIPE_DIRECTORY=/run/gpustow/mps/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=metadata.annotations['mps.gpustow.dev/a']",
    ] {
        assert!(all.contains(&variable.to_owned()), "{all:?}");
    }
    assert_eq!(made["spec"]["volumes"].as_array().map(Vec::len), Some(2));
    let mounts = &made["spec"]["containers"][0]["volumeMounts"];
    assert_eq!(
        mounts[1],
        json!({ "name": "gpustow-mps-shm", "mountPath": "/dev/shm" })
    );
    assert!(made["spec"]["containers"][1]["volumeMounts"].is_null());
    Ok(())
}

#[test]
fn pod_is_queued_by_the_entries_that_apply_to_it() -> Result<()> {
    let entry = |priority, mib_per_gpu, gpus| QueueFrom {
        priority,
        mib_per_gpu,
        gpus,
    };
    let gated = |site: &Site, pod: &Value| -> Result<bool> {
        let made = site.create(pod)?.pod;
        Ok(made["spec"]["schedulingGates"] == json!([{ "name": names::GATE }]))
    };
    let small = pod(json!({}), json!([asks("a", "1024")]));
    let large = pod(json!({ names::GPU_COUNT: "2" }), json!([asks("a", "8192")]));
    let part = pod(
        json!({ names::GPU_MEM_PERCENTAGE: "10" }),
        json!([asks("a", "1")]),
    );
    let mut site = Site {
        from: vec![entry(0, 4096, 2)],
        ..Site::default()
    };
    for (pod, expected) in [(&small, false), (&large, true), (&part, true)] {
        assert_eq!(gated(&site, pod)?, expected, "{pod}");
    }
    for (path, value) in [
        ("/spec/priority", json!(1)),
        ("/spec/nodeName", json!("n")),
        ("/spec/priorityClassName", json!("system-node-critical")),
        (
            "/metadata/ownerReferences",
            json!([{ "kind": "DaemonSet", "controller": true }]),
        ),
    ] {
        let mut pod = large.clone();
        let (parent, key) = path.rsplit_once('/').unwrap_or_default();
        if let Some(parent) = pod.pointer_mut(parent) {
            parent[key] = value;
        }
        let made = site.ask(&pod, Act::Create);
        let gates = made.map(|it| it.pod["spec"]["schedulingGates"].clone());
        assert!(gates.is_err() || gates == Ok(Value::Null), "{path}");
    }
    site.namespace = Site::labelled(&[(names::QUEUE_LABEL, "off")]).namespace;
    assert!(!gated(&site, &large)?);
    Ok(())
}

#[test]
fn debug_container_gets_no_gpu_but_the_pods_own() -> Result<()> {
    let before = Site::default()
        .create(&pod(json!({}), json!([asks("main", "1")])))?
        .pod;
    let debug = |env: Value| {
        let mut pod = before.clone();
        pod["spec"]["ephemeralContainers"] = json!([{ "name": "debug", "env": env }]);
        let act = Act::Debug { before: &before };
        let made = Site::default().ask(&pod, act);
        made.map(|it| crate::env(&it.pod["spec"]["ephemeralContainers"][0]))
    };
    let own = |value: &str| json!([{ "name": names::VISIBLE_DEVICES, "value": value }]);
    assert_eq!(
        debug(json!([]))?,
        [format!("{}=void", names::VISIBLE_DEVICES)]
    );
    let refused = debug(own("all")).err().map(|it| it.field);
    assert_eq!(refused.as_deref(), Some("spec.ephemeralContainers[0].env"));
    let path = "metadata.annotations['devices.gpustow.dev/main']";
    let shared = json!([{ "name": names::VISIBLE_DEVICES, "valueFrom": { "fieldRef": { "fieldPath": path } } }]);
    assert_eq!(debug(shared)?, [devices("main")]);
    Ok(())
}

#[test]
fn pods_of_named_namespaces_start_alone_unless_they_say_how_they_start() -> Result<()> {
    let site = |names: Value, namespace: &str| -> Result<Site> {
        let mut site = Site::with(json!({ "requests": { "startAlone": names } }))?;
        site.namespace.name = Some(namespace.to_owned());
        Ok(site)
    };
    let silent = || json!({});
    let says = |how: &str| json!({ names::START: how });
    for (names, namespace, says, expected) in [
        (json!([]), "serving", silent(), None),
        (json!(["serving"]), "serving", silent(), Some("alone")),
        (json!(["serving"]), "other", silent(), None),
        (json!(["*"]), "other", silent(), Some("alone")),
        (json!(["*"]), "other", says("beside"), Some("beside")),
        (json!([]), "other", says("alone"), Some("alone")),
    ] {
        let made = site(names, namespace)?.create(&pod(says, json!([asks("a", "1")])))?;
        assert_eq!(note(&made.pod, names::START), expected);
    }
    let wrong = pod(says("first"), json!([asks("a", "1")]));
    let refusal = site(json!([]), "n")?.refusal(&wrong)?;
    assert!(refusal.ends_with("write alone, or beside"), "{refusal}");
    Ok(())
}

#[test]
fn who_starts_alone_without_a_probe_is_warned_that_nothing_shows_the_end_of_the_start() -> Result<()>
{
    let says = json!({ names::START: "alone" });
    let warnings = |container: Value| -> Result<usize> {
        let made = Site::default().create(&pod(says.clone(), json!([container])))?;
        let of_start = |it: &&String| it.contains("readinessProbe");
        Ok(made.warnings.iter().filter(of_start).count())
    };
    assert_eq!(warnings(asks("a", "1"))?, 1);
    for probe in ["readinessProbe", "startupProbe"] {
        let probed = with(
            asks("a", "1"),
            probe,
            json!({ "tcpSocket": { "port": 80 } }),
        );
        assert_eq!(warnings(probed)?, 0);
    }
    Ok(())
}

#[test]
fn pod_may_name_a_scheduler_of_the_administrators_list() -> Result<()> {
    let mut named = pod(json!({}), json!([asks("a", "1")]));
    named["spec"]["schedulerName"] = json!("own");
    let listed = Site::with(json!({ "scheduling": { "schedulers": ["own"] } }))?;
    assert_eq!(listed.create(&named)?.pod["spec"]["schedulerName"], "own");
    let refusal = Site::default().refusal(&named)?;
    assert!(
        refusal.starts_with("spec.schedulerName: own does not use gpustow"),
        "{refusal}"
    );
    Ok(())
}
