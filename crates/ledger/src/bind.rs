//! From the reservation to the bound pod.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Assignment, PodFacts};
use gpustow_pack::{Choice, Request};
use thiserror::Error;

use crate::Ledger;
use crate::Reason;
use crate::node::{Charges, Hold, Uid};

/// Memory held for a pod that is not bound yet. What it holds is in its node's books.
#[derive(Clone, Debug)]
pub(crate) struct Reservation {
    pub(crate) node: Arc<str>,
    pub(crate) assignment: Arc<Assignment>,
    /// What it was chosen for.
    request: Arc<Request>,
    /// The ledger's clock when it was made.
    pub(crate) made: u64,
    /// What kube-scheduler had said of the pod when it asked ([`PodFacts::refusal`]).
    refusal: u64,
    /// The pod's group.
    group: Option<Arc<str>>,
    /// When it ends if no bind has begun.
    pub(crate) deadline: Duration,
    /// Bindings that were sent or are about to be and whose outcome is not known; while there are
    /// any, the reservation stays.
    pub(crate) binds: u32,
    /// What spoke for it when it was chosen, for people.
    pub(crate) because: Box<str>,
}

/// How a bind ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The API server took the Binding.
    Bound,
    /// The pod is certainly not bound by it.
    Failed,
    /// The same, because the API server would not take a Binding to this node: another one may do.
    Refused,
    /// The same, because the pod had changed or was bound already.
    Conflict,
}

/// Why a bind is not even tried.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BindRefusal {
    /// The node does not do any more.
    #[error("node {node} does not fit any more: {}", .reason.text())]
    NoFit {
        /// The node that kube-scheduler chose.
        node: String,
        /// Why it does not do.
        reason: Reason,
    },
    /// A Binding of the same pod to another node is under way.
    #[error("a bind of this pod to node {0} is still under way")]
    UnderWay(String),
    /// The pod is bound already.
    #[error("the pod is already bound to node {0}")]
    Bound(String),
    /// The pod's own constraints keep it off the node: kube-scheduler would not have asked.
    #[error("node {node} is not for this pod: {reason}")]
    Excluded {
        /// The node that was asked for.
        node: String,
        /// What keeps it off.
        reason: &'static str,
    },
}

impl Ledger {
    /// The assignment to send for this pod on this node; from here on its memory is held until
    /// [`Ledger::end_bind`], to be called once for every success.
    ///
    /// # Errors
    /// If the node cannot take the pod any more (a reservation without a bind under way is then
    /// gone), if a bind to another node is under way, or if the pod is bound.
    pub fn begin_bind(
        &mut self,
        pod: &PodFacts,
        node: &str,
        now: Duration,
    ) -> Result<Arc<Assignment>, BindRefusal> {
        let begun = self.begin(pod, node, now);
        if matches!(begun, Err(BindRefusal::NoFit { .. })) {
            self.note_conflict(&pod.uid);
        }
        begun
    }

    fn begin(
        &mut self,
        pod: &PodFacts,
        node: &str,
        now: Duration,
    ) -> Result<Arc<Assignment>, BindRefusal> {
        let uid = &pod.uid;
        let refusal = |reason| BindRefusal::NoFit {
            node: node.to_owned(),
            reason,
        };
        let Ok(request) = pod.request.clone() else {
            return Err(refusal(Reason::Fit(gpustow_pack::Refusal::TooComplex)));
        };
        let known = self.pods.get(uid);
        if let Some(bound) = known.and_then(|known| known.facts.node.as_ref()) {
            return Err(BindRefusal::Bound(bound.to_string()));
        }
        if let Some(reason) = self.excluded(node, &pod.constraints) {
            if !self.is_binding(uid) {
                self.drop_reservation(uid);
            }
            let node = node.to_owned();
            return Err(BindRefusal::Excluded { node, reason });
        }
        if self.is_unfenced(uid) {
            return Err(refusal(Reason::Unfenced));
        }
        match self.reservations.get(uid) {
            // Annotations may have changed what it asks for since filter saw it.
            Some(held) if *held.node == *node && held.request == request => {}
            Some(held) if held.binds > 0 => {
                return Err(BindRefusal::UnderWay(held.node.to_string()));
            }
            _ => {
                self.drop_reservation(uid);
                self.check(node, now).map_err(refusal)?;
                let choice = self.choose(node, pod, &request).map_err(refusal)?;
                let deadline = now + self.config.reservation_ttl;
                self.reserve(pod, node, &request, &choice, deadline);
            }
        }
        if let Err(reason) = self.within_bounds(uid, node) {
            if !self.is_binding(uid) {
                self.drop_reservation(uid);
            }
            return Err(refusal(reason));
        }
        let held = self.reservations.get_mut(uid);
        let held = held.ok_or_else(|| refusal(Reason::NoReport))?;
        held.binds += 1;
        Ok(held.assignment.clone())
    }

