//! A stage on which a script is played, with the simulated kube-scheduler or with the real one: nodes, pods, and an
//! extender that follows orders and records its requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use gpustow_api::names;
use gpustow_simworld::merge;
use gpustow_testkit::POD_GROUPS;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Request};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::net::{NAMESPACE, Shared, locked};
use crate::scheduler::{name, uid};
use crate::server::{Key, Kind, Refusal};

/// How long something may take on either.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);
/// Longer than any back-off, shorter than kube-scheduler's flush.
const QUIET: Duration = Duration::from_secs(3);

/// The priority classes of pods, and their priorities.
pub(crate) const RANKS: [(&str, i64); 4] = [
    ("low", 10),
    ("middle", 100),
    ("high", 1000),
    ("never", 2000),
];

/// Where a script is played.
#[derive(Clone)]
pub(crate) enum Cluster {
    Simulated(Shared),
    Real(Client),
}

fn key(name: &str) -> Key {
    (Kind::Pod, NAMESPACE.to_owned(), name.to_owned())
}

fn answered<T>(answer: Result<T, Refusal>) -> Result<T> {
    answer.map_err(|Refusal(code, _, text)| anyhow!("{code}: {text}"))
}

impl Cluster {
    fn pods(client: &Client) -> Api<Pod> {
        Api::namespaced(client.clone(), NAMESPACE)
    }

    async fn create(&self, kind: Kind, object: Value) -> Result<()> {
        match self {
            Self::Simulated(server) => {
                let namespace = if kind == Kind::Node { "" } else { NAMESPACE };
                answered(locked(server).create(kind, namespace, object))?;
            }
            Self::Real(client) => {
                // The typed API knows nothing of groups.
                let path = match kind {
                    Kind::Pod => format!("/api/v1/namespaces/{NAMESPACE}/pods"),
                    Kind::PodGroup => format!("{POD_GROUPS}/namespaces/{NAMESPACE}/podgroups"),
                    _ => "/api/v1/nodes".to_owned(),
                };
                let mut object = object;
                object["apiVersion"] = json!(kind.api_version());
                object["kind"] = json!(format!("{kind:?}"));
                let request =
                    Request::new(path).create(&PostParams::default(), object.to_string().into())?;
                client.request::<Value>(request).await?;
            }
        }
        Ok(())
    }

    /// The pod, if it exists.
    async fn pod(&self, name: &str) -> Result<Option<Value>> {
        Ok(match self {
            Self::Simulated(server) => locked(server)
                .get(&key(name))
                .ok()
                .map(|pod| Value::clone(&pod)),
            Self::Real(client) => {
                let pod = Self::pods(client).get_opt(name).await?;
                pod.map(serde_json::to_value).transpose()?
            }
        })
    }

    async fn patch(&self, name: &str, patch: Value) -> Result<()> {
        match self {
            Self::Simulated(server) => drop(answered(locked(server).patch(
                key(name),
                &patch,
                false,
                false,
            ))?),
            Self::Real(client) => {
                let pods = Self::pods(client);
                pods.patch(name, &PatchParams::default(), &Patch::Merge(patch))
                    .await?;
            }
        }
        Ok(())
    }

    /// The pod's kubelet reports that the pod is gone.
    async fn end(&self, name: &str) -> Result<()> {
        match self {
            Self::Simulated(server) => locked(server).end(key(name)),
            Self::Real(client) => {
                let now = DeleteParams::default().grace_period(0);
                Self::pods(client).delete(name, &now).await?;
            }
        }
        Ok(())
    }

    async fn bind(&self, name: &str, node: &str) -> Result<()> {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name, "namespace": NAMESPACE },
            "target": { "kind": "Node", "name": node },
        });
        match self {
            Self::Simulated(server) => {
                let bound = locked(server).write(|kept| kept.bind(key(name), &binding));
                drop(answered(bound)?);
            }
            Self::Real(client) => {
                let (pods, params) = (Self::pods(client), PostParams::default());
                pods.create_subresource::<Value, Value>("binding", name, &params, &binding)
                    .await?;
            }
        }
        Ok(())
    }
}

/// Orders for the extender.
#[derive(Default)]
pub(crate) struct Orders {
    /// It refuses this pod on this node.
    refuses: BTreeSet<(String, String)>,
    /// It answers with an error this many times, when it is to filter for this pod, or to bind it.
    fails: BTreeMap<(&'static str, String), usize>,
    /// It takes so long to bind.
    pub(crate) binds_after: Duration,
    /// It does not let pods be evicted on this node.
    pub(crate) spares: String,
    /// It likes this one best.
    pub(crate) likes: String,
}

struct Inner {
    cluster: Cluster,
    orders: Mutex<Orders>,
    heard: Mutex<Vec<(String, String)>>,
    /// Names by UID.
    names: Mutex<BTreeMap<String, String>>,
}

/// The stage; see the module.
#[derive(Clone)]
pub(crate) struct Stage(Arc<Inner>);

impl Stage {
    pub(crate) fn new(cluster: Cluster) -> Self {
        Self(Arc::new(Inner {
            cluster,
            orders: Mutex::default(),
            heard: Mutex::default(),
            names: Mutex::default(),
        }))
    }

