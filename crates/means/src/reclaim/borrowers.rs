//! Which borrowers give memory back, and who was asked without result.
//!
//! An owner may soften the action on a pod, a disruption budget may forbid it, and a program may ignore it. Such a pod
//! must not shield the others that borrow there. Once the time of a demand is over, others are asked before it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::config::Action;
use gpustow_api::gpunode::PodUse;
use gpustow_books::{Cause, HashMap, Node, Uid};
use gpustow_pack::Mib;

use crate::parts::Parts;
use crate::sight::Sight;

/// The longest that the victims' own time to end puts a deadline off.
const LONGEST_GRACE: Duration = Duration::from_secs(600);

impl Parts {
    /// Notes the pods whose memory did not come in time. This runs before their reclaim ends.
    pub fn note_late_borrowers(&mut self) {
        let mut refused: Vec<Uid> = Vec::new();
        for uid in self.earmarks.all_of(Cause::Reclaim) {
            let earmark = self.earmarks.earmark(&uid);
            if earmark.is_some_and(|it| it.until() <= self.now) {
                let victims = self.sight().reclamation(&uid).into_iter();
                let victims = victims.flat_map(|called| called.victims);
                refused.extend(victims.map(|pod| pod.uid.clone()));
            }
        }
        self.asked.note(refused, self.now);
    }

    /// Notes who has been asked for longer than anything is waited for.
    pub(super) fn note_refusals(&mut self) {
        let mut refused: Vec<Uid> = Vec::new();
        let mut since = HashMap::default();
        for pod in self.books.marked() {
            self.count(1);
            let (uid, node) = (&pod.uid, pod.node.as_ref());
            // A pod that terminates is on its way.
            let node = node.filter(|_| pod.asked_back.is_some() && !pod.deleting);
            let node = node.and_then(|name| self.books.node(name));
            if node.is_some_and(Node::lends) {
                let first = self.asked.since(uid).unwrap_or(self.now);
                let grace = self.sight().grace(std::slice::from_ref(uid));
                if self.now >= first + self.config.reclaim_for + grace {
                    refused.push(uid.clone());
                }
                since.insert(uid.clone(), first);
            }
        }
        self.asked.go_on(since, self.now);
        self.asked.note(refused, self.now);
    }
}

impl Sight<'_> {
    /// The action that may make this pod give memory back. For a pod whose group is disrupted as a whole, it is at most
    /// an Event. Its owner chose the group, so the group softens the action, too, and only where owners may.
    pub fn action_on(&self, pod: &PodFacts) -> Action {
        let action = self.config.action;
        if !self.config.owners_soften {
            return action;
        }
        let action = pod.action.map_or(action, |own| own.min(action));
        match self.books.is_disrupted_alone(pod) {
            true => action,
            false => action.min(Action::Event),
        }
    }

    /// The pods that are to give back the missing memory: no more pods than needed, in a fixed order. Pods that were
    /// asked or already end come first, then low priority, then pods whose owners do not soften the action. The pod
    /// that borrows most follows, then the pod that has been idle longest. Pods that were asked without result come
    /// last. None if all of them together borrow too little. A pod that should be gone by now gives nothing back.
    pub(crate) fn choose_borrowers(
        &self,
        node: &Node,
        missing: &[(usize, Mib)],
        asked: &[Uid],
        only_asked: bool,
    ) -> Option<Vec<Uid>> {
        let mut lent: BTreeMap<&Uid, Vec<Mib>> = BTreeMap::new();
        for (at, (card, mib)) in missing.iter().enumerate() {
            let gpu = node.gpus().get(*card).filter(|_| *mib > Mib::ZERO);
            let borrowers = gpu.into_iter().flat_map(|gpu| node.borrowers(gpu));
            for (uid, held, used) in borrowers {
                let of_each = lent
                    .entry(uid)
                    .or_insert_with(|| vec![Mib::ZERO; missing.len()]);
                of_each[at] = used.minus(held);
            }
        }
        // It is busy if it is on one of the cards.
        let idle = |uid: &str| {
            let cards = missing
                .iter()
                .filter_map(|(card, _)| node.gpus().get(*card));
            let used = cards.flat_map(|gpu| gpu.pods.iter().filter(|used| used.uid == uid));
            used.map(PodUse::idle)
                .reduce(|one, other| one.zip(other).map(|(one, other)| one.max(other)))
                .flatten()
                .unwrap_or(i64::MAX)
        };
        let was_asked = |uid: &Uid, pod: &PodFacts| {
            pod.deleting || pod.asked_back.is_some() || asked.contains(uid)
        };
        let is_soft = |pod: &PodFacts| self.action_on(pod) < self.config.action;
        let ordered = lent.into_iter().filter_map(|(uid, of_each)| {
            let pod = self.books.pod(uid)?;
            let counts = (!only_asked || asked.contains(uid)) && !self.is_late(pod);
            let sum: Mib = of_each.iter().copied().sum();
            let key = (
                self.asked.refused(uid) && !pod.deleting,
                !was_asked(uid, pod),
                pod.priority,
                is_soft(pod),
                Reverse(sum),
                idle(uid),
                uid,
            );
            counts.then_some((key, of_each))
        });
        let mut ordered: Vec<_> = ordered.collect();
        ordered.sort_unstable_by_key(|(key, _)| *key);
        let suffices = |chosen: &[&Vec<Mib>]| {
            missing.iter().enumerate().all(|(at, (_, mib))| {
                let back: Mib = chosen.iter().filter_map(|it| it.get(at)).copied().sum();
                back >= *mib
            })
        };
        let all: Vec<&Vec<Mib>> = ordered.iter().map(|(_, of_each)| of_each).collect();
        // The fewest first pods that suffice, without each pod that is not needed, the most precious first.
        let count = (0..=all.len()).find(|&count| suffices(&all[..count]))?;
        let mut chosen: Vec<usize> = (0..count).collect();
        for index in (0..count).rev() {
            let rest = chosen.iter().filter(|other| **other != index);
            if suffices(&rest.map(|other| all[*other]).collect::<Vec<_>>()) {
                chosen.retain(|other| *other != index);
            }
        }
        let uid = |index: usize| Some(ordered.get(index)?.0.6.clone());
        chosen.into_iter().map(uid).collect()
    }

    /// The longest that one of these pods may take to end.
    pub(crate) fn grace(&self, victims: &[Uid]) -> Duration {
        let pods = victims.iter().filter_map(|uid| self.books.pod(uid));
        let longest = pods.map(|pod| pod.grace).max().unwrap_or_default();
        Duration::from_secs(longest.into()).min(LONGEST_GRACE)
    }
}

/// The held and used memory of a card beyond the memory that pods may hold there: borrowers may use the headroom.
pub(crate) fn beyond_capacity(node: &Node, card: usize) -> Mib {
    let Some((gpu, status)) = node.gpus().get(card).zip(node.status()) else {
        return Mib::ZERO;
    };
    let held = |uid: &str| {
        let hold = node.bound().get(uid);
        hold.map_or(Mib::ZERO, |hold| hold.on(&gpu.uuid))
    };
    let used = gpu.pods.iter();
    let excess = used.map(|used| Mib(used.used_mib).minus(held(&used.uid)));
    let taken = node.held(&gpu.uuid, |_| true) + Mib(gpu.unmanaged_mib) + excess.sum();
    taken.minus(gpu.capacity(Mib(status.headroom_mib)))
}
