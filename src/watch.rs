//! Watches → ledger. Each object is reduced to the fields used as it arrives.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{GpuNode, NodeFacts, PodFacts, Shared};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::watch;

use crate::App;

/// How far one resource has been read: the number of the last list that is in, and of the list
/// that is wanted.
#[derive(Debug)]
pub(crate) struct List {
    name: &'static str,
    done: watch::Sender<u64>,
    wanted: watch::Sender<u64>,
}

impl List {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            done: watch::Sender::new(0),
            wanted: watch::Sender::new(1),
        }
    }

    /// Lists anew and waits until the ledger has that list.
    pub(crate) async fn renew(&self) {
        let mut number = 0;
        self.wanted.send_modify(|wanted| {
            *wanted += 1;
            number = *wanted;
        });
        self.reached(number).await;
    }

    async fn reached(&self, number: u64) {
        // The sender lives as long as self: there is no error.
        let _ = self.done.subscribe().wait_for(|done| *done >= number).await;
    }
}

/// The lists that decisions need.
#[derive(Debug)]
pub(crate) struct Lists {
    /// Pods.
    pub(crate) pods: Arc<List>,
    nodes: Arc<List>,
    gpunodes: Arc<List>,
}

impl Default for Lists {
    fn default() -> Self {
        Self {
            pods: List::new("pods").into(),
            nodes: List::new("nodes").into(),
            gpunodes: List::new("gpunodes").into(),
        }
    }
}

impl Lists {
    fn all(&self) -> [&List; 3] {
        [&self.pods, &self.nodes, &self.gpunodes]
    }

    /// Those that have never been in.
    #[must_use]
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        let missing = self
            .all()
            .into_iter()
            .filter(|list| *list.done.borrow() == 0);
        missing.map(|list| list.name).collect()
    }

    /// Waits until each has been in once.
    pub(crate) async fn all_in(&self) {
        for list in self.all() {
            list.reached(1).await;
        }
    }
}

/// Starts the three watches; they run until the process ends.
pub(crate) fn spawn(app: &Arc<App>) {
    // What is Succeeded or Failed holds nothing; it leaves this list as if it were deleted.
    let unfinished = "status.phase!=Succeeded,status.phase!=Failed";
    let client = app.client.clone();
    let pods = move || {
        let config = watcher::Config::default().fields(unfinished);
        watcher(Api::<Pod>::all(client.clone()), config)
    };
    let resource = app.args.resource_name.clone();
    let mut shared = Shared::default();
    let facts = move |pod: Pod| {
        let mut facts = PodFacts::from_pod(&pod, &resource)?;
        shared.share(&mut facts);
        Some(facts)
    };
    let change = |app: &App, change| match change {
        Change::Apply(pod) => app.ledger().apply_pod(pod),
        Change::Delete(pod) => app.ledger().delete_pod(&pod.uid),
        Change::Reset(pods, began) => app.ledger().reset_pods(pods, began),
    };
    let list = app.lists.pods.clone();
    tokio::spawn(follow(app.clone(), list, pods, facts, change));

    let client = app.client.clone();
    let nodes = move || watcher(Api::<Node>::all(client.clone()), watcher::Config::default());
    let mut shared = Shared::default();
    let facts = move |node: Node| {
        let mut facts = NodeFacts::from_node(&node);
        shared.share_node(&mut facts);
        Some(facts)
    };
    let change = |app: &App, change| match change {
        Change::Apply(node) => app.ledger().apply_node(node),
        Change::Delete(node) => app.ledger().delete_node(&node.name),
        Change::Reset(nodes, _) => app.ledger().reset_nodes(nodes),
    };
    let list = app.lists.nodes.clone();
    tokio::spawn(follow(app.clone(), list, nodes, facts, change));

    let client = app.client.clone();
    let gpunodes = move || {
        watcher(
            Api::<GpuNode>::all(client.clone()),
            watcher::Config::default(),
        )
    };
    let facts = |node: GpuNode| Some((node.name_any(), node.status.unwrap_or_default()));
    let change = |app: &App, change: Change<(String, GpuNodeStatus)>| match change {
        Change::Apply((name, status)) => app.ledger().apply_gpunode(&name, status, app.now()),
        Change::Delete((name, _)) => app.ledger().delete_gpunode(&name),
        Change::Reset(list, _) => app.ledger().reset_gpunodes(list, app.now()),
    };
    let list = app.lists.gpunodes.clone();
    tokio::spawn(follow(app.clone(), list, gpunodes, facts, change));
}

enum Change<F> {
    Apply(F),
    Delete(F),
    /// The whole list, and the ledger's clock when it was asked for.
    Reset(Vec<F>, u64),
}

async fn follow<K, F, S>(
    app: Arc<App>,
    list: Arc<List>,
    watch: impl Fn() -> S + Send,
    mut facts: impl FnMut(K) -> Option<F> + Send,
    change: impl Fn(&App, Change<F>) + Send,
) where
    S: Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
    K: Send,
    F: Send,
{
    let resource = list.name;
    let mut wanted = list.wanted.subscribe();
    loop {
        let number = *wanted.borrow_and_update();
        let mut events = std::pin::pin!(watch().backoff(Retry::default()));
        let mut listed = Vec::new();
        let mut began = app.ledger().copies();
        loop {
            let event = tokio::select! {
                _ = wanted.changed() => break,
                event = events.next() => event,
            };
            let Some(event) = event else { break };
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
                    began = app.ledger().copies();
                }
                Ok(watcher::Event::InitApply(object)) => listed.extend(facts(object)),
                Ok(watcher::Event::InitDone) => {
                    tracing::debug!(resource, objects = listed.len(), "listed");
                    change(&app, Change::Reset(std::mem::take(&mut listed), began));
                    list.done.send_replace(number);
                }
                Err(error) => tracing::warn!(resource, %error, "watch failed; it starts again"),
            }
            app.wake.notify_one();
            app.warm.notify_one();
        }
    }
}

/// Pauses of a watch that fails: short, so that waiting pods hear of room soon after an outage.
#[derive(Default)]
struct Retry {
    failures: u32,
}

impl Iterator for Retry {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.failures += 1;
        Some(Duration::from_millis(200 << self.failures.min(4)))
    }
}

impl Backoff for Retry {
    fn reset(&mut self) {
        self.failures = 0;
    }
}
