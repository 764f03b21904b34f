//! For which gangs others may be preempted, and whether a plan for one holds still.

use std::sync::Arc;

use gpustow_api::{Group, PodFacts, Regards};
use gpustow_books::{Budget, Earmark, Ended, Evidence, HashSet, Host, Uid};

use crate::gangs::Roll;
use crate::preempt::importance;
use crate::sight::Sight;

/// The choice for a gang: the pods that get room, and the victims.
struct Chosen<'a> {
    /// The gang's pods that are to get room.
    open: Vec<(&'a Arc<PodFacts>, &'a Earmark)>,
    /// Victims that are to finish or already terminate, the most important first.
    chosen: Vec<&'a Arc<PodFacts>>,
    /// The victims that do not terminate yet.
    gone: HashSet<Uid>,
}

impl Sight<'_> {
    /// Who of the gang is where, if others may finish for it: it waits as a whole, and nothing is done for it yet.
    pub(super) fn waiting_gang(&self, gang: &Group, budget: &mut Budget) -> Option<Roll> {
        // Victims for one part of a whole that may not fit would finish for nothing.
        if self.books.pod_group(gang)?.part_of.is_some() {
            return None;
        }
        budget.charge(1 + self.books.members(gang).count());
        let roll = self.roll(gang, None, None)?;
        let wanted = roll.wanted();
        let may = |pod: &Arc<PodFacts>| {
            pod.preempts
                && !pod.queued
                && !self.earmarks.is_nominated(pod)
                && !self.books.is_unfenced(&pod.uid)
                && !self.earmarks.pauses_evictions(pod, self.now)
                && !self.earmarks.has_more_than_reservation(&pod.uid)
                && self.has_waited(pod, self.config.preempt_after)
        };
        let waits = wanted > 0
            && wanted <= roll.open().len()
            && roll.open().iter().any(|pod| pod.waiting)
            && roll.open().iter().all(may)
            && self.books.assumed_of(gang).is_empty();
        waits.then_some(roll)
    }

    /// Is the node for this pod of the gang? If the gang does not fit, kube-scheduler asks about the first pod only.
    /// Its answer holds for pods with the same constraints. Other pods are for another kind of node, about which
    /// kube-scheduler asks later.
    pub(super) fn is_for_member(&self, gang: &Group, pod: &PodFacts, node: &str) -> Evidence {
        if self.books.excluded(node, &pod.constraints).is_some() {
            return Evidence::Rejected;
        }
        let tried = self.shown.tried(&pod.uid);
        if tried.is_some_and(|tried| tried.has(node)) {
            return Evidence::Rejected;
        }
        let alike = self.books.members(gang);
        let alike = alike.filter(|other| {
            other.uid == pod.uid || other.node.is_none() && other.constraints == pod.constraints
        });
        let mut found = Evidence::Unknown;
        let mut asked = false;
        for other in alike {
            asked |= self.shown.was_asked_about(&other.uid);
            match self.evidence(other, node) {
                Evidence::Offered | Evidence::Short => return Evidence::Offered,
                Evidence::Unknown => {}
                other if found != Evidence::Rejected => found = other,
                _ => {}
            }
        }
        // For another kind of node, the ledger knows all other obstacles for the pod.
        let is_other_kind = || {
            let mut all = self.books.members(gang);
            all.any(|it| self.shown.was_asked_about(&it.uid))
        };
        match !asked && pod.constraints.regards == Regards::NoPod && is_other_kind() {
            true => Evidence::Offered,
            false => found,
        }
    }

    /// Pods of the gang for which nothing is to be earmarked any more.
    pub(super) fn left_gang(&self, gang: &Group) -> Vec<(Uid, Ended)> {
        let all = self.earmarks.evictions_for(gang).into_iter();
        let left = all.filter(|(uid, earmark)| {
            let pod = self.books.pod(uid);
            !pod.is_some_and(|pod| {
                let request = pod.asks.request();
                request.is_some_and(|it| earmark.is_for(it)) && pod.may_be_placed()
            })
        });
        left.map(|(uid, _)| (uid.clone(), Ended::Gone)).collect()
    }

    /// The reason why the gang's earmarks end, if they do.
    pub(super) fn gang_ends(&self, gang: &Group, budget: &mut Budget) -> Option<Ended> {
        let all = self.earmarks.evictions_for(gang);
        let Some(roll) = self.roll(gang, None, None) else {
            return Some(Ended::Gone);
        };
        let open = all
            .iter()
            .filter(|(uid, _)| self.books.assumed(uid).is_none());
        if roll.wanted() > open.count() {
            return Some(Ended::Gone);
        }
        if all
            .iter()
            .any(|(_, earmark)| self.check(earmark.node()).is_err())
        {
            return Some(Ended::Unfit);
        }
        let chosen = self.chosen_for(gang, budget);
        chosen.is_none().then_some(Ended::Late)
    }

    /// A pod of the gang about which kube-scheduler must be asked again before any pod finishes, with the present
    /// evidence.
    pub(super) fn outdated_for(&self, gang: &Group) -> Option<(Uid, Evidence)> {
        let mut all = self.earmarks.evictions_for(gang).into_iter();
        all.find_map(|(uid, earmark)| {
            let pod = self.books.pod(uid).filter(|pod| pod.node.is_none())?;
            let evidence = self.is_for_member(gang, pod, earmark.node());
            let is_old = matches!(evidence, Evidence::Outdated | Evidence::Awaited);
            is_old.then(|| (uid.clone(), evidence))
        })
    }

    /// The pods of the gang that are to get room, and the remaining victims, the most important first. None if the gang
    /// does not get its room though all victims finish. None, too, if kube-scheduler refuses one of the nodes
    /// meanwhile.
    fn chosen_for(&self, gang: &Group, budget: &mut Budget) -> Option<Chosen<'_>> {
        let all = self.earmarks.evictions_for(gang);
        let open = all.iter().filter_map(|(uid, earmark)| {
            let pod = self.books.pod(uid)?;
            let is_open = pod.node.is_none() && self.books.assumed(uid).is_none();
            is_open.then_some((pod, *earmark))
        });
        let open: Vec<(&Arc<PodFacts>, &Earmark)> = open.collect();
        budget.charge(open.len());
        let refused = |(pod, earmark): &(&Arc<PodFacts>, &Earmark)| {
            self.is_for_member(gang, pod, earmark.node()) == Evidence::Rejected
        };
        if open.iter().any(refused) {
            return None;
        }
        let chosen = all.iter().flat_map(|(_, earmark)| earmark.waits_for());
        let chosen = chosen.filter_map(|uid| self.books.pod(uid));
        let mut chosen: Vec<&Arc<PodFacts>> = chosen.filter(|pod| pod.node.is_some()).collect();
        budget.charge(chosen.len());
        chosen.sort_unstable_by_key(|pod| importance(pod));
        let left = chosen.iter().filter(|pod| !pod.deleting);
        let gone = left.map(|pod| pod.uid.clone()).collect();
        let has_room = self.has_room_for(&open, &gone, budget);
        has_room.then_some(Chosen { open, chosen, gone })
    }

    /// The victims that the gang still needs for its room, as in `chosen_for`. All of them were needed when they were
    /// chosen. A victim counts as needed if the budget does not suffice for its check.
    pub(super) fn needed_by(
        &self,
        gang: &Group,
        budget: &mut Budget,
    ) -> Option<Vec<Arc<PodFacts>>> {
        let Chosen {
            open,
            chosen,
            mut gone,
        } = self.chosen_for(gang, budget)?;
        let begun: HashSet<&Group> = chosen
            .iter()
            .filter(|pod| pod.deleting && !self.books.is_disrupted_alone(pod))
            .filter_map(|pod| pod.group.as_ref())
            .collect();
        let left: Vec<&Arc<PodFacts>> = chosen.into_iter().filter(|pod| !pod.deleting).collect();
        let unit_of = |pod: &PodFacts| match self.books.is_disrupted_alone(pod) {
            true => None,
            false => pod.group.clone(),
        };
        let mut spared: HashSet<Uid> = HashSet::default();
        for pod in &left {
            let unit = unit_of(pod);
            let is_begun = unit.as_ref().is_some_and(|unit| begun.contains(unit));
            if budget.is_spent() {
                break;
            }
            if is_begun || spared.contains(&pod.uid) {
                continue;
            }
            let with = left
                .iter()
                .filter(|other| other.uid == pod.uid || unit.is_some() && unit_of(other) == unit);
            let with: Vec<&Arc<PodFacts>> = with.copied().collect();
            // On other nodes nothing changes.
            let is_near = |earmark: &Earmark| {
                let mut nodes = with.iter().filter_map(|pod| pod.node.as_ref());
                nodes.any(|node| node == earmark.node())
            };
            let near = open.iter().filter(|(_, earmark)| is_near(earmark));
            let near: Vec<_> = near.copied().collect();
            let with: Vec<Uid> = with.iter().map(|pod| pod.uid.clone()).collect();
            gone.retain(|uid| !with.contains(uid));
            match self.has_room_for(&near, &gone, budget) {
                true => spared.extend(with),
                false => gone.extend(with),
            }
        }
        let needed = left.into_iter().filter(|pod| gone.contains(&pod.uid));
        Some(needed.cloned().collect())
    }

    /// Do these pods of a gang get their GPUs once the `gone` pods and the leaving pods are gone?
    fn has_room_for(
        &self,
        open: &[(&Arc<PodFacts>, &Earmark)],
        gone: &HashSet<Uid>,
        budget: &mut Budget,
    ) -> bool {
        let Some((first, _)) = open.first() else {
            return true;
        };
        // The agent's next report is awaited.
        let mut trial = self.trial().without_ended(true).for_all_of(first);
        trial.leave(gone.iter().cloned());
        let nodes = open.iter().map(|(_, earmark)| earmark.node());
        trial.leave(nodes.flat_map(|name| self.leaving(name)));
        open.iter().all(|(pod, earmark)| {
            let name = earmark.node();
            let Some(node) = self.books.node(name) else {
                return false;
            };
            budget.charge_fits(1);
            let only = node.charges(earmark.cards()).into_iter();
            let only: Vec<usize> = only.map(|(card, _)| card).collect();
            let all = &mut Budget::all();
            let found = trial.fit(pod, name, Some(&only), Host::Whole, all);
            found.is_ok_and(|choice| {
                trial.take(pod, name, &choice.placement.charges);
                true
            })
        })
    }
}
