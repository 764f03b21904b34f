//! Gangs in the model: PodGroups come and go, and kube-scheduler asks about the pods of one in a cycle, as from 1.37 on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpustow_api::{Group, GroupPolicy, PodFacts, PodGroupFacts};
use gpustow_ledger::{Filtered, Reason, Reserved};

use super::event::Event;
use super::evidence::cpu;
use super::server::{GroupEvent, NODES};
use super::world::{World, require};

use crate::act::Act as _;

pub(super) const GROUPS: [&str; 2] = ["g0", "g1"];

pub(super) fn group(number: usize) -> Group {
    Group::in_tree("default", GROUPS[number % GROUPS.len()])
}

/// The PodGroups that the ledger has heard of.
pub(super) type Known = BTreeMap<Group, PodGroupFacts>;

impl World {
    /// A PodGroup is created, or deleted if it is there.
    pub(super) fn turn_group(&mut self, event: &Event) {
        let Event::Group {
            group: number,
            min_count,
            basic,
            single,
        } = *event
        else {
            return;
        };
        let group = group(number);
        if self.server.groups.contains_key(&group) {
            self.server.set_group(group, None);
            return;
        }
        let facts = PodGroupFacts {
            uid: format!("g{}", self.server.number()).into(),
            policy: match basic {
                true => GroupPolicy::Basic,
                false => GroupPolicy::Gang(min_count),
            },
            disrupted_singly: single,
            part_of: None,
            group: group.clone(),
        };
        self.server.set_group(group, Some(facts));
    }

    pub(super) fn deliver_groups(&mut self) {
        for event in std::mem::take(&mut self.server.group_watch) {
            match event {
                GroupEvent::Apply(facts) => {
                    self.known_groups.insert(facts.group.clone(), facts.clone());
                    self.ledger.apply_pod_group(facts);
                }
                GroupEvent::Delete(group) => {
                    self.known_groups.remove(&group);
                    self.ledger.delete_pod_group(&group);
                }
                GroupEvent::Reset(all) => {
                    let known = all.iter().map(|it| (it.group.clone(), it.clone()));
                    self.known_groups = known.collect();
                    self.ledger.reset_pod_groups(all);
                }
            }
        }
    }

    /// Has the ledger heard of all that happened to pods and PodGroups?
    fn is_told(&self) -> bool {
        let pods = self.server.pod_watch.is_empty() && self.listing.is_none();
        pods && self.server.group_watch.is_empty()
    }

    /// The pods of the group that kube-scheduler counts. Also the number of them with a node or a Binding on its way,
    /// and the number that must have one.
    fn muster(&self, group: &Group) -> Option<(Vec<&PodFacts>, usize, usize)> {
        let facts = self.server.groups.get(group)?;
        let there = self.server.pods.iter();
        let there = there.filter(|pod| pod.group.as_ref() == Some(group) && !pod.released);
        let there: Vec<&PodFacts> = there.collect();
        let placed = there.iter().filter(|pod| self.is_on_its_way(pod)).count();
        let wanted = match facts.policy {
            GroupPolicy::Gang(min_count) => min_count,
            _ => 0,
        };
        Some((there, placed, wanted))
    }

    fn is_on_its_way(&self, pod: &PodFacts) -> bool {
        let mut posts = self.server.posts.iter();
        pod.node.is_some() || posts.any(|post| post.awaited && post.pod.uid == pod.uid)
    }

    /// May kube-scheduler ask about the pod?
    fn is_open(&self, pod: &PodFacts) -> bool {
        !pod.gated && !pod.queued && !pod.deleting && !self.is_on_its_way(pod)
    }

    /// Does kube-scheduler try the pod without waiting for others of its group?
    pub(super) fn is_single(&self, pod: &PodFacts) -> bool {
        pod.group.as_ref().is_none_or(|group| {
            let muster = self.muster(group);
            muster.is_some_and(|(_, placed, wanted)| placed >= wanted)
        })
    }

