//! Watches → ledger. Each object is reduced to the fields used as it arrives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt};
use gpustow_api::{GpuNode, NodeFacts, PodFacts};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};

use crate::App;

/// Which lists are in.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    pods: AtomicBool,
    nodes: AtomicBool,
    gpunodes: AtomicBool,
}

impl Ready {
    /// The lists that are still awaited.
    #[must_use]
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        [
            ("pods", &self.pods),
            ("nodes", &self.nodes),
            ("gpunodes", &self.gpunodes),
        ]
        .into_iter()
        .filter(|(_, ready)| !ready.load(Ordering::Acquire))
        .map(|(name, _)| name)
        .collect()
    }
}

/// Starts the three watches; they run until the process ends.
pub(crate) fn spawn(app: &Arc<App>) {
    let client = || app.client.clone();
    // What is Succeeded or Failed holds nothing; it leaves this list as if it were deleted.
    let unfinished = "status.phase!=Succeeded,status.phase!=Failed";
    let pods = watcher(
        Api::<Pod>::all(client()),
        watcher::Config::default().fields(unfinished),
    );
    let nodes = watcher(Api::<Node>::all(client()), watcher::Config::default());
    let gpunodes = watcher(Api::<GpuNode>::all(client()), watcher::Config::default());

    let resource = app.args.resource_name.clone();
    let facts = move |pod: Pod| PodFacts::from_pod(&pod, &resource);
    tokio::spawn(follow(app.clone(), "pods", pods, facts, |app, change| {
        let mut ledger = app.ledger();
        match change {
            Change::Apply(pod) => ledger.apply_pod(pod),
            Change::Delete(pod) => ledger.delete_pod(&pod.uid),
            Change::Reset(pods, began) => {
                ledger.reset_pods(pods, began);
                app.ready.pods.store(true, Ordering::Release);
            }
        }
    }));
    let facts = |node: Node| Some(NodeFacts::from_node(&node));
    tokio::spawn(follow(app.clone(), "nodes", nodes, facts, |app, change| {
        let mut ledger = app.ledger();
        match change {
            Change::Apply(node) => ledger.apply_node(node),
            Change::Delete(node) => ledger.delete_node(&node.name),
            Change::Reset(nodes, _) => {
                ledger.reset_nodes(nodes);
                app.ready.nodes.store(true, Ordering::Release);
            }
        }
    }));
    let facts = |node: GpuNode| Some((node.name_any(), node.status.unwrap_or_default()));
    tokio::spawn(follow(
        app.clone(),
        "gpunodes",
        gpunodes,
        facts,
        |app, change| {
            let (mut ledger, now) = (app.ledger(), app.now());
            match change {
                Change::Apply((name, status)) => ledger.apply_gpunode(&name, status, now),
                Change::Delete((name, _)) => ledger.delete_gpunode(&name),
                Change::Reset(list, _) => {
                    ledger.reset_gpunodes(list, now);
                    app.ready.gpunodes.store(true, Ordering::Release);
                }
            }
        },
    ));
}

enum Change<F> {
    Apply(F),
    Delete(F),
    /// The whole list, and when it was asked for.
    Reset(Vec<F>, Duration),
}

async fn follow<K, F>(
    app: Arc<App>,
    resource: &'static str,
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
    facts: impl Fn(K) -> Option<F> + Send,
    change: impl Fn(&App, Change<F>) + Send,
) where
    K: Send,
    F: Send,
{
    let mut events = std::pin::pin!(events.default_backoff());
    let mut listed = Vec::new();
    let mut began = app.now();
    while let Some(event) = events.next().await {
        app.metrics.watch_event(resource);
        match event {
            Ok(watcher::Event::Apply(object)) => {
                facts(object)
                    .into_iter()
                    .for_each(|facts| change(&app, Change::Apply(facts)));
            }
            Ok(watcher::Event::Delete(object)) => {
                facts(object)
                    .into_iter()
                    .for_each(|facts| change(&app, Change::Delete(facts)));
            }
            Ok(watcher::Event::Init) => {
                listed = Vec::new();
                began = app.now();
            }
            Ok(watcher::Event::InitApply(object)) => listed.extend(facts(object)),
            Ok(watcher::Event::InitDone) => {
                tracing::debug!(resource, objects = listed.len(), "listed");
                change(&app, Change::Reset(std::mem::take(&mut listed), began));
            }
            Err(error) => tracing::warn!(resource, %error, "watch failed; it starts again"),
        }
        app.wake.notify_one();
    }
}
