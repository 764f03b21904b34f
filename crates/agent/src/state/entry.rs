//! How the report's entry of a GPU follows from a reading.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::gpunode::{ClaimUse, Gpu, HeldBy, PodUse};
use gpustow_pack::Mib;

use crate::claims::Held;
use crate::clock::Now;
use crate::devices::Card;
use crate::pods::NodePods;
use crate::shares::CardUse;

use super::{Seen, State, Tracked, ceil, floor, shortened};

impl State {
    /// Takes in the reading of a card.
    pub(super) fn see(
        &mut self,
        card: &Card,
        used: CardUse,
        pods: &NodePods,
        held: Option<&Held>,
        now: Now,
    ) {
        let (total, reserved) = self.size(card);
        let whole = held.and_then(|held| held.whole.as_ref());
        let past_mps = self.past_mps(card, &used, pods);
        let parent = card.place.parent.as_deref();
        let illness = self.health.of(&card.uuid, parent, now);
        let reason = illness
            .map(|illness| illness.reason.clone())
            .or_else(|| {
                let HeldBy { pod, through } = whole?;
                Some(format!("held by pod {pod} through {through}"))
            })
            .or_else(|| {
                let no_size = is_unified(card) && self.settings.unified_memory.is_none();
                no_size.then(|| "shares the host's memory: set --unified-memory-mib".to_owned())
            })
            .or_else(|| self.closed(card, &used, &past_mps, pods));
        let failed = illness.map(|illness| illness.since.to_string());
        let foreign = used.other_pods.saturating_add(used.host);
        // A process that starts or ends shows in one figure before the other.
        let before = self.known.get(&card.uuid);
        let lasting = before
            .map_or(0, |known| known.unmanaged_before)
            .min(used.unmanaged);
        let gpu = Gpu {
            uuid: card.uuid.clone(),
            index: card.index,
            model: shortened(&card.model, 128),
            total_mib: total.0,
            reserved_mib: reserved.0,
            healthy: reason.is_none(),
            reason: reason.map(|reason| shortened(&reason, 256)),
            pods: self.uses(card, &used, pods, now),
            unmanaged_mib: ceil(foreign.saturating_add(lasting)).0,
            other_pods_mib: ceil(used.other_pods).0,
            host_mib: ceil(used.host).0,
            utilization: card.utilization.map(|percent| percent.min(100)),
            failed,
            held_by: whole.map(|by| HeldBy {
                pod: shortened(&by.pod, 320),
                through: shortened(&by.through, 640),
            }),
            claims: held.map_or_else(Vec::new, |held| claims(held, total)),
            missing: false,
            memory_limit: Some(<&str>::from(self.limits.support(card)).to_owned()),
            mps: self.has_mps(card),
            mig: card.on_demand.clone().map(Box::new),
            place: Some(Box::new(card.place.clone())),
        };
        let tracked = Tracked {
            unmanaged_before: used.unmanaged,
            seen: Seen {
                gpu,
                used,
                used_bytes: card.memory.map_or(foreign, |memory| memory.used),
                past_mps,
            },
            when: now.age,
            there: true,
        };
        self.known.insert(card.uuid.clone(), tracked);
    }

    /// All memory of the card, and the driver's reserve in it. A card that failed keeps its last figures.
    fn size(&self, card: &Card) -> (Mib, Mib) {
        let before = self.known.get(&card.uuid);
        match (card.memory, before) {
            (Some(memory), _) => {
                let total = floor(memory.total);
                // The reserve rounds up, but never above the total.
                (total, ceil(memory.reserved).min(total))
            }
            (None, Some(known)) if !is_unified(card) => {
                let gpu = &known.seen.gpu;
                (Mib(gpu.total_mib), Mib(gpu.reserved_mib))
            }
            _ => (self.settings.unified_memory.unwrap_or_default(), Mib::ZERO),
        }
    }

    /// The memory that each pod uses of the card, now and in its history.
    fn uses(&mut self, card: &Card, used: &CardUse, pods: &NodePods, now: Now) -> Vec<PodUse> {
        let uids: BTreeSet<&Arc<str>> = used.pods.keys().map(|(uid, _)| uid).collect();
        let uses = uids.into_iter().take(1024).map(|uid| {
            let (mib, idle) = (ceil(used.pod(uid)), used.idle.contains(uid));
            let (high, since) = self.history.see(&card.uuid, uid, mib, idle, now);
            let pod = pods.get(uid);
            let starts = pod.filter(|pod| pod.facts.starting_since.is_some());
            let settled = starts.and_then(|pod| {
                let held = pod.assigned(&card.uuid);
                self.history.settles(&card.uuid, uid, (mib, held), now)
            });
            let each = used.containers(uid, pods).into_iter().take(64);
            let each =
                each.map(|(name, bytes)| self.history.peak(&card.uuid, uid, &name, ceil(bytes)));
            PodUse {
                containers: each.collect(),
                mps: used.mps.contains(uid),
                uid: uid.to_string(),
                used_mib: mib.0,
                high_mib: Some(high.0),
                idle_since: since.map(|since| since.to_string()),
                settled_at: settled.map(|at| at.to_string()),
            }
        });
        uses.collect()
    }
}

/// The GPU shares the host's memory, and has none of its own.
fn is_unified(card: &Card) -> bool {
    card.memory.is_none() && card.failure.is_none()
}

/// The claims on a card of this size, as the report shows them.
fn claims(held: &Held, total: Mib) -> Vec<ClaimUse> {
    let claims = held.claims.iter().map(|it| ClaimUse {
        claim: shortened(&it.claim, 320),
        pod: shortened(&it.pod, 320),
        held_mib: it.held_mib.min(total.0),
    });
    claims.collect()
}
