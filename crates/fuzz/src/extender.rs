//! The inputs of the extender and its webhook.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow::wire::{ExtenderArgs, ExtenderBindingArgs, ExtenderPreemptionArgs};
use gpustow_admission::adopt::Sharer;
use gpustow_admission::{Act, Admitted, Ask as Asked, Cluster, admit};
use gpustow_api::config::{GpustowConfigSpec, Requests};
use gpustow_api::facts::{has_soft_preferences, tolerates_prefer_no_schedule};
use gpustow_api::limit::Enforce;
use gpustow_api::{Assignment, GpuNode, NodeFacts, PodFacts, QueueFrom, names, quantity};
use gpustow_ledger::{Ask, Config, Ledger};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use strum::VariantNames as _;

const NOW: Duration = Duration::from_secs(1);
const NODES: [&str; 2] = ["a", "b"];

fn node(name: &str) -> NodeFacts {
    let node = json!({
        "metadata": { "name": name, "labels": { "zone": name } },
        "status": { "allocatable": { "cpu": "8", "memory": "64Gi", "pods": "110", names::GPU_MEM: "160000" } },
    });
    NodeFacts::from_node(&serde_json::from_value::<Node>(node).unwrap_or_default())
}

fn status(name: &str) -> Value {
    let gpu = |index: u32| json!({ "uuid": format!("GPU-{name}{index}"), "index": index, "model": "H100", "totalMiB": 80_000, "healthy": true });
    json!({ "gpus": [gpu(0), gpu(1)] })
}

/// Two nodes with two cards each.
fn ledger() -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        queue: true,
        reserve_after: Some(Duration::ZERO),
        preempt_fragmented: true,
        ..Config::default()
    });
    for name in NODES {
        ledger.apply_node(node(name));
        let status = serde_json::from_value(status(name)).unwrap_or_default();
        ledger.apply_gpunode(name, status, NOW);
    }
    ledger
}

/// The free memory of a card never exceeds its capacity, for any input.
fn is_sound(ledger: &Ledger) {
    for node in ledger.snapshot(NOW) {
        for card in &node.cards {
            assert!(card.free <= card.capacity, "{card:?}");
        }
    }
}

/// Everything that is decided about a pod.
fn decide(ledger: &mut Ledger, pod: &Pod, names: &[&str]) {
    let Some(facts) = PodFacts::from_pod(pod, names::GPU_MEM) else {
        return;
    };
    // The extender does not decide about a pod that does not request GPU memory.
    if facts.asks.is_nothing() {
        return;
    }
    let tolerates = |taints: &_| tolerates_prefer_no_schedule(pod, taints);
    let ask = Ask {
        cooperative: has_soft_preferences(pod),
        tolerates: &tolerates,
        ..Ask::of(&facts)
    };
    let filtered = ledger.filter(&ask, names, NOW);
    for name in &filtered.nodes {
        assert!(names.contains(name), "{name} was no candidate");
    }
    let scores = ledger.rank(&facts, &tolerates, &filtered.nodes, NOW);
    assert_eq!(scores.len(), filtered.nodes.len());
    if let Some(name) = filtered.nodes.first()
        && let Ok(assignment) = ledger.begin_bind(&facts, name, NOW)
    {
        // The API server lets no two containers have one name.
        let names: HashSet<_> = facts.containers.iter().collect();
        if names.len() == facts.containers.len() {
            let text = assignment.encode();
            let read = Assignment::decode(&text);
            assert_eq!(read.ok().as_ref(), Some(&*assignment), "{text}");
        }
    }
    let (mut steps, none) = (ledger.budget(), Vec::<Arc<str>>::new());
    for name in NODES {
        let _ = ledger.explain(&facts, name, NOW);
        let _ = ledger.preempt(&facts, name, &none, &mut steps, NOW);
    }
    is_sound(ledger);
}

/// A body that kube-scheduler sends.
pub(crate) fn calls(data: &[u8]) {
    let mut ledger = ledger();
    if let Ok(args) = serde_json::from_slice::<ExtenderArgs<'_>>(data) {
        let names = args.node_names.iter().flatten();
        decide(
            &mut ledger,
            &args.pod,
            &names.map(|name| &*name.0).collect::<Vec<_>>(),
        );
    }
    if let Ok(args) = serde_json::from_slice::<ExtenderPreemptionArgs>(data) {
        decide(&mut ledger, &args.pod, &NODES);
    }
    let _ = serde_json::from_slice::<ExtenderBindingArgs>(data);
}

