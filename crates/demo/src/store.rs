//! The simulated API server's objects: optimistic concurrency and a log of changes, as etcd and
//! kube-apiserver have them. It knows the binding and status subresources of pods, and no HTTP.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use k8s_openapi::jiff::{Timestamp, Unit};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

/// Changes that a watch can start from; older ones are forgotten.
const LOG: usize = 20_000;

/// A request that the API server refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// HTTP status.
    pub(crate) code: StatusCode,
    /// What went wrong, in a sentence.
    pub(crate) message: String,
}

fn refused(code: StatusCode, message: impl Into<String>) -> Refused {
    Refused {
        code,
        message: message.into(),
    }
}

/// Plural resource, namespace (empty for cluster-scoped ones) and name.
pub(crate) type Key = (String, String, String);

/// One write.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) resource: String,
    /// The object before; none if it was created.
    pub(crate) old: Option<Arc<Value>>,
    /// The object after; none if it was deleted.
    pub(crate) new: Option<Arc<Value>>,
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    log: VecDeque<Arc<Change>>,
}

/// All objects.
#[derive(Debug)]
pub(crate) struct Store {
    state: Mutex<State>,
    /// The time of day, to the second, at which it began on the runtime's clock: ages follow that clock.
    began: (Timestamp, Instant),
    version: watch::Sender<u64>,
}

/// What a write to an existing object insists on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Preconditions {
    uid: Option<String>,
    resource_version: Option<String>,
}

