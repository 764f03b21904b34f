//! What takes new pods and what does not: one rule for every command and the page. Reports are stale
//! by the ledger's rule, to which [`Cluster`] tells how old they are.

use gpustow_ledger::{CardView, NodeView};
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;

use crate::cluster::Cluster;

/// Why no GPU of the node takes a new pod.
pub(crate) fn node_refuses(cluster: &Cluster, view: &NodeView) -> Option<&'static str> {
    if !cluster.reports.contains_key(&*view.name) {
        Some("no report")
    } else if view.stale {
        Some("agent silent")
    } else {
        None
    }
}

/// Why the GPU takes no new pod.
pub(crate) fn refuses(cluster: &Cluster, view: &NodeView, card: &CardView) -> Option<String> {
    if let Some(why) = node_refuses(cluster, view) {
        return Some(why.to_owned());
    }
    if card.healthy {
        return None;
    }
    let report = cluster.reports.get(&*view.name);
    let gpu = report.and_then(|report| report.gpus.iter().find(|gpu| gpu.uuid == card.uuid));
    let reason = gpu.and_then(|gpu| gpu.reason.as_deref());
    let reason = reason.unwrap_or("unhealthy");
    Some(match meaning(reason) {
        Some(meaning) => format!("{reason} ({meaning})"),
        None => reason.to_owned(),
    })
}

/// What the number of an error means, in NVIDIA's words: of XIDs by
/// <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, of NVML's by nvml.h.
fn meaning(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "NVML's error 15" | "XID 79" => "GPU has fallen off the bus",
        "XID 48" => "double bit ECC error",
        "XID 62" => "internal micro-controller halt",
        "XID 63" => "ECC page retirement or row remapping recorded",
        "XID 64" => "ECC page retirement or row remapping failed",
        "XID 74" => "NVLink error",
        "XID 92" => "high single-bit ECC error rate",
        "XID 94" => "contained ECC error",
        "XID 95" => "uncontained ECC error",
        "XID 109" => "context switch timeout",
        "XID 119" => "GSP RPC timeout",
        "XID 120" => "GSP error",
        _ => return None,
    })
}

/// What a new pod may take of the GPU: nothing while it takes none.
pub(crate) fn room(view: &NodeView, card: &CardView) -> Mib {
    if view.stale || !card.healthy {
        Mib::ZERO
    } else {
        card.free
    }
}

/// What keeps a pod for which there is room from its place, by what kube-scheduler said last: the
/// refusals that neither gpustow nor this program would make, or no answer from the extender at all.
pub(crate) fn held_by(said: &str) -> Option<String> {
    if said.starts_with("Post \"") && said.contains("/filter\"") {
        return Some("kube-scheduler does not reach gpustow's extender".to_owned());
    }
    let Some((_, reasons)) = said.split_once(" nodes are available: ") else {
        return Some(format!("kube-scheduler says: {said}"));
    };
    // What follows is about preemption.
    let reasons = reasons.split(". ").next().unwrap_or_default();
    let others: Vec<_> = reasons
        .trim_end_matches('.')
        .split(", ")
        .filter(|reason| !is_looked_at(reason))
        .collect();
    (!others.is_empty()).then(|| {
        format!(
            "kube-scheduler refuses nodes for reasons that gpustow does not look at: {}",
            others.join(", ")
        )
    })
}

/// What kube-scheduler said of a pod, for a list: gpustow's own refusals, most common first, without
/// what is about preemption.
pub(crate) fn plainly(said: Option<&str>) -> String {
    let Some(said) = said else {
        return "no scheduler has looked at it yet".to_owned();
    };
    let Some((_, reasons)) = said.split_once(" nodes are available: ") else {
        return held_by(said).unwrap_or_else(|| said.to_owned());
    };
    let reasons = reasons.split(". ").next().unwrap_or_default();
    let mut counted: Vec<(usize, &str)> = reasons
        .trim_end_matches('.')
        .split(", ")
        .map(|reason| {
            let digits = reason.bytes().take_while(u8::is_ascii_digit).count();
            let (count, text) = reason.split_at(digits);
            (count.parse().unwrap_or(1), text.trim_start())
        })
        .collect();
    counted.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let texts = counted.iter().map(|(count, text)| {
        let nodes = if *count == 1 { "node" } else { "nodes" };
        format!("{} ({count} {nodes})", text.trim_start_matches("node(s) "))
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// Is it a refusal that `why` weighs itself, so that it may be a thing of the past?
fn is_looked_at(reason: &str) -> bool {
    let text = reason.trim_start_matches(|it: char| it.is_ascii_digit());
    let text = text.trim_start();
    let own = gpustow_ledger::Reason::all().any(|it| it.text() == text);
    own || [
        "Insufficient ",
        "node(s) were unschedulable",
        "node(s) had untolerated taint",
        "node(s) didn't match Pod's node affinity",
    ]
    .iter()
    .any(|known| text.starts_with(known))
}

/// Is this one of the extender's own pods, and ready? None if it is another pod.
pub(crate) fn extender_is_ready(pod: &Pod) -> Option<bool> {
    if pod.metadata.namespace.as_deref() != Some(gpustow_api::names::NAMESPACE) {
        return None;
    }
    let spec = pod.spec.as_ref()?;
    spec.containers.iter().find(|it| it.name == "extender")?;
    let statuses = pod
        .status
        .as_ref()
        .and_then(|it| it.container_statuses.as_ref());
    let mut statuses = statuses.into_iter().flatten();
    Some(statuses.any(|it| it.name == "extender" && it.ready))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_errors_have_words() {
        assert_eq!(meaning("XID 79"), Some("GPU has fallen off the bus"));
        assert_eq!(meaning("XID 79: fallen off the bus"), None);
    }

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
            (None, "no scheduler has looked at it yet"),
        ] {
            assert_eq!(plainly(said), plain);
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
                "pod has unbound immediate PersistentVolumeClaims",
                Some("says: pod has unbound"),
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
