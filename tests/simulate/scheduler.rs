//! kube-scheduler as far as gpustow sees it: a cache that lags, pods that it assumes to be bound, a queue with
//! back-off, binds that overlap, and events that wake those it could not place.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use gpustow_api::names;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt as _;

use crate::check::ended;
use crate::net::{Link, Shared, locked};
use crate::server::{Copy, Kind};

/// As in scheduler-config.
const BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
const HTTP_TIMEOUT: Duration = Duration::from_secs(10);
/// podMaxInUnschedulablePodsDuration.
const FLUSH: Duration = Duration::from_secs(300);
/// Between two looks when nothing happens.
const IDLE: Duration = Duration::from_millis(50);

/// Where a waiting pod is.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// It is looked at from then on.
    Queued(Instant),
    /// An event, or the flush, must wake it.
    Refused(Instant),
    /// Its bind is under way, there.
    Assumed,
}

#[derive(Default)]
struct Cache {
    pods: BTreeMap<String, Copy>,
    nodes: BTreeMap<String, Copy>,
    places: BTreeMap<String, (Place, u32)>,
    /// Where a pod is assumed to be, by UID.
    assumed: BTreeMap<String, String>,
}

impl Cache {
    /// The pod has been created or has changed: it is looked at again.
    fn queue(&mut self, uid: &str) {
        let now = Instant::now();
        let first = || (Place::Queued(now), 0);
        let (place, _) = self.places.entry(uid.to_owned()).or_insert_with(first);
        if let Place::Refused(_) = place {
            *place = Place::Queued(now);
        }
    }
}

/// One process of kube-scheduler, with the extender beside it.
pub(crate) struct Scheduler {
    server: Shared,
    link: Arc<Link>,
    extender: Router,
    cache: Mutex<Cache>,
    random: Mutex<StdRng>,
    /// It leads, as far as it knows.
    pub(crate) leads: Mutex<bool>,
}

fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

