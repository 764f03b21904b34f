//! The simulated API server: the true state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::{Assignment, BrokenAssignment, Group, PodFacts, PodGroupFacts};

use crate::build::{able, card, report, used};

pub(super) const NODES: [&str; 3] = ["n0", "n1", "n2"];
/// Variants of reports from here on are those before, with MPS on the first card.
pub(super) const MPS: u64 = 8;
/// Variants from here on also have an agent that makes MIG instances on the first card.
pub(super) const MIG: u64 = 16;
/// Variants from here on also have an instance that others made before, once for each possible slice.
pub(super) const OTHERS: u64 = 32;

/// An event of the watch of pods.
#[derive(Clone)]
pub(super) enum PodEvent {
    Apply(Box<PodFacts>),
    Delete(Arc<str>),
}

/// An event of the watch of nodes: that a node is there, or its report.
#[derive(Clone)]
pub(super) enum NodeEvent {
    Node(&'static str, bool),
    Report(&'static str, Option<GpuNodeStatus>),
}

/// An event of the watch of PodGroups.
#[derive(Clone)]
pub(super) enum GroupEvent {
    Apply(PodGroupFacts),
    Delete(Group),
    /// A list.
    Reset(Vec<PodGroupFacts>),
}

/// A Binding on its way.
#[derive(Clone)]
pub(super) struct Post {
    /// The pod as it was sent.
    pub(super) pod: PodFacts,
    pub(super) node: Arc<str>,
    pub(super) assignment: Arc<Assignment>,
    /// Whether it took effect, once that is decided.
    pub(super) landed: Option<bool>,
    /// The API server would have none of it.
    pub(super) refused: bool,
    /// The caller still waits for it.
    pub(super) awaited: bool,
}

#[derive(Default)]
pub(super) struct Server {
    /// By UID, in the order of creation.
    pub(super) pods: Vec<PodFacts>,
    pub(super) nodes: BTreeMap<&'static str, bool>,
    pub(super) groups: BTreeMap<Group, PodGroupFacts>,
    pub(super) reports: BTreeMap<&'static str, GpuNodeStatus>,
    pub(super) posts: Vec<Post>,
    pub(super) pod_watch: VecDeque<PodEvent>,
    pub(super) node_watch: VecDeque<NodeEvent>,
    pub(super) group_watch: VecDeque<GroupEvent>,
    /// Bindings to these nodes are refused.
    pub(super) barred: BTreeSet<&'static str>,
    /// Disruption budgets protect these pods.
    pub(super) protected: BTreeSet<Arc<str>>,
    saved: (Vec<PodFacts>, BTreeMap<Group, PodGroupFacts>),
    version: u64,
}

impl Server {
    pub(super) fn create(&mut self, pod: PodFacts) {
        self.pods.push(pod);
        self.write(self.pods.len() - 1, |_| {});
    }

    pub(super) fn number(&self) -> u64 {
        self.version
    }

    /// Changes a pod in one write.
    pub(super) fn write(&mut self, index: usize, change: impl FnOnce(&mut PodFacts)) {
        let pod = &mut self.pods[index];
        change(pod);
        self.version += 1;
        pod.resource_version = self.version.to_string().into();
        self.pod_watch
            .push_back(PodEvent::Apply(Box::new(pod.clone())));
    }

    pub(super) fn remove(&mut self, index: usize) {
        let pod = self.pods.remove(index);
        self.pod_watch.push_back(PodEvent::Delete(pod.uid));
    }

    /// A budget protects a pod, or does so no more.
    pub(super) fn protect(&mut self, index: usize) {
        let uid = self.pods[index].uid.clone();
        if !self.protected.remove(&uid) {
            self.protected.insert(uid);
        }
    }

    /// An eviction of this copy of a pod: UID and resourceVersion are preconditions, budgets are obeyed.
    pub(super) fn evict(&mut self, copy: &PodFacts) -> bool {
        !self.protected.contains(&copy.uid) && self.delete(copy)
    }

    /// A deletion of this copy of a pod. False if the pod has changed or is gone.
    pub(super) fn delete(&mut self, copy: &PodFacts) -> bool {
        let index = self.find(&copy.uid);
        let same = |index: &usize| self.pods[*index].resource_version == copy.resource_version;
        let Some(index) = index.filter(same) else {
            return false;
        };
        self.write(index, |pod| pod.deleting = true);
        true
    }

    pub(super) fn save(&mut self) {
        self.saved = (self.pods.clone(), self.groups.clone());
    }

    pub(super) fn restore(&mut self) {
        (self.pods, self.groups) = self.saved.clone();
        self.pod_watch.clear();
        self.group_watch.clear();
        let groups = self.groups.values().cloned().collect();
        self.group_watch.push_back(GroupEvent::Reset(groups));
        for post in &mut self.posts {
            post.landed.get_or_insert(false);
        }
        // Kubelets end pods that are not theirs any more, and agents report that.
        for (name, mut report) in self.reports.clone() {
            let on_node = |uid: &str| {
                let is_it = |pod: &PodFacts| *pod.uid == *uid && pod.node.as_deref() == Some(name);
                self.pods.iter().any(is_it)
            };
            for gpu in &mut report.gpus {
                gpu.pods.retain(|used| on_node(&used.uid));
            }
            self.set_report(name, Some(report));
        }
    }

    /// Does it have the Node, whatever the watch has shown?
    pub(super) fn has_node(&self, name: &str) -> bool {
        self.nodes.get(name) == Some(&true)
    }

    pub(super) fn set_node(&mut self, name: &'static str, present: bool) {
        self.nodes.insert(name, present);
        self.node_watch.push_back(NodeEvent::Node(name, present));
    }

    /// A PodGroup is created, or deleted.
    pub(super) fn set_group(&mut self, group: Group, facts: Option<PodGroupFacts>) {
        self.version += 1;
        let event = match &facts {
            Some(facts) => GroupEvent::Apply(facts.clone()),
            None => GroupEvent::Delete(group.clone()),
        };
        self.group_watch.push_back(event);
        match facts {
            Some(facts) => self.groups.insert(group, facts),
            None => self.groups.remove(&group),
        };
    }

    pub(super) fn set_report(&mut self, name: &'static str, report: Option<GpuNodeStatus>) {
        match report.clone() {
            Some(report) => self.reports.insert(name, report),
            None => self.reports.remove(name),
        };
        self.node_watch.push_back(NodeEvent::Report(name, report));
    }

    pub(super) fn find(&self, uid: &str) -> Option<usize> {
        self.pods.iter().position(|pod| *pod.uid == *uid)
    }

    /// Could this Binding still take effect? UID and resourceVersion are preconditions.
    pub(super) fn may_land(&self, post: &Post) -> bool {
        let index = self.find(&post.pod.uid);
        post.landed.is_none()
            && index.is_some_and(|index| {
                let pod = &self.pods[index];
                pod.node.is_none()
                    && !pod.deleting
                    && pod.resource_version == post.pod.resource_version
            })
    }

    pub(super) fn land(&mut self, index: usize) {
        let post = self.posts[index].clone();
        if post.landed.is_some() {
            return;
        }
        self.posts[index].refused = self.may_land(&post) && self.barred.contains(&*post.node);
        let takes = self.may_land(&post) && !self.posts[index].refused;
        self.posts[index].landed = Some(takes);
        if let Some(pod) = self.find(&post.pod.uid).filter(|_| takes) {
            self.write(pod, |pod| {
                pod.node = Some(post.node);
                pod.assignment = Some(Ok(post.assignment));
                pod.nominated = None;
            });
        }
    }

    pub(super) fn bind_by_hand(&mut self, index: usize, node: &str, broken: bool) {
        self.write(index, |pod| {
            pod.node = Some(node.into());
            pod.assignment = broken.then(|| Err(BrokenAssignment("no GPUs".into())));
        });
    }

    /// The assignments that a node has or may yet get, apart from the assignment of `uid`.
    pub(super) fn assignments<'s>(
        &'s self,
        node: &'s str,
        uid: &'s str,
    ) -> impl Iterator<Item = &'s Arc<Assignment>> {
        let bound = self.pods.iter().filter(move |pod| {
            pod.node.as_deref() == Some(node) && !pod.released && *pod.uid != *uid
        });
        let bound = bound.filter_map(|pod| pod.assignment.as_ref()?.as_ref().ok());
        let mut flying: Vec<&Post> = self
            .posts
            .iter()
            .filter(|post| *post.node == *node && *post.pod.uid != *uid && self.may_land(post))
            .collect();
        flying.sort_by_key(|post| &post.pod.uid);
        flying.dedup_by_key(|post| &post.pod.uid);
        bound.chain(flying.into_iter().map(|post| &post.assignment))
    }

