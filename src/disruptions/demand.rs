//! The GPUs under pressure, and the words for demands on pods.

use gpustow_api::{PodFacts, names};
use gpustow_ledger::{Action, Cause, Demand, Shortage};
use tokio::time::sleep;

use super::TURN;
use crate::app::App;

/// Nodes that are looked at before filter has its turn.
const AT_ONCE: usize = 8;

/// The reasons of the condition on the victim, in the order in which they are written.
pub(super) fn reasons(demand: &Demand) -> &'static [&'static str] {
    match (demand.cause, demand.action) {
        (Cause::Preempt, _) => &[names::PREEMPTED],
        (Cause::Defragment, _) => &[names::DEFRAGMENTED],
        (_, Action::KillProcess) => &["Event", "KillProcess"],
        (_, Action::Evict) => &["Event", "Evict"],
        _ => &["Event"],
    }
}

/// The GPUs under pressure, by node and UUID.
pub(super) async fn under_pressure(app: &App) -> Vec<Shortage> {
    let nodes = app.ledger.lock().may_be_short();
    let mut all = Vec::new();
    for (index, few) in nodes.chunks(AT_ONCE).enumerate() {
        if index > 0 {
            sleep(TURN).await;
        }
        let now = app.ledger.now();
        let ledger = app.ledger.lock();
        all.extend(few.iter().flat_map(|name| ledger.shortages_on(name, now)));
    }
    all.sort_by(|one, other| (&one.node, &one.uuid).cmp(&(&other.node, &other.uuid)));
    all
}

/// Namespace and name.
pub(super) fn name(pod: &PodFacts) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}
