//! The invariants after every step, and once everything has come to its end.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ledger, NodeView, Victims};

use super::server::NODES;
use super::world::{World, require};
use crate::build::{ask, asking, assumed, at, exclusive, isolated, limited};

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

    /// One pod has one node in the books, and holds each of its cards once.
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
        if self.listing.is_some() {
            self.take_list();
            self.list_arrives();
        }
        self.deliver_pods(usize::MAX);
        self.deliver_groups();
        self.check_books()?;
        self.check_places_end()?;
        // Assumed pods have thirty seconds, and room for replacements is kept twice as long as other room.
        self.now += Duration::from_secs(31) + super::lending::CALLED_FOR;
        for pod in self.ledger.unconfirmed(self.now) {
            match self.server.find(&pod.uid) {
                Some(index) => {
                    let (copy, asked) = (self.server.pods[index].clone(), self.ledger.copies());
                    self.ledger.read_back(copy, asked, self.now);
                }
                None => self.ledger.delete_pod(&pod.uid),
            }
        }
        self.report_again();
        // Before there is a list that would heal it.
        self.check_rebuilt()?;
        self.listing = Some((self.ledger.copies(), None));
        self.take_list();
        self.list_arrives();
        self.empty_queue()?;
        self.check_wake()?;
        self.check_no_pod_comes()?;
        self.check_bystanders()?;
        self.check_free_reservations()?;
        self.check_windows()?;
        let mut rebuilt = self.check_rebuilt()?;
        self.end_nominations(&mut rebuilt);
        self.ledger.learn();
        rebuilt.learn();
        for (gpus, size) in [(1, 1), (1, 4), (1, 7), (1, 10), (1, 16), (2, 5)] {
            for priority in [0, 2] {
                let mut probe = asking(&format!("probe-{gpus}-{size}-{priority}"), &[(gpus, size)]);
                probe.priority = priority;
                match size {
                    7 => probe = exclusive(probe),
                    4 => probe = limited(probe),
                    _ => {}
                }
                if self.switches.mig && gpus == 1 && !matches!(size, 4 | 7) {
                    probe = isolated(probe);
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
        self.check_placed()?;
        self.check_reclaims_end()
    }

    /// Lets so much time pass that no nomination keeps room: lists do not show how long a nomination keeps it.
    fn end_nominations(&mut self, rebuilt: &mut Ledger) {
        for seconds in [1, 3901] {
            self.now += Duration::from_secs(seconds);
            self.report_again();
            let reports = self.server.reports.iter();
            for (name, report) in reports.filter(|(name, _)| NODES.contains(name)) {
                rebuilt.apply_gpunode(name, report.clone(), self.now);
            }
            self.ledger.expire(self.now);
            rebuilt.expire(self.now);
        }
    }

    /// Every agent repeats its report, later.
    fn report_again(&mut self) {
        for name in NODES {
            if let Some(mut report) = self.server.reports.get(name).cloned() {
                report.heartbeat = Some(format!("{:?}", self.now));
                self.server.set_report(name, Some(report));
            }
        }
        self.deliver_nodes();
    }

    /// Nothing is reserved any more. The books equal the books of a ledger that has only seen the lists, and the
    /// definition.
    fn check_rebuilt(&mut self) -> Result<Ledger, String> {
        self.ledger.expire(self.now);
        require(assumed(&self.ledger) == (0, 0), || {
            format!("{:?} reservations are left", assumed(&self.ledger))
        })?;
        let rebuilt = self.rebuilt();
        let (ours, theirs) = (self.ledger.snapshot(self.now), rebuilt.snapshot(self.now));
        require(ours == theirs, || {
            format!("history {ours:#?}\nlists {theirs:#?}")
        })?;
        ours.iter().try_for_each(|node| self.check_free(node))?;
        Ok(rebuilt)
    }

    /// The free memory of a card is the memory that is neither promised to a pod nor in use.
    fn check_free(&self, node: &NodeView) -> Result<(), String> {
        let report = self.server.reports.get(&*node.name);
        for (card, gpu) in node.cards.iter().zip(report.iter().flat_map(|it| &it.gpus)) {
            let charged = |uid: &str| {
                let share = card.pods.iter().find(|share| *share.uid == *uid);
                share.map_or(0, |share| share.charged.0)
            };
            let is_whole = |pod: &&PodFacts| match &pod.assignment {
                Some(Ok(assignment)) if assignment.exclusive.is_some() => {
                    assignment.exclusive == Some(true)
                }
                _ => pod.asks.is_exclusive(),
            };
            let whole = self
                .server
                .pods
                .iter()
                .any(|pod| charged(&pod.uid) > 0 && is_whole(&pod));
            let excess = gpu.pods.iter();
            let excess: u64 = excess
                .map(|used| used.used_mib.saturating_sub(charged(&used.uid)))
                .sum();
            let taken = card.held.0.saturating_add(gpu.unmanaged_mib + excess);
            let free = match self.free_slices(&node.name, gpu, card) {
                Some(free) => free,
                None if whole => 0,
                None => card.capacity.0.saturating_sub(taken),
            };
            require(card.free.0 == free, || {
                format!("{free} should be free on {card:?}")
            })?;
        }
        Ok(())
    }

    /// Once faults have ceased, kube-scheduler gets every pod bound that fits on a node to which
    /// Bindings are not refused, in as many rounds as there are nodes and two.
    fn check_placed(&mut self) -> Result<(), String> {
        // Nothing is assumed any more.
        self.chosen.clear();
        let windows = self.switches.window.map_or(1, |_| NODES.len());
        self.schedule((NODES.len() + 2) * windows)?;
        let open = NODES;
        for pod in &self.server.pods {
            // Of gangs enough fit, or none is bound: that is looked at below.
            if pod.node.is_some() || pod.gated || pod.deleting || !self.is_single(pod) {
                continue;
            }
            for name in open
                .iter()
                .filter(|name| !self.server.barred.contains(**name))
            {
                let fits = self.admits(pod, name) && self.fits_on(&self.ledger, pod, name);
                require(!fits, || {
                    format!("{} fits on {name} and is not bound", pod.uid)
                })?;
            }
        }
        self.check_gangs_placed()
    }

    /// The first waiting pod that fits is woken before long.
    fn check_wake(&mut self) -> Result<(), String> {
        self.ledger.expire(self.now);
        let able = |pod: &&PodFacts| {
            self.ledger.is_waiting(&pod.uid) && pod.node.is_none() && !pod.gated && !pod.deleting
        };
        let waiting = self.server.pods.iter().filter(able);
        let waiting = waiting.filter(|pod| self.is_single(pod) && self.fits(&self.ledger, pod));
        let first = waiting.min_by_key(turn);
        let Some(first) = first.map(|pod| pod.uid.clone()) else {
            return Ok(());
        };
        // The longest pause after wake-ups without result is five minutes, and the room may be another's by then.
        for second in 0..620 {
            self.now += Duration::from_secs(1);
            if second % 60 == 0 {
                self.report_again();
            }
            let woken = self.ledger.wake(10, self.now);
            if woken.iter().any(|pod| pod.uid == first) {
                return Ok(());
            }
        }
        Err(format!("{first} fits and is not woken"))
    }

    fn fits(&self, ledger: &Ledger, pod: &PodFacts) -> bool {
        NODES.iter().any(|name| self.fits_on(ledger, pod, name))
    }

    /// Preempt answers that no pod has to go, and there are CPU and a slot. The pod is not in the node's books.
    pub(super) fn fits_on(&self, ledger: &Ledger, pod: &PodFacts, name: &str) -> bool {
        let kept = || ledger.explain(pod, name, self.now).is_err();
        let host = ledger.refused_in_tree(name, pod).is_none();
        let scarce = self.switches.scarce_cpu || self.switches.few_slots;
        host && self.has_room(ledger, pod, name) && !(scarce && kept())
    }

    /// Preempt answers that no pod has to go.
    pub(super) fn has_room(&self, ledger: &Ledger, pod: &PodFacts, name: &str) -> bool {
        let mut budget = ledger.budget();
        let victims = ledger.preempt(pod, name, &[], &mut budget, self.now);
        victims == Some(Victims::default())
    }

    /// All unbound pods wait, and something that the ledger does not know keeps every pod from coming. The last pod
    /// that fits is still woken in time, and no pod again and again.
    fn check_no_pod_comes(&mut self) -> Result<(), String> {
        let mut ledger = self.rebuilt();
        let pods = self.server.pods.iter();
        let asleep = pods.filter(|pod| pod.node.is_none() && !pod.gated && !pod.deleting);
        let asleep: Vec<&PodFacts> = asleep.collect();
        for pod in &asleep {
            ledger.filter(&ask(pod), &[], self.now);
        }
        // Only now: the mix of waiting pods decides on which card room is kept for nominated pods.
        let fitting = asleep.iter().copied();
        let fitting = fitting.filter(|pod| self.is_single(pod) && self.fits(&ledger, pod));
        let Some(last) = fitting.max_by_key(turn) else {
            return Ok(());
        };
        // A pod that joins is looked at after two seconds; then each round of two offers twice as many. Nominated pods
        // may take one more.
        let limit = 2 * (4 + u64::from(asleep.len().ilog2()));
        let mut woken: HashMap<Arc<str>, Vec<u64>> = HashMap::new();
        for second in 0..19 {
            for pod in ledger.wake(10, self.now + at(second)) {
                woken.entry(pod.uid.clone()).or_default().push(second);
            }
        }
        let first = woken.get(&last.uid).and_then(|times| times.first());
        require(first.is_some_and(|first| *first <= limit), || {
            format!("{} is woken after {first:?} s, not {limit}", last.uid)
        })?;
        // Once for each node, and for one again after a pause of at least four seconds, then eight.
        let most = NODES.len() + 2;
        let often = woken.iter().find(|(_, times)| times.len() > most);
        require(often.is_none(), || format!("woken for nothing: {often:?}"))
    }
}

/// The order in which kube-scheduler tries pods.
fn turn<'a>(pod: &&'a PodFacts) -> (i32, i64, &'a Arc<str>) {
    (-pod.priority, pod.created, &pod.name)
}
