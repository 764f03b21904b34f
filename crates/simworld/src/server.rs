//! The server: objects, their versions, and the history that watches follow.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::objects::{Answer, Copy, Key, Kind, Objects, Refusal, conflict, key_of, not_found};
use crate::patch::{conditions_of, merge, preconditions};
use crate::repeat::time;

/// The time that pods have to terminate, in seconds.
const GRACE: i64 = 30;

/// One write.
#[derive(Debug)]
pub struct Change {
    /// The version that it made.
    pub version: u64,
    /// When it was.
    pub at: Instant,
    /// Of which kind the object is.
    pub kind: Kind,
    /// The object before; none if it was created.
    pub before: Option<Copy>,
    /// The object after; none if it was deleted.
    pub after: Option<Copy>,
    /// The object as text, for watches.
    text: OnceLock<String>,
}

impl Change {
    /// The object after it, written down once for all who watch.
    pub(crate) fn told(&self, after: &Value) -> &str {
        self.text.get_or_init(|| after.to_string())
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Server {
    objects: Objects,
    history: Vec<Arc<Change>>,
    version: u64,
    uids: u64,
    /// Versions up to this one are forgotten.
    compacted: u64,
    life: u64,
    changed: watch::Sender<u64>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            objects: Objects::default(),
            history: Vec::new(),
            version: 1,
            uids: 0,
            compacted: 0,
            life: 0,
            changed: watch::Sender::new(1),
        }
    }
}

impl Deref for Server {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

impl Server {
    /// That of the last write.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// How often it was restored from a backup.
    #[must_use]
    pub fn life(&self) -> u64 {
        self.life
    }

    /// A receiver of each new version.
    #[must_use]
    pub fn news(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// All writes that are not undone.
    #[must_use]
    pub fn history(&self) -> &[Arc<Change>] {
        &self.history
    }

    /// The writes after this version.
    ///
    /// # Errors
    /// If they are forgotten.
    pub fn since(&self, version: u64) -> Result<&[Arc<Change>], Refusal> {
        if version < self.compacted {
            let text = format!("too old resource version: {version} ({})", self.compacted);
            return Err(Refusal(410, "Expired", text));
        }
        let first = self.history.partition_point(|it| it.version <= version);
        Ok(&self.history[first..])
    }

    /// Forgets its history: nothing can be watched from an older version.
    pub fn compact(&mut self) {
        self.compacted = self.version;
    }

    /// Restores its etcd to that version. With `later`, the next versions are later than any before, as Kubernetes'
    /// documentation describes, and watches cannot start from there. Otherwise versions are used again.
    pub fn restore(&mut self, version: u64, later: bool) {
        let last = self.version;
        while let Some(change) = self.history.pop_if(|it| it.version > version) {
            let Some(object) = change.after.as_ref().or(change.before.as_ref()) else {
                continue;
            };
            let key = key_of(change.kind, object);
            match &change.before {
                Some(before) => self.objects.0.insert(key, before.clone()),
                None => self.objects.0.remove(&key),
            };
        }
        if later {
            self.history.clear();
            self.version = last + 1_000_000;
            self.compacted = self.version;
        } else {
            self.version = version;
            self.compacted = self.compacted.min(version);
        }
        self.life += 1;
        self.changed.send_replace(self.version);
    }

    fn write(&mut self, key: Key, object: Option<Value>) -> Option<Copy> {
        self.version += 1;
        let after = object.map(|mut object| {
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            Arc::new(object)
        });
        let kind = key.0;
        let before = match &after {
            Some(after) => self.objects.0.insert(key, after.clone()),
            None => self.objects.0.remove(&key),
        };
        self.history.push(Arc::new(Change {
            version: self.version,
            at: Instant::now(),
            kind,
            before,
            after: after.clone(),
            text: OnceLock::new(),
        }));
        self.changed.send_replace(self.version);
        after
    }

    fn written(&mut self, key: Key, object: Value) -> Answer {
        let missing = not_found(&key);
        self.write(key, Some(object)).ok_or(missing)
    }

    /// POST: gives the object UID and age.
    ///
    /// # Errors
    /// If one of that name exists.
    pub fn create(&mut self, kind: Kind, namespace: &str, mut object: Value) -> Answer {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let key = (kind, namespace.to_owned(), name.to_owned());
        if self.objects.0.contains_key(&key) {
            let text = format!("{} already exists", key.2);
            return Err(Refusal(409, "AlreadyExists", text));
        }
        self.uids += 1;
        object["metadata"]["uid"] = json!(format!("00000000-0000-0000-0000-{:012}", self.uids));
        object["metadata"]["creationTimestamp"] = json!(time(SignedDuration::ZERO));
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = json!(namespace);
        }
        object["apiVersion"] = json!(kind.api_version());
        object["kind"] = json!(format!("{kind:?}"));
        self.written(key, object)
    }