    /// The sums of these assignments on a card: MiB, and percent of its compute.
    pub(super) fn assigned(&self, node: &str, uuid: &str, uid: &str) -> (u64, u64) {
        let on_card = |assignment: &Assignment| {
            let charges = assignment.charges.iter();
            let charges = charges.filter(|(card, _)| **card == *uuid);
            let mib: u64 = charges.map(|(_, mib)| mib.0).sum();
            (
                mib,
                if mib > 0 {
                    assignment.compute.into()
                } else {
                    0
                },
            )
        };
        let all = self.assignments(node, uid).map(|it| on_card(it));
        all.fold((0, 0), |(mib, compute), card| {
            (mib + card.0, compute + card.1)
        })
    }

    /// The `variant`-th report that the agent of a node may write now.
    pub(super) fn variant(&self, name: &str, variant: u64) -> GpuNodeStatus {
        let [a, b, c] = ["a", "b", "c"].map(|card| format!("{name}-{card}"));
        let unhealthy = Gpu {
            healthy: false,
            ..card(&a, 10)
        };
        let strangers = Gpu {
            unmanaged_mib: 4,
            ..card(&a, 10)
        };
        let on_node = self
            .pods
            .iter()
            .filter(|pod| pod.node.as_deref() == Some(name));
        let greedy = Gpu {
            memory_limit: Some("Missing".into()),
            pods: on_node.map(|pod| used(&pod.uid, 6)).collect(),
            ..card(&a, 10)
        };
        let mut report = match variant % MPS {
            0 | 1 => report(&[card(&a, 10), able(card(&b, 10))]),
            2 => report(&[able(card(&a, 6)), card(&b, 10)]),
            3 => report(&[able(card(&b, 10))]),
            4 => report(&[able(card(&c, 16)), card(&b, 10)]),
            5 => report(&[unhealthy, card(&b, 10)]),
            6 => report(&[strangers, card(&b, 12)]),
            _ => report(&[greedy, card(&b, 10)]),
        };
        report.gpus[0].mps = variant & MPS != 0;
        if variant & MIG != 0 {
            let first = report.gpus[0].clone();
            report.gpus[0] = self.divided(name, first, (variant / OTHERS) as u8);
        }
        report
    }
}
