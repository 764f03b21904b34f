use gpustow_pack::Rules;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn asks(name: &str, mib: impl Into<Value>) -> Value {
    let mib: Value = mib.into();
    json!({"name": name, "resources": {"limits": {names::GPU_MEM: mib.to_string().trim_matches('"')}}})
}

fn pod(annotations: Value, spec: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"annotations": annotations}, "spec": spec})).unwrap()
}

fn read(pod: &Pod) -> Result<(Request, Vec<Box<str>>), String> {
    request(pod, names::GPU_MEM).map_err(|bad| bad.to_string())
}

fn main(gpus: u32, mib: u64) -> Claim {
    Claim::new(ClaimKind::Main, gpus, Mib(mib))
}

#[test]
fn every_kind_of_container_makes_a_claim_in_the_order_of_the_pod() {
    let pod = pod(
        json!({}),
        json!({
            "initContainers": [
                asks("fetch", "8Ki"),
                {"name": "log", "restartPolicy": "Always", "resources": {"requests": {names::GPU_MEM: "16"}}},
                {"name": "idle"},
            ],
            "containers": [asks("zero", "0"), asks("main", 1024)],
        }),
    );
    let (request, names) = read(&pod).unwrap();
    let claims = [
        Claim::new(ClaimKind::Init, 1, Mib(8192)),
        Claim::new(ClaimKind::Sidecar, 1, Mib(16)),
        main(1, 1024),
    ];
    assert_eq!(request.claims, claims);
    assert_eq!(names, ["fetch", "log", "main"].map(Box::from));
}

#[test]
fn annotations_say_how_many_gpus_whether_whole_and_by_which_policy() {
    let two = || json!({"containers": [asks("a", 4096), asks("b", 3000)]});
    let read = |annotations| read(&pod(annotations, two())).unwrap().0;
    let plain = read(json!({"gpustow.dev/unknown": "x"}));
    assert_eq!(
        (plain.claims, plain.exclusive, plain.policy),
        (vec![main(1, 4096), main(1, 3000)], false, None)
    );
    let all = read(json!({
        names::GPU_COUNT: "2",
        "gpu-count.gpustow.dev/b": "3",
        names::EXCLUSIVE: "true",
        names::POLICY: "spread",
    }));
    assert_eq!(all.claims, [main(2, 2048), main(3, 1000)]);
    assert!(all.exclusive);
    assert_eq!(all.policy, Some(PolicyKind::Spread));
}

#[test]
fn percentage_is_of_each_gpu_and_the_amount_is_the_least() {
    let two = json!({"containers": [asks("a", 4096), asks("b", 3000)]});
    let (request, _) = read(&pod(
        json!({
            names::GPU_MEM_PERCENTAGE: "25",
            "gpu-mem-percentage.gpustow.dev/b": "100",
            "gpu-count.gpustow.dev/b": "2",
        }),
        two,
    ))
    .unwrap();
    let on = |mib| request.claims.iter().map(move |claim| claim.on(Mib(mib)).0);
    assert_eq!(on(80_003).collect::<Vec<_>>(), [20_000, 80_003]);
    assert_eq!(on(8_000).collect::<Vec<_>>(), [4_096, 8_000]);
    assert_eq!(request.in_sum(), Mib(4096 + 3000));
    assert!(!request.bursts && !request.exclusive);
}

#[test]
fn the_assignment_must_have_room_among_the_annotations() {
    let large = "v".repeat(240 << 10);
    let spec = || json!({"containers": [asks("main", 4096)]});
    let problem = read(&pod(json!({"k": large}), spec())).unwrap_err();
    assert!(
        problem.starts_with("metadata.annotations: they have 245761 bytes"),
        "{problem}"
    );
    assert!(read(&pod(json!({"k": large, names::ASSIGNMENT: "{}"}), spec())).is_ok());
    assert!(
        read(&pod(
            json!({"k": large}),
            json!({"containers": [{"name": "main"}]})
        ))
        .is_ok()
    );
}

#[test]
fn a_pod_that_asks_for_nothing_is_not_held_to_the_annotations() {
    for container in [
        json!({"name": "a"}),
        asks("a", "0"),
        json!({"name": "a", "resources": {"limits": {names::NVIDIA_GPU: "1"}}}),
    ] {
        let annotations = json!({names::GPU_COUNT: "no", "gpu-count.gpustow.dev/z": "1"});
        let (request, names) = read(&pod(annotations, json!({"containers": [container]}))).unwrap();
        assert!(request.is_empty() && names.is_empty());
    }
    assert_eq!(read(&Pod::default()).unwrap(), Default::default());
}

