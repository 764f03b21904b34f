//! The API server of a world: its objects, the errors that its writes have caused, and the disruptions of pods.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::names;
use gpustow_simworld as simworld;
pub(crate) use gpustow_simworld::{Answer, Change, Copy, Key, Kind, Objects, Refusal};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::check;
use crate::disruptions::Disruptions;
use crate::net::NAMESPACE;
use crate::past::Past;
use crate::scheduler::{name, uid};
use crate::story::Story;

/// Components must not act on older knowledge. This covers the use of a silent agent's report and the delay of a
/// message.
const STALE: Duration = Duration::from_secs(300);

/// The server.
pub(crate) struct Server {
    kept: simworld::Server,
    pub(crate) past: Past,
    /// It serves PodGroups.
    pub(crate) has_pod_groups: bool,
    /// It is of Kubernetes 1.38, or of 1.37.
    pub(crate) is_1_38: bool,
    /// Of the pods that [`check::guarded`] names so many may be away, if there is a budget.
    pub(crate) budget: Option<usize>,
    /// When each pod, by UID, used more than it asked for.
    pub(crate) over: BTreeMap<String, Instant>,
    pub(crate) disruptions: Disruptions,
    /// The errors that writes have caused.
    pub(crate) wrong: Vec<String>,
    pub(crate) story: Story,
}

impl Deref for Server {
    type Target = simworld::Server;

    fn deref(&self) -> &simworld::Server {
        &self.kept
    }
}

impl Server {
    pub(crate) fn new(story: Story) -> Self {
        Self {
            kept: simworld::Server::default(),
            past: Past::default(),
            has_pod_groups: false,
            is_1_38: false,
            budget: None,
            over: BTreeMap::new(),
            disruptions: Disruptions::default(),
            wrong: Vec::new(),
            story,
        }
    }

    /// Writes, and records the errors that the write causes.
    pub(crate) fn write<T>(&mut self, write: impl FnOnce(&mut simworld::Server) -> T) -> T {
        self.past.keep(&self.kept);
        let before = self.kept.history().len();
        let written = write(&mut self.kept);
        let changes = self
            .kept
            .history()
            .get(before..)
            .unwrap_or_default()
            .to_vec();
        for change in changes.iter().filter(|it| it.kind == Kind::Pod) {
            if let Some(after) = &change.after {
                let wrong = check::pod(self, change.before.as_deref(), after);
                self.wrong.extend(wrong);
            }
        }
        self.keep_budget();
        written
    }

    /// Restores its etcd to that version; open requests do not survive.
    pub(crate) fn restore(&mut self, version: u64, later: bool) {
        self.kept.restore(version, later);
    }

    pub(crate) fn compact(&mut self) {
        self.kept.compact();
    }

    pub(crate) fn create(&mut self, kind: Kind, namespace: &str, object: Value) -> Answer {
        self.write(|kept| kept.create(kind, namespace, object))
    }

    pub(crate) fn patch(
        &mut self,
        key: Key,
        patch: &Value,
        strategic: bool,
        status: bool,
    ) -> Answer {
        self.write(|kept| kept.patch(key, patch, strategic, status))
    }

    pub(crate) fn apply(&mut self, key: Key, object: Value, status: bool) -> Answer {
        self.write(|kept| kept.apply(key, object, status))
    }

    pub(crate) fn delete(&mut self, key: Key, precondition: &Value) -> Answer {
        self.write(|kept| kept.delete(key, precondition))
    }

    pub(crate) fn end(&mut self, key: Key) {
        self.write(|kept| kept.end(key));
    }

    /// The version before the pod was bound to its node, if that is known.
    pub(crate) fn before_bind(&self, name: &str) -> Option<u64> {
        let is_bind = |it: &&Arc<Change>| {
            let node = |copy: &Option<Copy>| {
                let copy = copy.as_ref()?;
                let is_it = copy["metadata"]["name"] == *name;
                (is_it && it.kind == Kind::Pod).then(|| copy["spec"]["nodeName"].is_string())
            };
            (node(&it.before), node(&it.after)) == (Some(false), Some(true))
        };
        Some(self.history().iter().rev().find(is_bind)?.version - 1)
    }

    /// The names of the pods that were created, bound, changed or deleted after that version.
    pub(crate) fn changed_since(&self, version: u64) -> Vec<String> {
        let changes = self.history().iter().filter(|it| it.version > version);
        let pods = changes.filter(|it| it.kind == Kind::Pod);
        let copies = pods.filter_map(|it| it.after.as_ref().or(it.before.as_ref()));
        copies.map(|pod| name(pod)).collect()
    }

    /// Adds the bind of a pod to the story.
    pub(crate) fn tell_of_bind(&self, bound: &Value) {
        self.story.tell(format!(
            "{} is bound to {} by epoch {}: {}",
            bound["metadata"]["name"],
            bound["spec"]["nodeName"],
            bound["metadata"]["annotations"][names::EPOCH],
            bound["metadata"]["annotations"][names::ASSIGNMENT],
        ));
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

    /// Writes the disruption budget as its controller does, if there is one.
    fn keep_budget(&mut self) {
        let Some(allowed) = self.disruptions() else {
            return;
        };
        let name = "guard";
        let key = (Kind::PodDisruptionBudget, NAMESPACE.into(), name.into());
        let known = self.kept.get(&key);
        let exists = known.is_ok();
        if known.is_ok_and(|it| it["status"]["disruptionsAllowed"] == allowed) {
            return;
        }
        let budget = json!({
            "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": { "selector": { "matchLabels": { (check::GUARDED): "yes" } } },
            "status": { "disruptionsAllowed": allowed },
        });
        let written = self.kept.apply(key, budget, exists);
        self.wrong.extend(written.err().map(|it| it.2));
    }

    /// Has the pod used more than its request lately?
    pub(crate) fn uses_more(&self, pod: &Value) -> bool {
        let over = self.over.get(&uid(pod));
        over.is_some_and(|at| at.elapsed() <= STALE)
    }

    /// Evicts a pod, as the extender does it.
    pub(crate) fn evict(&mut self, key: Key, eviction: &Value, unwanted: Vec<String>) -> Answer {
        let precondition = &eviction["deleteOptions"]["preconditions"];
        if check::guarded(&*self.get(&key)?) && self.disruptions() == Some(0) {
            let text = "Cannot evict pod as it would violate the pod's disruption budget.";
            return Err(Refusal(429, "TooManyRequests", text.to_owned()));
        }
        let pod = self.delete(key, precondition)?;
        let name = &pod["metadata"]["name"];
        self.story.tell(format!("{name} is evicted"));
        self.wrong.extend(unwanted);
        self.disrupted(&pod);
        Ok(Arc::new(
            json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {} }),
        ))
    }
}