    /// The hard bound: with this reservation in the books, no card of it holds more than it has.
    fn within_bounds(&self, uid: &Uid, name: &str) -> Result<(), Reason> {
        let node = self.nodes.get(name).ok_or(Reason::NoReport)?;
        let report = node.report.as_ref().ok_or(Reason::NoReport)?;
        let held = self.reservations.get(uid).ok_or(Reason::NoReport)?;
        for (uuid, _) in &held.assignment.charges {
            let index = report
                .status
                .gpus
                .iter()
                .position(|gpu| *gpu.uuid == **uuid);
            let card = index.and_then(|index| node.view.cards.get(index));
            let card = card.ok_or(Reason::Fit(gpustow_pack::Refusal::NoRoom))?;
            if !card.usable {
                return Err(Reason::Fit(gpustow_pack::Refusal::Unhealthy));
            }
            if node.held(uuid, |_| true) > card.capacity {
                return Err(Reason::Fit(gpustow_pack::Refusal::NoRoom));
            }
        }
        Ok(())
    }

    /// Ends what [`Ledger::begin_bind`] began. `pod` is the pod as it was sent.
    pub fn end_bind(&mut self, pod: &PodFacts, outcome: Outcome, now: Duration) {
        let uid = &pod.uid;
        let Some(held) = self.reservations.get_mut(uid) else {
            // A watch knew the end before us.
            return;
        };
        if outcome == Outcome::Bound {
            let bound = PodFacts {
                node: Some(held.node.clone()),
                assignment: Some(Ok(held.assignment.clone())),
                nominated: None,
                waiting: false,
                ..pod.clone()
            };
            return self.put_bound(bound, now);
        }
        held.binds = held.binds.saturating_sub(1);
        let (node, last) = (held.node.clone(), held.binds == 0);
        if last {
            self.drop_reservation(uid);
        }
        match outcome {
            Outcome::Conflict => self.note_conflict(uid),
            Outcome::Refused if self.pods.contains_key(uid) => self.note_refusal(uid, node),
            _ => {}
        }
    }

    /// A bind of this pod came too late. Two, and filter decides alone.
    fn note_conflict(&mut self, uid: &Uid) {
        if self.pods.contains_key(uid) {
            self.tried.entry(uid.clone()).or_default().conflicts += 1;
        }
    }

    /// One sentence on why this pod's reservation is where it is.
    #[must_use]
    pub fn reserved_because(&self, uid: &str) -> Option<&str> {
        self.reservations.get(uid).map(|held| &*held.because)
    }

    /// True while a bind of this pod has no known outcome.
    #[must_use]
    pub fn is_binding(&self, uid: &str) -> bool {
        self.reservations
            .get(uid)
            .is_some_and(|held| held.binds > 0)
    }

    /// Ends reservations whose bind never came, because something after us refused their nodes, and
    /// claims whose time is over.
    pub fn expire(&mut self, now: Duration) {
        self.expire_claims(now);
        if now < self.earliest {
            return;
        }
        self.earliest = Duration::MAX;
        let mut late = Vec::new();
        // One with a bind under way ends with it.
        for (uid, held) in self.reservations.iter().filter(|(_, held)| held.binds == 0) {
            match held.deadline <= now {
                true => late.push((uid.clone(), held.node.clone())),
                false => self.earliest = self.earliest.min(held.deadline),
            }
        }
        for (uid, node) in late {
            self.expirations += 1;
            self.drop_reservation(&uid);
            match self.pods.get(&uid) {
                Some(known) => {
                    let pod = known.facts.clone();
                    self.note_refusal(&uid, node);
                    self.wait(&pod);
                }
                None => drop(self.tried.remove(&uid)),
            }
        }
    }

