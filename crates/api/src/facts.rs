//! What gpustow keeps of a Pod and of a Node: the fields it decides by, and no others.

use std::sync::Arc;

use gpustow_pack::{Mib, Request};

use crate::assignment::{Assignment, BrokenAssignment};
use crate::request::BadRequest;

/// A Pod, reduced to what scheduling needs.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// `metadata.uid`: the identity; a pod recreated under the same name is another pod.
    pub uid: Arc<str>,
    /// `metadata.namespace`.
    pub namespace: Arc<str>,
    /// `metadata.name`.
    pub name: Arc<str>,
    /// `metadata.resourceVersion` of this copy.
    pub resource_version: Arc<str>,
    /// `metadata.creationTimestamp` in seconds since 1970, the scheduler's order among equals.
    pub created: i64,
    /// `spec.nodeName`, once bound.
    pub node: Option<Arc<str>>,
    /// `spec.schedulerName`.
    pub scheduler: Arc<str>,
    /// `spec.priority`, zero if unset.
    pub priority: i32,
    /// `status.nominatedNodeName`.
    pub nominated: Option<Arc<str>>,
    /// What the pod asks for; a request with no claims for a pod that asks for no GPU memory.
    pub request: Result<Arc<Request>, BadRequest>,
    /// Container names, one per claim of the request.
    pub containers: Arc<[Box<str>]>,
    /// The assignment in the annotations, if there is one.
    pub assignment: Option<Result<Arc<Assignment>, BrokenAssignment>>,
    /// The epoch annotation: replicas with an older epoch may not bind this copy.
    pub epoch: Option<u64>,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// `spec.schedulingGates` is not empty.
    pub gated: bool,
    /// It holds nothing any more: Succeeded or Failed, or being deleted with every container
    /// terminated.
    pub released: bool,
    /// kube-scheduler said that it is unschedulable and may be asleep.
    pub waiting: bool,
}

/// A Node, reduced to what scheduling needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: Arc<str>,
    /// Allocatable CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Allocatable host memory.
    pub ram: Mib,
    /// Keys and values of `PreferNoSchedule` taints.
    pub prefer_no_schedule: Vec<(Box<str>, Box<str>)>,
}
