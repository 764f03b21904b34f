//! A search for many pods over many nodes, in pieces: what one look costs is bounded, and the next goes on where it
//! stopped.
//!
//! A round takes a list of pods, in the order in which they are to be served, and looks at nodes for one after the
//! other. Pods that come later wait for the next round. In a cluster where one look suffices, a look is a round.

use std::sync::Arc;

use super::Plan;
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::Cause;
use crate::parts::Parts;
use crate::sight::Sight;

/// What one node offers to a pod.
pub(crate) enum Offer<R> {
    /// A plan.
    Plan(Plan<R>),
    /// Nothing.
    Nothing,
    /// The pod fits there now: it needs no plan.
    Fits,
}

impl<R> Offer<R> {
    pub(crate) fn of(plan: Option<Plan<R>>) -> Self {
        plan.map_or(Self::Nothing, Self::Plan)
    }
}

/// What all nodes together offer: the least plan.
pub(crate) type Found<R> = (Uid, Offer<R>);

/// A round that is under way.
#[derive(Debug)]
pub(crate) struct Round<R> {
    /// Pods that were not looked at yet, the last one first.
    pods: Vec<Uid>,
    current: Option<Search<R>>,
}

/// The search for one pod.
#[derive(Debug)]
struct Search<R> {
    uid: Uid,
    /// Nodes that were not looked at yet, the last one first.
    nodes: Vec<Arc<str>>,
    best: Option<Plan<R>>,
}

impl<R> Default for Round<R> {
    fn default() -> Self {
        Self {
            pods: Vec::new(),
            current: None,
        }
    }
}

impl<R: Ord> Round<R> {
    /// A round for these pods, in this order.
    pub(crate) fn of(mut pods: Vec<Uid>) -> Self {
        pods.reverse();
        Self {
            pods,
            current: None,
        }
    }

    /// Was everything looked at?
    pub(crate) fn is_over(&self) -> bool {
        self.pods.is_empty() && self.current.is_none()
    }

    /// Goes on until the round is over or one look has cost enough, and pursues the plans. Of one that `is_open`,
    /// kube-scheduler is not known to have offered the node: it is asked.
    pub(crate) fn run(
        &mut self,
        parts: &mut Parts,
        means: Cause,
        nodes: impl Fn(&Sight<'_>, &Uid) -> Option<Vec<Arc<str>>>,
        look: impl Fn(&Sight<'_>, &Uid, &Arc<str>, &mut Budget) -> Offer<R>,
        is_open: impl Fn(&Plan<R>) -> bool,
    ) {
        let mut budget = Budget::of_round();
        while let Some((uid, found)) = {
            let sight = &parts.sight();
            let look = |uid: &Uid, name: &Arc<str>, it: &mut Budget| look(sight, uid, name, it);
            self.go_on(&mut budget, |uid| nodes(sight, uid), look)
        } {
            match found {
                Offer::Plan(plan) if is_open(&plan) => {
                    let sight = parts.sight();
                    let pod = sight.books.pod(&uid);
                    if let Some(open) = pod.map(|pod| sight.evidence(pod, &plan.node)) {
                        parts.ask_for_evidence(&uid, open);
                    }
                }
                Offer::Plan(plan) => parts.pursue(&uid, means, plan),
                Offer::Nothing => parts.all_tried(&uid, means),
                Offer::Fits => {}
            }
        }
        parts.count_spent(budget.spent());
    }

    /// Goes on until the search for one pod ends. None once the round is over or the budget is spent. `nodes` names the
    /// nodes for a pod, or none if the pod needs nothing any more.
    pub(crate) fn go_on(
        &mut self,
        budget: &mut Budget,
        mut nodes: impl FnMut(&Uid) -> Option<Vec<Arc<str>>>,
        mut look: impl FnMut(&Uid, &Arc<str>, &mut Budget) -> Offer<R>,
    ) -> Option<Found<R>> {
        loop {
            let mut search = match self.current.take() {
                Some(search) => search,
                None if budget.is_spent() => return None,
                None => {
                    let uid = self.pods.pop()?;
                    budget.charge(1);
                    let Some(mut nodes) = nodes(&uid) else {
                        continue;
                    };
                    nodes.reverse();
                    let best = None;
                    Search { uid, nodes, best }
                }
            };
            while let Some(name) = search.nodes.last() {
                if budget.is_spent() {
                    self.current = Some(search);
                    return None;
                }
                budget.charge(1);
                match look(&search.uid, name, budget) {
                    Offer::Fits => return Some((search.uid, Offer::Fits)),
                    Offer::Plan(plan) => {
                        if search.best.as_ref().is_none_or(|best| plan < *best) {
                            search.best = Some(plan);
                        }
                    }
                    Offer::Nothing => {}
                }
                search.nodes.pop();
            }
            // It may be some looks old.
            let found = search
                .best
                .map_or(Offer::Nothing, |best| look(&search.uid, &best.node, budget));
            return Some((search.uid, found));
        }
    }
}
