//! From the reservation to the bound pod.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Assignment, PodFacts};
use gpustow_pack::{Choice, Mib, Request};
use thiserror::Error;

use crate::Ledger;
use crate::decide::{Ask, Reason};
use crate::node::{Charges, Hold, Uid};

/// Memory held for a pod that is not bound yet. What it holds is in its node's books.
#[derive(Clone, Debug)]
pub(crate) struct Reservation {
    pub(crate) node: Arc<str>,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) deadline: Duration,
    pub(crate) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Filter chose it; gone at the deadline.
    Reserved,
    /// A Binding was sent or is about to be; stays until its outcome is known.
    Binding,
}

/// How a bind ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The API server took the Binding.
    Bound,
    /// The pod is certainly not bound by it.
    Failed,
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
}

impl Ledger {
    /// The assignment to send for this pod on this node; from here on its memory is held until
    /// [`Ledger::end_bind`].
    ///
    /// # Errors
    /// If the node cannot take the pod any more, or another bind of the pod is under way. The
    /// reservation is then gone (in the first case) or untouched (in the second).
    pub fn begin_bind(
        &mut self,
        ask: &Ask<'_>,
        node: &str,
        now: Duration,
    ) -> Result<Arc<Assignment>, BindRefusal> {
        let uid = &ask.pod.uid;
        let refusal = |reason| BindRefusal::NoFit {
            node: node.to_owned(),
            reason,
        };
        let Ok(request) = ask.pod.request.clone() else {
            return Err(refusal(Reason::Fit(gpustow_pack::Refusal::TooComplex)));
        };
        match self.reservations.get(uid) {
            Some(held) if *held.node == *node => {}
            Some(held) if held.state == State::Binding => {
                return Err(BindRefusal::UnderWay(held.node.to_string()));
            }
            _ => {
                self.drop_reservation(uid);
                let choice = self.choose(node, ask, &request).map_err(refusal)?;
                self.reserve(ask, node, &request, choice, now);
            }
        }
        if let Err(reason) = self.within_bounds(uid, node) {
            self.drop_reservation(uid);
            return Err(refusal(reason));
        }
        let held = self
            .reservations
            .get_mut(uid)
            .ok_or_else(|| refusal(Reason::NoReport))?;
        held.state = State::Binding;
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
        match outcome {
            Outcome::Bound => {
                let Some(held) = self.reservations.get(&pod.uid) else {
                    return;
                };
                let bound = PodFacts {
                    node: Some(held.node.clone()),
                    assignment: Some(Ok(held.assignment.clone())),
                    nominated: None,
                    waiting: false,
                    ..pod.clone()
                };
                self.put_bound(bound, now);
            }
            Outcome::Failed | Outcome::Conflict => {
                self.drop_reservation(&pod.uid);
                let bound = self
                    .pods
                    .get(&pod.uid)
                    .is_some_and(|known| known.facts.node.is_some());
                if !bound && outcome == Outcome::Conflict {
                    self.tried.entry(pod.uid.clone()).or_default().conflicts += 1;
                }
            }
        }
    }

    /// True while a bind of this pod has no known outcome.
    #[must_use]
    pub fn is_binding(&self, uid: &str) -> bool {
        self.reservations
            .get(uid)
            .is_some_and(|held| held.state == State::Binding)
    }

    /// Ends reservations whose bind never came.
    pub fn expire(&mut self, now: Duration) {
        let late = self
            .reservations
            .iter()
            .filter(|(_, held)| held.state == State::Reserved && held.deadline <= now)
            .map(|(uid, _)| uid.clone())
            .collect::<Vec<_>>();
        for uid in late {
            self.drop_reservation(&uid);
            if self.pods.contains_key(&uid) {
                self.waiting.insert(uid);
            }
        }
    }

    /// Writes a choice into the books.
    pub(crate) fn reserve(
        &mut self,
        ask: &Ask<'_>,
        name: &str,
        request: &Request,
        choice: Choice,
        now: Duration,
    ) {
        let uid = ask.pod.uid.clone();
        let Some((node_name, node)) = self.nodes.get_key_value(name) else {
            return;
        };
        let (node_name, uuid) = (node_name.clone(), |card: usize| {
            Box::<str>::from(node.uuid(card))
        });
        let charges: Vec<(Box<str>, Mib)> = choice
            .placement
            .charges
            .iter()
            .map(|&(card, mib)| (uuid(card), mib))
            .collect();
        let containers = ask.pod.containers.iter().zip(&choice.placement.cards);
        let containers = containers
            .map(|(name, cards)| (name.clone(), cards.iter().map(|&card| uuid(card)).collect()));
        let assignment = Arc::new(Assignment {
            charges: charges.clone(),
            containers: containers.collect(),
        });
        let hold = Hold {
            charges: Charges::Cards(charges),
            cpu_milli: request.cpu_milli,
            ram: request.ram,
        };
        let ttl = match ask.slow {
            true => self.config.slow_reservation_ttl,
            false => self.config.reservation_ttl,
        };
        let state = State::Reserved;
        let held = Reservation {
            node: node_name,
            assignment,
            deadline: now + ttl,
            state,
        };
        self.reservations.insert(uid.clone(), held);
        if let Some(node) = self.nodes.get_mut(name) {
            node.reserved.insert(uid, hold);
        }
        self.touch(name);
    }

    /// Gives a reservation back, if there is one.
    pub(crate) fn drop_reservation(&mut self, uid: &str) {
        let Some(held) = self.reservations.remove(uid) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(&held.node) {
            node.reserved.remove(uid);
            self.touch(&held.node);
        }
    }
}
