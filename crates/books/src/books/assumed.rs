//! Memory that is held for pods which are not bound yet, until a bind's outcome is known.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Assignment, Group, PodFacts};
use gpustow_pack::{Placement, Refusal, Request};

use super::hold::Hold;
use super::{Books, Change, Event, Uid};
use crate::reason::Reason;

/// How a bind ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The API server took the Binding.
    Bound,
    /// The pod is certainly not bound by it.
    Failed,
    /// The pod is not bound: the API server refused a Binding to this node, and another node may do.
    Refused,
    /// The pod is not bound by it: the pod had changed or was bound already.
    Conflict,
}

/// Memory that is held for a pod that is not bound yet. The hold itself is in the node's books.
#[derive(Clone, Debug)]
pub struct AssumedPod {
    node: Arc<str>,
    assignment: Arc<Assignment>,
    /// The request for which it was chosen.
    request: Arc<Request>,
    /// The ledger's clock when it was made.
    made: u64,
    /// The refusal in kube-scheduler's copy of the pod when it asked ([`PodFacts::refusal`]).
    refusal: u64,
    /// The pod's group.
    group: Option<Group>,
    /// When it ends if no bind has begun.
    deadline: Duration,
    /// Bindings that were sent or are about to be and whose outcome is not known; while there are
    /// any, the reservation stays.
    binds: u32,
    /// The reasons for its choice, for people.
    because: Box<str>,
}

impl AssumedPod {
    /// The node that it is to be bound to.
    pub fn node(&self) -> &Arc<str> {
        &self.node
    }

    /// Is it for this, on this node?
    pub fn is_for(&self, node: &str, request: &Arc<Request>) -> bool {
        *self.node == *node && self.request == *request
    }

    /// Was its Binding sent?
    pub fn is_binding(&self) -> bool {
        self.binds > 0
    }

    /// Why this place was chosen.
    pub fn because(&self) -> &str {
        &self.because
    }

    /// Was it made before that time on the ledger's clock, and is no bind under way?
    pub(super) fn is_unused_since(&self, began: u64) -> bool {
        self.made < began && !self.is_binding()
    }
}

impl Books {
    /// The pod's reservation before it is bound.
    pub fn assumed(&self, uid: &str) -> Option<&AssumedPod> {
        self.assumed.get(uid)
    }

    /// Every pod that is not bound and holds memory.
    pub fn assumed_pods(&self) -> impl Iterator<Item = &AssumedPod> {
        self.assumed.values()
    }

    /// Reservations that ended because no bind came in time.
    pub fn expirations(&self) -> u64 {
        self.expirations
    }

    /// Writes a placement down: memory is held for the pod until `deadline`, or until its bind ends.
    pub fn reserve(
        &mut self,
        pod: &PodFacts,
        name: &str,
        request: &Arc<Request>,
        placement: &Placement,
        because: String,
        deadline: Duration,
    ) -> Change {
        let mut change = Change::default();
        let made = self.tick();
        let starts = self.reserved_starts(pod, request);
        let Some((_, node_name, node)) = self.nodes.get_full_mut(name) else {
            return change;
        };
        let node_name = node_name.clone();
        let assignment = Assignment::from_placement(
            placement,
            &pod.containers,
            &node.uuids(),
            request.exclusive,
            request.compute,
        );
        let instance = match &placement.piece {
            Some(piece) => node.instance(placement, piece).map(Some),
            None => Some(None),
        };
        let Some((assignment, instance)) = assignment.zip(instance) else {
            return change;
        };
        let assignment = Arc::new(Assignment {
            instance,
            ..assignment
        });
        node.reserve(&pod.uid, Hold::reserved(&assignment, request, starts));
        let held = AssumedPod {
            node: node_name.clone(),
            assignment,
            request: request.clone(),
            made,
            refusal: pod.refusal,
            group: pod.group.clone(),
            deadline,
            binds: 0,
            because: because.into(),
        };
        self.earliest = self.earliest.min(deadline);
        self.assumed.insert(pod.uid.clone(), held);
        self.traffic.note(&node_name, Some(pod), self.copies);
        self.touch(name, &mut change);
        let (uid, node) = (pod.uid.clone(), node_name);
        change.note(Event::Reserved { uid, node });
        change
    }

