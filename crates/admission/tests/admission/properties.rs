//! Properties of any pod, good or bad, and of any JSON.

use gpustow_admission::{Act, Admitted};
use gpustow_api::{QueueFrom, names};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::Site;

/// Any JSON, with keys that admission reads more often than others.
fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2i64..300).prop_map(Value::from),
        "[a-z0-9*.,:/-]{0,8}".prop_map(Value::from),
        prop::sample::select(vec!["void", "driver", "true", "auto", "mig", "2", "8192"])
            .prop_map(Value::from),
    ];
    let key = prop::sample::select(vec![
        "metadata",
        "annotations",
        "labels",
        "ownerReferences",
        "spec",
        "containers",
        "initContainers",
        "ephemeralContainers",
        "env",
        "resources",
        "limits",
        "requests",
        "name",
        "value",
        "valueFrom",
        "volumes",
        "volumeMounts",
        "schedulerName",
        "schedulingGates",
        names::GPU_MEM,
        names::GPUSHARE_MEM,
        names::NVIDIA_GPU,
        names::COMPUTE_PERCENT,
        names::ENFORCE,
        names::GPU_COUNT,
    ]);
    leaf.prop_recursive(8, 96, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6).prop_map(|fields| {
                let fields = fields.into_iter().map(|(key, it)| (key.to_owned(), it));
                Value::Object(fields.collect::<Map<_, _>>())
            }),
        ]
    })
}

fn one_of(values: &'static [(&'static str, &'static str)]) -> impl Strategy<Value = Value> {
    let some = prop::sample::subsequence(values.to_vec(), 0..=values.len().min(3));
    some.prop_map(|pairs| {
        pairs
            .into_iter()
            .map(|(key, it)| (key.to_owned(), json!(it)))
            .collect()
    })
}

/// Limits, in the resources of every sharer.
const LIMITS: [(&str, &str); 14] = [
    (names::GPU_MEM, "4096"),
    (names::GPU_MEM, "8Ki"),
    (names::GPU_MEM, "3"),
    (names::GPU_MEM, "0"),
    ("cpu", "1"),
    (names::NVIDIA_GPU, "1"),
    (names::NVIDIA_GPU, "0"),
    (names::GPUSHARE_MEM, "3"),
    ("nvidia.com/gpumem", "3001"),
    ("nvidia.com/gpumem-percentage", "30"),
    ("volcano.sh/vgpu-number", "2"),
    ("volcano.sh/vgpu-memory", "2000"),
    ("nvidia.com/hostdev", "1"),
    ("gpustow.dev/gpu-memory", "1"),
];
const NOTES: [(&str, &str); 14] = [
    (names::GPU_COUNT, "2"),
    (names::GPU_COUNT, "x"),
    (names::ENFORCE, "driver"),
    (names::MEM_LIMIT, "9000"),
    (names::EXCLUSIVE, "true"),
    (names::COMPUTE_PERCENT, "30"),
    (names::ISOLATION, "mig"),
    ("team", "a"),
    (names::GPU_MEM_PERCENTAGE, "25"),
    ("nvidia.com/use-gputype", "A100"),
    (names::GPU_MEM, "auto"),
    (names::EPOCH, "1"),
    ("gpustow.dev/gpu-modles", "x"),
    (names::MADE_FOR, "9999.0.0"),
];
const ENV: [(&str, &str); 6] = [
    ("A", "b"),
    (names::VISIBLE_DEVICES, "void"),
    (names::VISIBLE_DEVICES, "all"),
    (names::MEM_SHARE, "0.5"),
    (names::MEMORY_LIMIT, "4096"),
    (names::MPS_THREADS, "30"),
];
const SHARERS: [&str; 8] = [
    "gpushare",
    "hami",
    "volcano",
    "whole",
    "time-slicing",
    "mig",
    "mig-instance",
    "nvshare",
];

fn container(name: String) -> impl Strategy<Value = Value> {
    (
        one_of(&LIMITS),
        prop::sample::subsequence(ENV.to_vec(), 0..=2),
    )
        .prop_map(move |(limits, env)| {
            let env: Vec<_> = env
                .into_iter()
                .map(|(name, value)| json!({ "name": name, "value": value }))
                .collect();
            let resources = json!({ "limits": limits, "requests": limits });
            json!({ "name": name, "image": "cuda", "env": env, "resources": resources })
        })
}

fn pods() -> impl Strategy<Value = Value> {
    let list = |kind: &'static str, from: usize| {
        (from..3usize).prop_flat_map(move |count| {
            (0..count)
                .map(|index| container(format!("{kind}{index}")))
                .collect::<Vec<_>>()
        })
    };
    let scheduler = prop::sample::select(vec![
        "default-scheduler",
        names::SCHEDULER,
        "volcano",
        "other",
    ]);
    (list("c", 1), list("i", 0), one_of(&NOTES), scheduler).prop_map(
        |(main, init, notes, scheduler)| {
            json!({ "metadata": { "name": "p", "annotations": notes },
            "spec": { "schedulerName": scheduler, "containers": main, "initContainers": init } })
        },
    )
}

