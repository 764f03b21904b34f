//! The room of a node that is kept for others.

use std::cmp::Reverse;

use gpustow_api::PodFacts;

use super::{Host, Left, Trial};
use crate::books::Uid;
use crate::budget::Budget;
use crate::earmarks::{Cause, Earmark, Holder};
use crate::known::Known;
use crate::reason::Reason;

/// A pod for which room is earmarked, made or not.
#[derive(Clone, Copy)]
struct Other<'a> {
    pod: &'a PodFacts,
    /// None if only a nomination earmarks it.
    earmark: Option<&'a Earmark>,
}

impl<'a> Other<'a> {
    /// The earmark, if `is_it` accepts its cause.
    fn earmark_if(&self, is_it: impl Fn(Cause) -> bool) -> Option<&'a Earmark> {
        self.earmark.filter(|it| is_it(it.cause()))
    }

    fn reclaim(&self) -> Option<&'a Earmark> {
        self.earmark_if(|cause| cause == Cause::Reclaim)
    }
}

impl Known<'_> {
    /// Pods that are not assumed, for which room is earmarked on a node, and that the pod must make way for.
    fn others_kept<'s>(
        &'s self,
        name: &'s str,
        pod: &'s PodFacts,
    ) -> impl Iterator<Item = Other<'s>> {
        let counts = move |holder: &&Holder| match holder {
            Holder::Pod(uid) => *uid != pod.uid && self.books.assumed(uid).is_none(),
            Holder::Replacement(_) => !self.earmarks.is_replaced_by(holder, pod),
        };
        let others = self.earmarks.holders(name).filter(counts);
        let others = others.filter_map(|holder| {
            let earmark = self.earmarks.earmark_of(holder);
            let pod = self.earmarks.pod_of(holder, self.books)?;
            Some(Other { pod, earmark })
        });
        // Room for which a pod was woken is not for pods of lower priority. Among equals the first that asks gets it.
        let woken = self.woken_for(name).filter_map(|uid| self.books.pod(uid));
        let woken = woken.filter(|it| it.priority > pod.priority);
        let woken = woken.map(|pod| Other { pod, earmark: None });
        others
            .chain(woken)
            // Of room that is offered to several ungated pods of one priority, the first that asks has its part.
            .filter(move |it| {
                let equal = |cause| cause == Cause::Ungated && it.pod.priority == pod.priority;
                it.earmark_if(equal).is_none() || !self.offered.is_for(&pod.uid, name)
            })
            .filter(|it| it.pod.priority >= pod.priority && !it.pod.gated && !it.pod.deleting)
            // Room for one pod of a gang is for any of them: they are placed together.
            .filter(|it| !self.is_of_gang(pod, it.pod))
            .filter(|it| !self.may_take_reservation(pod, it.pod))
    }

    /// Is room of the node kept from the pod?
    #[inline]
    pub fn is_kept_from(&self, name: &str, pod: &PodFacts) -> bool {
        let keeps = !self.earmarks.is_empty() || !self.offered.is_empty();
        keeps && self.others_kept(name, pod).next().is_some()
    }

    /// Why the room there is not for the pod.
    pub(super) fn kept_because(&self, name: &str, pod: &PodFacts) -> Reason {
        let others = || self.others_kept(name, pod);
        let reserves = |cause| cause == Cause::Reserve;
        match () {
            () if others().all(|it| it.reclaim().is_some()) => Reason::Reclaimed,
            () if others().any(|it| it.earmark_if(reserves).is_some()) => Reason::Reserved,
            () => Reason::Nominated,
        }
    }
}

impl<'k> Trial<'k> {
    /// Reduces `left` by the needs of the pods for which room is kept there. Memory of pods that leave, and memory that
    /// is reclaimed for them, covers these needs first. False if no room is kept from the `asker`.
    pub(super) fn keep(
        &self,
        left: &mut Left,
        name: &str,
        asker: &PodFacts,
        budget: &mut Budget,
    ) -> Result<bool, Reason> {
        let others = self.known.others_kept(name, asker);
        let mut kept: Vec<_> = others.filter(|it| !self.has_left(&it.pod.uid)).collect();
        kept.sort_unstable_by_key(|it| (Reverse(it.pod.priority), it.pod.created, &it.pod.uid));
        let is_kept = !kept.is_empty();
        // Reclaimed memory covers no needs of other pods than those for which it is reclaimed: it may not come back.
        let reclaims = kept.iter().any(|it| it.reclaim().is_some());
        let all = reclaims.then(|| kept.clone());
        kept.retain(|it| it.reclaim().is_none());
        let others = Some(kept).filter(|it| !it.is_empty());
        for kept in others.into_iter().chain(all) {
            // Where a pod does not fit, its victims may be gone and still be in the agent's last report.
            for ended in [self.ended, true] {
                let mut later = self.once_left(name, &kept, ended);
                let spot = later.spot(name, asker, budget)?;
                if self.starts {
                    // Current starts are over by then; the pods for which room is kept start.
                    later.count_starts(spot);
                }
                let all_fit = later.come(spot, &kept, budget)?;
                left.cap(later.at(spot));
                if all_fit || ended {
                    break;
                }
            }
        }
        Ok(is_kept)
    }

    /// The `kept` pods that fit come to the node. False if one does not fit.
    fn come(&mut self, at: usize, kept: &[Other<'_>], budget: &mut Budget) -> Result<bool, Reason> {
        let (node, mut all_fit) = (self.spots[at].node, true);
        for Other { pod, earmark } in kept {
            let charges = match earmark.filter(|it| !it.cards().is_empty()) {
                Some(earmark) => node.charges(earmark.cards()),
                // kube-scheduler keeps CPU and memory of the host for pods that it nominated, and for no others.
                None => match self.fit_at(at, pod, None, Host::Beside, budget) {
                    Ok(choice) => choice.placement.charges,
                    Err(Reason::NotYet) => return Err(Reason::NotYet),
                    Err(_) => {
                        all_fit = false;
                        continue;
                    }
                },
            };
            self.take_at(at, pod, &charges);
        }
        Ok(all_fit)
    }

    /// This what-if after pods have left the node, for a `kept` pod or anyway, and borrowers have returned reclaimed
    /// memory. A late pod does not leave, nor does it give memory back.
    fn once_left(&self, name: &str, kept: &[Other<'_>], ended: bool) -> Trial<'k> {
        let stays = |uid: &Uid| {
            let pod = self.known.books.pod(uid);
            pod.is_none_or(|pod| self.known.is_late(pod))
        };
        let called = kept.iter().filter_map(Other::reclaim).flat_map(|earmark| {
            let back = earmark.waits_for().iter().filter(|uid| !stays(uid));
            back.flat_map(move |uid| {
                let cards = earmark.cards().iter();
                cards.map(move |(card, _)| (card.clone(), Some(uid.clone())))
            })
        });
        let mut later = self.known.trial().keeping_nothing();
        (later.ended, later.repaid) = (ended, self.repaid.clone());
        later.repaid.extend(called);
        let evictions = kept.iter().filter_map(|it| it.earmark_if(Cause::evicts));
        let ending = evictions
            .flat_map(Earmark::waits_for)
            .filter(|uid| !stays(uid));
        later.leave(self.gone.iter().chain(ending).cloned());
        later.leave(self.known.leaving(name));
        later
    }
}