    /// Ends the reservation of a pod that kube-scheduler has given up since it asked: `pod` is a new
    /// copy of it that says so in words that are neither those of the copy before nor those that
    /// kube-scheduler itself knew when it asked.
    pub(crate) fn end_given_up(&mut self, pod: &PodFacts) {
        let before = self
            .pods
            .get(&pod.uid)
            .map_or(0, |known| known.facts.refusal);
        let is_news = |held: &&Reservation| ![0, before, held.refusal].contains(&pod.refusal);
        let held = self.reservations.get(&pod.uid).filter(is_news);
        if let Some(held) = held.filter(|held| held.binds == 0 && pod.node.is_none()) {
            let node = held.node.clone();
            self.drop_reservation(&pod.uid);
            self.note_refusal(&pod.uid, node);
        }
    }

    /// A node was reserved for this pod, and no bind came.
    pub(crate) fn note_refusal(&mut self, uid: &Uid, node: Arc<str>) {
        self.tried
            .entry(uid.clone())
            .or_default()
            .nodes
            .insert(node);
    }

    /// Writes a choice into the books.
    pub(crate) fn reserve(
        &mut self,
        pod: &PodFacts,
        name: &str,
        request: &Arc<Request>,
        choice: &Choice,
        deadline: Duration,
    ) {
        let uid = pod.uid.clone();
        let made = self.tick();
        let Some((node_name, node)) = self.nodes.get_key_value(name) else {
            return;
        };
        let node_name = node_name.clone();
        let cards = 0..node.view.cards.len();
        let uuids: Vec<&str> = cards.map(|card| node.uuid(card)).collect();
        let containers = &pod.containers;
        let assignment =
            Assignment::from_placement(&choice.placement, containers, &uuids, request.exclusive);
        let Some(assignment) = assignment else {
            return;
        };
        let assignment = Arc::new(assignment);
        let hold = Hold {
            charges: Charges::Assigned(Some(assignment.clone())),
            exclusive: request.exclusive,
            cpu_milli: request.cpu_milli,
            ram: request.ram,
        };
        let because = self
            .scores
            .because(&node.view, request, &choice.placement.charges);
        let held = Reservation {
            node: node_name,
            assignment,
            request: request.clone(),
            made,
            refusal: pod.refusal,
            group: pod.group.clone(),
            deadline,
            binds: 0,
            because: because.into(),
        };
        self.earliest = self.earliest.min(held.deadline);
        self.reservations.insert(uid.clone(), held);
        if let Some(node) = self.nodes.get_mut(name) {
            node.reserved.insert(uid.clone(), hold);
        }
        self.touch(name);
        self.waiting.reserved(&uid, name);
        self.nomination_changed(&uid);
    }

    /// A pod was refused: the others of its group will not be scheduled without it. What they have
    /// reserved would only keep other groups out, and those would keep out this one.
    pub(crate) fn release_group(&mut self, pod: &PodFacts) {
        let Some(group) = &pod.group else { return };
        let held = self.reservations.iter().filter(|(_, held)| held.binds == 0);
        let same = held.filter(|(_, held)| held.group.as_ref() == Some(group));
        for uid in same.map(|(uid, _)| uid.clone()).collect::<Vec<_>>() {
            self.drop_reservation(&uid);
            if let Some(known) = self.pods.get(&uid) {
                let pod = known.facts.clone();
                self.wait(&pod);
            }
        }
    }

    /// Gives a reservation back, if there is one.
    pub(crate) fn drop_reservation(&mut self, uid: &str) {
        if let Some(node) = self.take_reservation(uid) {
            self.touch(&node);
        }
    }

    /// The same, but leaves it to the caller to touch the node.
    pub(crate) fn take_reservation(&mut self, uid: &str) -> Option<Arc<str>> {
        let held = self.reservations.remove(uid)?;
        let node = self.nodes.get_mut(&held.node)?;
        node.reserved.remove(uid);
        Some(held.node)
    }
}
