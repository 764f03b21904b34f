//! The demands on pods now, with their purposes and causes, and the memory that is reserved by them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts, config, names};
use gpustow_books::{Cause, Earmark, Uid};
use gpustow_pack::Mib;
use strum::IntoStaticStr;

/// An action on a pod or a node, the mildest first. As a string, it is the `action` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Action {
    /// The pod gets an Event.
    Event,
    /// Its agent ends processes of it that use GPUs.
    KillProcess,
    /// It is evicted, as disruption budgets allow.
    Evict,
    /// It is deleted.
    Delete,
    /// The node is marked for autoscalers.
    MarkNode,
}

impl Action {
    /// The actions on pods or nodes for a cause.
    #[must_use]
    pub fn of(cause: Cause) -> &'static [Self] {
        match cause {
            Cause::Reclaim | Cause::Pressure | Cause::OverLimit => {
                &[Self::Event, Self::KillProcess, Self::Evict]
            }
            Cause::Preempt => &[Self::Delete],
            Cause::Defragment => &[Self::Evict],
            Cause::Reserve => &[Self::MarkNode],
            Cause::Nominated | Cause::Ungated | Cause::Replacement => &[],
        }
    }
}

impl From<config::Action> for Action {
    fn from(action: config::Action) -> Self {
        match action {
            config::Action::Off | config::Action::Event => Self::Event,
            config::Action::KillProcess => Self::KillProcess,
            config::Action::Evict => Self::Evict,
        }
    }
}

/// The purpose of a disruption.
#[derive(Clone, Debug)]
pub enum Purpose {
    /// For this pod.
    Pod(Arc<PodFacts>),
    /// So much must be free.
    Headroom(Mib),
    /// It is over its limit.
    Limit,
    /// Its node is emptied.
    Autoscaler,
}

impl Purpose {
    /// The pod, if it is for one.
    #[must_use]
    pub fn pod(&self) -> Option<&Arc<PodFacts>> {
        match self {
            Self::Pod(pod) => Some(pod),
            Self::Headroom(_) | Self::Limit | Self::Autoscaler => None,
        }
    }

    /// Its UID.
    #[must_use]
    pub fn uid(&self) -> Option<&Arc<str>> {
        self.pod().map(|pod| &pod.uid)
    }
}

/// A pod that uses more of a card than it asked for.
#[derive(Clone, Debug)]
pub struct Borrower {
    /// The pod.
    pub pod: Arc<PodFacts>,
    /// The card.
    pub uuid: Box<str>,
    /// The memory that the pod holds there.
    pub held: Mib,
    /// The memory that the pod uses there.
    pub used: Mib,
}

/// A card that is short.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// Where.
    pub node: Arc<str>,
    /// The card.
    pub uuid: Box<str>,
    /// A pod that is below its request and could not grow to it, or the headroom, of which less is free.
    pub harm: Purpose,
    /// The memory that borrowers are to give back: no more than is lent.
    pub missing: Mib,
    /// The pods that must give memory back; none if the pods that end already suffice.
    pub victims: Vec<Borrower>,
}

/// Memory that is reserved for a pod that waits.
#[derive(Clone, Debug)]
pub struct Reserved {
    /// The pod that gets it.
    pub pod: Arc<PodFacts>,
    /// By which means.
    pub cause: Cause,
    /// Where.
    pub node: Arc<str>,
    /// When that is given up.
    pub until: Duration,
    /// The GPUs that the pod is to get, by UUID, with its memory on each.
    pub cards: Vec<(Arc<str>, Mib)>,
    /// The pods that must still finish or give memory back. Empty once the pod fits, or will when others have left.
    pub victims: Vec<Arc<PodFacts>>,
    /// The usage of victims that must give memory back, by the latest report.
    pub borrowers: Vec<Borrower>,
    /// It is a part of the room of this gang: the victims for all its pods finish together, or none.
    pub gang: Option<Group>,
}

impl Reserved {
    /// Of a pod, by its earmark.
    pub fn of(pod: &Arc<PodFacts>, earmark: &Earmark, victims: Vec<Arc<PodFacts>>) -> Self {
        Self {
            pod: pod.clone(),
            cause: earmark.cause(),
            node: earmark.node().clone(),
            until: earmark.until(),
            cards: earmark.cards().to_vec(),
            victims,
            borrowers: Vec::new(),
            gang: earmark.gang().cloned(),
        }
    }
}

