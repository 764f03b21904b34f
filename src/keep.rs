//! Places for pods that have waited for long: which, and for whom, is the ledger's answer
//! ([`gpustow_ledger::Ledger::keep_places`]); here it is asked every second while this extender decides, and whoever
//! has a place is told so. Nothing is written but Events, and nobody is made to end.

pub(crate) mod marks;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpustow_ledger::{Ended, Place};
use tokio::time::sleep;

use crate::app::App;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Names in one Event.
const NAMES: usize = 3;

/// Looks after places for as long as the process runs.
pub(crate) async fn run(app: Arc<App>) {
    // Who was told, and of a place on which node.
    let mut told: HashMap<Arc<str>, Arc<str>> = HashMap::new();
    loop {
        sleep(LOOK).await;
        let decides = app.epoch.held().is_some() && app.lists.missing().is_empty();
        if !decides || app.is_draining() {
            app.metrics.places.set(0);
            told.clear();
            continue;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix = i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(i64::MAX);
        let (places, given_up) = {
            let now = app.ledger.now();
            let mut ledger = app.ledger.lock();
            ledger.keep_places(now, unix);
            let places: Vec<(Place, Vec<String>)> = ledger
                .places()
                .into_iter()
                .map(|place| {
                    let ends = place.ends.iter().filter_map(|uid| ledger.pod(uid));
                    let names = ends.map(|pod| format!("{}/{}", pod.namespace, pod.name));
                    let names = names.collect();
                    (place, names)
                })
                .collect();
            (
                places,
                Ended::GIVEN_UP.map(|why| (why, ledger.given_up(why))),
            )
        };
        app.metrics
            .places
            .set(i64::try_from(places.len()).unwrap_or(i64::MAX));
        for (why, count) in given_up {
            app.metrics.given_up(why, count);
        }
        told.retain(|uid, _| places.iter().any(|(place, _)| place.pod.uid == *uid));
        for (place, ends) in &places {
            let Place { pod, node, .. } = place;
            if told.insert(pod.uid.clone(), node.clone()).as_ref() != Some(node) {
                tracing::info!(
                    namespace = %pod.namespace, pod = %pod.name, %node, ends = ends.len(), "keeps a place"
                );
                let note = note(place, ends, app.config.spec().reserve.give_up_after.into());
                app.events.keeps_place(pod, note);
            }
        }
    }
}

/// What the pod is told.
fn note(place: &Place, ends: &[String], lasts: Duration) -> String {
    let (first, more) = ends.split_at(ends.len().min(NAMES));
    let more = match more.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let finish = match ends.len() {
        0 => "They are about to be free".to_owned(),
        1 => format!("One pod must finish there first: {}", first.join(", ")),
        pods => format!(
            "{pods} pods must finish there first: {}{more}",
            first.join(", ")
        ),
    };
    let gpus = match &place.cards[..] {
        [(uuid, mib)] => format!("{mib} of GPU {uuid}"),
        cards => format!("{} GPUs", cards.len()),
    };
    format!(
        "Has waited for long, so gpustow reserves {gpus} on node {} for it. {finish}. What becomes free there goes to no \
         pod of equal or lower priority. If no pod finishes there within {}, gpustow tries other GPUs",
        place.node,
        period(lasts)
    )
}

/// `4 h`, `90 min` or `45 s`.
fn period(lasts: Duration) -> String {
    let seconds = lasts.as_secs();
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
    use std::sync::Arc;

    use gpustow_api::PodFacts;
    use gpustow_pack::Mib;
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    #[test]
    fn the_note_is_short_and_names_a_few_pods() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": { "namespace": "a", "name": "p", "uid": "u" },
        }))
        .unwrap();
        let facts = PodFacts::from_pod(&pod, "gpustow.dev/gpu-mem").unwrap();
        let uuid = |card: usize| format!("GPU-6e1d9d2c-0000-0000-0000-{card:012}");
        let place = |cards: usize| Place {
            pod: Arc::new(facts.clone()),
            node: "gpu-node-3".into(),
            until: Duration::ZERO,
            ends: Vec::new(),
            cards: (0..cards)
                .map(|card| (uuid(card).into(), Mib(81_920)))
                .collect(),
        };
        let ends: Vec<_> = (0..45).map(|pod| format!("team/pod-{pod}")).collect();
        let hours = Duration::from_secs(4 * 3600);
        let all = note(&place(8), &ends, hours);
        assert_eq!(
            all,
            "Has waited for long, so gpustow reserves 8 GPUs on node gpu-node-3 for it. 45 pods must finish there \
             first: team/pod-0, team/pod-1, team/pod-2 and 42 more. What becomes free there goes to no pod of equal or \
             lower priority. If no pod finishes there within 4 h, gpustow tries other GPUs"
        );
        let one = note(&place(1), &ends[..1], Duration::from_secs(90));
        assert!(
            one.contains(&format!("81920 MiB of GPU {}", uuid(0))),
            "{one}"
        );
        assert!(
            one.contains("One pod must finish there first: team/pod-0."),
            "{one}"
        );
        assert!(one.contains("within 90 s"), "{one}");
    }
}
