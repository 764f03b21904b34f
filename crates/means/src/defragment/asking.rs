//! The check whether a pod waits for memory that is free in pieces. It looks at one node after the other, within the
//! budget of a look.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Evidence, Reason, Uid};
use gpustow_pack::Mib;

use crate::preempt::Site;
use crate::sight::Sight;

/// The question under way.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) uid: Uid,
    /// The clock of gains before the first node was looked at.
    pub(super) began: u64,
    /// Nodes that are left.
    nodes: Vec<Arc<str>>,
    /// The first round is over.
    is_second: bool,
    /// The sum of the free memory of the nodes so far.
    free: Mib,
    /// A node could hold the pod if it were empty.
    could: bool,
    /// Room that others leave, or could be made to leave, is waited for.
    patient: bool,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    GoesOn,
    Yes,
    No,
}

impl Asking {
    pub(super) fn new(uid: Uid, began: u64, nodes: Vec<Arc<str>>, patient: bool) -> Self {
        Self {
            uid,
            began,
            nodes,
            is_second: false,
            free: Mib::ZERO,
            could: false,
            patient,
        }
    }
}

impl Sight<'_> {
    /// Does the pod wait although the sum of free memory suffices and a node could hold it if it were empty? False if
    /// leaving pods make the room, or if other pods may be preempted for it.
    pub fn waits_for_fragmented(&self, pod: &Arc<PodFacts>) -> bool {
        let mut asking = Asking::new(pod.uid.clone(), 0, self.node_names(), true);
        let mut budget = Budget::of(self.config);
        pod.may_be_placed()
            && pod.requests_memory()
            && self.ask_on(pod, &mut asking, &mut budget) == Asked::Yes
    }

    /// Goes on with the question whether the pod waits for pieces.
    pub(super) fn ask_on(
        &self,
        pod: &Arc<PodFacts>,
        asking: &mut Asking,
        budget: &mut Budget,
    ) -> Asked {
        while let Some(name) = asking.nodes.pop() {
            let is_first = budget.is_whole();
            let served = !budget.is_spent() && self.ask_of(pod, &name, asking, budget);
            if served {
                return Asked::No;
            }
            // A node that a whole look is not enough for is left out.
            if budget.is_spent() {
                if !is_first {
                    asking.nodes.push(name);
                }
                return Asked::GoesOn;
            }
        }
        match pod.asks.request() {
            Some(request) if asking.could && request.in_sum().0 <= asking.free.0 => {}
            _ => return Asked::No,
        }
        if asking.is_second {
            return Asked::Yes;
        }
        asking.is_second = true;
        asking.nodes = self.node_names();
        self.ask_on(pod, asking, budget)
    }

    /// Adds the findings of one node. True if the pod is served there without any move. The cheap checks come first.
    /// The first round adds up free memory, and the second checks whether the pod is served.
    fn ask_of(
        &self,
        pod: &Arc<PodFacts>,
        name: &Arc<str>,
        asking: &mut Asking,
        budget: &mut Budget,
    ) -> bool {
        budget.charge(1);
        let Some(site) = self.site(pod, name) else {
            return false;
        };
        budget.charge(site.node.bound().len() / 8);
        let evidence = self.evidence(pod, name);
        let is_refused = evidence == Evidence::Rejected;
        if asking.is_second {
            let is_open = !is_refused && self.books.refused_in_tree(name, pod).is_none();
            return is_open && asking.patient && self.is_served(&site, evidence, budget);
        }
        if self.books.excluded(name, &pod.constraints).is_some() {
            return false;
        }
        if !is_refused && self.may_fit(name, pod) {
            let found = self.trial().choose(pod, name, budget);
            // True, too, if the budget is spent before the answer.
            if !matches!(found, Err(reason) if reason != Reason::NotYet) && !budget.is_spent() {
                return true;
            }
        }
        if !asking.could {
            asking.could = self.could_hold(name, pod, budget);
        }
        if !budget.is_spent() {
            asking.free = asking.free + site.node.view().free();
        }
        false
    }

    /// Does room come without any move, from pods that leave or from pods that may be preempted?
    fn is_served(&self, site: &Site<'_>, evidence: Evidence, budget: &mut Budget) -> bool {
        let leave = !site.leaving.is_empty();
        if leave && self.reprieve(site, &[], &[], None, budget).is_some() {
            return true;
        }
        let is_asked = evidence == Evidence::Short || self.config.preempt_fragmented;
        is_asked && site.pod.preempts && self.preempt(site.pod, site.name, &[], budget).is_some()
    }
}
