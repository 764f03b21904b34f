//! kube-scheduler's extender protocol, `k8s.io/kube-scheduler/extender/v1`.
//!
//! The Go types lack JSON tags: keys are Go field names, nothing is omitted, nil is `null`, and the decoder on the
//! other side ignores case. So does this one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use gpustow_api::PodObject;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

/// A string that borrows from the body where it can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text<'a>(pub Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

/// Body of `/filter` and `/prioritize`.
#[derive(Debug, Default)]
pub struct ExtenderArgs<'a> {
    /// The pod to place.
    pub pod: PodObject,
    /// The candidate nodes; `None` for `null`.
    pub node_names: Option<Vec<Text<'a>>>,
    /// Full node objects were sent: the scheduler's `nodeCacheCapable` is off.
    pub has_nodes: bool,
}

impl<'de> Deserialize<'de> for ExtenderArgs<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ArgsVisitor;
        impl<'de> Visitor<'de> for ArgsVisitor {
            type Value = ExtenderArgs<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("ExtenderArgs: an object with Pod and NodeNames")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut args = ExtenderArgs::default();
                let mut pod = None;
                while let Some(key) = map.next_key::<Text<'de>>()? {
                    match &*key.0 {
                        key if key.eq_ignore_ascii_case("Pod") => {
                            pod = map.next_value::<Option<PodObject>>()?;
                        }
                        key if key.eq_ignore_ascii_case("NodeNames") => {
                            args.node_names = map.next_value()?;
                        }
                        key if key.eq_ignore_ascii_case("Nodes") => {
                            args.has_nodes = map.next_value::<Option<IgnoredAny>>()?.is_some();
                        }
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                args.pod = pod.ok_or_else(|| M::Error::custom("no Pod"))?;
                Ok(args)
            }
        }
        deserializer.deserialize_map(ArgsVisitor)
    }
}

/// Answer of `/filter`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderFilterResult<'a> {
    /// Always `null`: we answer with names.
    pub nodes: Option<()>,
    /// The nodes that pass.
    pub node_names: Option<Vec<&'a str>>,
    /// Refused nodes and why, where kube-scheduler is to ask for victims.
    #[serde(serialize_with = "as_map")]
    pub failed_nodes: Vec<(&'a str, &'a str)>,
    /// The other refused nodes. Both are empty if a node passes, because kube-scheduler does not read them then.
    #[serde(serialize_with = "as_map")]
    pub failed_and_unresolvable_nodes: Vec<(&'a str, &'a str)>,
    /// Ends the pod's scheduling attempt with this text, unless empty.
    pub error: String,
}

fn as_map<S: serde::Serializer>(pairs: &[(&str, &str)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

/// One entry of the answer of `/prioritize`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority<'a> {
    /// Node name.
    pub host: &'a str,
    /// 0 to 10.
    pub score: i64,
}

/// Body of `/bind`.
#[derive(Debug, Deserialize)]
#[serde(from = "BTreeMap<String, serde_json::Value>")]
pub struct ExtenderBindingArgs {
    /// Pod name.
    pub pod_name: String,
    /// Pod namespace.
    pub pod_namespace: String,
    /// Pod UID.
    pub pod_uid: String,
    /// Node that the scheduler chose.
    pub node: String,
}

impl From<BTreeMap<String, serde_json::Value>> for ExtenderBindingArgs {
    fn from(map: BTreeMap<String, serde_json::Value>) -> Self {
        let text = |wanted: &str| {
            let found = map.iter().find(|(key, _)| key.eq_ignore_ascii_case(wanted));
            found
                .and_then(|(_, value)| value.as_str())
                .unwrap_or_default()
                .to_owned()
        };
        Self {
            pod_name: text("PodName"),
            pod_namespace: text("PodNamespace"),
            pod_uid: text("PodUID"),
            node: text("Node"),
        }
    }
}

/// Answer of `/bind`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingResult {
    /// Empty for success.
    pub error: String,
}

/// Body of `/preempt`. Victims come as UIDs (`nodeCacheCapable: true`).
#[derive(Debug, Default)]
pub struct ExtenderPreemptionArgs {
    /// The pod that preempts.
    pub pod: PodObject,
    /// Candidate nodes and the victims there.
    pub victims: BTreeMap<String, MetaVictims>,
    /// Full victims were sent: the scheduler's `nodeCacheCapable` is off.
    pub has_full_victims: bool,
}

impl<'de> Deserialize<'de> for ExtenderPreemptionArgs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ArgsVisitor;
        impl<'de> Visitor<'de> for ArgsVisitor {
            type Value = ExtenderPreemptionArgs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("ExtenderPreemptionArgs: an object with Pod and NodeNameToMetaVictims")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut args = ExtenderPreemptionArgs::default();
                let mut pod = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key.eq_ignore_ascii_case("Pod") {
                        pod = map.next_value::<Option<PodObject>>()?;
                    } else if key.eq_ignore_ascii_case("NodeNameToMetaVictims") {
                        args.victims = map.next_value::<Option<_>>()?.unwrap_or_default();
                    } else if key.eq_ignore_ascii_case("NodeNameToVictims") {
                        let victims = map.next_value::<Option<BTreeMap<String, IgnoredAny>>>()?;
                        args.has_full_victims = victims.is_some_and(|map| !map.is_empty());
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                args.pod = pod.ok_or_else(|| M::Error::custom("no Pod"))?;
                Ok(args)
            }
        }
        deserializer.deserialize_map(ArgsVisitor)
    }
}

/// The pods to evict from one node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "PascalCase", default)]
pub struct MetaVictims {
    /// Their UIDs.
    #[serde(alias = "pods", deserialize_with = "nullable")]
    pub pods: Vec<MetaPod>,
    /// How many of them a disruption budget protects.
    #[serde(
        rename = "NumPDBViolations",
        alias = "numPDBViolations",
        alias = "numpdbviolations"
    )]
    pub num_pdb_violations: i64,
}

fn nullable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<MetaPod>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// One pod to evict.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct MetaPod {
    /// Its UID.
    #[serde(rename = "UID", alias = "uid")]
    pub uid: String,
}

/// Answer of `/preempt`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderPreemptionResult {
    /// Nodes on which the pod would fit, each with at least one victim.
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}