    /// PUT.
    ///
    /// # Errors
    /// If there is none, or it is not the copy that is replaced.
    pub fn replace(&mut self, key: Key, mut object: Value) -> Answer {
        let now = self.get(&key)?;
        preconditions(&object["metadata"], &now)?;
        for field in ["uid", "creationTimestamp", "namespace"] {
            object["metadata"][field] = now["metadata"][field].clone();
        }
        self.written(key, object)
    }

    /// PATCH, as a merge or strategically. A strategic patch keeps conditions of other types and deletes the named
    /// gates. Through `status` the spec stays. Nothing is written if nothing changes.
    ///
    /// # Errors
    /// If there is none, or it is not the copy that is patched.
    pub fn patch(&mut self, key: Key, patch: &Value, strategic: bool, status: bool) -> Answer {
        let now = self.get(&key)?;
        preconditions(&patch["metadata"], &now)?;
        let mut object = Value::clone(&now);
        let conditions = patch["status"]["conditions"].as_array();
        let merged = conditions
            .filter(|_| strategic)
            .map(|new| conditions_of(&now["status"]["conditions"], new));
        let gates = patch["spec"]["schedulingGates"].as_array();
        let left = gates.filter(|_| strategic).map(|patches| {
            let gates = now["spec"]["schedulingGates"].as_array();
            let gone = |gate: &&Value| patches.iter().any(|it| it["name"] == gate["name"]);
            let left = gates.into_iter().flatten().filter(|gate| !gone(gate));
            left.cloned().collect::<Value>()
        });
        merge(&mut object, patch);
        if let Some(left) = left {
            object["spec"]["schedulingGates"] = left;
        }
        if let Some(merged) = merged {
            object["status"]["conditions"] = merged;
        }
        if status {
            object["spec"] = now["spec"].clone();
        } else {
            object["status"] = now["status"].clone();
        }
        if object == *now {
            return Ok(now);
        }
        self.written(key, object)
    }

    /// A write with `dryRun`: is this the copy that it is about?
    ///
    /// # Errors
    /// If not.
    pub fn may_write(&self, key: &Key, precondition: &Value) -> Answer {
        let now = self.get(key)?;
        preconditions(precondition, &now)?;
        Ok(now)
    }

    /// PATCH by the only writer that applies to these objects. The given part replaces the old part, and a missing
    /// object is created.
    ///
    /// # Errors
    /// If there is none whose status could be applied.
    pub fn apply(&mut self, key: Key, object: Value, status: bool) -> Answer {
        let part = if status { "status" } else { "spec" };
        let mut now = match self.get(&key) {
            Ok(now) => Value::clone(&now),
            Err(missing) if status => return Err(missing),
            Err(_) => return self.create(key.0, &key.1, object),
        };
        now[part] = object[part].clone();
        self.written(key, now)
    }

    /// A Binding: sets the node and adds the Binding's annotations, in one write.
    ///
    /// # Errors
    /// If the pod is gone, changed, bound, deleted or gated, or the Binding names no node.
    pub fn bind(&mut self, key: Key, binding: &Value) -> Answer {
        let now = self.get(&key)?;
        preconditions(&binding["metadata"], &now)?;
        let node = binding["target"]["name"].as_str().unwrap_or_default();
        if node.is_empty() {
            let text = "target.name: Required value".to_owned();
            return Err(Refusal(422, "Invalid", text));
        }
        let gates = now["spec"]["schedulingGates"].as_array();
        if now["spec"]["nodeName"].is_string() {
            return Err(conflict("the pod is already assigned to a node"));
        }
        if now["metadata"]["deletionTimestamp"].is_string() {
            return Err(conflict("the pod is being deleted"));
        }
        if gates.is_some_and(|gates| !gates.is_empty()) {
            return Err(conflict("the pod has scheduling gates"));
        }
        let mut object = Value::clone(&now);
        object["spec"]["nodeName"] = json!(node);
        merge(
            &mut object["metadata"]["annotations"],
            &binding["metadata"]["annotations"],
        );
        let scheduled = json!({ "type": "PodScheduled", "status": "True" });
        object["status"]["conditions"] = conditions_of(&now["status"]["conditions"], &[scheduled]);
        self.written(key, object)
    }

    /// DELETE. Of a pod that is bound its kubelet has the last word: see [`Server::end`].
    ///
    /// # Errors
    /// If there is none, or it is not the copy that is deleted.
    pub fn delete(&mut self, key: Key, precondition: &Value) -> Answer {
        let old = self.may_write(&key, precondition)?;
        if key.0 == Kind::Pod && old["spec"]["nodeName"].is_string() {
            let mut object = Value::clone(&old);
            if object["metadata"]["deletionTimestamp"].is_null() {
                let by = time(SignedDuration::from_secs(GRACE));
                object["metadata"]["deletionTimestamp"] = json!(by);
                object["metadata"]["deletionGracePeriodSeconds"] = json!(GRACE);
            }
            return self.written(key, object);
        }
        self.end(key);
        Ok(old)
    }

    /// It is gone.
    pub fn end(&mut self, key: Key) {
        if self.objects.0.contains_key(&key) {
            self.write(key, None);
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
