//! Which GPUs accept new pods: one rule for every command and the page. Reports are stale by the ledger's rule, and
//! [`Cluster`] gives the ledger their age.

use gpustow_api::faults::{self, NodeFault};
use gpustow_api::gpunode::{Condition, NO_GPUS, READY};
use gpustow_api::{limit, names};
use gpustow_ledger::{CardView, NodeView, PodShare, Reason};
use gpustow_pack::{Compute, Mib, Request};
use k8s_openapi::api::core::v1::{Pod, PodCondition};

use crate::{Cluster, age, system};

/// Refusals that only the deciding extender can check: they depend on its reservations and on the offers to the queue.
const IN_TURN: [Reason; 2] = [Reason::Reserved, Reason::Queued];

/// Why no GPU of the node takes a new pod.
pub fn node_refuses(cluster: &Cluster, view: &NodeView) -> Option<&'static str> {
    if !cluster.reports.contains_key(&*view.name) {
        Some("no report")
    } else if view.stale {
        Some("agent silent")
    } else {
        let unread = unread(cluster, &view.name)?;
        Some(unread.fault.map_or("GPUs unreadable", NodeFault::in_short))
    }
}

/// Why an agent reads none of the GPUs that its node has.
pub struct Unread<'c> {
    /// None if this version does not know it.
    pub fault: Option<NodeFault>,
    /// The agent's words.
    pub message: &'c str,
}

/// Why the node's agent reads none of its GPUs, if it does not.
pub fn unread<'c>(cluster: &'c Cluster, node: &str) -> Option<Unread<'c>> {
    let report = cluster.reports.get(node)?;
    let not_ready = |it: &&Condition| it.r#type == READY && it.status == "False";
    let condition = report.conditions.iter().find(not_ready)?;
    // A driver that shows no GPU is no fault: there is none to read.
    (condition.reason != NO_GPUS).then(|| Unread {
        fault: condition.reason.parse().ok(),
        message: &condition.message,
    })
}

/// Does the driver show the GPU no more?
pub fn is_missing(cluster: &Cluster, node: &str, uuid: &str) -> bool {
    cluster.gpu(node, uuid).is_some_and(|gpu| gpu.missing)
}

/// Why the GPU does not accept a new pod.
pub fn refuses(cluster: &Cluster, view: &NodeView, card: &CardView) -> Option<String> {
    if let Some(why) = node_refuses(cluster, view) {
        return Some(why.to_owned());
    }
    if card.healthy {
        return None;
    }
    if card.cordoned {
        return Some("cordoned".to_owned());
    }
    if card.claimed {
        return Some("left to ResourceClaims".to_owned());
    }
    let gpu = cluster.gpu(&view.name, &card.uuid);
    let reason = gpu.and_then(|gpu| gpu.reason.as_deref());
    Some(faults::in_words(reason.unwrap_or("unhealthy")))
}

/// Why the driver would hold no container on the GPU to a limit; none if it would.
pub fn no_limit(cluster: &Cluster, view: &NodeView, card: &CardView) -> Option<&'static str> {
    let gpu = cluster.gpu(&view.name, &card.uuid);
    limit::hindrance(gpu.and_then(|gpu| gpu.memory_limit.as_deref()))
}

/// Why the GPU has too little compute for such a pod, or MPS that it should not have, or no MPS; none if it is right.
pub fn no_compute(card: &CardView, request: &Request) -> Option<String> {
    let Compute { capacity, free } = card.compute;
    match (u16::from(request.compute), capacity) {
        (0, 0) => None,
        (0, _) => Some("has MPS, for pods with compute-percent".to_owned()),
        (_, 0) => Some("has no MPS".to_owned()),
        (asked, _) => (asked > free).then(|| format!("{free} % of compute free")),
    }
}

/// Why the GPU is wrong for the pod because of MIG: it cannot make an instance, or serves only pods with instances.
/// None if it is right.
pub fn no_instance(card: &CardView, request: &Request) -> Option<String> {
    let says = match (&card.slices, request.isolated) {
        (None, false) => return None,
        (None, true) => "makes no MIG instances",
        (Some(_), false) => "makes MIG instances, for pods with isolation mig",
        (Some(slices), true) => {
            let mib = request.hardest()?.mib;
            return match slices.place(mib) {
                Some(_) => None,
                None => Some("no slices free where its MIG instance could start".to_owned()),
            };
        }
    };
    Some(says.to_owned())
}

/// The pods that start on the GPU, and for how many seconds they have.
pub fn starting(card: &CardView) -> Vec<(String, u64)> {
    let named = |pod: &PodShare| Some((format!("{}/{}", pod.namespace, pod.name), pod.starting?));
    card.pods.iter().filter_map(named).collect()
}

