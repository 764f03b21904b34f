//! A search for many pods over many nodes, in pieces. The cost of one look is bounded, and the next look goes on where
//! it stopped.
//!
//! A round takes a list of pods, in the order in which they are to be served, and looks at nodes for one after the
//! other. Pods that come later wait for the next round. In a cluster where one look suffices, a look is a round.

use std::sync::Arc;

use gpustow_books::{Budget, Cause, Uid};

use crate::means::Plan;
use crate::parts::Parts;
use crate::sight::Sight;

/// The offer of one node to a pod.
pub(crate) enum Offer<R> {
    /// A plan.
    Plan(Plan<R>),
    /// Nothing.
    Nothing,
    /// The pod fits there now, and does not need a plan.
    Fits,
    /// Others make the room for the pod, or it needs none any more.
    Served,
    /// The budget is spent: the next look begins with this node again.
    Spent,
}

impl<R> Offer<R> {
    pub(crate) fn of(plan: Option<Plan<R>>) -> Self {
        plan.map_or(Self::Nothing, Self::Plan)
    }
}

/// The offer of all nodes together: the least plan.
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
    /// It took more than one look.
    is_long: bool,
    /// A node was left out, because one look was not enough for it.
    is_cut: bool,
}

/// How searches for pods have ended.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// A plan is pursued.
    pub(super) pursued: Vec<Uid>,
    /// The pod fits.
    pub fit: Vec<Uid>,
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

    /// Goes on until the round is over or the budget is spent, and pursues the plans. Of one that `is_open`, kube-scheduler is
    /// not known to have offered the node: it is asked.
    pub(crate) fn run(
        &mut self,
        parts: &mut Parts,
        means: Cause,
        mut budget: Budget,
        nodes: impl Fn(&Sight<'_>, &Uid) -> Option<Vec<Arc<str>>>,
        look: impl Fn(&Sight<'_>, Candidate<'_, R>, &mut Budget) -> Offer<R>,
        is_open: impl Fn(&Plan<R>) -> bool,
    ) -> Ends {
        let mut ends = Ends::default();
        while let Some((uid, found)) = {
            let sight = &parts.sight();
            let look = |asked: Candidate<'_, R>, it: &mut Budget| look(sight, asked, it);
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
                Offer::Plan(plan) => {
                    parts.pursue(&uid, means, plan);
                    ends.pursued.push(uid);
                }
                Offer::Nothing => parts.all_tried(&uid, means),
                Offer::Fits => ends.fit.push(uid),
                Offer::Served => {}
                Offer::Spent => {
                    parts.all_tried(&uid, means);
                    parts.cut.push(uid);
                }
            }
        }
        parts.count_spent(budget.spent());
        ends
    }

    /// Goes on until the search for one pod ends. None once the round is over or the budget is spent. `nodes` names the
    /// nodes for a pod, or none if the pod needs nothing any more. The offer is [`Offer::Spent`] if one look was not
    /// enough for a node and no plan was found.
    pub(crate) fn go_on(
        &mut self,
        budget: &mut Budget,
        mut nodes: impl FnMut(&Uid) -> Option<Vec<Arc<str>>>,
        mut look: impl FnMut(Candidate<'_, R>, &mut Budget) -> Offer<R>,
    ) -> Option<Found<R>> {
        loop {
            let mut search = match self.current.take() {
                Some(search) => search,
                None if budget.is_spent() => return None,
                None => {
                    let uid = self.pods.pop()?;
                    budget.charge(1);
                    let Some(nodes) = nodes(&uid) else {
                        continue;
                    };
                    Search::new(uid, nodes)
                }
            };
            match search.go_on(budget, &mut look) {
                None => {
                    search.is_long = true;
                    self.current = Some(search);
                    return None;
                }
                Some(found) => return Some((search.uid, found)),
            }
        }
    }
}

/// One pod and one node, and the best that others have offered.
pub(crate) struct Candidate<'a, R> {
    pub uid: &'a Uid,
    pub node: &'a Arc<str>,
    pub best: Option<&'a Plan<R>>,
}

impl<R: Ord> Search<R> {
    fn new(uid: Uid, mut nodes: Vec<Arc<str>>) -> Self {
        nodes.reverse();
        Self {
            uid,
            nodes,
            best: None,
            is_long: false,
            is_cut: false,
        }
    }

    /// None if the budget is spent before the end.
    fn go_on(
        &mut self,
        budget: &mut Budget,
        look: &mut impl FnMut(Candidate<'_, R>, &mut Budget) -> Offer<R>,
    ) -> Option<Offer<R>> {
        while let Some(node) = self.nodes.last() {
            if budget.is_spent() {
                return None;
            }
            let is_first = budget.is_whole();
            budget.charge_node();
            let best = self.best.as_ref();
            let uid = &self.uid;
            match look(Candidate { uid, node, best }, budget) {
                // A node that a whole look is not enough for is left out.
                Offer::Spent if is_first => self.is_cut = true,
                Offer::Spent => return None,
                Offer::Plan(plan) if self.best.as_ref().is_none_or(|best| plan < *best) => {
                    self.best = Some(plan);
                }
                Offer::Plan(_) | Offer::Nothing => {}
                ends => return Some(ends),
            }
            self.nodes.pop();
        }
        let Some(plan) = self.best.take() else {
            return Some(match self.is_cut {
                true => Offer::Spent,
                false => Offer::Nothing,
            });
        };
        // The node may have changed since it was looked at.
        Some(match self.is_long {
            true => {
                let (uid, node, best) = (&self.uid, &plan.node, None);
                look(Candidate { uid, node, best }, &mut budget.again())
            }
            false => Offer::Plan(plan),
        })
    }
}