    /// kube-scheduler asks about the pods of a group in one cycle. If too few fit, it reverts that in its own memory alone.
    pub(super) fn cycle(&mut self, group: &Group, binds: bool) -> Result<(), String> {
        let Some((there, placed, wanted)) = self.muster(group) else {
            return Ok(());
        };
        // It waits for enough to be created.
        if there.len() < wanted {
            return Ok(());
        }
        // The queue keeps room for pods that it is about to ungate, and the gang is not refused then.
        let ungates = there.iter().any(|pod| pod.queued);
        let open = there.iter().filter(|pod| self.is_open(pod));
        let mut open: Vec<PodFacts> = open.map(|pod| PodFacts::clone(pod)).collect();
        open.sort_by_key(|pod| (-pod.priority, pod.created, pod.uid.clone()));
        for pod in &open {
            self.chosen.remove(&pod.uid);
        }
        // An extender is not called for a pod that no node passes: it cannot distinguish it from a pod that is still to
        // come.
        let (mut fit, mut refused, mut all_asked) = (Vec::new(), false, true);
        for (index, pod) in open.iter().enumerate() {
            let nodes = self.candidates(pod, &NODES);
            if nodes.is_empty() {
                all_asked = false;
            } else {
                self.filter_among(pod, &nodes, false)?;
                refused = !self.chosen.contains_key(&pod.uid);
            }
            if self.chosen.contains_key(&pod.uid) {
                fit.push(pod.uid.clone());
            }
            if placed + fit.len() + open.len() - index - 1 < wanted {
                break;
            }
        }
        if placed + fit.len() < wanted {
            for pod in &open {
                self.chosen.remove(&pod.uid);
            }
            return match refused && all_asked && !ungates && self.is_told() {
                true => self.check_released(&open),
                false => Ok(()),
            };
        }
        if binds {
            for uid in fit {
                self.bind_chosen(&uid)?;
            }
        }
        Ok(())
    }

    /// Filter and bind on the same view.
    fn bind_chosen(&mut self, uid: &Arc<str>) -> Result<(), String> {
        let Some(index) = self.server.find(uid) else {
            return Ok(());
        };
        let pod = &self.server.pods[index];
        let same = |known: Arc<PodFacts>| known.asks == pod.asks && known.group == pod.group;
        let settled =
            self.is_told() && !self.ledger.is_binding(uid) && self.ledger.pod(uid).is_none_or(same);
        if let Some(name) = self.chosen.get(uid).copied() {
            let refused = self.begin_bind(uid, name)?;
            require(refused.is_none() || !settled, || {
                format!("filter chose {name} for {uid} of a gang, bind says {refused:?}")
            })?;
        }
        Ok(())
    }

    /// The extender refused a pod without which the gang is too small: nothing is held for any of it.
    fn check_released(&self, open: &[PodFacts]) -> Result<(), String> {
        let shares = self.shares();
        for pod in open {
            let holds = shares.iter().any(|(uid, ..)| *uid == pod.uid);
            require(!holds || self.ledger.is_binding(&pod.uid), || {
                format!("{} holds memory after its gang was refused", pod.uid)
            })?;
        }
        Ok(())
    }

    /// A refusal in the name of the group is for a pod of a gang: too few of its pods fit, or the fitting pods need the
    /// room.
    pub(super) fn check_shortfall(
        &self,
        pod: &PodFacts,
        verdict: &Filtered<'_>,
    ) -> Result<(), String> {
        let by_gang = verdict.refused.iter().any(|(_, it)| *it == Reason::Gang);
        let known = pod.group.as_ref().and_then(|it| self.known_groups.get(it));
        let is_gang = known.is_some_and(|it| matches!(it.policy, GroupPolicy::Gang(_)));
        let short = verdict.shortfall.as_ref();
        let holds = by_gang == short.is_some() && (!by_gang || is_gang && verdict.nodes.is_empty());
        require(holds, || format!("{} of {known:?}: {verdict:?}", pod.uid))
    }

    /// May the pod be disrupted without the rest of its group, as far as the ledger has heard?
    pub(super) fn is_disrupted_alone(&self, pod: &PodFacts) -> bool {
        pod.group.as_ref().is_none_or(|group| {
            let facts = self.known_groups.get(group);
            facts.is_some_and(|facts| facts.disrupted_singly)
        })
    }

    /// Pods that are disrupted together are victims together, and of a gang alone.
    pub(super) fn check_units(&self, all: &[Reserved]) -> Result<(), String> {
        for it in all {
            for victim in &it.victims {
                if self.is_disrupted_alone(victim) {
                    continue;
                }
                require(it.gang.is_some(), || {
                    format!("{} is disrupted without its group: {it:?}", victim.uid)
                })?;
                let same = all.iter().filter(|other| other.gang == it.gang);
                let victims: BTreeSet<_> = same
                    .flat_map(|other| &other.victims)
                    .map(|pod| pod.uid.clone())
                    .collect();
                let mut others = self
                    .ledger
                    .pods()
                    .filter(|pod| pod.group == victim.group && pod.node.is_some() && !pod.released);
                let spared = others.find(|pod| !pod.deleting && !victims.contains(&pod.uid));
                require(spared.is_none(), || {
                    format!("{spared:?} is spared of a group that is disrupted: {all:?}")
                })?;
            }
        }
        Ok(())
    }