    pub(crate) fn order(&self, orders: impl FnOnce(&mut Orders)) {
        orders(&mut locked(&self.0.orders));
    }

    /// It is to refuse this pod on this node.
    pub(crate) fn refuse(&self, pod: &str, node: &str) {
        let refused = (pod.to_owned(), node.to_owned());
        self.order(|it| it.refuses = [refused].into());
    }

    /// It no longer refuses anything.
    pub(crate) fn allow(&self) {
        self.order(|it| it.refuses.clear());
    }

    /// The extender is to answer with an error this many times.
    pub(crate) fn fail(&self, verb: &'static str, pod: &str, times: usize) {
        self.order(|it| it.fails = [((verb, pod.to_owned()), times)].into());
    }

    /// The extender.
    pub(crate) fn extender(&self) -> Router {
        Router::new()
            .route("/filter", post(filter))
            .route("/prioritize", post(prioritize))
            .route("/preempt", post(preempt))
            .route("/bind", post(bind))
            .with_state(self.clone())
    }

    fn hear(&self, pod: &str, text: String) {
        locked(&self.0.heard).push((pod.to_owned(), text));
    }

    /// Is it to fail this time?
    fn fails(&self, verb: &'static str, pod: &str) -> bool {
        let mut orders = locked(&self.0.orders);
        match orders.fails.get_mut(&(verb, pod.to_owned())) {
            Some(left) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        }
    }

    /// The extender's requests about each pod. Equal requests count once: the simulated kube-scheduler sometimes looks
    /// at pods without result where the real one does not. This happens while a victim ends.
    pub(crate) fn heard(&self) -> BTreeMap<String, Vec<String>> {
        let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (pod, text) in locked(&self.0.heard).iter() {
            let asked = all.entry(pod.clone()).or_default();
            if !asked.contains(text) {
                asked.push(text.clone());
            }
        }
        all
    }