    /// The door to every Binding. Hands the assignment out if the books then charge no card of it beyond the card's
    /// capacity. The memory of the assignment is held until [`Books::end_bind`].
    ///
    /// # Errors
    /// If the pod is without a reservation there, or a card of the assignment does not suffice any more.
    pub fn begin_bind(&mut self, uid: &str, name: &str) -> Result<Arc<Assignment>, Reason> {
        let held = self.assumed.get_mut(uid).ok_or(Reason::NoReport)?;
        let node = self.nodes.get(name).filter(|node| node.status().is_some());
        let node = node.ok_or(Reason::NoReport)?;
        for (uuid, _) in &held.assignment.charges {
            let card = node.card(uuid).ok_or(Reason::Fit(Refusal::NoRoom))?;
            if !card.usable {
                let gpu = node.gpus().iter().find(|gpu| *gpu.uuid == **uuid);
                return Err(match gpu.filter(|gpu| gpu.healthy) {
                    Some(gpu) if node.leaves(gpu) => Reason::Claimed,
                    Some(_) => Reason::Cordoned,
                    None => Reason::Fit(Refusal::Unhealthy),
                });
            }
            if held.request.limit() > card.limit {
                return Err(Reason::Fit(Refusal::NoLimit));
            }
            if held.request.isolated != card.slices.is_some() {
                return Err(Reason::Fit(match held.request.isolated {
                    true => Refusal::NoMig,
                    false => Refusal::OnlyMig,
                }));
            }
            if held.request.isolated && !node.may_make(uuid, uid, &held.assignment) {
                return Err(Reason::Fit(Refusal::NoSlices));
            }
            let asked = held.request.compute;
            if (asked == 0) != (card.compute.capacity == 0) {
                return Err(Reason::Fit(match asked {
                    0 => Refusal::OnlyMps,
                    _ => Refusal::NoMps,
                }));
            }
            if asked > 0 && node.compute_promised(uuid) > card.compute.capacity {
                return Err(Reason::Fit(Refusal::NoCompute));
            }
            if node.promised(uuid) > card.capacity {
                return Err(Reason::Fit(Refusal::NoRoom));
            }
        }
        held.binds += 1;
        Ok(held.assignment.clone())
    }

    /// The outcome of a bind is known; `pod` is the pod as it was sent.
    pub fn end_bind(&mut self, pod: &PodFacts, outcome: &Outcome, now: Duration) -> Change {
        let mut change = Change::default();
        let uid = &pod.uid;
        let Some(held) = self.assumed.get_mut(uid) else {
            // A watch knew the end before us.
            return change;
        };
        if *outcome == Outcome::Bound {
            let bound = PodFacts {
                node: Some(held.node.clone()),
                assignment: Some(Ok(held.assignment.clone())),
                starting_since: Some(i64::MAX),
                nominated: None,
                waiting: false,
                ..pod.clone()
            };
            self.put_bound(bound, now, &mut change);
            return change;
        }
        held.binds = held.binds.saturating_sub(1);
        let (node, last) = (held.node.clone(), held.binds == 0);
        if last {
            self.drop_assumed(uid, &mut change);
        }
        let uid = uid.clone();
        match outcome {
            Outcome::Conflict => change.note(Event::Conflict(uid)),
            Outcome::Refused if self.pods.contains_key(&uid) => {
                change.note(Event::Refused { uid, node });
            }
            _ => {}
        }
        change
    }

    /// A bind of this pod came too late.
    pub fn conflict(&self, uid: &Uid) -> Change {
        let mut change = Change::default();
        change.note(Event::Conflict(uid.clone()));
        change
    }

