//! Claims, devices and rules, as watches show them, reduced to the fields that count.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use gpustow_api::claim::{self, Consumed, Device, GROUP, Rule};
use gpustow_api::names;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::watch::{Retry, config};

/// Objects of a kind by namespace and name; none before the first list is in.
type Kind<T> = Option<HashMap<String, T>>;

/// The request and the allocation of a claim.
#[derive(Clone, Debug, Default)]
pub(super) struct Claim {
    /// Its consumption, once it is allocated.
    pub(super) consumed: HashMap<Device, Consumed>,
    /// It is allocated, if only to devices that are none of ours.
    pub(super) allocated: bool,
    /// Classes of devices, each with a number.
    pub(super) requests: Vec<(String, usize)>,
}

impl Claim {
    pub(super) fn of(claim: &Value) -> Self {
        let requests = claim["spec"]["devices"]["requests"].as_array();
        let requests = requests.into_iter().flatten().take(32).flat_map(|request| {
            let several = request["firstAvailable"].as_array().into_iter().flatten();
            let one = Some(&request["exactly"]).filter(|it| it.is_object());
            // The first that is available: one of them counts.
            one.into_iter().chain(several).take(1)
        });
        let requests = requests.filter_map(|request| {
            let class = request["deviceClassName"].as_str()?.to_owned();
            let count = request["count"].as_u64().unwrap_or(1).clamp(1, 256);
            Some((class, usize::try_from(count).unwrap_or(1)))
        });
        let mut consumed = claim::consumed(claim);
        consumed.retain(|_, it| *it != Consumed::Nothing);
        Self {
            allocated: claim["status"]["allocation"].is_object(),
            requests: requests.collect(),
            consumed,
        }
    }
}

/// The known objects.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) claims: Kind<Claim>,
    /// Devices, each with the UUIDs of the GPUs that it is or is a part of.
    pub(super) slices: Kind<Vec<(Device, Vec<String>)>>,
    pub(super) rules: Kind<Rule>,
}

/// Watches that end when this is dropped.
pub(super) struct Watched {
    seen: Arc<Mutex<Seen>>,
    _tasks: JoinSet<()>,
    /// The version in which DeviceTaintRules are served.
    pub(super) version: &'static str,
}

fn resource(version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, version, kind))
}

/// All objects of a kind of the group of claims.
pub(super) fn all(client: &Client, kind: &str) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &resource("v1", kind))
}

/// All DeviceTaintRules, in the version in which they are served.
pub(super) fn rules(client: &Client, version: &str) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &resource(version, "DeviceTaintRule"))
}

pub(super) fn rule_of(object: &DynamicObject) -> Rule {
    Rule::of(&serde_json::to_value(object).unwrap_or_default())
}

impl Watched {
    pub(super) fn start(client: &Client, version: &'static str) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut tasks = JoinSet::new();
        let all = |kind| watcher(all(client, kind), config());
        let labelled = config().labels(names::CLAIMS_FENCE);
        let rules = watcher(rules(client, version), labelled);
        let claim = |it: &DynamicObject| Claim::of(&it.data);
        let slice = |it: &DynamicObject| claim::published(&it.data).collect();
        let (claims, slices) = (all("ResourceClaim"), all("ResourceSlice"));
        tasks.spawn(follow(seen.clone(), claims, |it| &mut it.claims, claim));
        tasks.spawn(follow(seen.clone(), slices, |it| &mut it.slices, slice));
        tasks.spawn(follow(seen.clone(), rules, |it| &mut it.rules, rule_of));
        Self {
            seen,
            _tasks: tasks,
            version,
        }
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn follow<T: Send>(
    seen: Arc<Mutex<Seen>>,
    events: impl Stream<Item = watcher::Result<watcher::Event<DynamicObject>>> + Send,
    kind: impl Fn(&mut Seen) -> &mut Kind<T> + Send,
    reduced: impl Fn(&DynamicObject) -> T + Send,
) {
    let reduced = |object: &DynamicObject| {
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        let name = object.metadata.name.as_deref().unwrap_or_default();
        (format!("{namespace}/{name}"), reduced(object))
    };
    let mut events = std::pin::pin!(events.backoff(Retry::default()));
    let mut listed = HashMap::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => listed.clear(),
            Ok(watcher::Event::InitApply(object)) => {
                listed.extend([reduced(&object)]);
            }
            Ok(watcher::Event::InitDone) => {
                *kind(&mut lock(&seen)) = Some(std::mem::take(&mut listed));
            }
            Ok(watcher::Event::Apply(object)) => {
                let (name, object) = reduced(&object);
                kind(&mut lock(&seen))
                    .get_or_insert_default()
                    .insert(name, object);
            }
            Ok(watcher::Event::Delete(object)) => {
                let (name, _) = reduced(&object);
                kind(&mut lock(&seen)).get_or_insert_default().remove(&name);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot watch ResourceClaims: GPUs stay as they are; is the ClusterRole gpustow-claims there?");
            }
        }
    }
}
