//! Reports silent agents, by an Event on their node.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::app::App;

/// Between two looks, at most; a short `scheduling.staleAfter` is looked at more often.
const LOOK: Duration = Duration::from_secs(10);
/// Silent nodes that one look reports. If more fall silent at once, the agents are not the cause.
const MOST: usize = 16;
/// Nodes that are looked at before filter has its turn.
const AT_ONCE: usize = 256;

/// Writes an Event on each node whose report goes stale, until the process ends. Only the leader writes it, and only
/// for reports that it saw go stale: an earlier leader reported the others.
pub(crate) async fn run(app: Arc<App>) {
    let (ledger, config) = (&app.ledger, &app.config);
    let mut heard: HashSet<Arc<str>> = HashSet::new();
    config.known(LOOK).await;
    loop {
        let stale_after: Duration = config.spec().scheduling.stale_after.into();
        sleep(LOOK.min(stale_after / 3)).await;
        let names = ledger.lock().node_names();
        let mut silent = Vec::new();
        for few in names.chunks(AT_ONCE) {
            let now = ledger.now();
            let ledger = ledger.lock();
            for name in few {
                match ledger.is_stale(name, now) {
                    Some(false) => _ = heard.insert(name.clone()),
                    Some(true) if heard.remove(name) => silent.push(name.clone()),
                    Some(true) | None => {}
                }
            }
        }
        if app.leads().is_none() {
            continue;
        }
        if silent.len() > MOST {
            tracing::warn!(
                nodes = silent.len(),
                "many agents fell silent at once: only some have an Event"
            );
        }
        for node in silent.iter().take(MOST) {
            tracing::warn!(%node, "the agent has fallen silent");
            app.events.silent(node, stale_after);
        }
    }
}
