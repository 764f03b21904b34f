//! kube-scheduler as far as gpustow sees it: a cache that lags, pods that it assumes to be bound, a queue with
//! back-off, binds that overlap, and events that wake those it could not place.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use gpustow_api::intree::nodes_to_find;
use gpustow_simworld::Extender;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::autoscaler::{allows, is_placeholder};
use crate::cache::{Cache, Place, backoff};
use crate::check::{ended, group, pod_group, rejects};
use crate::net::{Link, Mode, Shared, locked};
use crate::preempt::{nominated, priority};
use crate::probes::PRIORITY;
use crate::server::{Copy, Kind};
use crate::story::Story;

/// The coscheduling plugin's permitWaitingTimeSeconds.
const GROUP: Duration = Duration::from_secs(60);
/// Between two looks, at most, when something has happened.
const IDLE: Duration = Duration::from_millis(50);

/// The extender in the same pod, and the pod's connection.
#[derive(Clone)]
pub(crate) struct Beside {
    pub(crate) link: Arc<Link>,
    pub(crate) extender: Extender,
}

impl Beside {
    /// Calls and answers pass as the link lets them.
    pub(crate) fn new(link: Arc<Link>, extender: Router) -> Self {
        let between = link.clone();
        let passes = from_fn(move |request: Request, next: Next| {
            let link = between.clone();
            async move {
                let down = |_| StatusCode::BAD_GATEWAY;
                link.pass().await.map_err(down)?;
                let answer = next.run(request).await;
                link.pass().await.map_err(down)?;
                Ok::<_, StatusCode>(answer)
            }
        });
        let extender = Extender(extender.layer(passes));
        Self { link, extender }
    }
}

/// One process of kube-scheduler, with its extender.
pub(crate) struct Scheduler {
    pub(crate) server: Shared,
    beside: Mutex<Beside>,
    pub(crate) cache: Mutex<Cache>,
    random: Mutex<StdRng>,
    /// Pods that wait for the others of their group, by UID.
    permits: Mutex<BTreeMap<String, String>>,
    /// It clears the nomination of a pod for which no preemption helps, as Kubernetes before 1.35 does.
    pub(crate) clears: bool,
    /// The names of its profiles, out of the names that pods give in `schedulerName`.
    profiles: &'static [&'static str],
    pub(crate) story: Story,
    /// Another pod may be due by now.
    moved: Notify,
    /// It leads, as far as it knows.
    pub(crate) leads: watch::Sender<bool>,
}

pub(crate) fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

