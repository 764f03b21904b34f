//! Places for pods that have waited for long: which, and for whom, is the ledger's answer
//! ([`gpustow_ledger::Ledger::keep_places`]); here it is asked every second while this extender decides, and whoever
//! has a place is told so. Nothing is written but Events, and nobody is made to end.

pub(crate) mod marks;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpustow_ledger::{GivenUp, Place};
use tokio::time::sleep;

use crate::app::App;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Names in one Event.
const NAMES: usize = 8;

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
            (places, GivenUp::ALL.map(|why| (why, ledger.given_up(why))))
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
                let note = note(place, ends, app.args.keep_for.0);
                app.events.keeps_place(pod, note);
            }
        }
    }
}

/// What the pod is told.
fn note(place: &Place, ends: &[String], lasts: Duration) -> String {
    let cards: Vec<String> = place
        .cards
        .iter()
        .map(|(uuid, mib)| format!("{mib} of GPU {uuid}"))
        .collect();
    let more = ends.len().saturating_sub(NAMES);
    let mut names = ends[..ends.len() - more].join(", ");
    if more > 0 {
        names += &format!(" and {more} more");
    }
    format!(
        "Has waited for long, and a place is kept for it on node {}, where these pods have to end: {names}. Whatever \
         comes free there goes to no pod of equal or lower priority. Where nobody ends for {} s another place is \
         tried. Kept are {}",
        place.node,
        lasts.as_secs(),
        cards.join(", ")
    )
}
