//! Karpenter adds nodes for pods that are unschedulable. Its cloud is simulated: the nodes are objects, whose kubelet and
//! agent the cases play.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_accepted};
use gpustow_testkit::{
    Launch, PodBuilder, Process, eventually, free_port, gpu_node, node_of, pod, wait_bound,
    wait_refused,
};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::site::{CARD, Neighbour, SOON, Site, gates, is_bound, repository};

/// On each node of the case, by which its pods choose them.
const LABEL: &str = "testkit/case";
const POOL: &str = "karpenter.sh/nodepool";
/// An agent labels its node as known so many seconds after its first report.
const KNOWN_AFTER: i64 = 6;

/// A kind of machine that the cloud has, and its node pool.
#[derive(Clone, Copy)]
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) cards: u64,
    /// MiB of each card.
    pub(crate) mib: u64,
    /// Its nodes come with gpustow's startup taint.
    pub(crate) is_tainted: bool,
}

impl Machine {
    /// One with so many cards.
    pub(crate) fn of(cards: u64) -> Self {
        Self {
            name: "cards",
            cards,
            mib: CARD,
            is_tainted: false,
        }
    }
}

/// Starts Karpenter, whose cloud has these machines.
pub(crate) async fn karpenter(site: &Site, machines: &[Machine]) -> Result<Process> {
    let neighbour = Neighbour::built("karpenter").await?;
    for folder in ["pkg/apis/crds", "kwok/apis/crds"] {
        let folder = neighbour.source.join(folder).display().to_string();
        let apply = ["apply", "--server-side", "-f", &folder];
        site.cluster.kubectl(&apply).await?;
    }
    let types = site.cluster.dir().join("instance-types.json");
    let is =
        |label: &str, value: &str| json!({ "key": label, "operator": "In", "values": [value] });
    let kind = |it: &Machine| {
        let sum = (it.cards * it.mib).to_string();
        json!({
            "name": it.name, "architecture": "amd64", "operatingSystems": ["linux"],
            "offerings": [{ "Price": 1.0, "Requirements": [
                is("karpenter.sh/capacity-type", "on-demand"), is("topology.kubernetes.io/zone", "zone"),
            ] }],
            "resources": { "cpu": "16", "memory": "64Gi", names::GPU_MEM: sum },
        })
    };
    let kinds: Vec<Value> = machines.iter().map(kind).collect();
    std::fs::write(&types, json!(kinds).to_string())?;
    let health = free_port()?;
    let set = |name: &str, value: String| (name.to_owned(), value);
    let kubeconfig = site.cluster.admin_kubeconfig().display().to_string();
    let process = Process::start(Launch {
        program: neighbour.program,
        args: vec![
            format!("--instance-types-file-path={}", types.display()),
            format!("--metrics-port={}", free_port()?),
            format!("--health-probe-port={health}"),
            "--disable-leader-election=true".to_owned(),
        ],
        env: vec![
            set("KUBECONFIG", kubeconfig),
            set("SYSTEM_NAMESPACE", "kube-system".to_owned()),
        ],
        log: site.cluster.dir().join("karpenter.log"),
    })?;
    let url = format!("http://127.0.0.1:{health}");
    eventually(SOON, "Karpenter is ready", async || {
        gpustow_testkit::get(&url, "/readyz").await
    })
    .await?;
    let class = json!({
        "apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass",
        "metadata": { "name": "default" },
    });
    site.cluster.apply(&class.to_string()).await?;
    let taint = json!({ "key": names::STARTUP_TAINT, "effect": "NoSchedule" });
    for machine in machines {
        let taints = if machine.is_tainted {
            vec![&taint]
        } else {
            Vec::new()
        };
        let pool = json!({
            "apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": { "name": machine.name },
            "spec": { "template": {
                "metadata": { "labels": {
                    LABEL: site.case.namespace,
                    names::GPU_MEMORY_LABEL: machine.mib.to_string(),
                    names::GPU_COUNT_LABEL: machine.cards.to_string(),
                } },
                "spec": {
                    "nodeClassRef": { "group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default" },
                    "requirements": [
                        is("kubernetes.io/arch", "amd64"), is(names::INSTANCE_TYPE, machine.name),
                    ],
                    "startupTaints": taints,
                },
            }, "disruption": { "consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s" } },
        });
        site.cluster.apply(&pool.to_string()).await?;
    }
    Ok(process)
}

