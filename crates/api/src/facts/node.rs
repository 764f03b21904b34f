//! The fields of a Node that gpustow keeps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpustow_pack::Bytes;
use k8s_openapi::api::core::v1::Node;

use crate::gpunode::Gpu;
use crate::intree::{self, Label, PREFER_NO_SCHEDULE, Taint};
use crate::{names, quantity};

/// A Node, reduced to the fields that scheduling needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: Arc<str>,
    /// Allocatable CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Allocatable host memory.
    pub ram: Bytes,
    /// Allocatable pods, if the node reports them.
    pub pods: Option<u64>,
    /// Keys and values of `PreferNoSchedule` taints.
    pub prefer_no_schedule: Vec<(Box<str>, Box<str>)>,
    /// The taints that keep pods off it.
    pub taints: Box<[Taint]>,
    /// Its labels, in order of their keys.
    pub labels: Box<[Arc<Label>]>,
    /// `spec.unschedulable`.
    pub cordoned: bool,
    /// The entries of [`names::CORDONED_GPUS`], in order: UUIDs, if its author made no error.
    pub cordoned_gpus: Box<[Box<str>]>,
    /// The last heartbeat of its kubelet, by the node's clock: seconds since 1970.
    pub heartbeat: Option<i64>,
}

impl NodeFacts {
    /// The facts of `node`.
    #[must_use]
    pub fn from_node(node: &Node) -> Self {
        let allocatable = node
            .status
            .as_ref()
            .and_then(|status| status.allocatable.as_ref());
        let known = |name: &str, per| {
            let amount = allocatable.and_then(|list| list.get(name));
            amount.map(|amount| quantity::rounded_up(amount, per))
        };
        let amount = |name: &str, per| known(name, per).unwrap_or(0);
        let labels = node.metadata.labels.iter().flatten();
        let conditions = node.status.iter().flat_map(|status| &status.conditions);
        let mut ready = conditions.flatten().filter(|it| it.type_ == "Ready");
        let taints = node
            .spec
            .iter()
            .flat_map(|spec| spec.taints.iter().flatten());
        Self {
            name: Arc::from(node.metadata.name.as_deref().unwrap_or_default()),
            cpu_milli: amount("cpu", 1000),
            ram: Bytes(amount("memory", 1)),
            pods: known("pods", 1),
            prefer_no_schedule: taints
                .filter(|taint| taint.effect == PREFER_NO_SCHEDULE)
                .map(|taint| {
                    let value = taint.value.as_deref().unwrap_or_default();
                    (taint.key.as_str().into(), value.into())
                })
                .collect(),
            taints: intree::hard_taints(node),
            labels: labels
                .map(|(key, value)| Arc::new(Label::new(key, value)))
                .collect(),
            cordoned: node
                .spec
                .as_ref()
                .is_some_and(|spec| spec.unschedulable == Some(true)),
            cordoned_gpus: node.metadata.annotations.iter().flat_map(cordons).collect(),
            heartbeat: ready
                .next()
                .and_then(|ready| Some(ready.last_heartbeat_time.as_ref()?.0.as_second())),
        }
    }

    /// True if an administrator cordoned the GPU, or the GPU of which this is a MIG instance. A cordoned GPU does not
    /// get new pods.
    #[must_use]
    pub fn cordons(&self, gpu: &Gpu) -> bool {
        let listed = |uuid: &str| {
            let at = self.cordoned_gpus.binary_search_by(|it| (**it).cmp(uuid));
            at.is_ok()
        };
        let place = gpu.place.as_ref();
        listed(&gpu.uuid)
            || place
                .and_then(|it| it.parent.as_deref())
                .is_some_and(listed)
    }

    /// The value of a label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        let at = self.labels.binary_search_by(|label| (*label.key).cmp(key));
        at.ok().map(|at| &*self.labels[at].value)
    }
}

fn cordons(annotations: &BTreeMap<String, String>) -> BTreeSet<Box<str>> {
    let listed = annotations.get(names::CORDONED_GPUS).into_iter();
    let listed = listed.flat_map(|list| list.split(',').map(str::trim));
    listed.filter(|it| !it.is_empty()).map(Box::from).collect()
}

#[cfg(test)]
mod tests;
