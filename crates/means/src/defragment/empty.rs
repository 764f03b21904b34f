//! Empties nearly empty nodes, so that an autoscaler can remove them: all pods of one node move to fuller ones, as for
//! defragmentation.
//!
//! A node is thought of if less than half of its GPU memory is taken, all of its pods may move, and none of them is
//! new ([`STEADY`]). The emptiest with a plan is emptied, one node at a time, and only while no pod waits. All
//! replacements fit at the same time on nodes that are fuller and hold pods: each time there is a node less in use, so that
//! no two nodes empty into each other. A node that was emptied rests ([`REST`]).
//!
//! Pods of DaemonSets and kubelets without a request for GPU memory stay. Any other pod that may not move keeps the
//! node as it is. The ledger does not know which nodes an autoscaler may remove.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_books::{Beneficiary, Budget, HashMap, Node, Uid, doubled};
use gpustow_pack::Mib;

use super::Move;
use crate::parts::Parts;
use crate::sight::Sight;

/// The seconds that every pod of a node must have run.
const STEADY: i64 = 600;
/// Thousandths of its GPU memory that are taken of a nearly empty node: fewer than that.
const NEARLY_EMPTY: u64 = 500;
/// Between two rounds over all nodes.
const PAUSE: Duration = Duration::from_secs(60);
/// A node that was emptied is not emptied again for so long: its pods may have come back, or no autoscaler removes it. The
/// time doubles with each attempt.
const REST: Duration = Duration::from_secs(3600);
const LONGEST_REST: Duration = Duration::from_secs(16 * 3600);

/// A node that is emptied.
#[derive(Clone, Debug)]
pub struct Emptying {
    /// Which.
    pub node: Arc<str>,
    /// The pods that are to be evicted still.
    pub moves: Vec<Move>,
}

/// The state between two looks.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// When the next round begins.
    next: Duration,
    /// Nodes that are left in this one, the emptiest last.
    left: Vec<Arc<str>>,
    /// Until when nodes rest, and how often they were emptied.
    rests: HashMap<Arc<str>, (Duration, u32)>,
}

impl Rounds {
    /// Begins to empty the emptiest node with a suitable plan, and keeps the room for all replacements. The plan moves
    /// at most `most` pods, and disruption budgets protect none of them.
    pub(super) fn go_on(&mut self, parts: &mut Parts, most: usize) {
        let (sight, mut budget) = (parts.sight(), Budget::of_look());
        if !sight.may_begin_to_empty() {
            return;
        }
        let may = |moves: &[Move]| {
            let pods = moves.iter().map(|it| &it.pod);
            moves.len() <= most.min(sight.config.empty_at_once)
                && sight.books.protected(pods).is_empty()
        };
        let next = self.next(&sight, may, &mut budget);
        sight.count_spent(budget.spent());
        if let Some(Emptying { node, moves }) = next {
            parts.keep_replacements(moves, &Beneficiary::Node(node.clone()));
            self.note(node, parts.now);
        }
    }

    fn next(
        &mut self,
        sight: &Sight<'_>,
        may: impl Fn(&[Move]) -> bool,
        budget: &mut Budget,
    ) -> Option<Emptying> {
        if self.left.is_empty() && self.next <= sight.now {
            self.next = sight.now + PAUSE;
            let rests = |name: &str| self.rests.get(name).is_some_and(|it| it.0 > sight.now);
            self.left = sight.nearly_empty(rests, budget);
        }
        while let Some(node) = self.left.pop() {
            let is_first = budget.is_whole();
            let moves = match budget.is_spent() {
                true => None,
                false => sight.moves_off_node(&node, budget),
            };
            if let Some(moves) = moves.filter(|moves| may(moves)) {
                return Some(Emptying { node, moves });
            }
            if budget.is_spent() {
                // A node that a whole look is not enough for is left out.
                if !is_first {
                    self.left.push(node);
                }
                return None;
            }
        }
        None
    }

    /// The node is gone: another of its name begins afresh.
    pub(super) fn forget(&mut self, node: &str) {
        self.rests.swap_remove(node);
    }

    fn note(&mut self, node: Arc<str>, now: Duration) {
        let (until, times) = self.rests.entry(node).or_default();
        *until = now + doubled(REST, *times, LONGEST_REST);
        *times += 1;
    }
}