#[test]
fn a_bad_request_names_the_field_and_the_mend() {
    let one = |mib: &str| json!({"containers": [asks("a", mib)]});
    let long = "c".repeat(MAX_CONTAINER_NAME + 1);
    let mixed = json!({"name": "a", "resources": {"limits": {names::GPU_MEM: "1", names::NVIDIA_GPU: "1"}}});
    for (annotations, spec, expected) in [
        (
            json!({names::GPU_COUNT: "3"}),
            one("8192"),
            "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: 8192 MiB do not split evenly over 3 GPUs: ask for 8193",
        ),
        (
            json!({}),
            one("8Gi"),
            "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: no GPU has 8589934592 MiB: the unit is MiB already, write 8192",
        ),
        (
            json!({names::GPU_COUNT: "2"}),
            one("3000001"),
            "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: no GPU has 1500000 MiB: write at most 2097150",
        ),
        (
            json!({names::GPU_COUNT: "0"}),
            one("1"),
            "metadata.annotations[gpustow.dev/gpu-count]: \"0\" is not a number of GPUs: write 1 to 64",
        ),
        (
            json!({names::GPU_COUNT: "65"}),
            one("1"),
            "metadata.annotations[gpustow.dev/gpu-count]: \"65\" is not a number of GPUs: write 1 to 64",
        ),
        (
            json!({names::GPU_COUNT: "+2"}),
            one("2"),
            "metadata.annotations[gpustow.dev/gpu-count]: \"+2\" is not a number of GPUs: write 1 to 64",
        ),
        (
            json!({"gpu-count.gpustow.dev/a": "two"}),
            one("1"),
            "metadata.annotations[gpu-count.gpustow.dev/a]: \"two\" is not a number of GPUs: write 1 to 64",
        ),
        (
            json!({"gpu-count.gpustow.dev/b": "1"}),
            one("1"),
            "metadata.annotations[gpu-count.gpustow.dev/b]: no container \"b\" asks for gpustow.dev/gpu-mem: remove the annotation or name a container that asks",
        ),
        (
            json!({names::EXCLUSIVE: "yes"}),
            one("1"),
            "metadata.annotations[gpustow.dev/exclusive]: \"yes\" is neither \"true\" nor \"false\"",
        ),
        (
            json!({names::POLICY: "best"}),
            one("1"),
            "metadata.annotations[gpustow.dev/policy]: unknown policy \"best\": use one of tight binpack spread first-fit",
        ),
        (
            json!({names::GPU_MODELS: "A100,,H100"}),
            one("1"),
            "metadata.annotations[gpustow.dev/gpu-models]: \"A100,,H100\" is no list of models: write like \"*A100*,*H100*\"",
        ),
        (
            json!({names::NOT_GPU_UUIDS: "GPU-1 GPU-2"}),
            one("1"),
            "metadata.annotations[gpustow.dev/not-gpu-uuids]: \"GPU-1 GPU-2\" is no list of UUIDs: write like \"GPU-8f2a,GPU-91bc\", with whole UUIDs",
        ),
        (
            json!({names::GPU_AFFINITY: "a/b"}),
            one("1"),
            "metadata.annotations[gpustow.dev/gpu-affinity]: \"a/b\" is no name of a group: write at most 63 letters, digits, dashes, dots and underscores",
        ),
        (
            json!({}),
            one("1500m"),
            "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: \"1500m\" is not a whole number of MiB: write it like 8192",
        ),
        (
            json!({}),
            json!({"initContainers": [mixed], "containers": []}),
            "spec.initContainers[0].resources.limits[nvidia.com/gpu]: a container asks either for this or for gpustow.dev/gpu-mem: remove one of them",
        ),
        (
            json!({}),
            json!({"containers": [asks(&long, "1")]}),
            "spec.containers[0].name: longer than 53 characters: shorten it",
        ),
    ] {
        assert_eq!(read(&pod(annotations, spec)).unwrap_err(), expected);
    }
}

#[test]
fn annotations_say_which_gpus_and_with_which_pods() {
    let spec = json!({"containers": [asks("a", "1")]});
    let mut said = pod(
        json!({
            names::GPU_MODELS: "*A100*, NVIDIA H100",
            names::NOT_GPU_MODELS: "*PCIe*",
            names::GPU_UUIDS: "GPU-1,MIG-2",
            names::NOT_GPU_UUIDS: " GPU-3 ",
            names::GPU_AFFINITY: "together",
            names::GPU_ANTI_AFFINITY: "apart",
        }),
        spec.clone(),
    );
    said.metadata.namespace = Some("team".to_owned());
    let list = |texts: &[&str]| texts.iter().map(|text| Box::from(*text)).collect();
    let rules = Rules {
        models: list(&["*A100*", "NVIDIA H100"]),
        not_models: list(&["*PCIe*"]),
        uuids: list(&["GPU-1", "MIG-2"]),
        not_uuids: list(&["GPU-3"]),
        affinity: Some("team/together".into()),
        anti_affinity: Some("team/apart".into()),
    };
    assert_eq!(read(&said).unwrap().0.rules.as_deref(), Some(&rules));
    assert_eq!(read(&pod(json!({}), spec)).unwrap().0.rules, None);
}

