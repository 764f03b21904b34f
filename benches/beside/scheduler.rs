//! kube-scheduler: the nodes that it passes, and its calls for new and for waiting pods.

use std::cmp::Reverse;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::intree::nodes_to_find;
use gpustow_ledger::{Ask, Outcome};
use gpustow_settings::Feature;
use rand::RngExt as _;

use crate::KINDS;
use crate::load::facts;
use crate::pods::{gate, pod};
use crate::world::{Due, World};

/// Until the watch shows a write.
const PATCH: Duration = Duration::from_millis(10);
/// Until kube-scheduler asks about a pod that the watch shows.
const SEEN: Duration = Duration::from_millis(1);
/// Pods that came during the bench and run at a time.
const RUN: usize = 200;

impl World {
    /// The nodes that kube-scheduler passes, by its shipped setting.
    pub(crate) fn shown(&mut self) -> Vec<String> {
        let nodes = self.names.len();
        let shown = nodes_to_find(0, nodes);
        let names = self.names.iter().cycle().skip(self.window).take(shown);
        self.window = (self.window + shown) % nodes;
        names.cloned().collect()
    }

    /// A pod comes; the queue has it gated first.
    pub(crate) fn come(&mut self, at: Duration) {
        self.calls += 1;
        let mib = 2_048 << self.rng.random_range(0..3_u32);
        let mut pod = pod(&format!("new-{}", self.calls), mib, 1, 10);
        pod["metadata"]["creationTimestamp"] = "2026-11-22T08:00:00Z".into();
        let free = facts(pod.clone());
        if self.on == Some(Feature::Queue) {
            gate(&mut pod);
            self.hold(at, "watch", |ledger, _| ledger.apply_pod(facts(pod)));
            self.changed(at);
            return;
        }
        self.schedulable(at, free);
    }

    /// The gate is taken off, and the watch shows it.
    pub(crate) fn ungated(&mut self, at: Duration, pod: &PodFacts) {
        assert!(!pod.uid.starts_with("waits"), "a queued pod is helped");
        let free = PodFacts {
            gated: false,
            queued: false,
            ..pod.clone()
        };
        self.schedulable(at.max(self.held) + PATCH, free);
    }

    pub(crate) fn schedulable(&mut self, at: Duration, pod: PodFacts) {
        self.ready.push_back(pod);
        self.due.push(Reverse((at, Due::Shown)));
    }

    pub(crate) fn shown_to_all(&mut self, at: Duration) {
        let pod = self.ready.pop_front().expect("one is ready");
        self.hold(at, "watch", |ledger, _| ledger.apply_pod(pod.clone()));
        self.asked.push_back(pod);
        self.due.push(Reverse((at + SEEN, Due::Call)));
    }

    /// A pod is bound, and one that came earlier ends. From the call until its answer.
    pub(crate) fn call(&mut self, at: Duration) -> Duration {
        let pod = self.asked.pop_front().expect("one is ready");
        let names = self.shown();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let chosen = self.hold(at, "filter", |ledger, now| {
            let verdict = ledger.filter(&Ask::of(&pod), &names, now);
            verdict.nodes.first().map(|node| (*node).to_owned())
        });
        let waited = self.held - at;
        let node = chosen.expect("it fits");
        self.hold(at, "bind", |ledger, now| {
            assert!(ledger.begin_bind(&pod, &node, now).is_ok(), "it is bound");
            ledger.end_bind(&pod, Outcome::Bound, now);
        });
        self.run.push_back(pod.uid.clone());
        if self.run.len() > RUN
            && let Some(oldest) = self.run.pop_front()
        {
            self.hold(at, "watch", |ledger, _| ledger.delete_pod(&oldest));
        }
        self.changed(at);
        waited
    }

    /// kube-scheduler tries a waiting pod again, unless it is gated.
    pub(crate) fn retry(&mut self, at: Duration) {
        self.retries += 1;
        let pod = self.waiting[self.retries % KINDS].clone();
        if pod.queued {
            return;
        }
        let names = self.shown();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let placed = self.hold(at, "filter", |ledger, now| {
            ledger.filter(&Ask::of(&pod), &names, now).nodes.len()
        });
        assert_eq!(placed, 0, "it fits nowhere");
    }
}
