//! Watches → ledger. Each object is reduced to the fields used as it arrives.

mod followed;

use std::collections::HashSet;
use std::fmt::Debug;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use gpustow_serve::rate::Backoff as Pauses;
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};

use crate::app::App;
use crate::decode::{self, Each};
use crate::locked::Locked;
use crate::metrics::Metrics;

pub(crate) use followed::spawn;

/// How far one resource has been read: the number of the last list that is in, and of the list
/// that is wanted.
#[derive(Debug)]
pub(crate) struct List {
    name: &'static str,
    done: watch::Sender<u64>,
    wanted: watch::Sender<u64>,
    /// Who wants to hear of the versions that the watch shows.
    listener: Mutex<Option<mpsc::UnboundedSender<String>>>,
}

/// The versions that a watch shows, once the ledger has them.
pub(crate) struct Shown(mpsc::UnboundedReceiver<String>);

impl Shown {
    /// Waits for this one; for ever if it has none such.
    pub(crate) async fn reach(mut self, version: &str) {
        loop {
            match self.0.recv().await {
                Some(shown) if shown == version => return,
                Some(_) => {}
                None => pending().await,
            }
        }
    }
}

impl List {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            done: watch::Sender::new(0),
            wanted: watch::Sender::new(1),
            listener: Mutex::default(),
        }
    }

    /// The versions that the watch shows from now on. An earlier receiver gets no more.
    pub(crate) fn shown(&self) -> Shown {
        let (listener, shown) = mpsc::unbounded_channel();
        *self.listener() = Some(listener);
        Shown(shown)
    }

    fn listener(&self) -> MutexGuard<'_, Option<mpsc::UnboundedSender<String>>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ledger has this version.
    fn show(&self, version: Option<String>) {
        let mut listener = self.listener();
        let version = version.unwrap_or_default();
        if listener
            .as_ref()
            .is_some_and(|it| it.send(version).is_err())
        {
            *listener = None;
        }
    }

    /// Lists again and waits until the ledger has that list.
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
    budgets: Arc<List>,
}

impl Default for Lists {
    fn default() -> Self {
        Self {
            pods: List::new("pods").into(),
            nodes: List::new("nodes").into(),
            gpunodes: List::new("gpunodes").into(),
            budgets: List::new("poddisruptionbudgets").into(),
        }
    }
}

impl Lists {
    fn all(&self) -> [&List; 4] {
        [&self.pods, &self.nodes, &self.gpunodes, &self.budgets]
    }

    /// Has all of them listed again, and waits for none.
    pub(crate) fn renew_all(&self) {
        for list in self.all() {
            list.wanted.send_modify(|wanted| *wanted += 1);
        }
    }

    /// The names of the lists that have never been in.
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

/// A watch ends after a minute at most and goes on from where it was: of a connection that died
/// without a word we hear before reports are stale.
pub(crate) fn config() -> watcher::Config {
    watcher::Config::default().timeout(gpustow_serve::WATCH_SECONDS)
}

enum Change<F> {
    Apply(F),
    Delete(F),
    /// The whole list, and the ledger's clock when it was asked for.
    Reset(Vec<F>, u64),
}

/// Follows one resource.
struct Follower {
    client: Client,
    ledger: Arc<Locked>,
    metrics: Arc<Metrics>,
    list: Arc<List>,
}

impl Follower {
    /// Follows `list`, for as long as the process runs.
    fn spawn<K, F>(
        app: &App,
        list: &Arc<List>,
        config: watcher::Config,
        facts: impl FnMut(Each<K>) -> Option<F> + Send + 'static,
        change: impl Fn(&Locked, Change<F>) + Send + 'static,
    ) where
        K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static,
        F: Send + 'static,
    {
        let follower = Self {
            client: app.client.clone(),
            ledger: app.ledger.clone(),
            metrics: app.metrics.clone(),
            list: list.clone(),
        };
        app.panics
            .spawn(list.name, follower.run(config, facts, change));
    }

