//! Room that is kept for the successor of a pod that moves: whichever pod of the same controller asks for the same gets
//! it.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::Queue;
use super::earmarks::{Cards, Cause, Earmark, Ended};
use crate::books::{Books, Uid};

/// A pod that is still to be made.
#[derive(Clone, Debug)]
pub(crate) struct Successor {
    /// As it will be when it waits.
    pod: PodFacts,
    /// Whose it will be.
    of: Uid,
    /// The pod for which that one moves.
    whom: Uid,
}

impl Successor {
    fn is(&self, pod: &PodFacts) -> bool {
        let asks = (pod.request.as_ref(), self.pod.request.as_ref());
        let same = matches!(asks, (Ok(one), Ok(other)) if one == other);
        // A pod of another namespace may name the same owner.
        let same = same && pod.namespace == self.pod.namespace && pod.priority == self.pod.priority;
        same && pod.movable.is_some() && pod.movable == self.pod.movable
    }
}

impl Queue {
    /// The pod for which room is kept under this UID, made or not.
    pub(crate) fn keeper<'a>(&'a self, uid: &str, books: &'a Books) -> Option<&'a PodFacts> {
        let made = || books.pod(uid).map(|pod| &**pod);
        let successor = self.successors.get(uid);
        successor.map(|it| &it.pod).or_else(made)
    }

    /// Is what is kept under this UID for that pod, which is the successor or as good?
    pub(crate) fn is_successor(&self, uid: &str, pod: &PodFacts) -> bool {
        let successor = self.successors.get(uid);
        successor.is_some_and(|it| it.is(pod))
    }

    /// Keeps room for the successor of a pod that moves for `whom`.
    pub(crate) fn keep_successor(
        &mut self,
        of: &PodFacts,
        whom: &Uid,
        node: &Arc<str>,
        cards: Cards,
        until: Duration,
        books: &Books,
    ) {
        let Ok(request) = &of.request else { return };
        let uid: Uid = format!("successor of {}", of.uid).into();
        let cause = Cause::Replacement;
        let earmark = Earmark::of_cards(node, cause, request, cards, Vec::new(), until);
        self.put(&uid, earmark, books);
        let pod = PodFacts {
            uid: uid.clone(),
            node: None,
            assignment: None,
            deleting: false,
            gone_by: None,
            preempted: false,
            ..of.clone()
        };
        let (of, whom) = (of.uid.clone(), whom.clone());
        self.successors.insert(uid, Successor { pod, of, whom });
    }

    /// Ends what is kept for successors of pods that do not move after all: nothing is kept for whom they would have.
    pub(crate) fn end_needless_successors(&mut self, books: &Books) {
        let stays = |of: &str| books.pod(of).is_some_and(|pod| !pod.deleting);
        let needless = self.successors.iter();
        let needless =
            needless.filter(|(_, it)| stays(&it.of) && !self.is_defragmented_for(&it.whom));
        let needless: Vec<Uid> = needless.map(|(uid, _)| uid.clone()).collect();
        needless
            .iter()
            .for_each(|uid| self.end(uid, Ended::Needless, books));
    }

    /// A pod has been bound: was room kept for it as somebody's successor?
    pub(super) fn successor_came(
        &mut self,
        old: Option<&PodFacts>,
        new: Option<&PodFacts>,
        books: &Books,
    ) {
        let came = new.filter(|_| old.is_none_or(|old| old.node.is_none()));
        let Some((pod, node)) = came.and_then(|pod| Some((pod, pod.node.as_ref()?))) else {
            return;
        };
        let kept = self.successors.iter().filter(|(_, it)| it.is(pod));
        let kept = kept.map(|(uid, _)| {
            let earmark = self.earmark(uid);
            let elsewhere = earmark.is_none_or(|it| it.node() != node);
            let assigned = pod.assignment.iter().flatten();
            let cards = earmark.map(Earmark::cards).unwrap_or_default();
            let others = assigned.flat_map(|it| &it.charges);
            let others = others.filter(|(card, _)| cards.iter().all(|(its, _)| its != card));
            (elsewhere, others.count(), uid.clone())
        });
        if let Some((.., uid)) = kept.min() {
            self.end(&uid, Ended::Taken, books);
        }
    }
}