fn name(object: &Value) -> String {
    object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

fn asked(pod: &Value) -> u64 {
    let (mib, gpus) = crate::check::asks(pod);
    mib * gpus as u64
}

impl Scheduler {
    pub(crate) fn new(server: &Shared, link: &Arc<Link>, extender: Router, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            server: server.clone(),
            link: link.clone(),
            extender,
            cache: Mutex::default(),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            leads: Mutex::new(false),
        })
    }

    /// Schedules for as long as it leads and the world lasts.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut at = 0;
        let mut led = false;
        loop {
            // A process that is gone does nothing; one that is frozen, later.
            if self.link.pass().await.is_err() {
                sleep(IDLE).await;
                continue;
            }
            let leads = *locked(&self.leads);
            if led && !leads {
                // It ends when it hears that it leads no more, and its container starts anew.
                *locked(&self.cache) = Cache::default();
                at = 0;
            }
            led = leads;
            at = self.catch_up(at);
            if !leads {
                sleep(IDLE).await;
                continue;
            }
            match self.next() {
                Some(pod) => self.clone().schedule(pod).await,
                None => sleep(IDLE).await,
            }
        }
    }

    fn random(&self, below: u64) -> u64 {
        locked(&self.random).random_range(0..below.max(1))
    }

    /// Reads what has happened, most of it, and wakes pods.
    fn catch_up(&self, at: u64) -> u64 {
        let server = locked(&self.server);
        let mut cache = locked(&self.cache);
        let cache = &mut *cache;
        let Ok(changes) = server.since(at).map(<[_]>::to_vec) else {
            *cache = Cache::default();
            for pod in server.all(Kind::Pod).filter(|pod| !ended(pod)) {
                cache.pods.insert(uid(pod), pod.clone());
                if !pod["spec"]["nodeName"].is_string() {
                    cache.queue(&uid(pod));
                }
            }
            for node in server.all(Kind::Node) {
                cache.nodes.insert(name(node), node.clone());
            }
            return server.version();
        };
        let lag = usize::try_from(self.random(3)).unwrap_or(0);
        let seen = changes.len().saturating_sub(lag);
        let mut at = at;
        let mut wakes = false;
        for change in &changes[..seen] {
            at = change.version;
            let gone = |it: &Copy| change.kind == Kind::Pod && ended(it);
            let after = change.after.as_ref().filter(|it| !gone(it));
            let Some(object) = after.or(change.before.as_ref()) else {
                continue;
            };
            match change.kind {
                Kind::Pod => {
                    let uid = uid(object);
                    let Some(pod) = after else {
                        cache.pods.remove(&uid);
                        cache.places.remove(&uid);
                        cache.assumed.remove(&uid);
                        wakes = true;
                        continue;
                    };
                    if pod["spec"]["nodeName"].is_string() {
                        cache.places.remove(&uid);
                        cache.assumed.remove(&uid);
                        wakes = true;
                    } else {
                        cache.queue(&uid);
                    }
                    cache.pods.insert(uid, pod.clone());
                }
                Kind::Node => {
                    wakes = true;
                    match after {
                        Some(node) => cache.nodes.insert(name(node), node.clone()),
                        None => cache.nodes.remove(&name(object)),
                    };
                }
                Kind::GpuNode | Kind::Lease => {}
            }
        }
        if wakes {
            for (place, _) in cache.places.values_mut() {
                if let Place::Refused(_) = place {
                    *place = Place::Queued(Instant::now() + BACKOFF);
                }
            }
        }
        at
    }

    /// The next pod to look at.
    fn next(&self) -> Option<Copy> {
        let now = Instant::now();
        let cache = locked(&self.cache);
        let due = cache.places.iter().filter(|(_, (place, _))| match place {
            Place::Queued(at) => *at <= now,
            Place::Refused(since) => *since + FLUSH <= now,
            Place::Assumed => false,
        });
        let due: Vec<&Copy> = due
            .filter_map(|(uid, _)| cache.pods.get(uid))
            .filter(|pod| !pod["metadata"]["deletionTimestamp"].is_string())
            .collect();
        let index = usize::try_from(self.random(due.len() as u64)).unwrap_or(0);
        due.get(index).map(|pod| Copy::clone(pod))
    }

    /// What NodeResourcesFit says: the node's sum.
    fn fits(&self, pod: &Value) -> Vec<String> {
        let cache = locked(&self.cache);
        let nodes = cache.nodes.iter().filter(|(node, object)| {
            let allocatable = object["status"]["allocatable"][names::GPU_MEM].as_str();
            let all: u64 = allocatable.and_then(|it| it.parse().ok()).unwrap_or(0);
            let here = cache.pods.iter().filter(|(uid, other)| {
                other["spec"]["nodeName"] == ***node || cache.assumed.get(*uid) == Some(*node)
            });
            let held: u64 = here.map(|(_, pod)| asked(pod)).sum();
            held + asked(pod) <= all
        });
        nodes.map(|(node, _)| node.clone()).collect()
    }

    fn put(&self, pod: &Value, place: Place) {
        let mut cache = locked(&self.cache);
        let uid = uid(pod);
        cache.assumed.remove(&uid);
        if let Some(entry) = cache.places.get_mut(&uid) {
            *entry = (place, entry.1 + 1);
        }
    }

    /// An error: it comes back after a pause.
    fn fail(&self, pod: &Value) {
        let tries = locked(&self.cache)
            .places
            .get(&uid(pod))
            .map_or(0, |it| it.1);
        let pause = (BACKOFF * 2_u32.pow(tries.min(3))).min(MAX_BACKOFF);
        self.put(pod, Place::Queued(Instant::now() + pause));
    }

    async fn schedule(self: Arc<Self>, pod: Copy) {
        let nodes = self.fits(&pod);
        if nodes.is_empty() {
            return self.put(&pod, Place::Refused(Instant::now()));
        }
        let body = json!({ "Pod": *pod, "NodeNames": nodes });
        let Some(answer) = self.call("filter", &body).await else {
            return self.fail(&pod);
        };
        if answer["Error"]
            .as_str()
            .is_some_and(|text| !text.is_empty())
        {
            return self.fail(&pod);
        }
        let nodes = answer["NodeNames"].as_array().cloned().unwrap_or_default();
        let node = match nodes.len() {
            0 => return self.put(&pod, Place::Refused(Instant::now())),
            1 => nodes[0].clone(),
            _ => {
                let body = json!({ "Pod": *pod, "NodeNames": nodes });
                let scores = self.call("prioritize", &body).await.unwrap_or_default();
                let scores = scores.as_array().cloned().unwrap_or_default();
                let best = scores.iter().max_by_key(|it| it["Score"].as_i64());
                best.map_or(nodes[0].clone(), |it| it["Host"].clone())
            }
        };
        let node = node.as_str().unwrap_or_default().to_owned();
        {
            let mut cache = locked(&self.cache);
            cache.assumed.insert(uid(&pod), node.clone());
            if let Some(entry) = cache.places.get_mut(&uid(&pod)) {
                entry.0 = Place::Assumed;
            }
        }
        tokio::spawn(async move {
            let body = json!({
                "PodName": pod["metadata"]["name"], "PodNamespace": pod["metadata"]["namespace"],
                "PodUID": pod["metadata"]["uid"], "Node": node,
            });
            let answer = self.call("bind", &body).await;
            let bound = answer.is_some_and(|answer| answer["Error"] == "");
            if !bound {
                self.fail(&pod);
            }
        });
    }

    /// Calls the extender; none if it does not answer.
    async fn call(&self, verb: &str, body: &Value) -> Option<Value> {
        let request = Request::post(format!("/{verb}"))
            .header("host", "127.0.0.1:32766")
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .ok()?;
        let call = async {
            self.link.pass().await.ok()?;
            let answer = self.extender.clone().oneshot(request).await.ok()?;
            self.link.pass().await.ok()?;
            let body = to_bytes(answer.into_body(), usize::MAX).await.ok()?;
            serde_json::from_slice(&body).ok()
        };
        timeout(HTTP_TIMEOUT, call).await.ok().flatten()
    }
}
