//! Groups of pods that are scheduled together: Kubernetes' own PodGroup, and the older labels.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use crate::names;

/// The group of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// `namespace/name`.
    name: Arc<str>,
    /// A PodGroup describes it, in `scheduling.k8s.io`; if not, labels of its pods do.
    in_tree: bool,
}

impl Group {
    /// The group of a PodGroup.
    #[must_use]
    pub fn in_tree(namespace: &str, name: &str) -> Self {
        Self {
            name: format!("{namespace}/{name}").into(),
            in_tree: true,
        }
    }

    /// The group that the labels of a pod name.
    pub(crate) fn of_labels(meta: &ObjectMeta) -> Option<Self> {
        let labels = meta.labels.as_ref()?;
        let mut keys = names::POD_GROUP_LABELS.iter();
        let name = keys.find_map(|key| labels.get(*key))?;
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        Some(format!("{namespace}/{name}").into())
    }

    /// Does a PodGroup describe it?
    #[must_use]
    pub fn is_in_tree(&self) -> bool {
        self.in_tree
    }

    pub(crate) fn name_mut(&mut self) -> &mut Arc<str> {
        &mut self.name
    }
}

/// The group that a label names, with its namespace.
impl<S: Into<Arc<str>>> From<S> for Group {
    fn from(name: S) -> Self {
        Self {
            name: name.into(),
            in_tree: false,
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A PodGroup of `scheduling.k8s.io`, as far as it is used here.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct PodGroup {
    /// Standard metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Its settings for kube-scheduler. Later versions may write policies that are not known here.
    #[serde(default)]
    pub spec: Value,
}

impl k8s_openapi::Resource for PodGroup {
    const API_VERSION: &'static str = "scheduling.k8s.io/v1beta1";
    const GROUP: &'static str = "scheduling.k8s.io";
    const KIND: &'static str = "PodGroup";
    const VERSION: &'static str = "v1beta1";
    const URL_PATH_SEGMENT: &'static str = "podgroups";
    type Scope = k8s_openapi::NamespaceResourceScope;
}

impl k8s_openapi::Metadata for PodGroup {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// How the pods of a group are scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupPolicy {
    /// Each by itself.
    Basic,
    /// So many at least at the same time, or none.
    Gang(usize),
    /// Together, by a rule of a later version of Kubernetes.
    Unknown,
}

/// A PodGroup, reduced to the fields that scheduling needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodGroupFacts {
    /// The group that it describes.
    pub group: Group,
    /// `metadata.uid`: a PodGroup created again under the same name is another group.
    pub uid: Arc<str>,
    /// How its pods are scheduled.
    pub policy: GroupPolicy,
    /// Its pods may be disrupted one by one.
    pub disrupted_singly: bool,
    /// The CompositePodGroup (Kubernetes 1.38) of which it is a part: kube-scheduler places all groups of one, or none.
    pub part_of: Option<Arc<str>>,
}

impl PodGroupFacts {
    /// The facts of `object`; `None` without a name, namespace or UID, that is, if it does not come from an API server.
    #[must_use]
    pub fn from_pod_group(object: &PodGroup) -> Option<Self> {
        let PodGroup { metadata, spec } = object;
        let policy = &spec["schedulingPolicy"];
        let min_count = policy["gang"]["minCount"].as_u64();
        let policy = match min_count.and_then(|count| usize::try_from(count).ok()) {
            Some(min_count) => GroupPolicy::Gang(min_count),
            None if policy["basic"].is_null() => GroupPolicy::Unknown,
            None => GroupPolicy::Basic,
        };
        let mode = &spec["disruptionMode"];
        Some(Self {
            group: Group::in_tree(metadata.namespace.as_deref()?, metadata.name.as_deref()?),
            uid: Arc::from(metadata.uid.as_deref()?),
            policy,
            disrupted_singly: mode.is_null() || !mode["single"].is_null(),
            part_of: spec["parentCompositePodGroupName"].as_str().map(Arc::from),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts(spec: &Value) -> PodGroupFacts {
        let object = json!({
            "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup",
            "metadata": {"namespace": "team", "name": "gang", "uid": "u"}, "spec": spec,
        });
        PodGroupFacts::from_pod_group(&serde_json::from_value(object).unwrap()).unwrap()
    }

    #[test]
    fn policy_and_disruption_mode_are_read_and_unknown_ones_bind_the_pods_together() {
        let gang = json!({"gang": {"minCount": 3}});
        for (policy, mode, wanted, singly) in [
            (&gang, json!({"single": {}}), GroupPolicy::Gang(3), true),
            (&gang, json!(null), GroupPolicy::Gang(3), true),
            (&gang, json!({"all": {}}), GroupPolicy::Gang(3), false),
            (&gang, json!({"someday": {}}), GroupPolicy::Gang(3), false),
            (
                &json!({"basic": {}}),
                json!({"single": {}}),
                GroupPolicy::Basic,
                true,
            ),
            (
                &json!({"someday": {}}),
                json!(null),
                GroupPolicy::Unknown,
                true,
            ),
        ] {
            let facts = facts(&json!({"schedulingPolicy": policy, "disruptionMode": mode}));
            assert_eq!(facts.group, Group::in_tree("team", "gang"));
            let read = (facts.policy, facts.disrupted_singly);
            assert_eq!(read, (wanted, singly), "{policy} {mode}");
            assert_eq!(facts.part_of, None);
        }
        let part = facts(&json!({"parentCompositePodGroupName": "all"}));
        assert_eq!(part.part_of.as_deref(), Some("all"));
    }
}
