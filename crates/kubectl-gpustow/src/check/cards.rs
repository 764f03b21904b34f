//! Problems of one card, or of its users.

use gpustow_api::gpunode::{Gpu, HeldBy};
use gpustow_api::limit::Enforce;
use gpustow_api::{faults, names};
use gpustow_inspect::{Cluster, PodInfo, memory, owner::Owners, state, system};
use gpustow_ledger::{CardView, NodeView};
use gpustow_pack::Mib;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Findings, Level};

/// A card that its agent saw fail this recently before its report still fails: seconds.
const STILL: i64 = 30;

pub(super) fn look(
    cluster: &Cluster,
    owners: &Owners<'_>,
    view: &NodeView,
    card: &CardView,
    findings: &mut Findings,
) {
    let object = || format!("node/{}", view.name);
    let Some(gpu) = cluster.gpu(&view.name, &card.uuid) else {
        return;
    };
    if let Some(by) = &gpu.held_by {
        held_by_others(by, view, card, findings);
    } else if gpu.missing {
        findings.add(
            Level::Warning,
            object(),
            format!("GPU {} ({}) is no longer there", card.index, card.uuid),
            "delete the pods that hold it, so that their owners make new ones; the agent forgets it then",
        );
    } else if !gpu.healthy && state::unread(cluster, &view.name).is_none() {
        failed(cluster, gpu, view, card, findings);
    }
    claimed(gpu, view, card, findings);
    let unknown = card.unmanaged.minus(owners.promised(&view.name, card));
    if unknown > Mib(2048) {
        findings.add(
            Level::Warning,
            object(),
            format!(
                "GPU {}: {} used by processes that belong to no gpustow pod",
                card.index,
                memory(unknown)
            ),
            "nvidia-smi on the node names them",
        );
    }
    for used in &gpu.pods {
        let amount = Mib(used.used_mib);
        match cluster.pods.get(used.uid.as_str()) {
            Some(pod) => uses(cluster, view, card, (pod, amount), findings),
            None => findings.add(
                Level::Warning,
                object(),
                format!(
                    "GPU {}: {} held by pod {}, which is gone",
                    card.index,
                    memory(amount),
                    used.uid
                ),
                "end the process on the node",
            ),
        }
    }
}

/// A pod that uses so much of a card.
fn uses(
    cluster: &Cluster,
    view: &NodeView,
    card: &CardView,
    (pod, used): (&PodInfo, Mib),
    findings: &mut Findings,
) {
    let Some(Ok(assignment)) = &pod.facts.assignment else {
        return;
    };
    let charges = assignment.charges.iter();
    let here = charges.filter(|(uuid, _)| **uuid == *card.uuid);
    let charged: Mib = here.map(|&(_, mib)| mib).sum();
    let on_node = pod.facts.node.as_deref() == Some(&*view.name);
    if charged > Mib::ZERO && on_node {
        return over(cluster, card, pod, used, charged, findings);
    }
    findings.add(
        Level::Error,
        format!("pod/{}", pod.full_name()),
        format!(
            "uses {} on {} GPU {}, which is not its own",
            memory(used),
            view.name,
            card.index
        ),
        format!("does its image or command set {}?", names::VISIBLE_DEVICES),
    );
}

/// A pod that uses more of a card than it may, unless no one is to watch that. A limit lets it borrow.
fn over(
    cluster: &Cluster,
    card: &CardView,
    pod: &PodInfo,
    used: Mib,
    charged: Mib,
    findings: &mut Findings,
) {
    let limit = pod.facts.limit_on(&card.uuid);
    let limit = limit.filter(|limit| *limit > charged);
    let may = limit.unwrap_or(charged);
    if pod.facts.enforce == Enforce::None || used.0 <= may.0.saturating_add(may.0 / 20) {
        return;
    }
    let (problem, fix) = match limit {
        None => (
            format!("uses {} of {} asked for", memory(used), memory(charged)),
            format!("raise its {}", cluster.resource()),
        ),
        Some(limit) => (
            format!(
                "uses {}, more than its limit of {}",
                memory(used),
                memory(limit)
            ),
            format!("raise its {}", names::MEM_LIMIT),
        ),
    };
    let level = match card.free {
        Mib::ZERO => Level::Warning,
        _ => Level::Info,
    };
    findings.add(level, format!("pod/{}", pod.full_name()), problem, fix);
}

