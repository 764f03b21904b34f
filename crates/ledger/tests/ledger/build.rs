//! Pods, nodes and ledgers in few words.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{Gpu, GpuNodeStatus, PodUse};
use gpustow_api::instances::{Instance, OnDemand, Profile};
use gpustow_api::intree::Label;
use gpustow_api::limit::Enforce;
use gpustow_api::{Asks, Assignment, DisruptionBudget, NodeFacts, PodFacts, names};
use gpustow_ledger::{Ask, Config, Ledger, Reason};
use gpustow_pack::{Claim, ClaimKind, Mib, Request};
use serde_json::{Value, json};

pub(crate) fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// An unbound pod with one container that asks for `mib` on one card.
pub(crate) fn pod(uid: &str, mib: u64) -> PodFacts {
    asking(uid, &[(1, mib)])
}

/// An unbound pod with a container per (GPUs, MiB on each).
pub(crate) fn asking(uid: &str, claims: &[(u32, u64)]) -> PodFacts {
    let claim = |&(gpus, mib): &(u32, u64)| Claim::new(ClaimKind::Main, gpus, Mib(mib));
    let containers: Arc<[Box<str>]> = (0..claims.len())
        .map(|index| format!("c{index}").into())
        .collect();
    PodFacts {
        asks: Asks::of(Request {
            claims: claims.iter().map(claim).collect(),
            ..Request::default()
        }),
        containers,
        labels: Arc::new([Label::new("uid", uid)]),
        ..PodFacts::new("default", uid, uid)
    }
}

