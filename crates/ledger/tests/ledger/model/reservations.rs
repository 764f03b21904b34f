//! Places in the model: for which pods they are kept, and when they end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ledger, Reason, Reserved};
use gpustow_pack::Mib;

use super::bystanders::Feature;
use super::switches::{Bystander, Switches};
use super::world::{World, require};

use crate::act::Act as _;

/// As long as a place is waited for if no pod ends.
pub(super) fn kept_for(switches: Switches) -> Duration {
    Duration::from_secs(if switches.reserve_long { 600 } else { 20 })
}

/// For how long a place may be kept of which nothing is missing.
const FREE_FOR: Duration = Duration::from_secs(65);

/// The pod that a place is kept for, and the node.
type Key = (Arc<str>, Arc<str>);

fn key(place: &Reserved) -> Key {
    (place.pod.uid.clone(), place.node.clone())
}

/// Is nothing missing of the place? Of a pod that may share its GPUs with none of a group, no pod of it may be there.
fn is_free(ledger: &Ledger, place: &Reserved, now: Duration) -> bool {
    let node = ledger.node_view(&place.node, now);
    let cards: Vec<_> = node.into_iter().flat_map(|node| node.cards).collect();
    let request = place.pod.asks.request();
    let rules = request.and_then(|request| request.rules.as_ref());
    let apart = rules.is_some_and(|rules| rules.anti_affinity.is_some());
    let free = place.cards.iter().all(|(uuid, mib)| {
        let card = cards.iter().find(|card| *card.uuid == **uuid);
        card.is_some_and(|card| card.free >= *mib && (!apart || card.held == Mib::ZERO))
    });
    free && ledger.refused_in_tree(&place.node, &place.pod).is_none()
}

impl World {
    /// Does the extender's work of every second. All pods have waited long enough. A pod that gets a place could have
    /// it if the node were empty.
    pub(super) fn keep_reservations(&mut self) -> Result<(), String> {
        self.wake(10)?;
        let before: BTreeSet<_> = self.ledger.reservations().iter().map(key).collect();
        self.ledger.keep_reservations(self.now);
        let cards: usize = self.known.values().map(|report| report.gpus.len()).sum();
        let most = cards * self.config.reserve_max_percent / 100;
        let places = self.ledger.reservations();
        let kept: usize = places.iter().map(|place| asked(&place.pod)).sum();
        // A gang is one that has all it needs.
        let gangs: BTreeSet<_> = places.iter().map(|place| &place.pod.group).collect();
        let first = match gangs.len() {
            1 => places[0].pod.group.is_some() || places.len() == 1,
            count => count == 0,
        };
        require(first || kept <= most, || {
            format!("of {cards} cards {kept} are kept: {places:?}")
        })?;
        for place in places.iter().filter(|place| !before.contains(&key(place))) {
            require(self.is_fresh(&place.node), || {
                format!("by a stale report: {place:?}")
            })?;
            let report = self.known.get(&*place.node);
            for (uuid, mib) in &place.cards {
                let mut gpus = report.iter().flat_map(|report| &report.gpus);
                let gpu = gpus.find(|gpu| *gpu.uuid == **uuid);
                let holds = gpu.is_some_and(|gpu| gpu.healthy && gpu.total_mib >= mib.0);
                require(holds, || format!("{uuid} could never hold it: {place:?}"))?;
            }
        }
        self.check_reservations()
    }

    /// All that holds a reserved card is gone, and the pod does not come, for something else rejects it: no card is
    /// reserved for much longer.
    pub(super) fn check_free_reservations(&self) -> Result<(), String> {
        if !self.switches.reserve_long {
            return Ok(());
        }
        let pods = self.cast(Bystander::Hopeless, false);
        let mut ledger = self.only(Feature::Reserve, &pods);
        self.ask_all(&mut ledger, &pods, self.now);
        ledger.keep_reservations(self.now);
        let places = ledger.reservations();
        let there = |pod: &&PodFacts| {
            let mut nodes = places.iter().map(|place| Some(&*place.node));
            pod.node.is_some() && nodes.any(|node| node == pod.node.as_deref())
        };
        for pod in pods.iter().filter(there) {
            ledger.delete_pod(&pod.uid);
        }
        let mut free_since = BTreeMap::new();
        for second in 0..2 * FREE_FOR.as_secs() {
            let now = self.now + Duration::from_secs(second);
            if second % 60 == 59 {
                self.report_to(&mut ledger, now);
            }
            ledger.wake(10, now);
            ledger.keep_reservations(now);
            let places = ledger.reservations();
            let free = places.iter().filter(|place| is_free(&ledger, place, now));
            let free: BTreeSet<_> = free.map(key).collect();
            free_since.retain(|key, _| free.contains(key));
            for key in free {
                let since = *free_since.entry(key.clone()).or_insert(now);
                require(now <= since + FREE_FOR, || {
                    format!("all of it is free since {since:?}: {key:?} of {places:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Reservations stay within the bound, each card has one, and each is for a pod that still waits without room.
    pub(super) fn check_reservations(&self) -> Result<(), String> {
        let places = self.ledger.reservations();
        require(places.len() <= self.config.reserve_max, || {
            format!("too many: {places:?}")
        })?;
        let mut cards = BTreeMap::new();
        let shares = if places.is_empty() {
            Vec::new()
        } else {
            self.shares()
        };
        for place in &places {
            let known = self.ledger.pod(&place.pod.uid);
            let waits = known.is_some_and(|pod| pod.node.is_none() && !pod.released);
            let has = shares.iter().any(|(uid, ..)| *uid == place.pod.uid);
            require(waits && !has, || format!("for no pod: {place:?}"))?;
            require(
                place.until <= self.now + self.config.reserve_give_up_after,
                || format!("without end: {place:?}"),
            )?;
            for (uuid, _) in &place.cards {
                let key = (place.node.clone(), uuid.clone());
                let other = cards.insert(key, &place.pod.group);
                let together = place.pod.group.is_some() && other == Some(&place.pod.group);
                require(other.is_none() || together, || {
                    format!("{uuid} is kept for two pods: {places:?}")
                })?;
            }
        }
        Ok(())
    }

    /// A pod is kept away by those alone whose priority is as high.
    pub(super) fn check_kept(
        &self,
        pod: &PodFacts,
        refused: &[(&str, Reason)],
    ) -> Result<(), String> {
        let kept = refused.iter().filter(|(_, why)| *why == Reason::Reserved);
        for (name, _) in kept {
            let places = self.ledger.reservations();
            let others = places.iter().filter(|place| *place.node == **name);
            let mut others = others.map(|place| &place.pod);
            require(
                others.any(|other| other.uid != pod.uid && other.priority >= pod.priority),
                || format!("no place keeps {} away from {name}", pod.uid),
            )?;
        }
        Ok(())
    }

    /// With time alone.
    pub(super) fn check_places_end(&mut self) -> Result<(), String> {
        if self.config.reserve_after.is_none() {
            return Ok(());
        }
        self.now += self.config.reserve_give_up_after;
        self.ledger.expire(self.now);
        let left = self.ledger.reservations();
        require(left.is_empty(), || format!("does not end: {left:?}"))
    }
}

/// How many cards the pod asks for.
fn asked(pod: &PodFacts) -> usize {
    let claims = pod.asks.claims().iter();
    claims.map(|claim| claim.gpus as usize).sum()
}