    async fn run<K, F>(
        self,
        config: watcher::Config,
        mut facts: impl FnMut(Each<K>) -> Option<F> + Send,
        change: impl Fn(&Locked, Change<F>) + Send,
    ) where
        K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static,
        F: Send,
    {
        let resource = self.list.name;
        let mut wanted = self.list.wanted.subscribe();
        let mut carefully = false;
        let mut broken = Broken::default();
        loop {
            let number = *wanted.borrow_and_update();
            let events = decode::watch::<K>(self.client.clone(), config.clone(), carefully);
            let mut events = std::pin::pin!(events.backoff(Retry::default()));
            let mut listed = Vec::new();
            let mut began = self.ledger.lock().copies();
            loop {
                let event = tokio::select! {
                    biased;
                    _ = wanted.changed() => break,
                    event = events.next() => event,
                };
                let Some(event) = event else { break };
                self.metrics.watch_event(resource);
                let change = |it| change(&self.ledger, it);
                match event {
                    Ok(watcher::Event::Apply(object)) => {
                        broken.look_at(resource, &object);
                        let version = object.meta().resource_version.clone();
                        let applied = facts(object).map(Change::Apply);
                        applied.into_iter().for_each(change);
                        self.list.show(version);
                    }
                    Ok(watcher::Event::Delete(object)) => {
                        broken.forget(&object);
                        let deleted = facts(object).map(Change::Delete);
                        deleted.into_iter().for_each(change);
                    }
                    Ok(watcher::Event::Init) => {
                        listed = Vec::new();
                        broken.0.clear();
                        began = self.ledger.lock().copies();
                    }
                    Ok(watcher::Event::InitApply(object)) => {
                        broken.look_at(resource, &object);
                        listed.extend(facts(object));
                    }
                    Ok(watcher::Event::InitDone) => {
                        tracing::debug!(resource, objects = listed.len(), "listed");
                        change(Change::Reset(std::mem::take(&mut listed), began));
                        self.list.done.send_replace(number);
                    }
                    Err(error) => {
                        tracing::warn!(resource, %error, "watch failed; it starts again");
                        if !carefully && decode::is_undecodable(&error) {
                            carefully = true;
                            break;
                        }
                    }
                }
                self.metrics.undecodable(resource, broken.0.len());
                self.ledger.wake.notify_one();
                self.ledger.warm.notify_one();
            }
        }
    }
}

/// Namespaces and names of the objects of one kind that cannot be decoded.
#[derive(Default)]
struct Broken(HashSet<(Option<String>, Option<String>)>);

impl Broken {
    fn look_at<K: Resource>(&mut self, resource: &str, object: &Each<K>) {
        if let Each::Broken(remains) = object {
            let (namespace, name) = (&remains.meta.namespace, &remains.meta.name);
            tracing::error!(
                resource,
                namespace = namespace.as_deref(),
                name = name.as_deref(),
                error = remains.error,
                "cannot read this object: it takes its node out of use until it is written again"
            );
            self.0.insert(key(object));
        } else if !self.0.is_empty() {
            self.forget(object);
        }
    }

    fn forget<K: Resource>(&mut self, object: &Each<K>) {
        self.0.remove(&key(object));
    }
}

fn key<K: Resource>(object: &Each<K>) -> (Option<String>, Option<String>) {
    let meta = object.meta();
    (meta.namespace.clone(), meta.name.clone())
}

/// Pauses of a watch that fails: short, so that waiting pods hear of room soon after an outage.
pub(crate) struct Retry(Pauses);

impl Default for Retry {
    fn default() -> Self {
        let [first, most] = [400, 3200].map(Duration::from_millis);
        Self(Pauses::new(first, most))
    }
}

impl Iterator for Retry {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.0.pause())
    }
}