fn asked<'a>(pod: &'a Value, act: Act<'a>) -> Asked<'a> {
    Asked { pod, act, user: "" }
}

/// Admission answers any request, and a pod that it returns passes again without a change.
fn admitted(pod: &Value) {
    let requests = Requests {
        runtime_class_name: "nvidia".to_owned(),
        driver_capabilities: "compute,utility".to_owned(),
        enforce: Enforce::Driver,
        ..Requests::default()
    };
    let spec = GpustowConfigSpec {
        requests,
        ..GpustowConfigSpec::default()
    };
    let cluster = Cluster {
        resource: names::GPU_MEM,
        spec: &spec,
        queue_from: &[QueueFrom::ALL],
    };
    let mut labels = vec![None];
    labels.extend(Sharer::VARIANTS.iter().map(|it| Some((*it).to_owned())));
    for label in labels {
        let label = label.map(|it| [(names::ADOPT_LABEL.to_owned(), it)].into());
        let namespace = ObjectMeta {
            labels: label,
            ..ObjectMeta::default()
        };
        let admit = |ask: Asked<'_>| admit(ask, cluster, &namespace, None);
        if let Ok(Admitted { pod, .. }) = admit(asked(pod, Act::Create)) {
            let again = admit(asked(&pod, Act::Create));
            assert_eq!(again.map(|it| it.patch), Ok(Vec::new()), "{pod}");
        }
        let changes = Act::Annotate {
            before: pod,
            resizes: true,
        };
        let adds = Act::Debug {
            before: &Value::Null,
        };
        for act in [changes, adds] {
            let _ = admit(asked(pod, act));
        }
    }
}

/// A pod as a tenant writes it.
pub(crate) fn pod(data: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(data) else {
        return;
    };
    admitted(&value);
    let mut ledger = ledger();
    match serde_json::from_value::<Pod>(value.clone()) {
        Ok(pod) => {
            decide(&mut ledger, &pod, &NODES);
            if let Some(facts) = PodFacts::from_pod(&pod, names::GPU_MEM) {
                ledger.apply_pod(facts);
            }
        }
        Err(error) => {
            let meta = serde_json::from_value(value["metadata"].clone()).unwrap_or_default();
            let text = error.to_string();
            if let Some(facts) = PodFacts::from_remains(&meta, &value, &text, names::GPU_MEM) {
                ledger.apply_pod(facts);
            }
        }
    }
    is_sound(&ledger);
    for uid in ledger.pods().map(|pod| pod.uid.clone()).collect::<Vec<_>>() {
        ledger.delete_pod(&uid);
    }
    is_sound(&ledger);
}

/// A GpuNode as an agent writes it.
pub(crate) fn report(data: &[u8]) {
    let Ok(report) = serde_json::from_slice::<GpuNode>(data) else {
        return;
    };
    let mut ledger = ledger();
    for _ in 0..2 {
        let status = report.status.clone().unwrap_or_default();
        ledger.apply_gpunode("a", status, NOW);
        for gpus in ["1", "2"] {
            let pod = json!({
                "metadata": { "name": "p", "namespace": "n", "uid": gpus, "annotations": { names::GPU_COUNT: gpus } },
                "spec": { "containers": [{ "name": "main", "resources": { "limits": { names::GPU_MEM: "2000" } } }] },
            });
            decide(
                &mut ledger,
                &serde_json::from_value(pod).unwrap_or_default(),
                &["a"],
            );
        }
    }
    ledger.delete_gpunode("a");
    is_sound(&ledger);
}

/// A quantity.
pub(crate) fn quantity(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let quantity = Quantity(text.to_owned());
    let whole = quantity::whole(&quantity);
    let up = quantity::rounded_up(&quantity, 1);
    assert!(
        whole.is_none_or(|whole| whole == up),
        "{text}: {whole:?}, {up}"
    );
    assert!(up <= quantity::rounded_up(&quantity, 1000), "{text}");
}