pub(crate) fn name(object: &Value) -> String {
    object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

pub(crate) fn asked(pod: &Value) -> u64 {
    let (mib, gpus) = crate::check::asks(pod);
    mib * gpus as u64
}

impl Scheduler {
    pub(crate) fn new(
        server: &Shared,
        beside: Beside,
        clears: bool,
        profiles: &'static [&'static str],
        story: &Story,
        seed: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            clears,
            profiles,
            story: story.clone(),
            server: server.clone(),
            beside: Mutex::new(beside),
            cache: Mutex::default(),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            permits: Mutex::default(),
            moved: Notify::new(),
            leads: watch::Sender::new(false),
        })
    }

    /// Schedules for as long as it leads and lives. Where nothing happens it sleeps, and costs the world nothing.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut at = 0;
        let mut led = false;
        let (mut told, mut news) = (self.leads.subscribe(), locked(&self.server).news());
        loop {
            let link = self.beside().link;
            // A process that is gone does nothing any more; one that is frozen, later.
            if link.mode() == Mode::Dead {
                return;
            }
            if !matches!(timeout(IDLE, link.pass()).await, Ok(Ok(()))) {
                sleep(IDLE).await;
                continue;
            }
            let leads = *told.borrow_and_update();
            if led && !leads {
                // It ends when it hears that it leads no more, and its container restarts.
                *locked(&self.cache) = Cache::default();
                at = 0;
            }
            led = leads;
            if !leads {
                // A process on standby reads the events once it leads. The sender lives as long as self.
                let _ = told.changed().await;
                continue;
            }
            at = self.catch_up(at);
            match self.next() {
                Some(pod) => match pod_group(&pod) {
                    Some(group) => self.clone().cycle(group).await,
                    None => self.clone().schedule(pod).await,
                },
                None if *news.borrow_and_update() > at => sleep(IDLE).await,
                None => tokio::select! {
                    biased;
                    _ = told.changed() => {}
                    _ = news.changed() => sleep(IDLE.mul_f64(self.random(100) as f64 / 100.0)).await,
                    () = self.moved.notified() => {}
                    () = self.wait() => {}
                },
            }
        }
    }

    /// Until the next pod is due.
    async fn wait(&self) {
        let due = locked(&self.cache).due().map(|(at, _)| at).min();
        match due {
            Some(at) => sleep_until(at).await,
            None => pending().await,
        }
    }

    pub(crate) fn beside(&self) -> Beside {
        locked(&self.beside).clone()
    }

    /// The extender was restarted.
    pub(crate) fn put_beside(&self, beside: Beside) {
        *locked(&self.beside) = beside;
    }

    pub(crate) fn random(&self, below: u64) -> u64 {
        locked(&self.random).random_range(0..below.max(1))
    }

    /// Is it this one that places the pod?
    fn is_its(&self, pod: &Value) -> bool {
        let named = pod["spec"]["schedulerName"].as_str();
        named.is_some_and(|named| self.profiles.contains(&named))
    }

    /// Reads most of the new events, and wakes pods.
    fn catch_up(&self, at: u64) -> u64 {
        let server = locked(&self.server);
        let mut cache = locked(&self.cache);
        let cache = &mut *cache;
        let Ok(changes) = server.since(at) else {
            *cache = Cache::default();
            for pod in server.all(Kind::Pod).filter(|pod| !ended(pod)) {
                cache.pods.insert(uid(pod), pod.clone());
                if !pod["spec"]["nodeName"].is_string() && self.is_its(pod) {
                    cache.queue(&uid(pod));
                }
            }
            for node in server.all(Kind::Node) {
                cache.nodes.insert(name(node), node.clone());
            }
            for group in server.all(Kind::PodGroup) {
                cache.groups.insert(name(group), group.clone());
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
                    } else if self.is_its(pod) {
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
                Kind::PodGroup => match after {
                    Some(group) => drop(cache.groups.insert(name(group), group.clone())),
                    None => drop(cache.groups.remove(&name(object))),
                },
                _ => {}
            }
        }
        if wakes {
            cache.wake();
        }
        at
    }

    /// The next pod to look at.
    fn next(&self) -> Option<Copy> {
        let now = Instant::now();
        let cache = locked(&self.cache);
        let due: Vec<&Copy> = cache
            .due()
            .filter_map(|(at, pod)| (at <= now).then_some(pod))
            .collect();
        let index = usize::try_from(self.random(due.len() as u64)).unwrap_or(0);
        due.get(index).map(|pod| Copy::clone(pod))
    }

    /// Does the node pass kube-scheduler's own filters? They are the node's sum, and reasons that the ledger cannot
    /// see.
    fn passes(cache: &Cache, pod: &Value, node: &str) -> bool {
        let held = cache.here(node).chain(cache.nominated(node, pod));
        let held: u64 = held.map(|pod| asked(pod)).sum();
        let allows = |placeholder: &Value| {
            let node = cache.nodes.get(node);
            node.is_some_and(|node| allows(node, placeholder))
        };
        held + asked(pod) <= cache.allocatable(node)
            && !rejects(pod, node)
            && (!is_placeholder(pod) || allows(pod))
    }

    /// The nodes that pass, or as many as it looks for; the next call goes on from there.
    pub(crate) fn window(&self, pod: &Value) -> Vec<String> {
        let mut cache = locked(&self.cache);
        let nodes: Vec<String> = cache.nodes.keys().cloned().collect();
        let (begin, enough) = (cache.next, nodes_to_find(0, nodes.len()));
        let mut passed = Vec::new();
        let mut looked = 0;
        for at in begin..begin + nodes.len() {
            if passed.len() == enough {
                break;
            }
            looked += 1;
            let node = &nodes[at % nodes.len()];
            if Self::passes(&cache, pod, node) {
                passed.push(node.clone());
            }
        }
        cache.next = (begin + looked) % nodes.len().max(1);
        passed
    }

    pub(crate) fn put(&self, pod: &Value, place: Place) {
        let uid = uid(pod);
        locked(&self.server).disruptions.assume(&uid, None);
        let mut cache = locked(&self.cache);
        cache.assumed.remove(&uid);
        if let Some(entry) = cache.places.get_mut(&uid) {
            *entry = (place, entry.1 + 1);
        }
        self.moved.notify_one();
    }

    /// An error: it comes back after a pause.
    pub(crate) fn fail(&self, pod: &Value) {
        let tries = locked(&self.cache)
            .places
            .get(&uid(pod))
            .map_or(0, |it| it.1);
        self.put(pod, Place::Queued(Instant::now() + backoff(tries + 1)));
    }

    async fn schedule(self: Arc<Self>, pod: Copy) {
        // The one that it is nominated to is asked about alone first.
        let first = nominated(&pod).filter(|node| {
            let cache = locked(&self.cache);
            cache.nodes.contains_key(*node) && Self::passes(&cache, &pod, node)
        });
        let first = first.map(|node| Some(vec![node.to_owned()]));
        let (mut nodes, mut passed, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for look in first.into_iter().chain([None]) {
            let look = look.unwrap_or_else(|| {
                passed = self.window(&pod);
                passed.clone()
            });
            if look.is_empty() {
                continue;
            }
            let Some(answer) = self.filter(&pod, &look).await else {
                return self.fail(&pod);
            };
            [nodes, failed] = answer;
            if !nodes.is_empty() {
                break;
            }
        }
        if nodes.is_empty() {
            self.put(&pod, Place::Refused(Instant::now()));
            self.reject_group(&pod);
            self.preempt(&pod, &passed, &failed).await;
            return self.say_refused(&pod).await;
        }
        let node = self.best(&pod, nodes).await;
        self.assume(&pod, &node);
        self.bind(pod, node);
    }

    /// The nodes of these that the extender passes, and refused nodes on which victims may help. None if it does not
    /// answer, or answers with an error.
    pub(crate) async fn filter(&self, pod: &Copy, nodes: &[String]) -> Option<[Vec<String>; 2]> {
        locked(&self.server)
            .disruptions
            .note_shown(&uid(pod), nodes);
        self.beside().extender.filter(pod, nodes).await
    }

    /// The one of these nodes that the extender likes best.
    pub(crate) async fn best(&self, pod: &Copy, nodes: Vec<String>) -> String {
        let best = self.beside().extender.best(pod, nodes, |_| 0).await;
        best.unwrap_or_default()
    }

    pub(crate) fn assume(&self, pod: &Value, node: &str) {
        let mut server = locked(&self.server);
        server.disruptions.assume(&uid(pod), Some(node));
        let mut cache = locked(&self.cache);
        cache.assumed.insert(uid(pod), node.to_owned());
        if let Some(entry) = cache.places.get_mut(&uid(pod)) {
            entry.0 = Place::Assumed;
        }
    }

    /// Binds the pod where it is assumed to be, while others are looked at.
    pub(crate) fn bind(self: Arc<Self>, pod: Copy, node: String) {
        // Other delays before the bind: volumes, or other plugins' Permit.
        let permit = match self.random(50) {
            0 if priority(&pod) < PRIORITY => Duration::from_millis(self.random(60_000)),
            _ => Duration::ZERO,
        };
        tokio::spawn(async move {
            sleep(permit).await;
            if !self.group_is_there(&pod).await {
                self.fail(&pod);
                locked(&self.cache).wake();
                return;
            }
            let bound = self.beside().extender.bind(&pod, &node).await;
            if !bound {
                self.fail(&pod);
                // The pod's assumed memory is free.
                locked(&self.cache).wake();
            }
        });
    }

    /// Waits at Permit until all of the pod's group are assumed or bound, as the coscheduling plugin has them. False
    /// if one was refused, or that lasts too long.
    async fn group_is_there(&self, pod: &Value) -> bool {
        let Some((group, members)) = group(pod).filter(|_| pod_group(pod).is_none()) else {
            return true;
        };
        let uid = uid(pod);
        locked(&self.permits).insert(uid.clone(), group.to_owned());
        let since = Instant::now();
        loop {
            if !locked(&self.permits).contains_key(&uid) {
                return false;
            }
            let there = {
                let cache = locked(&self.cache);
                let same = cache.pods.iter();
                let same = same.filter(|(_, it)| self::group(it).is_some_and(|it| it.0 == group));
                let there = same.filter(|(uid, it)| {
                    it["spec"]["nodeName"].is_string() || cache.assumed.contains_key(*uid)
                });
                there.count() >= members
            };
            if there {
                locked(&self.permits).remove(&uid);
                return true;
            }
            if since.elapsed() > GROUP {
                self.reject_group(pod);
            }
            sleep(IDLE).await;
        }
    }

    /// One of a group was refused: the others do not wait for it.
    fn reject_group(&self, pod: &Value) {
        if let Some((group, _)) = group(pod) {
            locked(&self.permits).retain(|_, it| it != group);
        }
    }
}
