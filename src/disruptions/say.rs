//! Texts for people about a disruption, and about memory that is reserved for a pod.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, Memory, PodFacts, names};
use gpustow_ledger::{Action, Cause, Demand, News, Purpose, Reserved};
use gpustow_pack::Mib;

use super::demand::name;
use crate::ask::AskError;

/// Pods that are named, out of all that must finish for a pod that has waited long.
const NAMES: usize = 3;

/// The text about memory that is reserved for a pod: on which node, until when, and who makes the memory free.
pub(super) fn reserved(it: &Reserved, until: &str, give_up_after: Duration) -> String {
    let gpus = match &it.cards[..] {
        [(uuid, mib)] => format!("{mib} of GPU {uuid}"),
        cards => format!("{} GPUs", cards.len()),
    };
    let names = names_of(&it.victims, usize::MAX);
    let how = match it.cause {
        Cause::Reserve => {
            return format!(
                "Reserved {gpus} on node {} for this pod, which has waited long. {}. If none finishes within {}, the extender \
                 tries other GPUs.",
                it.node,
                finish(&it.victims),
                period(give_up_after)
            );
        }
        _ if it.gang.is_some() => {
            let group = it.gang.as_ref().map(Group::to_string).unwrap_or_default();
            match it.victims.is_empty() {
                true => format!("All pods of group {group} are placed together"),
                false => format!("Preempting {names} for group {group}"),
            }
        }
        _ if it.victims.is_empty() => "Pods there terminate already".to_owned(),
        Cause::Defragment => format!("Evicting {names}, which can run elsewhere"),
        Cause::Preempt => format!("Preempting {names}"),
        _ => format!("Reclaiming memory from {names}"),
    };
    format!("Reserved {gpus} on node {} until {until}. {how}.", it.node)
}

fn finish(pods: &[Arc<PodFacts>]) -> String {
    match pods {
        [] => "The memory is about to become free".to_owned(),
        [pod] => format!("Waiting for pod {} to finish", name(pod)),
        pods => format!(
            "Waiting for {} pods to finish: {}",
            pods.len(),
            names_of(pods, NAMES)
        ),
    }
}

