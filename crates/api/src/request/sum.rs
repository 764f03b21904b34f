//! The request of a pod as kube-scheduler's own sums count it, exactly: the last step alone rounds to whole units. The
//! module does not know the meaning of the resource.
//!
//! kube-scheduler adds as `PodRequests` in k8s.io/component-helpers/resource does, up to 1.36. It
//! looks at the status of bound pods alone.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::is_sidecar;
use crate::quantity::{self, Billionths};

type List = Option<BTreeMap<String, Quantity>>;

/// The pod's request for `resource` by Kubernetes' own rule, in units of `1 / per`. It is the request of the pod as a
/// whole, if stated. Else it is the larger of two sums: regular containers and sidecars together, or an init container
/// with the sidecars before it. The overhead is added to it.
#[must_use]
pub fn effective(spec: &PodSpec, resource: &str, per: i128) -> u64 {
    quantity::in_units(sum(spec, None, resource), per)
}

/// The charge of a node for `pod`; for a pod that waits, it equals [`effective`]. For a bound pod a resize counts from
/// its request on, and until the kubelet has carried it out. A resize that the kubelet calls infeasible does not count.
pub(super) fn charged(pod: &Pod, spec: &PodSpec, resource: &str, per: i128) -> u64 {
    let bound = spec.node_name.as_ref().is_some_and(|node| !node.is_empty());
    let status = pod.status.as_ref().filter(|_| bound);
    quantity::in_units(sum(spec, status, resource), per)
}

fn sum(spec: &PodSpec, status: Option<&PodStatus>, resource: &str) -> Billionths {
    let infeasible = status.is_some_and(is_infeasible);
    let specified = |container: &Container| {
        let resources = container.resources.as_ref();
        resources.map_or(0, |resources| amount(&resources.requests, resource))
    };
    let resized = |container: &Container| {
        let specified = specified(container);
        let status = status.and_then(|status| status_of(status, &container.name));
        let Some((status, actuated)) = status.and_then(|it| Some((it, it.resources.as_ref()?)))
        else {
            return specified;
        };
        let allocated = amount(&status.allocated_resources, resource);
        let taken = amount(&actuated.requests, resource).max(allocated);
        match infeasible {
            true => taken,
            false => taken.max(specified),
        }
    };
    let (mut sidecars, mut peak): (Billionths, Billionths) = (0, 0);
    for container in spec.init_containers.iter().flatten() {
        if is_sidecar(container) {
            sidecars = sidecars.saturating_add(resized(container));
            peak = peak.max(sidecars);
        } else {
            peak = peak.max(sidecars.saturating_add(specified(container)));
        }
    }
    let regular = spec.containers.iter().map(resized);
    let containers = regular.fold(sidecars, Billionths::saturating_add).max(peak);
    let overhead = amount(&spec.overhead, resource);
    whole_pod(spec, resource)
        // A later API has the kubelet's allocation to a pod as a whole. The containers have at most as much: the
        // extender may wake a pod for nothing, and no pod sleeps on.
        .filter(|_| !infeasible)
        .unwrap_or(containers)
        .saturating_add(overhead)
}

/// The request of the pod as a whole, for resources where Kubernetes allows it.
fn whole_pod(spec: &PodSpec, resource: &str) -> Option<Billionths> {
    let can = matches!(resource, "cpu" | "memory") || resource.starts_with("hugepages-");
    let list = spec.resources.as_ref()?.requests.as_ref();
    let stated = list?.get(resource).filter(|_| can)?;
    Some(quantity::amount(stated))
}

fn amount(list: &List, resource: &str) -> Billionths {
    let list = list.as_ref();
    list.and_then(|list| list.get(resource))
        .map_or(0, quantity::amount)
}

fn status_of<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let init = status.init_container_statuses.iter().flatten();
    let mut all = init.chain(status.container_statuses.iter().flatten());
    all.find(|status| status.name == name)
}

/// The first condition of this type decides, whatever its status, as in kube-scheduler.
fn is_infeasible(status: &PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    let pending = conditions.find(|condition| condition.type_ == "PodResizePending");
    pending.is_some_and(|it| it.reason.as_deref() == Some("Infeasible"))
}

#[cfg(test)]
mod tests;
