//! Queued pods that the leader should have ungated.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, HashSet, Turn, asks};
use gpustow_means::Sight;
use gpustow_pack::Mib;
use gpustow_queue::Ungate;

/// Pods that are looked at to see whether the leader stalls.
const LOOK_AT: usize = 16;
/// The most kinds that are looked at. Pods with the same request for the same nodes are one kind, and one pod of each
/// is looked at.
const KINDS: usize = 64;

/// Queued pods that the leader should have ungated: see [`crate::Ledger::stalled`].
pub(crate) fn stalled(sight: &Sight<'_>) -> Vec<Arc<PodFacts>> {
    let gated = sight.queue.gated();
    let fits = |turn: &Turn| {
        let pod = sight.books.pod(turn.uid());
        pod.is_some_and(|pod| {
            sight.may_fit_now(pod)
                && sight.has_seats(pod, &mut Budget::of_look())
                && !may_be_reserved_from(sight, pod)
                && !may_be_assumed_instead(sight, pod)
        })
    };
    let waiting = gated.turns();
    let kinds = one_of_each(
        sight,
        waiting.filter_map(|turn| sight.books.pod(turn.uid())),
    );
    let first = kinds.take(KINDS).map(|pod| Turn::of(pod)).filter(fits);
    let first: Vec<Turn> = first.take(LOOK_AT).collect();
    // The choices that this replica made when it led are not the new leader's choices.
    let needs_no_room = |why| matches!(why, Ungate::NotOurs | Ungate::Off);
    let leaving = gated.leaving().filter(|(_, why)| needs_no_room(*why));
    let leaving = leaving.map(|(turn, _)| turn).take(LOOK_AT);
    let turns: BTreeSet<&Turn> = leaving.chain(&first).collect();
    let pods = turns
        .into_iter()
        .filter_map(|turn| sight.books.pod(turn.uid()));
    pods.cloned().collect()
}

/// May the leader have reserved memory for another pod that this one does not get? It writes a condition on the other
/// pod, but for reservations of pods that have waited long.
fn may_be_reserved_from(sight: &Sight<'_>, pod: &PodFacts) -> bool {
    let waits_before = |other: &Arc<PodFacts>| {
        let waits = asks(other) && other.node.is_none() && !other.deleting;
        waits && other.uid != pod.uid && other.priority >= pod.priority
    };
    match sight.config.reserve_after {
        Some(_) => sight.books.pods().any(waits_before),
        None => {
            let mut marked = sight.books.marked();
            marked.any(|other| other.reserved_on.is_some() && waits_before(other))
        }
    }
}

/// May the leader have assumed another pod where this one fits? That is in its memory alone, and one member of a gang
/// after the other may be assumed for as long as the gang waits. kube-scheduler asks about a pod without a gate, so that
/// the extender that it calls leads.
fn may_be_assumed_instead(sight: &Sight<'_>, pod: &PodFacts) -> bool {
    let asked = |other: &&Arc<PodFacts>| {
        let may = asks(other) && other.node.is_none() && !other.released && !other.deleting;
        let called = sight.queue.waiting().is_asker(&other.scheduler);
        may && called && !other.gated && !other.queued && other.uid != pod.uid
    };
    let mut others = one_of_each(sight, sight.books.pods().filter(asked));
    let fits = |other: &Arc<PodFacts>| sight.may_fit_now(other);
    others.by_ref().take(KINDS).any(fits) || others.next().is_some()
}

/// The first of the pods with the same request for the same nodes, if a GPU has enough free memory for them.
fn one_of_each<'p>(
    sight: &Sight<'_>,
    pods: impl Iterator<Item = &'p Arc<PodFacts>>,
) -> impl Iterator<Item = &'p Arc<PodFacts>> {
    let mut seen = HashSet::default();
    pods.filter(move |pod| {
        let least = pod.asks.request().map_or(Mib::ZERO, |it| it.least());
        let kind = (pod.asks.request(), &pod.constraints, &pod.group);
        sight.books.with_room(least).next().is_some() && seen.insert(kind)
    })
}
