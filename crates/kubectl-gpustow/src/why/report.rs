//! The actions of the extender to make room for a waiting pod, or why it does nothing.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_inspect::Cluster;
use gpustow_ledger::{Cause, NotNow, Pursuit};
use serde::Serialize;

/// One means and its action.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Means {
    /// As in `GpustowConfig`.
    pub(super) means: &'static str,
    /// As in "would evict team-a/x from n".
    pub(super) does: String,
}

/// The action of each means for the pod. `is_reserved`: an Event shows that GPUs are reserved for it.
pub(super) fn of(cluster: &Cluster, facts: &PodFacts, is_reserved: bool) -> Vec<Means> {
    let pod = Arc::new(facts.clone());
    let all = cluster.ledger.report(&pod, cluster.now).into_iter();
    all.map(|(cause, pursuit)| Means {
        means: cause.into(),
        does: match cause {
            Cause::Reserve if is_reserved => "has reserved GPUs, as in the Event".to_owned(),
            _ => does(cluster, cause, &pursuit),
        },
    })
    .collect()
}

fn does(cluster: &Cluster, cause: Cause, pursuit: &Pursuit) -> String {
    let names = |uids: &[Arc<str>]| {
        let names = uids.iter().map(|uid| match cluster.pods.get(uid) {
            Some(pod) => format!("{}/{}", pod.facts.namespace, pod.facts.name),
            None => "a pod that is gone".to_owned(),
        });
        super::print::listed(&names.collect::<Vec<_>>())
    };
    match pursuit {
        Pursuit::Off => format!("is off ({})", switch(cause)),
        Pursuit::NotNow(why) => not_now(cause, *why),
        Pursuit::BackingOff(until) => {
            let left = until.saturating_sub(cluster.now).as_secs();
            format!("pauses for {left} s, because its attempts did not help")
        }
        Pursuit::WaitsFor { node, pods, until } => {
            let left = until.saturating_sub(cluster.now).as_secs();
            format!("waits up to {left} s on {node} for {}", names(pods))
        }
        Pursuit::Plan { node, pods } if pods.is_empty() => format!("finds room on {node}"),
        Pursuit::Plan { node, pods } => {
            let pods = names(pods);
            match cause {
                Cause::Reclaim => {
                    format!("can reclaim on {node} the memory that {pods} uses beyond its request")
                }
                Cause::Reserve => format!("can reserve GPUs of {node} until {pods} finishes"),
                _ => format!("can evict {pods} from {node}"),
            }
        }
        Pursuit::NoPlan => "finds nothing that would give it room".to_owned(),
        Pursuit::BudgetSpent => "needs more than one look at the nodes".to_owned(),
    }
}

/// The field of `GpustowConfig` that turns it on.
fn switch(cause: Cause) -> &'static str {
    match cause {
        Cause::Reclaim => "reclaim.action",
        Cause::Defragment => "defragment.evictionsPerHour",
        Cause::Preempt => "preempt.fragmented",
        _ => "reserve.after",
    }
}

fn not_now(cause: Cause, why: NotNow) -> String {
    let why = match why {
        NotNow::NotPlaced => "kube-scheduler cannot place the pod yet",
        NotNow::Assumed => "the pod is being bound",
        NotNow::Nominated => "kube-scheduler nominated the pod to a node",
        NotNow::OfGang => "it makes no room for a single pod of a gang",
        NotNow::NeverPreempts => "the pod's preemptionPolicy is Never",
        NotNow::HasRoom => "room is reserved for the pod by other means",
        NotNow::Unfenced => "an earlier bind of the pod may still arrive",
        NotNow::ExpectsRoom => "pods that terminate leave room for the pod",
        NotNow::TooYoung(after) => {
            let (means, after) = (<&str>::from(cause), after.as_secs());
            return format!("does nothing: the pod has not waited {after} s yet ({means}.after)");
        }
    };
    format!("does nothing: {why}")
}
