//! Which pods of a waiting gang fit, and the needs of the others.

use gpustow_api::PodFacts;
use gpustow_inspect::{Cluster, try_pod};
use gpustow_ledger::{Extent, GangView, MOST_PODS, NodeView, Shortfall, Standing};
use serde::Serialize;

/// The gang of a pod that waits.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Gang {
    /// `namespace/name`.
    pub(super) group: String,
    pub(super) min_count: usize,
    /// Pods that are placed or fit now.
    pub(super) fit: usize,
    /// Its pods, by how they stand.
    pub(super) parts: Vec<Part>,
}

/// Pods of a gang with one description.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Part {
    /// As in "2 fit on n".
    pub(super) what: String,
    /// `namespace/name`.
    pub(super) pods: Vec<String>,
}

/// The answer about the gang of a pod.
pub(super) fn of(cluster: &Cluster, views: &[NodeView], gang: &GangView) -> Option<Gang> {
    let min_count = gang.min_count?;
    let mut parts: Vec<Part> = Vec::new();
    // A trial asks every node.
    let mut needs: Vec<(&PodFacts, String)> = Vec::new();
    for (pod, standing) in &gang.pods {
        let what = match standing {
            Standing::Placed(node) => format!("bound to {node}"),
            Standing::Fits(node) => format!("fit on {node}"),
            Standing::NoGpuMemory => "request no GPU memory".to_owned(),
            Standing::Gated => "held by scheduling gates".to_owned(),
            Standing::Waits => {
                let is_equal = |other: &&(&PodFacts, String)| {
                    other.0.asks == pod.asks && other.0.constraints == pod.constraints
                };
                if let Some((_, what)) = needs.iter().find(is_equal) {
                    what.clone()
                } else {
                    let what = need(cluster, views, pod);
                    needs.push((pod, what.clone()));
                    what
                }
            }
        };
        let name = format!("{}/{}", pod.namespace, pod.name);
        match parts.iter_mut().find(|part| part.what == what) {
            Some(part) => part.pods.push(name),
            None => parts.push(Part {
                what,
                pods: vec![name],
            }),
        }
    }
    parts.iter_mut().for_each(|part| part.pods.sort());
    parts.sort_by(|a, b| a.what.cmp(&b.what));
    Some(Gang {
        group: gang.group.to_string(),
        min_count,
        fit: gang.fit(),
        parts,
    })
}

/// The reason that the pods of a gang are not placed yet.
pub(super) fn lacks(gang: &GangView) -> Option<String> {
    let whole = gang.part_of.as_ref().map(|whole| {
        format!(
            "kube-scheduler places all groups of the CompositePodGroup {whole} or none, and gpustow preempts for no part of it"
        )
    });
    let lacks = lacks_itself(gang).into_iter().chain(whole);
    lacks.reduce(|one, other| format!("{one}; {other}"))
}

fn lacks_itself(gang: &GangView) -> Option<String> {
    let group = &gang.group;
    let Some(min_count) = gang.min_count else {
        return Some(format!(
            "there is no PodGroup {group}, and kube-scheduler waits for it"
        ));
    };
    if let Some(Shortfall {
        fit, of, search, ..
    }) = gang.shortfall()
    {
        return Some(match search {
            Extent::TooMany => format!(
                "its group {group} needs {of} pods at the same time, and gpustow places {MOST_PODS} at most"
            ),
            _ => format!(
                "only {fit} of the {of} pods that its group {group} needs fit at the same time"
            ),
        });
    }
    (gang.missing() > 0).then(|| {
        let there = min_count - gang.missing();
        format!(
            "kube-scheduler waits until its group {group} has {min_count} pods, and it has {there}"
        )
    })
}

/// The need of a pod that does not fit together with the others.
fn need(cluster: &Cluster, views: &[NodeView], pod: &PodFacts) -> String {
    let trial = try_pod(cluster, views, pod);
    let most = trial.refusals.iter().max_by_key(|(_, nodes)| **nodes);
    let why = match most {
        _ if !trial.fits.is_empty() => "the others leave no GPU for it",
        Some((reason, _)) => reason,
        None => "no node reports GPUs",
    };
    format!(
        "need {}: {why}",
        super::Requested::of(pod).parts().join("; ")
    )
}