#[test]
fn another_sharers_resource_can_be_the_one() {
    let spec = json!({"containers": [{"name": "a", "resources": {"limits": {"example.com/mem": "7", names::GPU_MEM: "9"}}}]});
    let (request, _) = request(&pod(json!({}), spec), "example.com/mem").unwrap();
    assert_eq!(request.claims, [main(1, 7)]);
}

/// Overhead belongs to no container, so that its GPU is unknown. kube-scheduler adds it to the node's sum: less is
/// placed, never more.
#[test]
fn overhead_of_gpu_memory_is_charged_to_no_gpu() {
    let overhead = json!({names::GPU_MEM: "250"});
    let spec = json!({"overhead": overhead, "containers": [asks("a", "200")]});
    let (request, _) = read(&pod(json!({}), spec)).unwrap();
    assert_eq!((request.claims, request.cpu_milli), (vec![main(1, 200)], 0));
    let alone = json!({"overhead": overhead, "containers": [{"name": "a"}]});
    assert!(read(&pod(json!({}), alone)).unwrap().0.is_empty());
}

#[test]
fn a_request_has_the_pods_cpu_and_host_memory() {
    let needs = json!({"requests": {"cpu": "1500m", "memory": "1G"}});
    let spec = json!({"containers": [{"name": "a", "resources": needs}]});
    let (request, _) = read(&pod(json!({}), spec)).unwrap();
    assert_eq!(
        (request.cpu_milli, request.ram),
        (1500, Bytes(1_000_000_000))
    );
}

proptest! {
    #[test]
    fn gpu_memory_in_sum_is_kube_schedulers(
        containers in vec((0..3_u8, 1..=4_u64, 1..=100_u64), 1..6),
    ) {
        let (mut init, mut main, mut annotations) = (Vec::new(), Vec::new(), json!({}));
        for (at, (kind, gpus, mib)) in containers.into_iter().enumerate() {
            let mut container = asks(&format!("c{at}"), gpus * mib);
            container["resources"]["requests"] = container["resources"]["limits"].clone();
            annotations[format!("{}c{at}", names::GPU_COUNT_OF)] = json!(gpus.to_string());
            match kind {
                0 => main.push(container),
                1 => init.push(container),
                _ => {
                    container["restartPolicy"] = json!("Always");
                    init.push(container);
                }
            }
        }
        let pod = pod(annotations, json!({"initContainers": init, "containers": main}));
        let (request, _) = read(&pod).unwrap();
        let sum = effective(pod.spec.as_ref().unwrap(), names::GPU_MEM, 1);
        prop_assert_eq!(request.in_sum(), Mib(sum));
    }

    #[test]
    fn rubbish_does_not_panic(
        count in "\\PC{0,6}|[0-9]{1,30}",
        own in "\\PC{0,6}|[0-9]{1,3}",
        container in "[ab]",
        mib in "\\PC{0,6}|[0-9]{1,30}[KMGTPE]?i?",
        flag in "\\PC{0,6}|true",
        list in "\\PC{0,9}|[*A-Za, -]{0,9}",
    ) {
        let annotations = json!({
            names::GPU_COUNT: count,
            format!("{}{container}", names::GPU_COUNT_OF): own,
            names::EXCLUSIVE: flag,
            names::POLICY: flag,
            names::GPU_MODELS: list,
            names::NOT_GPU_UUIDS: list,
            names::GPU_AFFINITY: list,
        });
        let pod = pod(annotations, json!({"containers": [asks("a", mib.clone())]}));
        if let Ok((request, names)) = request(&pod, names::GPU_MEM) {
            prop_assert_eq!(request.claims.len(), names.len());
            prop_assert!(request.claims.iter().all(|claim| claim.mib > Mib::ZERO && (1..=MAX_GPUS).contains(&claim.gpus)));
        }
    }
}

#[test]
fn a_name_that_no_pod_could_ask_for_is_refused() {
    for name in [
        "gpu-mem",
        "",
        "/",
        "a/",
        "kubernetes.io/x",
        "requests.example.com/x",
        "a/b\"c",
        "a/b/c",
        "a b/c",
    ] {
        assert!(extended_resource(name).is_err(), "{name}");
    }
    for name in ["gpustow.dev/gpu-mem", "aliyun.com/gpu-mem", "a.b/C_d.e"] {
        assert_eq!(extended_resource(name).as_deref(), Ok(name));
    }
}