fn sites() -> impl Strategy<Value = Site> {
    let sharer = prop::option::of(prop::sample::select(SHARERS.to_vec()));
    (sharer, prop::sample::select(vec!["watch", "driver"]), any::<bool>()).prop_map(|(sharer, enforce, queues)| {
        let requests = json!({ "runtimeClassName": "nvidia", "driverCapabilities": "compute", "enforce": enforce });
        let mut site = Site::with(json!({ "requests": requests })).unwrap_or_default();
        let shares = sharer.map(|_| (names::ADOPT_REPLICAS_LABEL, "4"));
        let labels: Vec<_> = sharer.map(|it| (names::ADOPT_LABEL, it)).into_iter().chain(shares).collect();
        site.namespace = Site::labelled(&labels).namespace;
        site.from = if queues { vec![QueueFrom::ALL] } else { Vec::new() };
        site
    })
}

/// The pod that the API server makes of one by a JSON patch that adds, replaces and removes.
fn patched(pod: &Value, patch: &[Value]) -> Value {
    let mut pod = pod.clone();
    for operation in patch {
        let path = operation["path"].as_str().unwrap_or_default();
        let (parent, key) = path.rsplit_once('/').unwrap_or_default();
        let key = key.replace("~1", "/").replace("~0", "~");
        let value = operation["value"].clone();
        match pod.pointer_mut(parent) {
            Some(Value::Object(fields)) if operation["op"] == "remove" => drop(fields.remove(&key)),
            Some(Value::Object(fields)) => drop(fields.insert(key, value)),
            Some(Value::Array(list)) => list.insert(key.parse().unwrap_or(list.len()), value),
            _ => {}
        }
    }
    pod
}

proptest! {
    #[test]
    fn any_json_has_an_answer_and_the_answer_stays(pod in anything(), before in anything(), site in sites()) {
        if let Ok(Admitted { pod, .. }) = site.ask(&pod, Act::Create) {
            prop_assert_eq!(site.ask(&pod, Act::Create).map(|it| it.patch), Ok(Vec::new()));
        }
        let _ = site.ask(&pod, Act::Annotate { before: &before, resizes: true });
        let _ = site.ask(&pod, Act::Debug { before: &before });
    }

    #[test]
    fn admitted_pod_passes_as_it_is(pod in pods(), site in sites()) {
        if let Ok(made) = site.ask(&pod, Act::Create) {
            prop_assert_eq!(&patched(&pod, &made.patch), &made.pod);
            let again = site.ask(&made.pod, Act::Create);
            prop_assert_eq!(again.map(|it| (it.pod, it.patch)), Ok((made.pod, Vec::new())));
        }
    }

    #[test]
    fn admitted_pod_lets_no_container_see_what_it_was_not_given(pod in pods(), site in sites()) {
        let Ok(made) = site.ask(&pod, Act::Create) else { return Ok(()) };
        let spec = &made.pod["spec"];
        let lists = ["containers", "initContainers"].map(|list| spec[list].as_array().cloned().unwrap_or_default());
        let all = lists.concat();
        let asks = |it: &Value| {
            let amount = &it["resources"]["limits"][names::GPU_MEM];
            !amount.is_null() && amount != "0"
        };
        if !all.iter().any(asks) {
            return Ok(());
        }
        for it in &all {
            let env = it["env"].as_array().cloned().unwrap_or_default();
            let of = |variable: &Value| variable["name"] == names::VISIBLE_DEVICES;
            let devices: Vec<_> = env.into_iter().filter(of).collect();
            let limits = it["resources"]["limits"].as_object();
            let mut limits = limits.into_iter().flatten();
            // NVIDIA's or HAMi's device plugin gives them.
            let whole = limits.any(|(key, amount)| names::is_nvidia_gpu(key) && amount != "0");
            prop_assert!(whole || !devices.is_empty(), "{}", it);
            for variable in devices {
                let path = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str().unwrap_or_default();
                let own = format!("metadata.annotations['{}{}']", names::DEVICES_OF, it["name"].as_str().unwrap_or_default());
                prop_assert!(if asks(it) { path == own } else { variable["value"] == "void" }, "{}", it);
            }
        }
        // The extender takes it, too.
        let typed = serde_json::from_value(made.pod.clone());
        let request = typed.map(|pod| gpustow_api::request(&pod, names::GPU_MEM).map(|it| it.1.len()));
        prop_assert!(matches!(request, Ok(Ok(1..))), "{:?}", request);
    }

    #[test]
    fn patch_is_bounded_by_the_size_of_the_pod(pod in pods(), site in sites()) {
        if let Ok(made) = site.ask(&pod, Act::Create) {
            let containers = made.pod["spec"]["containers"].as_array().map_or(0, Vec::len) + 2;
            prop_assert!(made.patch.len() <= 24 * containers, "{}", made.patch.len());
        }
    }
}