fn names_of(pods: &[Arc<PodFacts>], most: usize) -> String {
    let (first, more) = pods.split_at(pods.len().min(most));
    let mut names: Vec<String> = first.iter().map(|pod| name(pod)).collect();
    names.sort_unstable();
    names.dedup();
    let names = names.join(", ");
    match more.len() {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

/// The text about a reservation that the pod could not use.
pub(super) fn ended(node: &str) -> String {
    format!(
        "The reservation on node {node} ended before the pod could use it. The extender tries other GPUs."
    )
}

/// Why the victim is disrupted.
pub(super) fn why(demand: &Demand, over_limit_after: Duration) -> String {
    let Demand {
        victim,
        node,
        purpose,
        ..
    } = demand;
    let named = purpose.pod().map(|pod| name(pod)).unwrap_or_default();
    match demand.cause {
        Cause::Preempt => {
            let priority = purpose.pod().map_or(0, |pod| pod.priority);
            if let Some(gang) = &demand.gang {
                return format!(
                    "Preempted by {named} (priority {priority} over {}): all pods of group {gang} are placed together.",
                    victim.priority
                );
            }
            format!(
                "Preempted by {named} (priority {priority} over {}): the GPUs of node {node} have too little free memory.",
                victim.priority
            )
        }
        Cause::Defragment if purpose.pod().is_none() => format!(
            "Evicted from node {node}, which is nearly empty, so that an autoscaler can remove it. The pod allows this \
             ({}), and memory on another node is reserved for its replacement.",
            names::EVICTABLE
        ),
        Cause::Defragment => format!(
            "Evicted from node {node} for {named}, which waits for memory that is fragmented. The pod allows this \
             ({}), and memory on another node is reserved for its replacement.",
            names::EVICTABLE
        ),
        _ => format!(
            "{}. {} Free everything above the request.",
            uses(demand),
            need(purpose, &named, over_limit_after)
        ),
    }
}

/// The victim's use, request and limit on each GPU.
fn uses(demand: &Demand) -> String {
    let cards = demand.cards.iter().map(|card| {
        let limit = match demand.victim.limit_on(&card.uuid) {
            Some(Mib(u64::MAX)) => "no limit".to_owned(),
            limit => format!("limit {}", limit.unwrap_or(card.held)),
        };
        format!(
            "Uses {} on GPU {}, requested {}, {limit}",
            card.used, card.uuid, card.held
        )
    });
    cards.collect::<Vec<_>>().join("; ")
}

fn need(purpose: &Purpose, named: &str, over_limit_after: Duration) -> String {
    let requests = |pod: &PodFacts| {
        let hardest = pod.asks.request().and_then(|request| request.hardest());
        hardest.map_or_else(|| Mib::ZERO.to_string(), ToString::to_string)
    };
    match purpose {
        Purpose::Pod(pod) if pod.node.is_some() => format!(
            "Pod {named} requested {} there and cannot use all of it.",
            requests(pod)
        ),
        Purpose::Pod(pod) => format!(
            "Pod {named} requests {} and waits for this memory.",
            requests(pod)
        ),
        Purpose::Headroom(mib) => format!("Less memory is free than the headroom of {mib}."),
        Purpose::Autoscaler => "Its node is emptied.".to_owned(),
        Purpose::Limit => format!("Over its limit for more than {}.", period(over_limit_after)),
    }
}

/// The text for the pod that could not grow to its request.
pub(super) fn pressure(demand: &Demand) -> String {
    let gpus = demand.cards.iter().map(|card| format!("GPU {}", card.uuid));
    format!(
        "Reclaiming memory that this pod requested on {} from {}, which uses more than its request.",
        gpus.collect::<Vec<_>>().join(" and "),
        name(&demand.victim)
    )
}

/// Whether a pod has the memory that it requested.
pub(super) fn memory(it: &News) -> String {
    match it.memory {
        Memory::Asleep => "The pod sleeps: others may borrow its unused memory.".to_owned(),
        Memory::Free => "All memory that the pod requested is free.".to_owned(),
        Memory::Reclaiming => {
            let missing = it.missing.iter();
            let missing = missing.map(|(uuid, mib)| format!("{mib} of GPU {uuid}"));
            format!(
                "Others use {} that the pod requested. The extender reclaims memory that pods use beyond their requests.",
                missing.collect::<Vec<_>>().join(" and ")
            )
        }
    }
}

/// The text about the result of an action.
pub(super) fn then(action: Action) -> &'static str {
    match action {
        Action::KillProcess => "Its agent ends its GPU processes until it is within its request.",
        Action::Evict => "The pod was evicted.",
        Action::Delete => "The pod was deleted.",
        Action::Event | Action::MarkNode => "Nothing else is done.",
    }
}

/// The text about an action that the API server did not allow.
pub(super) fn refused(demand: &Demand, error: &AskError) -> String {
    let what = match demand.action {
        Action::Evict => "evict",
        Action::Delete => "delete",
        Action::Event | Action::KillProcess | Action::MarkNode => "reclaim memory from",
    };
    let purpose = match &demand.purpose {
        Purpose::Pod(pod) => format!("for {}", name(pod)),
        Purpose::Headroom(mib) => format!("for the headroom of {mib}"),
        Purpose::Limit => "over its limit".to_owned(),
        Purpose::Autoscaler => format!("to empty node {}", demand.node),
    };
    let hint = match error.status() {
        Some(403) => " If the ClusterRole gpustow-disruptions is missing, apply it.",
        _ => "",
    };
    format!(
        "Cannot {what} {} {purpose}: {error}. Retrying.{hint}",
        name(&demand.victim)
    )
}

/// `4 h`, `90 min`, `45 s` or `500 ms`.
fn period(lasts: Duration) -> String {
    let seconds = lasts.as_secs();
    if seconds == 0 {
        return format!("{} ms", lasts.as_millis());
    }
    [(3600, "h"), (60, "min")]
        .into_iter()
        .find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit))
        .map_or_else(
            || format!("{seconds} s"),
            |(unit, name)| format!("{} {name}", seconds / unit),
        )
}

