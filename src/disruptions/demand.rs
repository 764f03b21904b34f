//! What one pod must do for another, and why.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts, config, names};
use gpustow_ledger::{
    self as ledger, Borrower, Emptying, Harm, Ledger, OverLimit, Reserved, Shortage,
};
use gpustow_pack::Mib;
use strum::{IntoStaticStr, VariantArray};
use tokio::time::sleep;

use super::{TURN, Uid};
use crate::app::App;

/// Nodes that are looked at before filter has its turn.
const AT_ONCE: usize = 8;

/// Why memory is reserved or pods are disrupted; as a string, the `cause` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Cause {
    /// A pod whose request fits waits for memory that others use beyond theirs.
    Reclaim,
    /// A pod cannot grow to its request, or the headroom is not free, because others use more than they requested.
    Pressure,
    /// A pod has been over its limit for too long.
    OverLimit,
    /// A pod of higher priority waits for memory that is fragmented.
    Preempt,
    /// A pod waits for fragmented memory, or a node is nearly empty, and others can run elsewhere.
    Defragment,
    /// A pod has waited long.
    Reserve,
}

impl Cause {
    /// What is done for it.
    pub(crate) fn actions(self) -> &'static [Action] {
        match self {
            Self::Reclaim | Self::Pressure | Self::OverLimit => {
                &[Action::Event, Action::KillProcess, Action::Evict]
            }
            Self::Preempt => &[Action::Delete],
            Self::Defragment => &[Action::Evict],
            Self::Reserve => &[Action::MarkNode],
        }
    }
}

/// What is done to a pod or a node, the mildest first; as a string, the `action` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Action {
    /// The pod is told.
    Event,
    /// Its agent ends processes of it that use GPUs.
    KillProcess,
    /// It is evicted, as disruption budgets allow.
    Evict,
    /// It is deleted.
    Delete,
    /// Autoscalers are told about the node.
    MarkNode,
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

/// For whom a pod is disrupted.
#[derive(Clone, Debug)]
pub(super) enum Whom {
    Pod(Arc<PodFacts>),
    /// So much must be free.
    Headroom(Mib),
    /// It is over its limit.
    Limit,
    /// Its node is emptied.
    Autoscaler,
}

impl Whom {
    pub(super) fn pod(&self) -> Option<&Arc<PodFacts>> {
        match self {
            Self::Pod(pod) => Some(pod),
            Self::Headroom(_) | Self::Limit | Self::Autoscaler => None,
        }
    }

    pub(super) fn uid(&self) -> Option<&Uid> {
        self.pod().map(|pod| &pod.uid)
    }
}

/// A pod that must do something for another.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub(super) victim: Arc<PodFacts>,
    pub(super) cause: Cause,
    pub(super) action: Action,
    pub(super) node: Arc<str>,
    pub(super) whom: Whom,
    /// For all pods of this gang: all that is demanded for it is done, or nothing.
    pub(super) gang: Option<Group>,
    /// What it uses too much of.
    pub(super) cards: Vec<Borrower>,
}

impl Demand {
    /// The condition on the victim that says so.
    pub(super) fn condition(&self) -> &'static str {
        match self.cause {
            Cause::Preempt | Cause::Defragment => names::DISRUPTION_TARGET,
            _ => names::RECLAIM_CONDITION,
        }
    }

    /// Does the victim have a condition that says so?
    pub(super) fn is_marked(&self) -> bool {
        if self.condition() == names::DISRUPTION_TARGET {
            return self.victim.preempted;
        }
        let asked = self.victim.asked_back;
        asked.is_some_and(|done| Action::from(done) >= self.action)
    }

    /// The reasons of that condition, in the order in which they are written.
    pub(super) fn reasons(&self) -> &'static [&'static str] {
        match (self.cause, self.action) {
            (Cause::Preempt, _) => &[names::PREEMPTED],
            (Cause::Defragment, _) => &[names::DEFRAGMENTED],
            (_, Action::KillProcess) => &["Event", "KillProcess"],
            (_, Action::Evict) => &["Event", "Evict"],
            _ => &["Event"],
        }
    }

    /// Does the victim terminate by it?
    pub(super) fn terminates(&self) -> bool {
        matches!(self.action, Action::Evict | Action::Delete)
    }
}

/// What is demanded now.
#[derive(Debug, Default)]
pub(super) struct Demands {
    /// What is reserved for waiting pods.
    pub(super) reserved: Vec<Reserved>,
    /// One per pod that gives memory back, for a pod that waits before all others; then those that must finish.
    pub(super) all: Vec<Demand>,
    reclaimed: BTreeSet<Uid>,
}