    /// All that must finish for a gang is deleted, or nothing if a disruption budget protects one.
    pub(super) fn displace_for(&mut self, gang: &Group) {
        let all = self.ledger.preemptions_of(gang, self.now).into_iter();
        let victims: Vec<Arc<PodFacts>> = all.flat_map(|it| it.victims).collect();
        let protected = |pod: &Arc<PodFacts>| self.server.protected.contains(&pod.uid);
        if victims.iter().any(protected) {
            self.ledger.spare_for_gang(gang);
            return;
        }
        for victim in &victims {
            self.server.delete(victim);
        }
    }

    /// Do enough of the gang fit at the same time? Every way is tried. None if memory is kept for some pod.
    fn gang_fits(&self, group: &Group) -> Option<bool> {
        let quiet = self.ledger.reservations().is_empty()
            && self.ledger.preemptions(self.now).is_empty()
            && self.ledger.reclaims(self.now).is_empty();
        let (there, placed, wanted) = self.muster(group)?;
        let open = there.iter().filter(|pod| self.is_open(pod));
        let open: Vec<&PodFacts> = open.copied().collect();
        quiet.then_some(())?;
        let mut nodes = BTreeMap::new();
        for view in self.ledger.snapshot(self.now) {
            let name = NODES.iter().find(|name| ***name == *view.name)?;
            let cards = view.cards.iter();
            let free = cards.map(|card| if card.healthy { card.free.0 } else { 0 });
            let stays = self.server.pods.iter();
            let stays = stays.filter(|pod| pod.node.as_deref() == Some(*name) && !pod.released);
            let used: u64 = stays.map(cpu).sum();
            let left = self.cpu().saturating_sub(used);
            nodes.insert(*name, (free.collect::<Vec<u64>>(), left));
        }
        Some(placed + self.most(&mut nodes, &open) >= wanted)
    }

    fn most(
        &self,
        nodes: &mut BTreeMap<&'static str, (Vec<u64>, u64)>,
        open: &[&PodFacts],
    ) -> usize {
        let Some((pod, rest)) = open.split_first() else {
            return 0;
        };
        let mut best = self.most(nodes, rest);
        let claims = pod.asks.claims().iter();
        let [claim] = claims.collect::<Vec<_>>()[..] else {
            return best;
        };
        for name in NODES {
            let barred = self.server.barred.contains(name);
            if barred || !self.admits(pod, name) || !self.fits_on(&self.ledger, pod, name) {
                continue;
            }
            let Some((free, left)) = nodes.get(name).cloned() else {
                continue;
            };
            for set in 0..1_u32 << free.len() {
                let cards: Vec<usize> = (0..free.len()).filter(|it| set >> it & 1 == 1).collect();
                let fits = cards.iter().all(|card| free[*card] >= claim.mib.0);
                if set.count_ones() != claim.gpus || !fits || left < cpu(pod) {
                    continue;
                }
                let mut less = free.clone();
                cards.iter().for_each(|card| less[*card] -= claim.mib.0);
                nodes.insert(name, (less, left - cpu(pod)));
                best = best.max(1 + self.most(nodes, rest));
                nodes.insert(name, (free.clone(), left));
            }
        }
        best
    }

    /// Once faults have ceased, a gang that fits is bound.
    pub(super) fn check_gangs_placed(&self) -> Result<(), String> {
        for number in 0..GROUPS.len() {
            let group = group(number);
            let Some((there, placed, wanted)) = self.muster(&group) else {
                continue;
            };
            // kube-scheduler shows a hundred nodes at least, and here fewer than the gang needs.
            if placed >= wanted || there.len() < wanted || self.switches.window.is_some() {
                continue;
            }
            require(self.gang_fits(&group) != Some(true), || {
                let views = self.ledger.snapshot(self.now);
                format!("{group} fits and is not bound: {there:?} {views:?}")
            })?;
        }
        Ok(())
    }
}