/// The GPU's memory for a new pod: zero while its report is stale or the GPU is not healthy.
pub fn room(view: &NodeView, card: &CardView) -> Mib {
    if view.stale || !card.healthy {
        Mib::ZERO
    } else {
        card.free
    }
}

/// The last message of kube-scheduler about the pod.
pub fn said(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|it| it.type_ == "PodScheduled");
    scheduled?.message.as_deref()
}

/// The message of this condition of the pod, if it is True.
pub fn holds<'p>(pod: &'p Pod, of_type: &str) -> Option<&'p str> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let is_it = |it: &&PodCondition| it.type_ == of_type && it.status == "True";
    conditions.iter().find(is_it)?.message.as_deref()
}

/// Why no kube-scheduler looks at pods that name gpustow's own, by its Lease.
pub fn leaderless(cluster: &Cluster) -> Option<String> {
    let lease = cluster.system.lease(names::SCHEDULER)?;
    let Some(spec) = lease.and_then(|lease| lease.spec.as_ref()) else {
        let installed = !cluster.system.pods_with(system::SCHEDULER).is_empty();
        return installed
            .then(|| format!("no kube-scheduler has ever led as {}", names::SCHEDULER));
    };
    let renewed = spec.renew_time.as_ref()?;
    let since = cluster.seconds_since(&renewed.0.to_string())?;
    let lasts = u64::try_from(spec.lease_duration_seconds?).ok()?;
    // Two machines' clocks differ.
    (since > 2 * lasts + 30).then(|| {
        format!(
            "no kube-scheduler leads as {}: its Lease was renewed {} ago",
            names::SCHEDULER,
            age(since)
        )
    })
}

/// Why a pod waits although there is room, by kube-scheduler's last message. The reasons are refusals of other plugins,
/// refusals that only the deciding extender can check, or a missing answer from the extender.
pub fn held_by(said: &str) -> Option<String> {
    if is_unreached(said) {
        return Some("kube-scheduler does not reach gpustow's extender".to_owned());
    }
    let Some(reasons) = reasons(said) else {
        return Some(format!("kube-scheduler reports: {said}"));
    };
    let others: Vec<_> = reasons.clone().filter(|it| !is_looked_at(it)).collect();
    if !others.is_empty() {
        return Some(format!(
            "kube-scheduler refuses nodes for reasons that gpustow does not look at: {}",
            others.join(", ")
        ));
    }
    let in_turn = |reason: &&str| IN_TURN.iter().any(|it| it.text() == counted(reason).1);
    let in_turn: Vec<_> = reasons.filter(in_turn).map(counted).map(worded).collect();
    (!in_turn.is_empty()).then(|| {
        format!(
            "the extender refused it when kube-scheduler asked last: {}",
            in_turn.join(", ")
        )
    })
}

/// kube-scheduler's reasons to refuse nodes, without the part on preemption; none if the message has another form.
fn reasons(said: &str) -> Option<impl Iterator<Item = &str> + Clone> {
    let (_, reasons) = said.split_once(" nodes are available: ")?;
    let reasons = reasons.split(". ").next().unwrap_or_default();
    Some(reasons.trim_end_matches('.').split(", "))
}

/// At most how many nodes kube-scheduler looked at when it last refused the pod, and of how many. None for all nodes,
/// or if the message has another form. It stops at a percentage of the nodes, and does not mention the others. A node
/// may have several reasons, so that a sum below the number of nodes is proof.
pub fn sample(said: &str) -> Option<(usize, usize)> {
    let (before, _) = said.split_once(" nodes are available: ")?;
    let all = before.strip_prefix("0/")?.parse().ok()?;
    let looked = reasons(said)?.try_fold(0_usize, |sum, reason| {
        // A reason without a count holds for all nodes.
        let counts = reason.starts_with(|first: char| first.is_ascii_digit());
        counts.then(|| sum.saturating_add(counted(reason).0))
    })?;
    (looked < all).then_some((looked, all))
}

/// A reason, and how many nodes were refused for it.
fn counted(reason: &str) -> (usize, &str) {
    let digits = reason.bytes().take_while(u8::is_ascii_digit).count();
    let (count, text) = reason.split_at(digits);
    (count.parse().unwrap_or(1), text.trim_start())
}

fn worded((count, text): (usize, &str)) -> String {
    let nodes = if count == 1 { "node" } else { "nodes" };
    format!("{} ({count} {nodes})", text.trim_start_matches("node(s) "))
}