/// How many nodes Karpenter has asked its cloud for.
pub(crate) async fn claims(site: &Site) -> Result<usize> {
    let list = site
        .cluster
        .kubectl(&["get", "nodeclaims", "-o", "json"])
        .await?;
    let list: Value = serde_json::from_str(&list)?;
    Ok(list["items"].as_array().context("a list")?.len())
}

/// Has the nodes that are new run a kubelet, and an agent that reports the machine's cards.
pub(crate) async fn join(
    site: &Site,
    machines: &[Machine],
    joined: &mut BTreeSet<String>,
) -> Result<()> {
    let client = &site.case.client;
    let nodes = Api::<Node>::all(client.clone());
    for node in nodes.list(&ListParams::default().labels(POOL)).await? {
        let name = node.name_any();
        if joined.contains(&name) {
            let created = node.metadata.creation_timestamp.as_ref();
            let age = created.map(|it| Timestamp::now().as_second() - it.0.as_second());
            if age > Some(KNOWN_AFTER) && !node.labels().contains_key(names::KNOWN_LABEL) {
                let known = json!({ "metadata": { "labels": { names::KNOWN_LABEL: "true" } } });
                let (params, known) = (PatchParams::default(), Patch::Merge(known));
                nodes.patch(&name, &params, &known).await?;
            }
            continue;
        }
        let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        nodes
            .patch_status(&name, &PatchParams::default(), &Patch::Strategic(ready))
            .await?;
        let is = node.labels().get(names::INSTANCE_TYPE);
        let machine = machines
            .iter()
            .find(|it| is.is_some_and(|is| is == it.name));
        let machine = machine.context("of another kind")?;
        let uuids: Vec<_> = (0..machine.cards)
            .map(|card| format!("GPU-{name}-{card}"))
            .collect();
        let cards = uuids.iter().map(|uuid| (uuid.as_str(), machine.mib));
        let cards: Vec<_> = cards.collect();
        gpu_node(&name, "16", "64Gi", &cards).report(client).await?;
        joined.insert(name);
    }
    Ok(())
}

