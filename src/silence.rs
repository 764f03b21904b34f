//! Tells of agents that have fallen silent, by an Event on their node.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::config::Followed;
use crate::epoch::Epoch;
use crate::events::Events;
use crate::locked::Locked;

/// Between two looks, at most; a short `scheduling.staleAfter` is looked at more often.
const LOOK: Duration = Duration::from_secs(10);
/// Nodes of one look that are told of. Where more fall silent at once it is not the agents.
const MOST: usize = 16;
/// Nodes that are looked at before filter has its turn.
const AT_ONCE: usize = 256;

/// Writes an Event on each node whose report goes stale, until the process ends. Only the replica that
/// decides writes it, and only for reports that it saw go stale: an earlier one told of the others.
pub(crate) async fn run(
    ledger: Arc<Locked>,
    epoch: Arc<Epoch>,
    events: Arc<Events>,
    config: Arc<Followed>,
) {
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
        if epoch.held().is_none() {
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
            events.silent(node, stale_after);
        }
    }
}