#[cfg(test)]
mod tests {
    use gpustow_api::config::{self, GpustowConfigSpec};
    use gpustow_ledger::{Ledger, Pursuit, TURNS};
    use gpustow_settings::Feature;
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;
    use strum::VariantArray as _;

    use super::*;

    fn pod(name: &str) -> Arc<PodFacts> {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "namespace": "team", "name": name, "uid": name },
        }))
        .unwrap();
        Arc::new(PodFacts::from_pod(&pod, names::GPU_MEM).unwrap())
    }

    #[test]
    fn reservation_of_a_pod_that_waited_long_names_a_few_pods() {
        let place = |cards: usize, pods: usize, lasts| {
            let it = Reserved {
                pod: pod("p"),
                cause: Cause::Reserve,
                node: "gpu-node-3".into(),
                until: Duration::ZERO,
                cards: (0..cards)
                    .map(|card| (format!("GPU-{card}").into(), Mib(81_920)))
                    .collect(),
                victims: (0..pods).map(|nth| pod(&format!("pod-{nth}"))).collect(),
                borrowers: Vec::new(),
                gang: None,
            };
            reserved(&it, "", Duration::from_secs(lasts))
        };
        assert_eq!(
            place(8, 45, 4 * 3600),
            "Reserved 8 GPUs on node gpu-node-3 for this pod, which has waited long. Waiting for 45 pods to finish: \
             team/pod-0, team/pod-1, team/pod-2 and 42 more. If none finishes within 4 h, the extender tries other GPUs."
        );
        let one = place(1, 1, 90);
        assert!(one.contains("Reserved 81920 MiB of GPU GPU-0 on"), "{one}");
        assert!(
            one.contains("Waiting for pod team/pod-0 to finish."),
            "{one}"
        );
        assert!(one.contains("within 90 s"), "{one}");
    }

    #[test]
    fn each_cause_has_a_switch_a_plan_words_a_permission_and_a_page() {
        let rows = [
            (Cause::Reclaim, Feature::Reclaim, "reclaim"),
            (Cause::Pressure, Feature::Reclaim, "reclaim"),
            (Cause::OverLimit, Feature::Reclaim, "limits"),
            (Cause::Reserve, Feature::Reserve, "reservations"),
            (Cause::Preempt, Feature::Preempt, "preemption"),
            (Cause::Defragment, Feature::Defragment, "defragmentation"),
        ];
        let disrupt = |cause: &&Cause| !Action::of(**cause).is_empty();
        assert_eq!(Cause::VARIANTS.iter().filter(disrupt).count(), rows.len());
        let mut spec = GpustowConfigSpec::default();
        spec.reclaim.action = config::Action::Evict;
        spec.preempt.fragmented = true;
        spec.defragment.evictions_per_hour = 1;
        (spec.reserve.after.0, spec.reserve.mark_nodes) = (Some(Duration::ZERO), true);
        let ledger = Ledger::new(gpustow_settings::ledger(&spec));
        let plans = ledger.report(&pod("p"), Duration::ZERO);
        for (cause, feature, page) in rows {
            assert!(feature.is_on(&spec) && feature.needs(&spec).is_some());
            let plan = plans.iter().find(|(means, _)| *means == cause);
            assert_eq!(plan.is_some(), TURNS.contains(&cause), "{cause:?}");
            assert!(plan.is_none_or(|(_, it)| *it != Pursuit::Off), "{cause:?}");
            let demand = Demand {
                victim: pod("victim"),
                cause,
                action: Action::of(cause)[0],
                node: "n".into(),
                purpose: Purpose::Pod(pod("p")),
                gang: None,
                cards: Vec::new(),
            };
            assert!(why(&demand, Duration::ZERO).contains("team/p"), "{cause:?}");
            let page = format!("{}/docs/{page}.md", env!("CARGO_MANIFEST_DIR"));
            assert!(std::fs::exists(&page).unwrap(), "{page}");
        }
    }
}