impl Demands {
    /// As the ledger sees it now, with these GPUs under pressure.
    pub(super) fn of(ledger: &Ledger, short: Vec<Shortage>, now: Duration) -> Self {
        let mut demands = Self::default();
        let mut reclaim = |cause, node: &Arc<str>, whom: Whom, borrowers: Vec<Borrower>| {
            for borrower in borrowers {
                demands.add(Demand {
                    victim: borrower.pod.clone(),
                    cause,
                    action: ledger.action_on(&borrower.pod).into(),
                    node: node.clone(),
                    whom: whom.clone(),
                    gang: None,
                    cards: vec![borrower],
                });
            }
        };
        let backs = ledger.reclaims(now);
        for back in &backs {
            let whom = Whom::Pod(back.pod.clone());
            reclaim(Cause::Reclaim, &back.node, whom, back.borrowers.clone());
        }
        for short in short {
            let whom = match short.harm {
                Harm::Neighbour(pod) => Whom::Pod(pod),
                Harm::Headroom(mib) => Whom::Headroom(mib),
            };
            reclaim(Cause::Pressure, &short.node, whom, short.victims);
        }
        for OverLimit { node, victim, .. } in ledger.over_limits(now) {
            reclaim(Cause::OverLimit, &node, Whom::Limit, vec![victim]);
        }
        demands.reserved = backs;
        for reserved in ledger.preemptions(now) {
            let (cause, action) = match reserved.cause {
                ledger::Cause::Defragment => (Cause::Defragment, Action::Evict),
                _ => (Cause::Preempt, Action::Delete),
            };
            demands
                .all
                .extend(reserved.victims.iter().map(|victim| Demand {
                    victim: victim.clone(),
                    cause,
                    action,
                    // Those of a gang that finish together may be on nodes where nothing is reserved.
                    node: victim.node.as_ref().unwrap_or(&reserved.node).clone(),
                    whom: Whom::Pod(reserved.pod.clone()),
                    gang: reserved.gang.clone(),
                    cards: Vec::new(),
                }));
            demands.reserved.push(reserved);
        }
        if let Some(Emptying { node, moves }) = ledger.emptying(now) {
            demands.all.extend(moves.into_iter().map(|it| Demand {
                victim: it.pod,
                cause: Cause::Defragment,
                action: Action::Evict,
                node: node.clone(),
                whom: Whom::Autoscaler,
                gang: None,
                cards: Vec::new(),
            }));
        }
        demands.reserved.extend(ledger.reservations());
        demands
    }

    /// A pod that gives memory back is asked once, for all of its GPUs.
    fn add(&mut self, mut demand: Demand) {
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

    /// What is demanded for each gang.
    pub(super) fn by_gang(&self) -> BTreeMap<Group, Vec<&Demand>> {
        let mut all = BTreeMap::<_, Vec<_>>::new();
        for demand in &self.all {
            if let Some(gang) = &demand.gang {
                all.entry(gang.clone()).or_default().push(demand);
            }
        }
        all
    }

    /// Must this pod give memory back?
    pub(super) fn reclaims_from(&self, uid: &str) -> bool {
        self.reclaimed.contains(uid)
    }

    /// Must the same pod still do the same for the same beneficiary?
    pub(super) fn contains(&self, demand: &Demand) -> bool {
        let mut all = self.all.iter();
        all.any(|it| {
            it.condition() == demand.condition()
                && it.victim.uid == demand.victim.uid
                && it.whom.uid() == demand.whom.uid()
        })
    }

    /// Must it finish for another?
    pub(super) fn terminates(&self, uid: &str) -> bool {
        let mut all = self.all.iter();
        all.any(|it| it.condition() == names::DISRUPTION_TARGET && *it.victim.uid == *uid)
    }

    /// What conditions of pods say is reserved for them.
    pub(super) fn announced(&self) -> impl Iterator<Item = &Reserved> {
        let all = self.reserved.iter();
        all.filter(|it| it.cause != ledger::Cause::Reserve)
    }

    /// What the pod's condition says is reserved for it.
    pub(super) fn reserved_for(&self, uid: &str) -> Option<&Reserved> {
        let mut conditions = self.announced();
        conditions.find(|it| *it.pod.uid == *uid)
    }

    /// Must no pod be told anything?
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.announced().next().is_none()
    }
}

/// The GPUs under pressure, by node and UUID.
pub(super) async fn under_pressure(app: &App) -> Vec<Shortage> {
    let nodes = app.ledger.lock().may_be_short();
    let mut all = Vec::new();
    for (index, few) in nodes.chunks(AT_ONCE).enumerate() {
        if index > 0 {
            sleep(TURN).await;
        }
        let now = app.ledger.now();
        let ledger = app.ledger.lock();
        all.extend(few.iter().flat_map(|name| ledger.shortages_on(name, now)));
    }
    all.sort_by(|one, other| (&one.node, &one.uuid).cmp(&(&other.node, &other.uuid)));
    all
}

/// Namespace and name.
pub(super) fn name(pod: &PodFacts) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}