impl Preconditions {
    /// Those in an object's metadata.
    pub(crate) fn of(object: &Value) -> Self {
        let text = |path| {
            object
                .pointer(path)
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        Self {
            uid: text("/metadata/uid"),
            resource_version: text("/metadata/resourceVersion"),
        }
    }

    fn check(&self, name: &str, present: &Self) -> Result<(), Refused> {
        let holds = |wanted: &Option<String>, present| wanted.is_none() || wanted == present;
        if !holds(&self.uid, &present.uid) {
            let message = format!("{name}: precondition failed: another UID");
            return Err(refused(StatusCode::CONFLICT, message));
        }
        if !holds(&self.resource_version, &present.resource_version) {
            let message = format!("{name}: the object has been modified");
            return Err(refused(StatusCode::CONFLICT, message));
        }
        Ok(())
    }
}

impl Store {
    pub(crate) fn new() -> Self {
        let now = Timestamp::now();
        let now = now.round(Unit::Second).unwrap_or(now);
        Self {
            state: Mutex::default(),
            began: (now, Instant::now()),
            version: watch::Sender::new(0),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells of every new version.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Creates an object; gives it UID, resourceVersion and age.
    ///
    /// # Errors
    /// If one of that name exists.
    pub(crate) fn create(&self, resource: &str, mut object: Value) -> Result<Arc<Value>, Refused> {
        let key = key_of(resource, &object);
        let mut state = self.state();
        if state.objects.contains_key(&key) {
            let message = format!("{resource} {:?} already exists", key.2);
            return Err(refused(StatusCode::CONFLICT, message));
        }
        let uid = format!("00000000-0000-4000-8000-{:012x}", state.version + 1);
        let (day, began) = self.began;
        let created = (day + began.elapsed()).to_string();
        let given = json!({"metadata": {"uid": uid, "creationTimestamp": created}});
        merge(&mut object, &given, false);
        Ok(self.write(&mut state, key, None, object))
    }

    /// # Errors
    /// If there is none.
    pub(crate) fn get(&self, key: &Key) -> Result<Arc<Value>, Refused> {
        let state = self.state();
        state
            .objects
            .get(key)
            .cloned()
            .ok_or_else(|| not_found(key))
    }

    /// All objects of a resource, and the version of which this is the state.
    pub(crate) fn list(&self, resource: &str) -> (u64, Vec<Arc<Value>>) {
        let state = self.state();
        let from = (resource.to_owned(), String::new(), String::new());
        let of_it = state
            .objects
            .range(from..)
            .take_while(|((other, ..), _)| other == resource);
        (
            state.version,
            of_it.map(|(_, object)| object.clone()).collect(),
        )
    }

    /// What was written after `version`.
    ///
    /// # Errors
    /// If that is no longer known.
    pub(crate) fn since(&self, version: u64) -> Result<Vec<Arc<Change>>, Refused> {
        let state = self.state();
        let oldest = state
            .log
            .front()
            .map_or(state.version + 1, |change| change.version);
        if version + 1 < oldest {
            return Err(refused(
                StatusCode::GONE,
                format!("too old resource version: {version}"),
            ));
        }
        let skip = usize::try_from(version + 1 - oldest).unwrap_or(usize::MAX);
        Ok(state.log.iter().skip(skip).cloned().collect())
    }

    /// Changes an object; nothing is written if `change` leaves it as it is.
    ///
    /// # Errors
    /// If there is none, a precondition fails or `change` refuses.
    pub(crate) fn update(
        &self,
        key: Key,
        preconditions: &Preconditions,
        change: impl FnOnce(&mut Value) -> Result<(), Refused>,
    ) -> Result<Arc<Value>, Refused> {
        let mut state = self.state();
        let old = state
            .objects
            .get(&key)
            .cloned()
            .ok_or_else(|| not_found(&key))?;
        preconditions.check(&key.2, &Preconditions::of(&old))?;
        let mut new = Value::clone(&old);
        change(&mut new)?;
        if new == *old {
            return Ok(old);
        }
        Ok(self.write(&mut state, key, Some(old), new))
    }

    /// # Errors
    /// If there is none.
    pub(crate) fn delete(&self, key: Key) -> Result<(), Refused> {
        let mut state = self.state();
        let old = state.objects.remove(&key).ok_or_else(|| not_found(&key))?;
        self.log(&mut state, key.0, Some(old), None);
        Ok(())
    }

    /// `POST pods/NAME/binding`: sets the node and adds the Binding's annotations, once.
    ///
    /// # Errors
    /// If the pod is gone, changed or bound, or the Binding names no node.
    pub(crate) fn bind(&self, pod: Key, binding: &Value) -> Result<(), Refused> {
        let node = binding
            .pointer("/target/name")
            .and_then(Value::as_str)
            .filter(|node| !node.is_empty());
        let node = node.ok_or_else(|| {
            refused(
                StatusCode::UNPROCESSABLE_ENTITY,
                "target.name: Required value",
            )
        })?;
        let annotations = binding.pointer("/metadata/annotations");
        let name = pod.2.clone();
        self.update(pod, &Preconditions::of(binding), |pod| {
            if let Some(bound) = pod.pointer("/spec/nodeName").and_then(Value::as_str) {
                let message = format!("pod {name} is already assigned to node {bound:?}");
                return Err(refused(StatusCode::CONFLICT, message));
            }
            let scheduled = json!([{"type": "PodScheduled", "status": "True"}]);
            let patch = json!({
                "metadata": {"annotations": annotations.unwrap_or(&Value::Object(Map::new()))},
                "spec": {"nodeName": node},
                "status": {"conditions": scheduled},
            });
            merge(pod, &patch, true);
            Ok(())
        })
        .map(drop)
    }

    /// `PATCH pods/NAME/status`: changes status and annotations, nothing else. `strategic` merges
    /// conditions by their type.
    ///
    /// # Errors
    /// If the pod is gone or a precondition fails.
    pub(crate) fn patch_status(
        &self,
        pod: Key,
        patch: &Value,
        strategic: bool,
    ) -> Result<Arc<Value>, Refused> {
        let allowed = json!({
            "metadata": {"annotations": patch.pointer("/metadata/annotations").unwrap_or(&json!({}))},
            "status": patch.get("status").unwrap_or(&json!({})),
        });
        self.update(pod, &Preconditions::of(patch), |pod| {
            merge(pod, &allowed, strategic);
            Ok(())
        })
    }

    fn write(
        &self,
        state: &mut State,
        key: Key,
        old: Option<Arc<Value>>,
        mut new: Value,
    ) -> Arc<Value> {
        let version = (state.version + 1).to_string();
        merge(
            &mut new,
            &json!({"metadata": {"resourceVersion": version}}),
            false,
        );
        let new = Arc::new(new);
        state.objects.insert(key.clone(), new.clone());
        self.log(state, key.0, old, Some(new.clone()));
        new
    }

    fn log(
        &self,
        state: &mut State,
        resource: String,
        old: Option<Arc<Value>>,
        new: Option<Arc<Value>>,
    ) {
        state.version += 1;
        let version = state.version;
        if state.log.len() == LOG {
            state.log.pop_front();
        }
        state.log.push_back(Arc::new(Change {
            version,
            resource,
            old,
            new,
        }));
        self.version.send_replace(version);
    }
}

fn not_found((resource, _, name): &Key) -> Refused {
    refused(
        StatusCode::NOT_FOUND,
        format!("{resource} {name:?} not found"),
    )
}

/// The key of an object by its metadata.
pub(crate) fn key_of(resource: &str, object: &Value) -> Key {
    let text = |path| {
        object
            .pointer(path)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    (
        resource.to_owned(),
        text("/metadata/namespace"),
        text("/metadata/name"),
    )
}

/// JSON merge patch (RFC 7396), with lists of conditions merged by type if `strategic`.
pub(crate) fn merge(target: &mut Value, patch: &Value, strategic: bool) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let Value::Object(fields) = target else {
        return;
    };
    for (name, value) in patch {
        let conditions = strategic && name == "conditions";
        match value {
            Value::Null => drop(fields.remove(name)),
            Value::Array(patch) if conditions => {
                let list = fields.entry(name).or_insert_with(|| json!([]));
                let Value::Array(list) = list else { continue };
                for condition in patch {
                    match list.iter_mut().find(|old| old["type"] == condition["type"]) {
                        Some(old) => merge(old, condition, strategic),
                        None => list.push(condition.clone()),
                    }
                }
            }
            _ => merge(fields.entry(name).or_insert(Value::Null), value, strategic),
        }
    }
}

#[cfg(test)]
mod tests;
