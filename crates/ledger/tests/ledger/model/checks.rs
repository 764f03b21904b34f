//! What must hold after every step, and once everything has come to its end.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::Victims;

use super::server::NODES;
use super::world::{World, require};
use crate::build::{ask, asking, exclusive};

impl World {
    /// Every share in the books: (pod, node, card, MiB).
    pub(super) fn shares(&self) -> Vec<(Arc<str>, Arc<str>, String, u64)> {
        let mut shares = Vec::new();
        for node in self.ledger.snapshot(self.now) {
            for card in node.cards {
                for pod in card.pods.into_iter().filter(|pod| pod.charged.0 > 0) {
                    let uuid = card.uuid.clone();
                    shares.push((pod.uid, node.name.clone(), uuid, pod.charged.0));
                }
            }
        }
        shares
    }

    /// One pod has one place in the books, and each card holds what its pods are charged.
    pub(super) fn check_books(&self) -> Result<(), String> {
        let mut places: HashMap<Arc<str>, Arc<str>> = HashMap::new();
        let mut seen = BTreeSet::new();
        for (uid, node, card, _) in self.shares() {
            let place = places.entry(uid.clone()).or_insert_with(|| node.clone());
            require(*place == node, || {
                format!("{uid} holds memory on {place} and {node}")
            })?;
            require(seen.insert((uid.clone(), card.clone())), || {
                format!("{uid} holds {card} twice")
            })?;
        }
        Ok(())
    }

    /// Lets everything under way come to its end, then compares with a ledger that has only seen
    /// the lists.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for index in 0..self.server.posts.len() {
            self.server.land(index);
            self.end_bind(index);
        }
        self.take_list();
        self.list_arrives();
        self.deliver_pods(usize::MAX);
        self.check_books()?;
        self.now += Duration::from_secs(31);
        // A pod that came, was bound and went during one list is known until the next.
        self.listing = Some((self.ledger.copies(), None));
        self.take_list();
        self.list_arrives();
        for name in NODES {
            if let Some(mut report) = self.server.reports.get(name).cloned() {
                report.heartbeat = Some("later".into());
                self.server.set_report(name, Some(report));
            }
        }
        self.deliver_nodes();
        self.check_wake()?;
        self.ledger.expire(self.now);
        require(self.ledger.reservations() == (0, 0), || {
            format!("{:?} reservations are left", self.ledger.reservations())
        })?;
        let mut rebuilt = self.rebuilt();
        let (ours, theirs) = (self.ledger.snapshot(self.now), rebuilt.snapshot(self.now));
        require(ours == theirs, || {
            format!("history {ours:#?}\nlists {theirs:#?}")
        })?;
        self.ledger.learn();
        rebuilt.learn();
        for (gpus, size) in [(1, 1), (1, 4), (1, 7), (1, 10), (1, 16), (2, 5)] {
            for priority in [0, 2] {
                let mut probe = asking(&format!("probe-{gpus}-{size}-{priority}"), &[(gpus, size)]);
                probe.priority = priority;
                if size == 7 {
                    probe = exclusive(probe);
                }
                let mut ours = self.ledger.filter(&ask(&probe), &NODES, self.now);
                let mut theirs = rebuilt.filter(&ask(&probe), &NODES, self.now);
                ours.refused.sort_unstable();
                theirs.refused.sort_unstable();
                require(ours == theirs, || {
                    format!("history {ours:?}, lists {theirs:?}")
                })?;
                self.ledger.delete_pod(&probe.uid);
                rebuilt.delete_pod(&probe.uid);
            }
        }
        Ok(())
    }

    /// The first waiting pod that fits is woken before long.
    fn check_wake(&mut self) -> Result<(), String> {
        self.ledger.expire(self.now);
        let able = |pod: &&PodFacts| {
            self.ledger.is_waiting(&pod.uid) && pod.node.is_none() && !pod.gated && !pod.deleting
        };
        let fits = |pod: &&PodFacts| {
            NODES.iter().any(|name| {
                let victims = self
                    .ledger
                    .preempt(&ask(pod), name, &[], &|_| false, self.now);
                victims == Some(Victims::default())
            })
        };
        let waiting = self.server.pods.iter().filter(able).filter(fits);
        let first = waiting.min_by_key(|pod| (-pod.priority, pod.created, &pod.uid));
        let Some(first) = first.map(|pod| pod.uid.clone()) else {
            return Ok(());
        };
        for second in 0..70 {
            let now = self.now + Duration::from_secs(second);
            let woken = self.ledger.wake(10, now);
            if woken.iter().any(|pod| pod.uid == first) {
                return Ok(());
            }
        }
        Err(format!("{first} fits and is not woken"))
    }
}
