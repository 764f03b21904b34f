//! What an API server keeps: objects, their versions, and the history that watches follow. No sockets.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::names;
use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::check;
use crate::dice;
use crate::disruptions::Disruptions;
use crate::net::NAMESPACE;
use crate::past::Past;
use crate::patch::{conditions_of, merge, preconditions};
use crate::story::Story;

/// What was seen longer ago than a silent agent's report may be used, and a message may be late, nobody may act on.
const STALE: Duration = Duration::from_secs(300);
/// What pods have to terminate.
const GRACE: i64 = 30;

/// The kinds that it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    GpuNode,
    GpustowConfig,
    Lease,
    Node,
    Pod,
    PodGroup,
}

impl Kind {
    pub(crate) fn of_plural(plural: &str) -> Option<Self> {
        match plural {
            "gpunodes" => Some(Self::GpuNode),
            "gpustowconfigs" => Some(Self::GpustowConfig),
            "leases" => Some(Self::Lease),
            "nodes" => Some(Self::Node),
            "pods" => Some(Self::Pod),
            "podgroups" => Some(Self::PodGroup),
            _ => None,
        }
    }

    pub(crate) fn api_version(self) -> &'static str {
        match self {
            Self::GpuNode | Self::GpustowConfig => "gpustow.dev/v1alpha1",
            Self::Lease => "coordination.k8s.io/v1",
            Self::Node | Self::Pod => "v1",
            Self::PodGroup => "scheduling.k8s.io/v1beta1",
        }
    }
}

/// Kind, namespace (empty for none) and name.
pub(crate) type Key = (Kind, String, String);

/// An object at one version.
pub(crate) type Copy = Arc<Value>;

/// What is kept at one time.
#[derive(Clone, Default)]
pub(crate) struct Objects(BTreeMap<Key, Copy>);

impl Objects {
    pub(crate) fn all(&self, kind: Kind) -> impl Iterator<Item = &Copy> {
        let all = self.0.iter().filter(move |(key, _)| key.0 == kind);
        all.map(|(_, object)| object)
    }

    pub(crate) fn get(&self, key: &Key) -> Answer {
        self.0.get(key).cloned().ok_or_else(|| not_found(key))
    }
}

/// One write.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) at: Instant,
    pub(crate) kind: Kind,
    /// What it was and what it is.
    pub(crate) before: Option<Copy>,
    pub(crate) after: Option<Copy>,
    /// What it is, as watches are told.
    text: OnceCell<String>,
}

impl Change {
    /// The object after it, written down once for all who watch.
    pub(crate) fn told(&self, after: &Value) -> &str {
        self.text.get_or_init(|| after.to_string())
    }
}

