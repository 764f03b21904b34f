//! `why` and `fit` for users who may not list the whole cluster: answers from a pod, its Events and the API server.

use anyhow::{Context as _, Result};
use gpustow_api::{Asks, PodFacts, names};
use gpustow_inspect::{Cluster, PodInfo, Source, last_seen, state};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::ListParams;

use super::{Said, Verdict, Why, about_object, assigned, refused};
use crate::lists::indices;

/// Events that are shown, the last first.
const EVENTS: usize = 4;

/// The answer from a pod of the user's namespace and its Events.
pub(super) async fn why(source: &Source, cluster: &Cluster, pod: &PodInfo) -> Result<Why> {
    let (facts, object) = (&pod.facts, &pod.object);
    let (client, _) = source.client().await?;
    let about_it = ListParams::default().fields(&format!("involvedObject.uid={}", facts.uid));
    let events = Api::<Event>::namespaced(client, &facts.namespace);
    let events = events.list(&about_it).await;
    let mut events = events.context("cannot list the pod's Events")?.items;
    let is_ours = |it: &Event| it.reason.as_deref().is_some_and(|it| it.starts_with("Gpu"));
    events.retain(is_ours);
    events.sort_by_key(|it| std::cmp::Reverse(last_seen(it)));
    let events = events.into_iter().take(EVENTS).map(|event| Said {
        age_seconds: last_seen(&event).map_or(0, |it| {
            u64::try_from(cluster.wall.as_second() - it.as_second()).unwrap_or(0)
        }),
        event: event.reason.unwrap_or_default(),
        note: event.message.unwrap_or_default(),
    });
    let (verdict, summary) = says(cluster, facts, object);
    Ok(Why {
        verdict,
        summary,
        events: events.collect(),
        scheduler_said: state::said(object).map(str::to_owned),
        ..of_own(cluster, facts, object)
    })
}

fn says(cluster: &Cluster, facts: &PodFacts, pod: &Pod) -> (Verdict, String) {
    let kept =
        |condition| state::holds(pod, condition).map_or(String::new(), |it| format!(" {it}"));
    if let Asks::Unreadable(bad) = &facts.asks {
        return (Verdict::Invalid, bad.to_string());
    }
    let Some(node) = facts.node.as_deref() else {
        let verdict = match facts.gated || facts.queued {
            true => Verdict::Gated,
            false => Verdict::Waiting,
        };
        let said = state::plainly(state::said(pod));
        return (
            verdict,
            format!("It waits: {said}.{}", kept(names::RESERVED_CONDITION)),
        );
    };
    match assigned(facts, node) {
        Ok(assignment) => {
            let uuids = assignment.charges.iter().map(|(uuid, _)| &**uuid);
            let gpus = indices(cluster, Some(node), uuids).join(", ");
            let asked = kept(names::RECLAIM_CONDITION);
            (
                Verdict::Running,
                format!("It is on {node}, on GPU {gpus}.{asked}"),
            )
        }
        Err(summary) => (Verdict::Invalid, summary),
    }
}

/// The API server's answer about a pod that is not created, as it would create it.
pub(crate) fn fit(
    cluster: &Cluster,
    facts: &PodFacts,
    said: std::result::Result<Pod, String>,
) -> Why {
    match said {
        Ok(pod) => Why {
            verdict: Verdict::Unknown,
            summary: "The API server would create it. Whether a GPU has memory for it is unknown."
                .to_owned(),
            ..of_own(cluster, facts, &pod)
        },
        Err(refusal) => refused(cluster, facts, refusal),
    }
}

fn of_own(cluster: &Cluster, facts: &PodFacts, pod: &Pod) -> Why {
    Why {
        left_out: cluster.left_out,
        ..about_object(cluster, pod, facts)
    }
}