/// A pod that must do something for another.
#[derive(Clone, Debug)]
pub struct Demand {
    /// The pod.
    pub victim: Arc<PodFacts>,
    /// Why.
    pub cause: Cause,
    /// The action on the victim.
    pub action: Action,
    /// The node that gains by it.
    pub node: Arc<str>,
    /// The purpose.
    pub purpose: Purpose,
    /// For all pods of this gang: all that is demanded for it is done, or nothing.
    pub gang: Option<Group>,
    /// The cards of which the victim uses too much.
    pub cards: Vec<Borrower>,
}

impl Demand {
    /// The condition on the victim that shows the demand.
    #[must_use]
    pub fn condition(&self) -> &'static str {
        match self.cause.evicts() {
            true => names::DISRUPTION_TARGET,
            false => names::RECLAIM_CONDITION,
        }
    }

    /// Does the victim have a condition that shows the demand?
    #[must_use]
    pub fn is_marked(&self) -> bool {
        if self.cause.evicts() {
            return self.victim.preempted;
        }
        let asked = self.victim.asked_back;
        asked.is_some_and(|done| Action::from(done) >= self.action)
    }

    /// Does the victim terminate by it?
    #[must_use]
    pub fn terminates(&self) -> bool {
        matches!(self.action, Action::Evict | Action::Delete)
    }
}

/// The present demands.
#[derive(Debug, Default)]
pub struct Demands {
    /// The memory that is reserved for waiting pods.
    pub reserved: Vec<Reserved>,
    /// One demand per pod that gives memory back, first for waiting pods, then for other purposes. Demands on pods that
    /// must finish follow.
    pub all: Vec<Demand>,
    reclaimed: BTreeSet<Uid>,
    /// GPUs under pressure.
    pub short: Vec<Shortage>,
}

impl Demands {
    /// None yet, where these GPUs lack their headroom.
    pub fn of(short: Vec<Shortage>) -> Self {
        Self {
            short,
            ..Self::default()
        }
    }

    /// A pod that gives memory back is asked once, for all of its GPUs.
    pub fn reclaim(&mut self, mut demand: Demand) {
        if self.reclaimed.insert(demand.victim.uid.clone()) {
            return self.all.push(demand);
        }
        let known = self.all.iter_mut();
        let known = known.rev().find(|it| it.victim.uid == demand.victim.uid);
        if let Some(known) = known {
            let is_new = |card: &Borrower| known.cards.iter().all(|it| it.uuid != card.uuid);
            demand.cards.retain(is_new);
            known.cards.extend(demand.cards);
        }
    }

    /// Room is reserved for a pod, and these pods are evicted for it.
    pub(crate) fn evict(&mut self, all: Vec<Reserved>, action: Action) {
        for reserved in all {
            let demands = reserved.victims.iter().map(|victim| Demand {
                victim: victim.clone(),
                cause: reserved.cause,
                action,
                // Victims of one gang finish together, and may be on nodes without reserved memory.
                node: victim.node.as_ref().unwrap_or(&reserved.node).clone(),
                purpose: Purpose::Pod(reserved.pod.clone()),
                gang: reserved.gang.clone(),
                cards: Vec::new(),
            });
            self.all.extend(demands);
            self.reserved.push(reserved);
        }
    }

    /// The demands for each gang.
    #[must_use]
    pub fn by_gang(&self) -> BTreeMap<Group, Vec<&Demand>> {
        let mut all = BTreeMap::<_, Vec<_>>::new();
        for demand in &self.all {
            if let Some(gang) = &demand.gang {
                all.entry(gang.clone()).or_default().push(demand);
            }
        }
        all
    }

    /// Must this pod give memory back?
    #[must_use]
    pub fn reclaims_from(&self, uid: &str) -> bool {
        self.reclaimed.contains(uid)
    }

    /// Must it finish for another?
    #[must_use]
    pub fn terminates(&self, uid: &str) -> bool {
        let mut all = self.all.iter();
        all.any(|it| it.cause.evicts() && *it.victim.uid == *uid)
    }

    /// The reserved memory that the conditions of pods announce.
    pub fn announced(&self) -> impl Iterator<Item = &Reserved> {
        let all = self.reserved.iter();
        all.filter(|it| it.cause != Cause::Reserve)
    }

    /// The reserved memory that the pod's condition announces.
    #[must_use]
    pub fn reserved_for(&self, uid: &str) -> Option<&Reserved> {
        let mut conditions = self.announced();
        conditions.find(|it| *it.pod.uid == *uid)
    }

    /// Are there neither demands nor announced memory?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty() && self.announced().next().is_none()
    }
}