/// Why a request is refused: status, reason and message.
#[derive(Clone, Debug)]
pub(crate) struct Refusal(pub(crate) u16, pub(crate) &'static str, pub(crate) String);

pub(crate) type Answer = Result<Copy, Refusal>;

pub(crate) fn conflict(text: &str) -> Refusal {
    Refusal(409, "Conflict", text.to_owned())
}

fn not_found(key: &Key) -> Refusal {
    Refusal(404, "NotFound", format!("{:?} {} not found", key.0, key.2))
}

/// The server.
pub(crate) struct Server {
    objects: Objects,
    pub(crate) past: Past,
    history: Vec<Change>,
    version: u64,
    uids: u64,
    /// Versions up to this one are forgotten.
    pub(crate) compacted: u64,
    /// How often it was restored from a backup.
    pub(crate) life: u64,
    changed: watch::Sender<u64>,
    /// It serves PodGroups.
    pub(crate) has_pod_groups: bool,
    /// Of the pods that [`check::guarded`] names so many may be away, if there is a budget.
    pub(crate) budget: Option<usize>,
    /// When each pod, by UID, used more than it asked for.
    pub(crate) over: BTreeMap<String, Instant>,
    pub(crate) disruptions: Disruptions,
    /// What no write may have done.
    pub(crate) wrong: Vec<String>,
    pub(crate) story: Story,
}

impl Deref for Server {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

impl Server {
    pub(crate) fn new(story: Story) -> Self {
        Self {
            objects: Objects::default(),
            past: Past::default(),
            history: Vec::new(),
            version: 1,
            uids: 0,
            compacted: 0,
            life: 0,
            has_pod_groups: false,
            budget: None,
            changed: watch::Sender::new(1),
            over: BTreeMap::new(),
            disruptions: Disruptions::default(),
            wrong: Vec::new(),
            story,
        }
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Tells of each new version.
    pub(crate) fn news(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The writes after this version, if they are not forgotten.
    pub(crate) fn since(&self, version: u64) -> Result<&[Change], Refusal> {
        if version < self.compacted {
            let text = format!("too old resource version: {version} ({})", self.compacted);
            return Err(Refusal(410, "Expired", text));
        }
        let first = self.history.partition_point(|it| it.version <= version);
        Ok(&self.history[first..])
    }

    /// Its etcd is what it was at that version, and no request outlives that. As Kubernetes' documentation has it, `later`
    /// versions than any before follow, and nothing can be watched from there; else versions are used again.
    pub(crate) fn restore(&mut self, version: u64, later: bool) {
        let last = self.version;
        while let Some(change) = self.history.pop_if(|it| it.version > version) {
            let Some(object) = change.after.as_ref().or(change.before.as_ref()) else {
                continue;
            };
            let text = |field: &str| {
                let text = object["metadata"][field].as_str();
                text.unwrap_or_default().to_owned()
            };
            let key = (change.kind, text("namespace"), text("name"));
            match change.before {
                Some(before) => self.objects.0.insert(key, before),
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

    /// The version before the pod was bound to its node, if that is known.
    pub(crate) fn before_bind(&self, name: &str) -> Option<u64> {
        let is_bind = |it: &&Change| {
            let node = |copy: &Option<Copy>| {
                let copy = copy.as_ref()?;
                let is_it = copy["metadata"]["name"] == *name;
                (is_it && it.kind == Kind::Pod).then(|| copy["spec"]["nodeName"].is_string())
            };
            (node(&it.before), node(&it.after)) == (Some(false), Some(true))
        };
        Some(self.history.iter().rev().find(is_bind)?.version - 1)
    }

    /// The names of the pods that were created, bound, changed or deleted after that version.
    pub(crate) fn changed_since(&self, version: u64) -> Vec<String> {
        let changes = self.history.iter().filter(|it| it.version > version);
        let pods = changes.filter(|it| it.kind == Kind::Pod);
        let copies = pods.filter_map(|it| it.after.as_ref().or(it.before.as_ref()));
        copies.map(|pod| crate::scheduler::name(pod)).collect()
    }

    fn write(&mut self, key: Key, object: Option<Value>) -> Option<Copy> {
        self.past.keep(&self.objects);
        self.version += 1;
        let after = object.map(|mut object| {
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            Arc::new(object)
        });
        let before = match &after {
            Some(after) => self.objects.0.insert(key.clone(), after.clone()),
            None => self.objects.0.remove(&key),
        };
        let kind = key.0;
        if let (Kind::Pod, Some(after)) = (kind, &after) {
            let wrong = check::pod(self, before.as_deref(), after);
            self.wrong.extend(wrong);
        }
        self.history.push(Change {
            version: self.version,
            at: Instant::now(),
            kind,
            before,
            after: after.clone(),
            text: OnceCell::new(),
        });
        self.changed.send_replace(self.version);
        after
    }

    pub(crate) fn create(&mut self, kind: Kind, namespace: &str, mut object: Value) -> Answer {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let key = (kind, namespace.to_owned(), name.to_owned());
        if self.objects.0.contains_key(&key) {
            let text = format!("{} already exists", key.2);
            return Err(Refusal(409, "AlreadyExists", text));
        }
        self.uids += 1;
        object["metadata"]["uid"] = json!(format!("00000000-0000-0000-0000-{:012}", self.uids));
        object["metadata"]["creationTimestamp"] = json!(dice::time(SignedDuration::ZERO));
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = json!(namespace);
        }
        object["apiVersion"] = json!(kind.api_version());
        object["kind"] = json!(format!("{kind:?}"));
        self.written(key, object)
    }

    fn written(&mut self, key: Key, object: Value) -> Answer {
        let missing = not_found(&key);
        self.write(key, Some(object)).ok_or(missing)
    }

    /// PUT.
    pub(crate) fn replace(&mut self, key: Key, mut object: Value) -> Answer {
        let now = self.get(&key)?;
        preconditions(&object["metadata"], &now)?;
        for field in ["uid", "creationTimestamp"] {
            object["metadata"][field] = now["metadata"][field].clone();
        }
        self.written(key, object)
    }

    /// PATCH, as a merge or strategically: in conditions entries of other types stay, and of gates those that are
    /// named are to be deleted. Through `status` spec and labels stay.
    pub(crate) fn patch(
        &mut self,
        key: Key,
        patch: &Value,
        strategic: bool,
        status: bool,
    ) -> Answer {
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

    /// PATCH with `dryRun`: nothing is written.
    pub(crate) fn may_patch(&self, key: &Key, patch: &Value) -> Answer {
        let now = self.get(key)?;
        preconditions(&patch["metadata"], &now)?;
        Ok(now)
    }

    /// DELETE with `dryRun`.
    pub(crate) fn may_delete(&self, key: &Key, precondition: &Value) -> Answer {
        let now = self.get(key)?;
        preconditions(precondition, &now)?;
        Ok(now)
    }

    /// PATCH by the only one who applies to these objects: what it says is all there is, and the object is made if
    /// it is not there.
    pub(crate) fn apply(&mut self, key: Key, object: Value, status: bool) -> Answer {
        let part = if status { "status" } else { "spec" };
        let mut now = match self.get(&key) {
            Ok(now) => Value::clone(&now),
            Err(missing) if status => return Err(missing),
            Err(_) => return self.create(key.0, &key.1, object),
        };
        now[part] = object[part].clone();
        self.written(key, now)
    }

    /// A Binding, in one write.
    pub(crate) fn bind(&mut self, key: Key, binding: &Value) -> Answer {
        let now = self.get(&key)?;
        preconditions(&binding["metadata"], &now)?;
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
        object["spec"]["nodeName"] = binding["target"]["name"].clone();
        merge(
            &mut object["metadata"]["annotations"],
            &binding["metadata"]["annotations"],
        );
        let scheduled = json!({ "type": "PodScheduled", "status": "True" });
        object["status"]["conditions"] = conditions_of(&now["status"]["conditions"], &[scheduled]);
        let bound = self.written(key, object)?;
        self.story.tell(format!(
            "{} is bound to {} by epoch {}: {}",
            bound["metadata"]["name"],
            bound["spec"]["nodeName"],
            bound["metadata"]["annotations"][names::EPOCH],
            bound["metadata"]["annotations"][names::ASSIGNMENT],
        ));
        Ok(bound)
    }

    /// Of a pod that is bound its kubelet has the last word: see [`Server::end`].
    pub(crate) fn delete(&mut self, key: Key, precondition: &Value) -> Answer {
        let old = self.get(&key)?;
        preconditions(precondition, &old)?;
        if key.0 == Kind::Pod && old["spec"]["nodeName"].is_string() {
            let mut object = Value::clone(&old);
            if object["metadata"]["deletionTimestamp"].is_null() {
                let by = dice::time(SignedDuration::from_secs(GRACE));
                object["metadata"]["deletionTimestamp"] = json!(by);
                object["metadata"]["deletionGracePeriodSeconds"] = json!(GRACE);
            }
            return self.written(key, object);
        }
        self.end(key);
        Ok(old)
    }

    /// Deletes a pod for another, as the extender does it.
    pub(crate) fn preempt(&mut self, key: Key, options: &Value, unwanted: Vec<String>) -> Answer {
        let pod = self.delete(key, &options["preconditions"])?;
        let name = &pod["metadata"]["name"];
        self.story.tell(format!("{name} is preempted"));
        self.wrong.extend(unwanted);
        self.disrupted(&pod);
        Ok(pod)
    }

    /// How many more may be disrupted, if there is a budget: its controller is never late.
    pub(crate) fn disruptions(&self) -> Option<usize> {
        let bound = |pod: &&Copy| pod["spec"]["nodeName"].is_string() && !check::ended(pod);
        let guarded = self
            .all(Kind::Pod)
            .filter(bound)
            .filter(|pod| check::guarded(pod));
        let away = guarded.filter(|pod| pod["metadata"]["deletionTimestamp"].is_string());
        Some(self.budget?.saturating_sub(away.count()))
    }

    /// The budgets, as they are listed.
    pub(crate) fn budgets(&self) -> Value {
        let budget = |allowed| {
            json!({
                "metadata": { "name": "guard", "namespace": NAMESPACE },
                "spec": { "selector": { "matchLabels": { (check::GUARDED): "yes" } } },
                "status": { "disruptionsAllowed": allowed },
            })
        };
        let items: Vec<Value> = self.disruptions().map(budget).into_iter().collect();
        json!({
            "kind": "PodDisruptionBudgetList", "apiVersion": "policy/v1", "metadata": {}, "items": items,
        })
    }

    /// It is gone.
    pub(crate) fn end(&mut self, key: Key) {
        if self.objects.0.contains_key(&key) {
            self.write(key, None);
        }
    }

    /// Evicts a pod; nobody may have one evicted that keeps within its request, unless it moves.
    pub(crate) fn evict(&mut self, key: Key, eviction: &Value, unwanted: Vec<String>) -> Answer {
        let precondition = &eviction["deleteOptions"]["preconditions"];
        if check::guarded(&*self.get(&key)?) && self.disruptions() == Some(0) {
            let text = "Cannot evict pod as it would violate the pod's disruption budget.";
            return Err(Refusal(429, "TooManyRequests", text.to_owned()));
        }
        let pod = self.delete(key, precondition)?;
        let name = &pod["metadata"]["name"];
        self.story.tell(format!("{name} is evicted"));
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
        let over = self.over.get(uid);
        if over.is_none_or(|at| at.elapsed() > STALE) && !check::moves(self, &pod) {
            self.wrong
                .push(format!("{name} is evicted within its request"));
        }
        self.wrong.extend(unwanted);
        self.disrupted(&pod);
        Ok(Arc::new(
            json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {} }),
        ))
    }
}