impl Sight<'_> {
    /// The node that is emptied, as long as that is of use and harms no pod.
    pub fn emptying(&self) -> Option<Emptying> {
        let (name, kept) = self.earmarks.emptied().filter(|_| self.may_empty())?;
        let node = self.may_be_emptied(name)?;
        let pods = node.bound().keys().filter_map(|uid| self.books.pod(uid));
        let mut pods: Vec<_> = pods.filter(|pod| !stays(pod) && !pod.deleting).collect();
        pods.sort_unstable_by_key(|pod| &pod.uid);
        let moves = pods.into_iter().map(|pod| {
            let earmark = kept.get(&pod.uid).filter(|_| self.may_leave(pod))?;
            self.check(earmark.node()).ok()?;
            Some(Move {
                pod: pod.clone(),
                from: pod.assignment.as_ref()?.as_ref().ok()?.charges.clone(),
                node: earmark.node().clone(),
                cards: earmark.cards().to_vec(),
            })
        });
        Some(Emptying {
            node: name.clone(),
            moves: moves.collect::<Option<_>>()?,
        })
    }

    /// The node that would be emptied first, and the moves of its pods; none while a pod waits. The answer considers
    /// neither budgets for disruptions nor the rest of nodes.
    pub fn would_empty(&self) -> Option<Emptying> {
        let first = Rounds::default().next(self, |_| true, &mut Budget::of_look());
        first.filter(|_| self.may_empty())
    }

    fn may_begin_to_empty(&self) -> bool {
        self.may_empty() && !self.earmarks.awaits_replacements()
    }

    /// May a node be emptied now at all? A replacement that is queued for a moment is no pod that waits.
    fn may_empty(&self) -> bool {
        let comes = |uid: &Uid| {
            let pod = self.books.pod(uid).filter(|pod| pod.queued);
            pod.is_some_and(|pod| self.earmarks.left_emptied(pod))
        };
        let is_on = self.config.defragment && self.config.empty_nodes;
        is_on && self.queue.waiting().turns().all(|turn| comes(turn.uid()))
    }
}

impl Sight<'_> {
    /// The nodes that could be emptied, in order of the taken share of their GPU memory, the emptiest last.
    fn nearly_empty(&self, rests: impl Fn(&str) -> bool, budget: &mut Budget) -> Vec<Arc<str>> {
        budget.charge(self.books.nodes().len() / 8);
        let all = self.books.nodes();
        let all = all.filter(|(_, node)| (1..NEARLY_EMPTY).contains(&taken(node)));
        let all = all.filter(|(name, _)| !rests(name) && self.pods_that_move(name).is_some());
        let mut all: Vec<_> = all
            .map(|(name, node)| (taken(node), name.clone()))
            .collect();
        all.sort_unstable_by(|one, other| other.cmp(one));
        all.into_iter().map(|(_, name)| name).collect()
    }

    /// Is the first node fuller, and are there pods which request GPU memory and stay?
    pub(crate) fn is_fuller(&self, name: &str, than: &str) -> bool {
        let (Some(node), Some(other)) = (self.books.node(name), self.books.node(than)) else {
            return false;
        };
        let pods = || node.bound().keys().filter_map(|uid| self.books.pod(uid));
        (taken(node), name) > (taken(other), than)
            && pods().any(|pod| pod.requests_memory() && !pod.deleting)
    }

    /// How all pods leave the node.
    fn moves_off_node(&self, name: &str, budget: &mut Budget) -> Option<Vec<Move>> {
        let pods = self.pods_that_move(name)?;
        budget.charge(pods.len());
        self.moves_off(name, &pods, budget)
    }

    /// The pods of a node, the largest first, if all of them may move.
    fn pods_that_move(&self, name: &str) -> Option<Vec<&Arc<PodFacts>>> {
        let node = self.may_be_emptied(name)?;
        let pods = node.bound().keys().filter_map(|uid| self.books.pod(uid));
        let mut pods: Vec<_> = pods.filter(|pod| !stays(pod)).collect();
        let size = |pod: &PodFacts| pod.asks.request().map(|request| request.in_sum());
        pods.sort_by(|one, other| (size(other), &one.uid).cmp(&(size(one), &other.uid)));
        (!pods.is_empty() && pods.iter().all(|pod| self.may_leave(pod))).then_some(pods)
    }

    /// The node, if its report is fresh, and nothing is on its way there.
    fn may_be_emptied(&self, name: &str) -> Option<&Node> {
        self.check(name).ok()?;
        let node = self.books.node(name)?;
        let is_open = node.facts().is_some_and(|facts| !facts.cordoned);
        let is_calm = node.shares().count() == node.bound().len();
        let is_kept = self.earmarks.holders(name).next().is_some();
        (is_open && is_calm && !is_kept).then_some(node)
    }

    fn may_leave(&self, pod: &PodFacts) -> bool {
        let ran = self.unix.map_or(0, |unix| unix.saturating_sub(pod.started));
        let is_alone = self.books.is_disrupted_alone(pod);
        let holds = pod.requests_memory() && matches!(pod.assignment, Some(Ok(_)));
        let ends = pod.deleting || pod.released;
        pod.evictable.is_some() && is_alone && holds && !pod.tied && !ends && ran >= STEADY
    }
}

/// Does the pod keep no node from being removed?
fn stays(pod: &PodFacts) -> bool {
    pod.goes_with_node && pod.asks.is_nothing()
}

/// Thousandths of its GPU memory that are not free.
fn taken(node: &Node) -> u64 {
    let cards = &node.view().cards;
    let all: Mib = cards.iter().map(|card| card.capacity).sum();
    let taken: Mib = cards
        .iter()
        .map(|card| card.capacity.minus(card.free))
        .sum();
    taken.0.saturating_mul(1000) / all.0.max(1)
}