/// One disruption budget covers these pods: so many of them may end.
pub(crate) fn protect<U: AsRef<str>>(ledger: &mut Ledger, uids: &[U], allowed: usize) {
    let uids: Vec<&str> = uids.iter().map(AsRef::as_ref).collect();
    let selector =
        json!({ "matchExpressions": [{ "key": "uid", "operator": "In", "values": uids }] });
    let budget = json!({
        "metadata": { "name": "protects", "namespace": "default" },
        "spec": { "selector": selector }, "status": { "disruptionsAllowed": allowed,
            "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0 },
    });
    let budget = serde_json::from_value(budget);
    assert!(budget.is_ok(), "{budget:?}");
    ledger.reset_budgets(budget.iter().map(DisruptionBudget::of).collect());
}

/// The same pod, whose request is changed like this.
pub(crate) fn requesting(mut pod: PodFacts, change: impl FnOnce(&mut Request)) -> PodFacts {
    pod.asks.change(change);
    pod
}

/// The same pod, wanting whole cards.
pub(crate) fn exclusive(pod: PodFacts) -> PodFacts {
    requesting(pod, |request| request.exclusive = true)
}

/// The same pod with this spec's rules about nodes and other pods.
pub(crate) fn placed_by(pod: PodFacts, mut spec: Value) -> PodFacts {
    let limits = json!({ names::GPU_MEM: "1" });
    let mut container = json!({ "name": "c0", "resources": { "limits": limits } });
    if let Some(ports) = spec.get("ports") {
        container["ports"] = ports.clone();
    }
    spec["containers"] = json!([container]);
    let of = json!({ "metadata": { "uid": "of" }, "spec": &spec });
    let of = serde_json::from_value(of).ok();
    let of = of.and_then(|of| PodFacts::from_pod(&of, names::GPU_MEM));
    assert!(of.is_some(), "{spec}");
    let of = of.unwrap_or_else(|| pod.clone());
    PodFacts {
        constraints: of.constraints,
        repels: of.repels,
        ..pod
    }
}

/// A required rule of affinity, or of anti-affinity, with pods of the same domain that have the label `app: other`.
pub(crate) fn required(rule: &str, domain: &str) -> Value {
    let other = json!({ "matchLabels": { "app": "other" } });
    let term = json!({ "topologyKey": domain, "labelSelector": other });
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    json!({ "affinity": { rule: { required: [term] } } })
}

/// The same pod, which the driver must hold to its request.
pub(crate) fn limited(pod: PodFacts) -> PodFacts {
    let pod = requesting(pod, |request| {
        for claim in &mut request.claims {
            claim.driver_limit = claim.mib;
        }
    });
    PodFacts {
        enforce: Enforce::Driver,
        ..pod
    }
}

/// The same pod, with so many percent of the compute of each of its cards.
pub(crate) fn computing(pod: PodFacts, percent: u8) -> PodFacts {
    requesting(pod, |request| request.compute = percent)
}

/// The same card, whose processes share it through MPS.
pub(crate) fn mps(card: Gpu) -> Gpu {
    Gpu { mps: true, ..card }
}

/// The same pod, with a MIG instance of its own.
pub(crate) fn isolated(pod: PodFacts) -> PodFacts {
    requesting(pod, |request| request.isolated = true)
}

/// The same card in four slices, with these MIG instances; agents make others of one, two and four slices.
pub(crate) fn makes_instances(card: Gpu, instances: &[Instance]) -> Gpu {
    let slice = u32::try_from(card.total_mib / 4).unwrap_or(u32::MAX);
    let profile = |slices: u8, starts: &[u8]| Profile {
        name: format!("{slices}g"),
        memory_mib: slice * u32::from(slices),
        slices,
        compute_slices: slices,
        starts: starts.into(),
    };
    let mig = OnDemand {
        profiles: vec![
            profile(4, &[0]),
            profile(1, &[0, 1, 2, 3]),
            profile(2, &[0, 2]),
        ],
        instances: instances.into(),
    };
    Gpu {
        mig: Some(Box::new(mig)),
        ..card
    }
}

/// The same card, whose driver holds limits.
pub(crate) fn able(card: Gpu) -> Gpu {
    Gpu {
        memory_limit: Some("Holds".into()),
        ..card
    }
}

/// A pod bound to `node`, holding `mib` on the card.
pub(crate) fn bound(uid: &str, node: &str, card: &str, mib: u64) -> PodFacts {
    let assignment = Assignment {
        charges: vec![(card.into(), Mib(mib))],
        containers: vec![("c0".into(), vec![card.into()])],
        exclusive: None,
        compute: 0,
        instance: None,
    };
    PodFacts {
        node: Some(node.into()),
        assignment: Some(Ok(Arc::new(assignment))),
        ..pod(uid, mib)
    }
}

/// As [`bound`], with a priority, on the node that the card is named after.
pub(crate) fn holder(uid: &str, card: &str, mib: u64, priority: i32) -> PodFacts {
    let node = card.split('-').next().unwrap_or_default();
    PodFacts {
        priority,
        ..bound(uid, node, card, mib)
    }
}

/// As [`holder`], started at this time.
pub(crate) fn holder_since(
    uid: &str,
    card: &str,
    mib: u64,
    priority: i32,
    started: i64,
) -> PodFacts {
    PodFacts {
        started,
        ..holder(uid, card, mib, priority)
    }
}

/// The same pod, which kube-scheduler could not place; the ledger has not seen a call for it.
pub(crate) fn waiting(priority: i32, pod: PodFacts) -> PodFacts {
    PodFacts {
        priority,
        waiting: true,
        ..pod
    }
}

/// Such a pod of priority 10.
pub(crate) fn waits(uid: &str, mib: u64) -> PodFacts {
    waiting(10, pod(uid, mib))
}

pub(crate) fn card(uuid: &str, total_mib: u64) -> Gpu {
    Gpu {
        uuid: uuid.into(),
        total_mib,
        healthy: true,
        ..Gpu::default()
    }
}

pub(crate) fn used(uid: &str, used_mib: u64) -> PodUse {
    PodUse {
        uid: uid.into(),
        used_mib,
        ..PodUse::default()
    }
}

pub(crate) fn report(gpus: &[Gpu]) -> GpuNodeStatus {
    GpuNodeStatus {
        gpus: gpus.to_vec(),
        ..GpuNodeStatus::default()
    }
}

pub(crate) fn node(name: &str) -> NodeFacts {
    NodeFacts {
        name: name.into(),
        cpu_milli: 64_000,
        ram: Mib(1 << 20).into(),
        ..NodeFacts::default()
    }
}

/// A ledger with these nodes and the sizes of their cards, which are called `<node>-0` and so on.
pub(crate) fn ledger(nodes: &[(&str, &[u64])]) -> Ledger {
    configured(Config::default(), nodes)
}

/// As [`ledger`], with this configuration.
pub(crate) fn configured(config: Config, nodes: &[(&str, &[u64])]) -> Ledger {
    let mut ledger = Ledger::new(config);
    for (name, sizes) in nodes {
        joins(&mut ledger, name, sizes);
    }
    ledger
}

/// A node comes, with cards of these sizes.
pub(crate) fn joins(ledger: &mut Ledger, name: &str, sizes: &[u64]) {
    ledger.apply_node(node(name));
    let card = |(index, &size)| card(&format!("{name}-{index}"), size);
    let cards: Vec<_> = sizes.iter().enumerate().map(card).collect();
    ledger.apply_gpunode(name, report(&cards), at(0));
}

pub(crate) fn ask(pod: &PodFacts) -> Ask<'_> {
    Ask::of(pod)
}