    /// Gives a reservation back, unless a bind of it is under way.
    pub fn release(&mut self, uid: &str) -> Change {
        let mut change = Change::default();
        if !self.assumed.get(uid).is_some_and(AssumedPod::is_binding) {
            self.drop_assumed(uid, &mut change);
        }
        change
    }

    /// As [`Books::release`]: something after us refused the node.
    pub fn give_up(&mut self, uid: &Uid) -> Change {
        let held = self.assumed.get(uid).map(|held| held.node.clone());
        let mut change = self.release(uid);
        if let Some(node) = held {
            let uid = uid.clone();
            change.note(Event::Refused { uid, node });
        }
        change
    }

    /// The members of a group that hold memory and are not being bound.
    pub fn assumed_of(&self, group: &Group) -> Vec<Uid> {
        let held = self.assumed.iter();
        let same =
            held.filter(|(_, held)| !held.is_binding() && held.group.as_ref() == Some(group));
        same.map(|(uid, _)| uid.clone()).collect()
    }

    /// The group as a whole is not scheduled now, and the reservations of its members end. They would only keep other
    /// groups out, which in turn would keep out this group.
    pub fn release_group(&mut self, group: &Group) -> Change {
        let mut change = Change::default();
        for uid in self.assumed_of(group) {
            self.drop_assumed(&uid, &mut change);
            change.note(Event::Released(uid));
        }
        change
    }

    /// The reservation lasts until then at least.
    pub fn hold_until(&mut self, uid: &str, deadline: Duration) {
        if let Some(held) = self.assumed.get_mut(uid) {
            held.deadline = held.deadline.max(deadline);
        }
    }

    /// Ends reservations whose bind never came.
    pub fn expire(&mut self, now: Duration) -> Change {
        let mut change = Change::default();
        if now < self.earliest {
            return change;
        }
        self.earliest = Duration::MAX;
        let mut late = Vec::new();
        // One with a bind under way ends with it.
        for (uid, held) in self.assumed.iter().filter(|(_, held)| !held.is_binding()) {
            match held.deadline <= now {
                true => late.push((uid.clone(), held.node.clone())),
                false => self.earliest = self.earliest.min(held.deadline),
            }
        }
        for (uid, node) in late {
            self.expirations += 1;
            self.drop_assumed(&uid, &mut change);
            change.note(Event::Expired { uid, node });
        }
        change
    }

    /// Ends the reservation of a pod that kube-scheduler has given up since it asked. `pod` is a new copy, whose
    /// refusal is new: it differs from the copy before, and from kube-scheduler's copy when it asked.
    pub(super) fn end_given_up(&mut self, pod: &PodFacts, change: &mut Change) {
        let before = self.pod(&pod.uid).map_or(0, |known| known.refusal);
        let is_news = |held: &&AssumedPod| ![0, before, held.refusal].contains(&pod.refusal);
        let held = self.assumed.get(&pod.uid).filter(is_news);
        if let Some(held) = held.filter(|held| !held.is_binding() && pod.node.is_none()) {
            let (uid, node) = (pod.uid.clone(), held.node.clone());
            self.drop_assumed(&uid, change);
            change.note(Event::Refused { uid, node });
        }
    }

    /// Gives a reservation back, if there is one.
    pub(super) fn drop_assumed(&mut self, uid: &str, change: &mut Change) {
        if let Some(node) = self.take_assumed(uid) {
            self.tick();
            self.note_traffic(&node, uid);
            self.touch(&node, change);
        }
    }

    /// Gives a reservation back, if there is one. The caller touches the node.
    pub(super) fn take_assumed(&mut self, uid: &str) -> Option<Arc<str>> {
        let held = self.assumed.swap_remove(uid)?;
        self.nodes.get_mut(&held.node)?.release(uid);
        Some(held.node)
    }
}
