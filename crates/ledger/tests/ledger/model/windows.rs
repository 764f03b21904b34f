//! kube-scheduler shows windows of the nodes: a pod that was refused on all nodes of one is still placed in time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::server::NODES;
use super::world::{World, require};
use crate::build::ask;

/// Seconds for which a pod may fit somewhere without being placed: as many wake-ups as there are windows, with their pauses.
const PLACED_WITHIN: u64 = 20;
/// Seconds that are looked at: no pod that is placed is bound, and none is assumed for longer.
const LASTS: u64 = 29;

impl World {
    /// All that are unbound are asked about in turn, and again when they are woken: a pod that has fitted for long enough
    /// has been placed. Where memory is reclaimed for one pod, another fits when that is given up.
    pub(super) fn check_windows(&mut self) -> Result<(), String> {
        if self.switches.window.is_none() {
            return Ok(());
        }
        let mut ledger = self.rebuilt();
        let begin = self.now;
        let asleep = |pod: &&PodFacts| pod.node.is_none() && !pod.gated && !pod.deleting;
        let mut asleep: Vec<PodFacts> = self.server.pods.iter().filter(asleep).cloned().collect();
        asleep.retain(|pod| !pod.queued && pod.nominated.is_none() && self.is_single(pod));
        asleep.sort_by_key(|pod| (-pod.priority, pod.created, pod.name.clone()));
        let mut woken: Vec<Arc<str>> = asleep.iter().map(|pod| pod.uid.clone()).collect();
        let mut since: HashMap<Arc<str>, u64> = HashMap::new();
        for second in 0..=LASTS {
            let now = begin + Duration::from_secs(second);
            for uid in woken {
                let Some(pod) = asleep.iter().find(|pod| pod.uid == uid) else {
                    continue;
                };
                // A nominated node is tried before all others.
                let nominated = NODES.iter().filter(|name| {
                    pod.nominated.as_deref() == Some(**name)
                        && self.admits(pod, name)
                        && self.has_sum(pod, name)
                });
                let nominated: Vec<&str> = nominated.copied().collect();
                let mut chosen = ledger.filter(&ask(pod), &nominated, now).nodes;
                if chosen.is_empty() {
                    let nodes = self.candidates(pod, &NODES);
                    chosen = ledger.filter(&ask(pod), &nodes, now).nodes;
                }
                if let Some(name) = NODES.iter().find(|name| chosen.first() == Some(name)) {
                    self.chosen.insert(uid, name);
                }
            }
            let named = ledger.wake(10, now).into_iter();
            woken = named.map(|pod| pod.uid.clone()).collect();
            for pod in &mut asleep {
                if woken.contains(&pod.uid)
                    && let Some(node) = ledger.nomination(&pod.uid)
                {
                    (pod.nominated, pod.own_nomination) = (Some(node), true);
                    ledger.apply_pod(pod.clone());
                }
            }
            for pod in &asleep {
                let fits =
                    |name: &&&str| self.admits(pod, name) && self.fits_on(&ledger, pod, name);
                let is_placed = self.chosen.contains_key(&pod.uid);
                let Some(name) = NODES.iter().find(fits).filter(|_| !is_placed) else {
                    since.remove(&pod.uid);
                    continue;
                };
                let first = *since.entry(pod.uid.clone()).or_insert(second);
                require(second < first + PLACED_WITHIN, || {
                    format!(
                        "{} fits on {name}, since second {first}, and was not placed in time",
                        pod.uid
                    )
                })?;
            }
        }
        self.chosen.clear();
        Ok(())
    }
}