/// Karpenter removes all nodes that it added, including nodes that still join.
pub(crate) async fn no_node_is_left(
    site: &Site,
    machines: &[Machine],
    joined: &mut BTreeSet<String>,
) -> Result<()> {
    eventually(SOON * 2, "no node is left", async || {
        join(site, machines, joined).await?;
        let claims = claims(site).await?;
        ensure!(claims == 0, "{claims}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_node_on_which_a_place_is_kept_is_not_scaled_away() -> Result<()> {
    let config = [
        "provision: {max: 1}",
        "reserve: {after: 1s, markNodes: true}",
    ];
    let (site, occupant) = Site::with_queue(1, &config).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(2)];
    let karpenter = karpenter(&site, &machines).await?;
    let (mut small, mut joined) = (Vec::new(), BTreeSet::new());
    for name in ["first", "second"] {
        case.pod(name).gpu_mem(CARD).create(client).await?;
        small.push(on_a_node(&site, &machines, &mut joined, name).await?);
    }
    let no_more = r#"--patch={"spec": {"limits": {"cpu": "0"}}}"#;
    let no_more = ["patch", "nodepool", "cards", "--type=merge", no_more];
    site.cluster.kubectl(&no_more).await?;
    let large = case.pod("large").gpu_mem(2 * CARD);
    let large = large.annotation(names::GPU_COUNT, "2");
    let large = large.create(client).await?;
    let kept = format!("--selector={}", names::RESERVED_LABEL);
    let marked = ["get", "nodes", &kept, "--output=name"];
    eventually(SOON, "the node is marked", async || {
        let marked = site.cluster.kubectl(&marked).await?;
        ensure!(!marked.is_empty());
        Ok(())
    })
    .await?;

    // Its pod would fit on the other node now, and Karpenter have this one.
    for ends in [&occupant, &small[1]] {
        delete(client, ends, 0).await?;
    }
    // Karpenter emits this Event once in a quarter of an hour, for all causes together. A restarted Karpenter emits it
    // again.
    karpenter.restart()?;
    let blocked = "--field-selector=reason=DisruptionBlocked,involvedObject.kind=Node";
    let blocked = ["get", "events", "--all-namespaces", blocked];
    eventually(
        SOON * 2,
        "Karpenter says that it lets the node be",
        async || {
            let events = site.cluster.kubectl(&blocked).await?;
            ensure!(events.contains("do-not-disrupt"), "{events}");
            Ok(())
        },
    )
    .await?;
    delete(client, &small[0], 0).await?;
    let large = wait_bound(client, &large, SOON).await?;
    delete(client, &large, 0).await?;
    // Nothing is kept there any more.
    no_node_is_left(&site, &machines, &mut joined).await?;
    site.case.end().await
}

#[tokio::test]
async fn a_node_that_is_emptied_is_scaled_away() -> Result<()> {
    let config = [
        "provision: {max: 1}",
        "defragment: {evictionsPerHour: 10, emptyNodes: true}",
    ];
    let (site, _) = Site::with_queue(1, &config).await?;
    let (case, client) = (&site.case, &site.case.client);
    let disruptions = repository("manifests/disruptions").display().to_string();
    site.cluster.kubectl(&["apply", "-k", &disruptions]).await?;
    let machines = [Machine::of(1)];
    let _karpenter = karpenter(&site, &machines).await?;
    // Karpenter evicts no pod by itself.
    let empty_alone = r#"--patch={"spec": {"disruption": {"consolidationPolicy": "WhenEmpty"}}}"#;
    let empty_alone = ["patch", "nodepool", "cards", "--type=merge", empty_alone];
    site.cluster.kubectl(&empty_alone).await?;
    let mut joined = BTreeSet::new();
    let mut first = Vec::new();
    for (name, mib) in [("stays", 5000), ("ends", 3000)] {
        let pod = case.pod(name).gpu_mem(mib).create(client).await?;
        first.push(on_a_node(&site, &machines, &mut joined, &pod.name_any()).await?);
    }
    let moves = case.pod("moves").gpu_mem(2000);
    let moves = moves.annotation(names::EVICTABLE, "true");
    let before = running_replica(&site, &machines, &mut joined, moves).await?;
    delete(client, &first[1], 0).await?;
    eventually(
        SOON * 3,
        "its successor is on the fuller node",
        async || {
            let after = case.pods().get(&replica(&site).await?).await?;
            ensure!(after.uid() != before.uid(), "it was not evicted");
            ensure!(
                node_of(&after) == node_of(&first[0]),
                "{:?}",
                node_of(&after)
            );
            let claims = claims(&site).await?;
            ensure!(claims == 1, "{claims} nodes");
            Ok(())
        },
    )
    .await?;
    site.case.end().await
}

/// Karpenter compares sums of memory, not GPUs.
#[tokio::test]
async fn pod_that_fits_elsewhere_only_in_sum_is_evicted_by_karpenter() -> Result<()> {
    let (site, _) = Site::with_queue(1, &["provision: {max: 1}"]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let machines = [Machine::of(2)];
    let _karpenter = karpenter(&site, &machines).await?;
    let mut joined = BTreeSet::new();
    let mut first = Vec::new();
    let sizes = [
        ("stays-0", 5000),
        ("stays-1", 5000),
        ("ends-0", 3000),
        ("ends-1", 3000),
    ];
    for (name, mib) in sizes {
        let pod = case.pod(name).gpu_mem(mib);
        let pod = pod.annotation("karpenter.sh/do-not-disrupt", "true");
        pod.create(client).await?;
        first.push(on_a_node(&site, &machines, &mut joined, name).await?);
    }
    let moves = case.pod("moves").gpu_mem(6000);
    let before = running_replica(&site, &machines, &mut joined, moves).await?;
    for pod in &first[2..] {
        delete(client, pod, 0).await?;
    }
    let after = eventually(SOON * 3, "Karpenter evicts the pod", async || {
        join(&site, &machines, &mut joined).await?;
        let after = replica(&site).await?;
        let is_another = case.pods().get(&after).await?.uid() != before.uid();
        ensure!(is_another, "it was not evicted");
        Ok(after)
    })
    .await?;
    // 3192 MiB are free on each GPU of the first node, so the replacement needs a node of its own.
    let after = on_a_node(&site, &machines, &mut joined, &after).await?;
    ensure!(
        node_of(&after) != node_of(&first[0]),
        "{:?}",
        node_of(&after)
    );
    site.case.end().await
}

/// The pod, once it is bound to a node, which may be one that has to join.
async fn on_a_node(
    site: &Site,
    machines: &[Machine],
    joined: &mut BTreeSet<String>,
    pod: &str,
) -> Result<Pod> {
    eventually(SOON, "it is on a node", async || {
        join(site, machines, joined).await?;
        let pod = site.case.pods().get(pod).await?;
        ensure!(is_bound(&pod), "not yet");
        Ok(pod)
    })
    .await
}

/// The one pod of a ReplicaSet of such pods, which ends at once if it is evicted, on its node.
async fn running_replica(
    site: &Site,
    machines: &[Machine],
    joined: &mut BTreeSet<String>,
    pod: PodBuilder,
) -> Result<Pod> {
    let pod = pod.with(|spec| spec.termination_grace_period_seconds = Some(0));
    replica_set(site, pod.build()).await?;
    let pod = on_a_node(site, machines, joined, &replica(site).await?).await?;
    set_accepted(&site.case.client, &pod).await
}

/// Creates a ReplicaSet of one such pod.
async fn replica_set(site: &Site, pod: Pod) -> Result<()> {
    let labels = json!({ "app": "moves" });
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet",
        "metadata": { "name": "moves", "namespace": site.case.namespace },
        "spec": { "replicas": 1, "selector": { "matchLabels": labels }, "template": {
            "metadata": { "labels": labels, "annotations": pod.metadata.annotations },
            "spec": pod.spec,
        } },
    });
    site.cluster.apply(&set.to_string()).await.map(drop)
}

/// The name of the one pod that the ReplicaSet has.
async fn replica(site: &Site) -> Result<String> {
    eventually(SOON, "the ReplicaSet has a pod", async || {
        let its = ListParams::default().labels("app=moves");
        let pods = site.case.pods().list(&its).await?;
        Ok(pods.items.first().context("none")?.name_any())
    })
    .await
}

#[tokio::test]
async fn autoscalers_see_no_queued_pod() -> Result<()> {
    let (site, _) = Site::with_queue(1, &[]).await?;
    let (case, client) = (&site.case, &site.case.client);
    let _karpenter = karpenter(&site, &[Machine::of(1)]).await?;
    let beside = format!("{}-beside", case.namespace);
    let namespace =
        json!({ "metadata": { "name": beside, "labels": { names::QUEUE_LABEL: "off" } } });
    let namespace: Namespace = serde_json::from_value(namespace)?;
    Api::all(client.clone())
        .create(&PostParams::default(), &namespace)
        .await?;
    for name in ["first", "second"] {
        let held = case.pod(name).gpu_mem(CARD).create(client).await?;
        ensure!(gates(&held) == [names::GATE], "{:?}", gates(&held));
    }
    // Karpenter has looked once it has seen this one, which is the last to come.
    let seen = pod(&beside, "seen")
        .gpu_mem(CARD)
        .node_selector(LABEL, &case.namespace);
    let seen = seen.create(client).await?;
    wait_refused(client, &seen, "", SOON).await?;
    eventually(SOON, "a node for the one beside the queue", async || {
        let claims = claims(&site).await?;
        ensure!(claims == 1, "{claims}");
        Ok(())
    })
    .await?;
    for name in ["first", "second"] {
        let held = case.pods().get(name).await?;
        ensure!(gates(&held) == [names::GATE], "{:?}", gates(&held));
    }
    site.case.end().await
}
