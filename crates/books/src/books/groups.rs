//! Groups of pods that are scheduled together: their PodGroups and their members.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::{Group, GroupPolicy, PodFacts, PodGroupFacts};

use super::{Books, Change, Uid};
use crate::maps::{HashMap, HashSet};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Groups {
    described: HashMap<Group, Arc<PodGroupFacts>>,
    members: HashMap<Group, BTreeSet<Uid>>,
    /// How many of them are bound.
    bound: HashMap<Group, usize>,
}

impl Groups {
    /// A pod has come, changed or gone.
    pub(super) fn follow(&mut self, uid: &Uid, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let bound = |pod: &&PodFacts| pod.node.is_some() && !pod.released;
        let bound = |pod: Option<&PodFacts>| pod.filter(bound)?.group.clone();
        let (before, after) = (bound(old), bound(new));
        if before != after {
            if let Some(group) = after {
                *self.bound.entry(group).or_default() += 1;
            }
            if let Some(group) = before
                && let Some(count) = self.bound.get_mut(&group)
            {
                *count -= 1;
                if *count == 0 {
                    self.bound.swap_remove(&group);
                }
            }
        }
        let group = |pod: Option<&PodFacts>| pod.and_then(|pod| pod.group.clone());
        let (old, new) = (group(old), group(new));
        if old == new {
            return;
        }
        if let Some(old) = old
            && let Some(members) = self.members.get_mut(&old)
        {
            members.remove(uid);
            if members.is_empty() {
                self.members.swap_remove(&old);
            }
        }
        if let Some(new) = new {
            self.members.entry(new).or_default().insert(uid.clone());
        }
    }
}

impl Books {
    /// A PodGroup as a watch shows it.
    pub fn apply_pod_group(&mut self, facts: PodGroupFacts) -> Change {
        let group = facts.group.clone();
        let uid = facts.uid.clone();
        let old = self.groups.described.insert(group.clone(), facts.into());
        match old {
            // Another group of the same name: nothing is held for the earlier one.
            Some(old) if old.uid != uid => self.release_group(&group),
            _ => Change::default(),
        }
    }

    /// A PodGroup is gone.
    pub fn delete_pod_group(&mut self, group: &Group) -> Change {
        match self.groups.described.swap_remove(group) {
            Some(_) => self.release_group(group),
            None => Change::default(),
        }
    }

    /// The PodGroups that a list lacks.
    pub fn pod_groups_beside(&self, listed: &HashSet<Group>) -> Vec<Group> {
        let known = self.groups.described.keys();
        known
            .filter(|group| !listed.contains(*group))
            .cloned()
            .collect()
    }

    /// The PodGroup of this group, if there is one.
    pub fn pod_group(&self, group: &Group) -> Option<&Arc<PodGroupFacts>> {
        self.groups.described.get(group)
    }

    /// How many groups PodGroups describe.
    pub fn count_groups(&self) -> usize {
        self.groups.described.len()
    }

    /// Groups that PodGroups describe, from the `from`th on.
    pub fn gangs_from(&self, from: usize) -> impl Iterator<Item = &Group> {
        let described = self.groups.described.iter().skip(from);
        let gangs = described.filter(|(_, it)| matches!(it.policy, GroupPolicy::Gang(_)));
        gangs.map(|(group, _)| group)
    }

    /// The group with which the pod is scheduled or not at all.
    pub fn gang<'p>(&self, pod: &'p PodFacts) -> Option<&'p Group> {
        let group = pod.group.as_ref()?;
        let policy = self.pod_group(group).map(|facts| facts.policy);
        (policy != Some(GroupPolicy::Basic)).then_some(group)
    }

    /// Is the pod of a PodGroup and placed without the others? The policy is `basic`, or enough of the gang are bound.
    pub fn comes_alone(&self, pod: &PodFacts) -> bool {
        let group = pod.group.as_ref().filter(|group| group.is_in_tree());
        let described = group.and_then(|group| Some((group, self.pod_group(group)?)));
        described.is_some_and(|(group, facts)| match facts.policy {
            GroupPolicy::Basic => true,
            GroupPolicy::Gang(min_count) => {
                self.groups.bound.get(group).copied().unwrap_or_default() >= min_count
            }
            GroupPolicy::Unknown => false,
        })
    }

    /// May the pod be disrupted without the rest of its group? A label that one pod alone has makes no group.
    pub fn is_disrupted_alone(&self, pod: &PodFacts) -> bool {
        pod.group.as_ref().is_none_or(|group| {
            let facts = self.pod_group(group);
            let is_lone = || !group.is_in_tree() && self.members(group).nth(1).is_none();
            facts.map_or_else(is_lone, |facts| facts.disrupted_singly)
        })
    }

    /// The pods of its group that go with the pod if it is disrupted, and itself. None if that is not known, or if one of them
    /// is on its way to a node.
    pub fn disrupted_with(&self, pod: &Arc<PodFacts>) -> Option<Vec<Arc<PodFacts>>> {
        let Some(group) = pod.group.as_ref().filter(|_| !self.is_disrupted_alone(pod)) else {
            return Some(vec![pod.clone()]);
        };
        self.pod_group(group)?;
        let is_settled = self.assumed_of(group).is_empty();
        let all = self.members(group).filter(|pod| pod.node.is_some());
        is_settled.then(|| all.cloned().collect())
    }

    /// The pods of a group that have not ended, also pods without a request for GPU memory.
    pub fn members(&self, group: &Group) -> impl Iterator<Item = &Arc<PodFacts>> {
        let members = self.groups.members.get(group).into_iter().flatten();
        members
            .filter_map(|uid| self.pod(uid))
            .filter(|pod| !pod.released)
    }
}