/// Filters at `now` and gives the chosen nodes.
pub(crate) fn choose<'a>(
    ledger: &mut Ledger,
    pod: &PodFacts,
    nodes: &[&'a str],
    now: Duration,
) -> Vec<&'a str> {
    ledger.filter(&ask(pod), nodes, now).nodes
}

/// Why the node is of no use to the pod.
pub(crate) fn refused(ledger: &mut Ledger, pod: &PodFacts, node: &str) -> Option<Reason> {
    let refused = ledger.filter(&ask(pod), &[node], at(0)).refused;
    refused.first().map(|(_, why)| *why)
}

/// Why node a refuses a pod that comes now, by filter and by the explanation for people.
pub(crate) fn probed(ledger: &mut Ledger, mib: u64) -> Option<Reason> {
    let probe = pod(&format!("probe-{}", ledger.copies()), mib);
    let told = ledger.explain(&probe, "a", at(1)).err();
    let refused = ledger.filter(&ask(&probe), &["a"], at(1)).refused;
    ledger.delete_pod(&probe.uid);
    assert_eq!(told, refused.first().map(|(_, why)| *why));
    told
}

/// How many pods wait for their bind, and the binds of how many are under way.
pub(crate) fn assumed(ledger: &Ledger) -> (usize, usize) {
    let assumed = ledger.assumed();
    (assumed.waiting, assumed.binding)
}

/// The free memory of the cards of a node.
pub(crate) fn free(ledger: &Ledger, name: &str) -> Vec<u64> {
    let snapshot = ledger.snapshot(at(0));
    let node = snapshot.iter().find(|node| *node.name == *name);
    let cards = node.into_iter().flat_map(|node| &node.cards);
    cards.map(|card| card.free.0).collect()
}

/// kube-scheduler tries every pod that waits on every node.
pub(crate) fn offer_all(ledger: &mut Ledger, now: Duration) {
    let snapshot = ledger.snapshot(now);
    let nodes: Vec<&str> = snapshot.iter().map(|node| &*node.name).collect();
    let free = |pod: &&Arc<PodFacts>| {
        pod.node.is_none() && !pod.gated && !pod.queued && !pod.deleting && !pod.released
    };
    let mut pods: Vec<_> = ledger.pods().filter(free).cloned().collect();
    pods.sort_by_key(|pod| (pod.created, pod.uid.clone()));
    for pod in pods {
        ledger.filter(&ask(&pod), &nodes, now);
    }
}