    pub(crate) async fn node(&self, name: &str, mib: u64) -> Result<()> {
        let sum = json!({ "cpu": "64", "memory": "1Ti", "pods": "1000", names::GPU_MEM: mib.to_string() });
        let node = json!({
            "metadata": { "name": name }, "spec": {},
            "status": { "capacity": sum, "allocatable": sum, "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        self.0.cluster.create(Kind::Node, node).await
    }

    /// A pod that asks for so many MiB; of one of [`RANKS`], or of none.
    pub(crate) async fn pod(&self, name: &str, mib: u64, rank: &str) -> Result<()> {
        self.pod_with(name, mib, rank, json!({})).await
    }

    /// A PodGroup of which so many pods are scheduled at the same time.
    pub(crate) async fn gang(&self, name: &str, min_count: usize) -> Result<()> {
        let policy = json!({ "gang": { "minCount": min_count } });
        let group = json!({ "metadata": { "name": name }, "spec": { "schedulingPolicy": policy } });
        self.0.cluster.create(Kind::PodGroup, group).await
    }

    /// A pod of that PodGroup.
    pub(crate) async fn member(&self, gang: &str, name: &str, mib: u64, rank: &str) -> Result<()> {
        let group = json!({ "schedulingGroup": { "podGroupName": gang } });
        self.pod_with(name, mib, rank, group).await
    }

    /// With this in its specification.
    pub(crate) async fn pod_with(
        &self,
        name: &str,
        mib: u64,
        rank: &str,
        more: Value,
    ) -> Result<()> {
        let asks = json!({ names::GPU_MEM: mib.to_string() });
        let mut spec = json!({
            "schedulerName": names::SCHEDULER,
            "containers": [{ "name": "main", "image": "i", "resources": { "limits": asks, "requests": asks } }],
        });
        merge(&mut spec, &more);
        let priority = RANKS
            .iter()
            .find(|(known, _)| *known == rank)
            .map(|(_, priority)| *priority);
        match (&self.0.cluster, priority) {
            (_, None) => {}
            (Cluster::Real(_), Some(_)) => spec["priorityClassName"] = json!(rank),
            (Cluster::Simulated(_), Some(priority)) => {
                spec["priority"] = json!(priority);
                if rank == "never" {
                    spec["preemptionPolicy"] = json!("Never");
                }
            }
        }
        let pod =
            json!({ "metadata": { "name": name }, "spec": spec, "status": { "phase": "Pending" } });
        self.0.cluster.create(Kind::Pod, pod).await?;
        let pod = self.0.cluster.pod(name).await?.context("just created")?;
        locked(&self.0.names).insert(uid(&pod), name.to_owned());
        Ok(())
    }

    pub(crate) async fn patch(&self, name: &str, patch: Value) -> Result<()> {
        self.0.cluster.patch(name, patch).await
    }

    pub(crate) async fn end(&self, name: &str) -> Result<()> {
        self.0.cluster.end(name).await
    }

    /// Waits until `is` of a pod.
    async fn until(&self, what: &str, mut is: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        while !is().await? {
            ensure!(
                began.elapsed() < PATIENCE,
                "not within {PATIENCE:?}: {what}; heard {:?}",
                self.heard()
            );
            sleep(LOOK).await;
        }
        Ok(())
    }

    pub(crate) async fn bound(&self, name: &str, node: &str) -> Result<()> {
        self.until(&format!("{name} is bound to {node}"), async || {
            let pod = self.0.cluster.pod(name).await?.unwrap_or_default();
            Ok(pod["spec"]["nodeName"] == node)
        })
        .await
    }

    /// A client has deleted the pod, and its kubelet has not reported the end.
    pub(crate) async fn ending(&self, name: &str) -> Result<()> {
        self.until(&format!("{name} is to end"), async || {
            let pod = self.0.cluster.pod(name).await?.unwrap_or_default();
            Ok(pod["metadata"]["deletionTimestamp"].is_string())
        })
        .await
    }

    /// How often it was asked to filter for this pod.
    pub(crate) fn asked(&self, pod: &str) -> usize {
        let heard = locked(&self.0.heard);
        let asked = heard
            .iter()
            .filter(|(of, text)| of == pod && text.starts_with("filter"));
        asked.count()
    }

    /// Waits until it was asked once more than `before`.
    pub(crate) async fn asked_again(&self, pod: &str, before: usize) -> Result<()> {
        let what = format!("{pod} is asked about more than {before} times");
        self.until(&what, async || Ok(self.asked(pod) > before))
            .await
    }

    /// kube-scheduler does not ask about this pod while nothing happens.
    pub(crate) async fn sleeps(&self, pod: &str) -> Result<()> {
        // Earlier events have their consequences.
        sleep(QUIET).await;
        let before = self.asked(pod);
        sleep(QUIET).await;
        let after = self.asked(pod);
        ensure!(
            before == after,
            "{pod} was asked about {} times more",
            after - before
        );
        Ok(())
    }
}

fn listed(names: &Value) -> Vec<String> {
    let names = names
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

async fn filter(State(stage): State<Stage>, Json(args): Json<Value>) -> Json<Value> {
    let (pod, nodes) = (name(&args["Pod"]), listed(&args["NodeNames"]));
    stage.hear(&pod, format!("filter {}", nodes.join(" ")));
    if stage.fails("filter", &pod) {
        return Json(json!({ "Error": "as told" }));
    }
    let orders = locked(&stage.0.orders);
    let (refused, passed): (Vec<_>, Vec<_>) = nodes
        .into_iter()
        .partition(|node| orders.refuses.contains(&(pod.clone(), node.clone())));
    let refused: BTreeMap<_, _> = refused.into_iter().map(|node| (node, "as told")).collect();
    Json(json!({ "NodeNames": passed, "FailedAndUnresolvableNodes": refused, "Error": "" }))
}

async fn prioritize(State(stage): State<Stage>, Json(args): Json<Value>) -> Json<Value> {
    let (pod, nodes) = (name(&args["Pod"]), listed(&args["NodeNames"]));
    stage.hear(&pod, format!("prioritize {}", nodes.join(" ")));
    let orders = locked(&stage.0.orders);
    let score = |node: &String| json!({ "Host": node, "Score": if *node == orders.likes { 10 } else { 0 } });
    Json(nodes.iter().map(score).collect())
}

async fn preempt(State(stage): State<Stage>, Json(args): Json<Value>) -> Json<Value> {
    let mut answer = args["NodeNameToMetaVictims"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    let names = locked(&stage.0.names).clone();
    let mut all = BTreeMap::new();
    for (node, victims) in &answer {
        let pods = victims["Pods"].as_array().into_iter().flatten();
        let pods = pods.filter_map(|pod| names.get(pod["UID"].as_str()?).map(String::as_str));
        all.insert(node.clone(), BTreeSet::from_iter(pods));
    }
    stage.hear(&name(&args["Pod"]), format!("preempt {all:?}"));
    let orders = locked(&stage.0.orders);
    answer.retain(|node, _| *node != orders.spares);
    Json(json!({ "NodeNameToMetaVictims": answer }))
}

async fn bind(State(stage): State<Stage>, Json(args): Json<Value>) -> Json<Value> {
    let text = |field: &str| args[field].as_str().unwrap_or_default().to_owned();
    let (pod, node) = (text("PodName"), text("Node"));
    stage.hear(&pod, format!("bind {node}"));
    let after = locked(&stage.0.orders).binds_after;
    sleep(after).await;
    if stage.fails("bind", &pod) {
        return Json(json!({ "Error": "as told" }));
    }
    let bound = stage.0.cluster.bind(&pod, &node).await;
    Json(json!({ "Error": bound.err().map(|error| error.to_string()).unwrap_or_default() }))
}