/// Did kube-scheduler get no answer from the extender?
pub fn is_unreached(said: &str) -> bool {
    said.starts_with("Post \"") && said.contains("/filter\"")
}

/// kube-scheduler's message about a pod, for a list: gpustow's own refusals, most common first, without the part on
/// preemption.
pub fn plainly(said: Option<&str>) -> String {
    let Some(said) = said else {
        return "no scheduler has looked at it yet".to_owned();
    };
    let Some(reasons) = reasons(said) else {
        return held_by(said).unwrap_or_else(|| said.to_owned());
    };
    let mut counts: Vec<_> = reasons.map(counted).collect();
    counts.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let texts = counts.into_iter().map(worded);
    let texts = texts.collect::<Vec<_>>().join(", ");
    match sample(said) {
        Some((looked, all)) => format!("{texts}; kube-scheduler looked at {looked} of {all} nodes"),
        None => texts,
    }
}

/// Is it a refusal that `why` weighs itself, so that it may be a thing of the past?
fn is_looked_at(reason: &str) -> bool {
    let (_, text) = counted(reason);
    let own = Reason::all().any(|it| it.text() == text);
    own || [
        "Insufficient ",
        "node(s) were unschedulable",
        "node(s) had untolerated taint",
        "node(s) didn't match Pod's node affinity",
    ]
    .iter()
    .any(|known| text.starts_with(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_the_reasons_most_common_first() {
        for (said, plain) in [
            (
                Some(
                    "0/4 nodes are available: 1 node(s) were unschedulable, 3 not enough free memory on any one GPU. no new claims to deallocate, preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling.",
                ),
                "not enough free memory on any one GPU (3 nodes), were unschedulable (1 node)",
            ),
            (
                Some("Post \"http://127.0.0.1:1/filter\": dial tcp: connect: connection refused"),
                "kube-scheduler does not reach gpustow's extender",
            ),
            (
                Some("0/5000 nodes are available: 500 not enough free memory on any one GPU."),
                "not enough free memory on any one GPU (500 nodes); kube-scheduler looked at 500 of 5000 nodes",
            ),
            (None, "no scheduler has looked at it yet"),
        ] {
            assert_eq!(plainly(said), plain);
        }
    }

    #[test]
    fn a_sample_is_told_from_all_nodes() {
        for (said, found) in [
            (
                "0/5000 nodes are available: 20 node(s) were unschedulable, 480 not enough free memory on any one GPU. preemption: 0/5000 nodes are available: 5000 Preemption is not helpful for scheduling.",
                Some((500, 5000)),
            ),
            (
                "0/4 nodes are available: 1 node(s) were unschedulable, 3 not enough free memory on any one GPU.",
                None,
            ),
            (
                "0/2 nodes are available: 2 Insufficient cpu, 2 Insufficient memory.",
                None,
            ),
            (
                "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
                None,
            ),
            ("pod has unbound immediate PersistentVolumeClaims", None),
        ] {
            assert_eq!(sample(said), found, "{said}");
        }
    }

    #[test]
    fn what_the_scheduler_said_is_weighed() {
        for (said, held) in [
            (
                "0/5 nodes are available: 2 no GPU as large as the pod asks for, 3 Insufficient example.com/gpu-mem. no new claims to deallocate, preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling.",
                None,
            ),
            (
                "0/4 nodes are available: 1 node(s) had untolerated taint {gpu: no}, 3 not enough free memory on any one GPU.",
                None,
            ),
            (
                "Post \"http://127.0.0.1:26675/filter\": dial tcp 127.0.0.1:26675: connect: connection refused",
                Some("does not reach gpustow's extender"),
            ),
            (
                "0/4 nodes are available: 1 not enough free memory on any one GPU, 3 node(s) didn't match pod anti-affinity rules. preemption: 0/4 nodes are available.",
                Some("not look at: 3 node(s) didn't match pod anti-affinity rules"),
            ),
            (
                "0/4 nodes are available: 1 not enough free memory on any one GPU, 3 free GPU memory is reserved for a pod that has waited longer.",
                Some(
                    "asked last: free GPU memory is reserved for a pod that has waited longer (3 nodes)",
                ),
            ),
            (
                "pod has unbound immediate PersistentVolumeClaims",
                Some("reports: pod has unbound"),
            ),
        ] {
            let answer = held_by(said);
            match held {
                None => assert_eq!(answer, None, "{said}"),
                Some(part) => assert!(
                    answer.as_ref().is_some_and(|it| it.contains(part)),
                    "{said}: {answer:?}"
                ),
            }
        }
    }
}