impl Backoff for Retry {
    fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{Request, Response};
    use gpustow_api::{PodFacts, PodObject, names};
    use serde_json::{from_value, json};
    use tokio::sync::{Notify, mpsc};
    use tower::service_fn;

    use super::*;
    use crate::panics::Panics;

    fn facts(name: &str) -> PodFacts {
        let pod = json!({"metadata": {"namespace": "n", "name": name, "uid": name, "resourceVersion": "7"}});
        PodFacts::from_pod(&from_value(pod).unwrap(), names::GPU_MEM).unwrap()
    }

    fn follower(client: Client, ledger: &Arc<Locked>, list: Arc<List>) -> Follower {
        Follower {
            client,
            ledger: ledger.clone(),
            metrics: Metrics::new().unwrap().into(),
            list,
        }
    }

    /// A list cannot contain our binds and reads while it is on its way.
    #[tokio::test]
    async fn list_counts_from_when_it_was_asked_for() {
        let (asked, answer) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (listed, reply) = (asked.clone(), answer.clone());
        let service = service_fn(move |_: Request<kube::client::Body>| {
            let (listed, reply) = (listed.clone(), reply.clone());
            async move {
                listed.notify_one();
                reply.notified().await;
                let list = r#"{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "8"}, "items": []}"#;
                Ok::<_, kube::Error>(Response::new(Body::from(list)))
            }
        });
        let config = gpustow_ledger::Config::default();
        let ledger = Arc::new(Locked::new(config, Panics::default()));
        let client = Client::new(service, "default");
        let follower = follower(client, &ledger, List::new("pods").into());
        let (resets, mut reset) = mpsc::unbounded_channel();
        let change = move |_: &Locked, change| {
            if let Change::Reset(_, began) = change {
                resets.send(began).unwrap();
            }
        };
        let pod = |pod: Each<PodObject>| pod.facts(names::GPU_MEM);
        tokio::spawn(follower.run(super::config(), pod, change));
        asked.notified().await;
        let before = ledger.lock().copies();
        ledger.lock().apply_pod(facts("meanwhile"));
        assert!(ledger.lock().copies() > before);
        answer.notify_one();
        assert_eq!(reset.recv().await, Some(before));
    }

    /// Objects that were written before that version are in the ledger then, too: a takeover relies on it.
    #[tokio::test]
    async fn version_is_reached_once_the_ledger_has_it() {
        let service = service_fn(|request: Request<kube::client::Body>| async move {
            let pod = |name: &str, version: &str| {
                json!({
                    "kind": "Pod", "apiVersion": "v1",
                    "metadata": {"namespace": "n", "name": name, "uid": name, "resourceVersion": version},
                })
            };
            let query = request.uri().query().unwrap_or_default();
            let answer = match query.contains("watch=true") {
                false => json!({
                    "kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "8"},
                    "items": [pod("first", "8")],
                })
                .to_string(),
                true => ["9", "10"]
                    .map(|version| {
                        json!({"type": "ADDED", "object": pod(version, version)}).to_string()
                    })
                    .join("\n"),
            };
            Ok::<_, kube::Error>(Response::new(Body::from(answer)))
        });
        let config = gpustow_ledger::Config::default();
        let ledger = Arc::new(Locked::new(config, Panics::default()));
        let list = Arc::new(List::new("pods"));
        let client = Client::new(service, "default");
        let follower = follower(client, &ledger, list.clone());
        let change = |ledger: &Locked, change: Change<PodFacts>| match change {
            Change::Apply(pod) => ledger.lock().apply_pod(pod),
            Change::Delete(_) | Change::Reset(..) => {}
        };
        let pod = |pod: Each<PodObject>| pod.facts(names::GPU_MEM);
        let shown = list.shown();
        tokio::spawn(follower.run(super::config(), pod, change));
        shown.reach("10").await;
        let ledger = ledger.lock();
        assert!(ledger.pod("9").is_some() && ledger.pod("10").is_some());
    }
}