/// ResourceClaims that came after our pods: their allocator does not know of the pods.
fn claimed(gpu: &Gpu, view: &NodeView, card: &CardView, findings: &mut Findings) {
    let claimed: Mib = gpu.claims.iter().map(|it| Mib(it.held_mib)).sum();
    let over = (claimed + card.held).minus(card.capacity);
    if claimed == Mib::ZERO || card.held == Mib::ZERO || over == Mib::ZERO {
        return;
    }
    let claims: Vec<&str> = gpu.claims.iter().map(|it| it.claim.as_str()).collect();
    findings.add(
        Level::Error,
        format!("node/{}", view.name),
        format!(
            "GPU {}: pods hold {} and ResourceClaims {} ({}), which is {} too much",
            card.index,
            memory(card.held),
            memory(claimed),
            claims.join(", "),
            memory(over)
        ),
        "delete a pod of one of the two, and set spec.claims.fence of the GpustowConfig: docs/claims.md",
    );
}

/// Something that does not know gpustow has given the card away.
fn held_by_others(by: &HeldBy, view: &NodeView, card: &CardView, findings: &mut Findings) {
    let problem = format!(
        "GPU {} is held by pod {} through {}",
        card.index, by.pod, by.through
    );
    let ours = card
        .pods
        .iter()
        .map(|pod| format!("{}/{}", pod.namespace, pod.name));
    let ours: Vec<_> = ours.collect();
    if ours.is_empty() {
        findings.add(
            Level::Info,
            format!("node/{}", view.name),
            problem,
            "nothing: it takes pods again once that pod is gone",
        );
    } else {
        findings.add(
            Level::Error,
            format!("node/{}", view.name),
            format!(
                "{problem}, and by {}: they do not know of each other",
                ours.join(", ")
            ),
            "keep one of the two off the node: docs/platforms.md",
        );
    }
}

/// A card that has failed takes pods again by itself unless it fails on.
fn failed(cluster: &Cluster, gpu: &Gpu, view: &NodeView, card: &CardView, findings: &mut Findings) {
    let reason = faults::in_words(gpu.reason.as_deref().unwrap_or("no reason given"));
    let report = cluster.reports.get(&*view.name);
    let written = report.and_then(|report| report.written());
    let time = gpu
        .failed
        .as_deref()
        .and_then(|it| it.parse::<Timestamp>().ok());
    let passed = time
        .zip(written)
        .filter(|(time, written)| written - time.as_second() > STILL);
    let (problem, fix) = match passed {
        Some((time, _)) => {
            let again = time.saturating_add(probation(cluster, &view.name));
            let clock = |time: Timestamp| time.strftime("%H:%M UTC").to_string();
            let again = again.map_or_else(|_| "later".to_owned(), clock);
            (
                format!(", seen last at {}", clock(time)),
                format!(
                    "wait: it takes pods again from {again} on unless it fails again; if it does, drain the node \
                     and reset or replace the GPU"
                ),
            )
        }
        None => (
            String::new(),
            match gpu.failed {
                Some(_) => "drain the node, then reset or replace the GPU".to_owned(),
                None => "remove the cause on the node: docs/troubleshooting.md".to_owned(),
            },
        ),
    };
    findings.add(
        Level::Warning,
        format!("node/{}", view.name),
        format!("GPU {} takes no pods: {reason}{problem}", card.index),
        fix,
    );
}

/// How long the node's agent keeps a card that has failed from new pods.
fn probation(cluster: &Cluster, node: &str) -> SignedDuration {
    let pod = cluster.system.agent_on(node);
    let agent = pod.and_then(|pod| system::container(pod, system::AGENT));
    let said = agent.and_then(|agent| system::setting(agent, "probation"));
    let said = said.and_then(|text| gpustow_serve::seconds(&text).ok());
    let seconds = said.map_or(600, |it| it.as_secs());
    SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(600))
}
