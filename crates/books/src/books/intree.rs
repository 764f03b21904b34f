//! The verdicts of kube-scheduler's own filters on a node, as far as they can be known.

use std::sync::Arc;

use gpustow_api::intree::{self, Constraints};
use gpustow_api::{NodeFacts, PodFacts};

use super::Books;

impl Books {
    /// Why a pod with these constraints may not go to the node, whatever is free there.
    pub fn excluded(&self, node: &str, constraints: &Constraints) -> Option<&'static str> {
        intree::refuses(self.node(node)?.facts()?, constraints)
    }

    /// May a pod with these constraints go to the node? Not if there is no Node of the name: its report may be left over.
    pub fn is_open(&self, node: &str, constraints: &Constraints) -> bool {
        let facts = self.node(node).and_then(|node| node.facts());
        facts.is_some_and(|facts| intree::refuses(facts, constraints).is_none())
    }

    /// Why kube-scheduler's own filters refuse the node for the pod, which must not be in the node's books.
    pub fn refused_in_tree(&self, node: &str, pod: &PodFacts) -> Option<&'static str> {
        self.refused_by(node, pod, intree::refuses)
    }

    /// As [`Books::refused_in_tree`], once the agent has removed the node's startup taint.
    pub fn refused_once_started(&self, node: &str, pod: &PodFacts) -> Option<&'static str> {
        self.refused_by(node, pod, intree::refuses_once_started)
    }

    fn refused_by(
        &self,
        node: &str,
        pod: &PodFacts,
        refuses: fn(&NodeFacts, &Constraints) -> Option<&'static str>,
    ) -> Option<&'static str> {
        let node = self.node(node)?;
        let facts = node.facts()?;
        let request = pod.asks.readable().ok()?;
        let excluded = refuses(facts, &pod.constraints);
        if excluded.is_some() {
            excluded
        } else if request.cpu_milli > node.view().cpu_free_milli {
            Some("not enough CPU")
        } else if request.ram > node.view().ram_free {
            Some("not enough memory of the host")
        } else if facts.pods.is_some_and(|pods| node.count() >= pods) {
            Some("as many pods as the node takes")
        } else {
            None
        }
    }

    /// The pods of lower priority that hold GPU memory on a node and are not leaving already.
    pub fn evictable(&self, node: &str, priority: i32) -> Vec<Arc<PodFacts>> {
        let bound = self.node(node).into_iter();
        let bound = bound.flat_map(|node| node.bound().keys());
        let pods = bound.filter_map(|uid| self.pod(uid).cloned());
        let pods = pods.filter(|pod| self.is_disrupted_alone(pod));
        pods.filter(|pod| pod.priority < priority && !pod.deleting && pod.assignment.is_some())
            .collect()
    }
}
