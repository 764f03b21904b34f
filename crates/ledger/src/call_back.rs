//! Calling back: what a pod uses of a card beyond its request is lent to it, and is asked back where it keeps
//! a pod off whose request fits by the books.
//!
//! The ledger keeps the place ([`crate::queue`]), says who is to give memory back ([`Ledger::call_backs`]) and
//! wakes the pod once NVML shows the room. It acts on nobody. Nobody who is within its request is ever named,
//! nobody at all while the node's report is stale, and of one card's memory only one pod has some called
//! back at a time. What does not come until the deadline is given up, and another card is tried.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::PodUse;
use gpustow_pack::{Cost, Mib, Refusal, Request};

use crate::books::{Node, Uid};
use crate::budget::Budget;
use crate::queue::{CalledBack, Evidence};
use crate::{Ledger, Reason};

/// Kinds of waiting pods that one look calls memory back for.
const KINDS: usize = 16;
/// The longest that the victims' own time to end puts a deadline off.
const LONGEST_GRACE: Duration = Duration::from_secs(600);

/// Memory that is called back for a pod.
#[derive(Clone, Debug)]
pub struct CallBack {
    /// For whom.
    pub pod: Arc<PodFacts>,
    /// Where.
    pub node: Arc<str>,
    /// When that is given up.
    pub until: Duration,
    /// The cards that the pod is to get, by UUID, and what it will hold of each.
    pub cards: Vec<(Box<str>, Mib)>,
    /// Who is to give memory back, by the report that was last seen: nobody once there is room.
    pub victims: Vec<Borrower>,
}

/// A pod that uses more of a card than it asked for.
#[derive(Clone, Debug)]
pub struct Borrower {
    /// The pod.
    pub pod: Arc<PodFacts>,
    /// The card.
    pub uuid: Box<str>,
    /// What it holds there.
    pub held: Mib,
    /// What it uses there.
    pub used: Mib,
}

/// What is missing of cards, by their index in the view.
type Missing = Vec<(usize, Mib)>;

/// Where memory could be called back for a pod.
struct Plan {
    node: Arc<str>,
    cards: Vec<(Box<str>, Mib)>,
    victims: Vec<Uid>,
    missing: Mib,
    cost: Cost,
}

impl Plan {
    /// Of two plans the one with fewer victims is taken, then the one that asks for less.
    fn order(&self) -> (usize, Mib, Cost, &str) {
        (self.victims.len(), self.missing, self.cost, &self.node)
    }
}

impl Ledger {
    /// Looks after what is called back: ends what has come to its end, asks others where the first did not
    /// suffice, and begins anew for pods that wait. To be called every second or so.
    pub fn call_back(&mut self, now: Duration) {
        if !self.config.call_back {
            return;
        }
        self.expire(now);
        for uid in self.queue.all_called_back() {
            self.look_after(&uid, now);
        }
        let lenders = self.books.nodes().filter(|(_, node)| node.lends());
        let lenders: Vec<Arc<str>> = lenders.map(|(name, _)| name.clone()).collect();
        if lenders.is_empty() {
            return;
        }
        for uid in self.queue.without_room(KINDS, |_| true) {
            let Some(pod) = self.asleep(&uid).filter(|pod| !self.may_fit_now(pod, now)) else {
                continue;
            };
            let kept_before = lenders
                .iter()
                .filter(|name| pod.kept_on == Some((*name).clone()));
            let kept_before: Vec<&str> = kept_before.map(|name| &**name).collect();
            let open = |name: &&str| self.refused_in_tree(name, &pod).is_none();
            let open: Vec<&str> = lenders.iter().map(|name| &**name).filter(open).collect();
            if !self.call_back_for(&pod, &kept_before, now) && !self.call_back_for(&pod, &open, now)
            {
                // Every card was tried: a later look tries them all again.
                self.queue.call_all_again(&uid, now);
            }
        }
    }

    /// What is called back now, and from whom.
    #[must_use]
    pub fn call_backs(&self, now: Duration) -> Vec<CallBack> {
        let all = self.queue.all_called_back();
        all.iter().filter_map(|uid| self.called(uid, now)).collect()
    }

    fn called(&self, uid: &str, now: Duration) -> Option<CallBack> {
        let (name, what) = self.queue.called_back(uid)?;
        let pod = self.books.pod(uid)?;
        Some(CallBack {
            pod: pod.clone(),
            node: name.clone(),
            until: self.queue.kept_until(uid)?,
            cards: what.cards().to_vec(),
            victims: self.victims(pod, name, what, now).unwrap_or_default(),
        })
    }

    /// Those of the chosen who are needed still.
    fn victims(
        &self,
        pod: &PodFacts,
        name: &str,
        what: &CalledBack,
        now: Duration,
    ) -> Option<Vec<Borrower>> {
        self.check(name, now).ok()?;
        let node = self.books.node(name)?;
        let missing = self.missing(pod, name, node, what.cards(), what.victims())?;
        let needed = self.choose_borrowers(node, &missing, what.victims(), true)?;
        let short = missing.iter().filter(|(_, mib)| *mib > Mib::ZERO);
        let short = short.filter_map(|(card, _)| node.gpus().get(*card));
        let lent = short.flat_map(|gpu| node.borrowers(gpu).map(move |it| (gpu, it)));
        let victims = lent.filter(|(_, (uid, ..))| needed.contains(uid));
        let victims = victims.filter_map(|(gpu, (uid, held, used))| {
            let pod = self.books.pod(uid).filter(|pod| !pod.deleting)?.clone();
            let uuid = gpu.uuid.as_str().into();
            Some(Borrower {
                pod,
                uuid,
                held,
                used,
            })
        });
        Some(victims.collect())
    }

    /// Why a node is refused for the pod, if memory may be called back for it there.
    pub(crate) fn refused_because(&self, uid: &str, name: &str, reason: Reason) -> Reason {
        let is_here = || {
            let called = self.queue.called_back(uid);
            called.is_some_and(|(node, _)| **node == *name)
        };
        match reason {
            Reason::Fit(Refusal::NoRoom) if is_here() => Reason::CalledBack,
            other => other,
        }
    }

    /// Calls memory back for a pod that was refused on all of these nodes. False if none of them has any for
    /// it, or the pod has another way.
    pub(crate) fn call_back_for(
        &mut self,
        pod: &PodFacts,
        candidates: &[&str],
        now: Duration,
    ) -> bool {
        let Some(request) = self.may_call_back_for(pod) else {
            return false;
        };
        let mut budget = Budget::of(&self.config);
        let mut best: Option<Plan> = None;
        for name in candidates {
            let Some(plan) = self.plan(pod, &request, name, now, &mut budget) else {
                continue;
            };
            if best.as_ref().is_none_or(|best| plan.order() < best.order()) {
                best = Some(plan);
            }
        }
        let Some(plan) = best else {
            return false;
        };
        let until = now + self.config.call_back_for + self.grace(&plan.victims);
        let what = CalledBack::new(request, plan.cards, plan.victims);
        let books = &self.books;
        self.queue.keep(&pod.uid, &plan.node, what, until, books);
        true
    }

    /// What the pod asks for, if memory may be called back for it.
    fn may_call_back_for(&self, pod: &PodFacts) -> Option<Arc<Request>> {
        let request = pod.request.as_ref().ok()?;
        let known = self.books.pod(&pod.uid)?;
        let may = self.config.call_back
            && may_hold(known)
            && known.nominated.is_none()
            && pod.nominated.is_none()
            && known.request.as_ref() == Ok(request)
            && !self.queue.has_kept(&pod.uid)
            && !self.books.is_unfenced(&pod.uid)
            && self.books.reservation(&pod.uid).is_none();
        may.then(|| request.clone())
    }

    /// Does the pod fit somewhere, so that it will be woken? True, too, if that takes too long to tell.
    pub(crate) fn may_fit_now(&self, pod: &PodFacts, now: Duration) -> bool {
        let mut budget = Budget::of(&self.config);
        let mut nodes = self.books.nodes();
        nodes.any(|(name, _)| self.fits_now_on(name, pod, now, &mut budget))
    }

    /// Does the pod fit on this node, so that it will be woken? Not where kube-scheduler's own filters refuse it.
    pub(crate) fn fits_now_on(
        &self,
        name: &str,
        pod: &PodFacts,
        now: Duration,
        budget: &mut Budget,
    ) -> bool {
        let Ok(request) = &pod.request else {
            return true;
        };
        // Of a node that is gone the report may be there still: nobody is bound to it.
        let is_there = self
            .books
            .node(name)
            .is_some_and(|node| node.facts().is_some());
        is_there
            && self.may_fit(name, pod, now)
            && self.evidence(&pod.uid, name, now) != Evidence::Rejected
            && !matches!(
                self.choose_within(name, pod, request, budget),
                Err(reason) if reason != Reason::NotYet
            )
    }

    /// Who would have to give memory back on this node for the pod.
    fn plan(
        &self,
        pod: &PodFacts,
        request: &Arc<Request>,
        name: &str,
        now: Duration,
        budget: &mut Budget,
    ) -> Option<Plan> {
        let (name, node) = self.books.named_node(name)?;
        if !node.lends() || self.check(name, now).is_err() {
            return None;
        }
        let called = self.queue.kept_on(name);
        let called = called.filter_map(|uid| self.queue.called_back(uid));
        let called: Vec<&CalledBack> = called.map(|(_, what)| &**what).collect();
        let is_free = |uuid: &str| {
            !called.iter().any(|what| what.has(uuid)) && !self.queue.was_in_vain(&pod.uid, uuid)
        };
        let mut view = node.view_without_loans(|_| true, is_free);
        self.take_kept(&mut view, name, node, pod, |_| false, budget)
            .ok()?;
        let choice = self.scores.fit_within(&view, request, budget).ok()?;
        let charges = choice.placement.charges.iter();
        let cards = charges.map(|&(card, mib)| (node.uuid(card).into(), mib));
        let cards: Vec<(Box<str>, Mib)> = cards.collect();
        let missing = self.missing(pod, name, node, &cards, &[])?;
        let victims = self.choose_borrowers(node, &missing, &[], false)?;
        (!victims.is_empty()).then(|| Plan {
            node: name.clone(),
            cards,
            victims,
            missing: missing.iter().map(|(_, mib)| *mib).sum(),
            cost: choice.cost,
        })
    }

    /// What is missing of these cards for the pod to have what it is to get of them. None if one of them
    /// takes it no more. What victims that are gone still use by the last report is about to come.
    fn missing(
        &self,
        pod: &PodFacts,
        name: &str,
        node: &Node,
        cards: &[(Box<str>, Mib)],
        victims: &[Uid],
    ) -> Option<Missing> {
        let request = pod.request.as_ref().ok()?;
        let charges = node.charges(cards);
        let mut budget = Budget::of(&self.config);
        let view = self.view_without(name, node, pod, |_| false, &mut budget);
        let view = view.ok().filter(|_| charges.len() == cards.len())?;
        let left = |card: usize| {
            let used = node.gpus().get(card).into_iter().flat_map(|gpu| &gpu.pods);
            let is_gone = |uid: &str| {
                victims.iter().any(|it| **it == *uid) && !node.bound().contains_key(uid)
            };
            let gone = used.filter(|used| is_gone(&used.uid));
            gone.map(|used| Mib(used.used_mib)).sum()
        };
        let missing = |(card, mib): (usize, Mib)| {
            let room = request.room(view.cards.get(card)?)?;
            Some((card, mib.minus(room).minus(left(card))))
        };
        charges.into_iter().map(missing).collect()
    }

    /// Who is to give back what is missing: no more pods than it takes, in the written order: those who were
    /// asked or are ending already, then low priority, then whoever borrows most, then whoever has been idle
    /// longest. None if all of them together do not have it.
    pub(crate) fn choose_borrowers(
        &self,
        node: &Node,
        missing: &[(usize, Mib)],
        asked: &[Uid],
        only_asked: bool,
    ) -> Option<Vec<Uid>> {
        let mut lent: BTreeMap<&Uid, Vec<Mib>> = BTreeMap::new();
        for (at, (card, mib)) in missing.iter().enumerate() {
            let gpu = node.gpus().get(*card).filter(|_| *mib > Mib::ZERO);
            let borrowers = gpu.into_iter().flat_map(|gpu| node.borrowers(gpu));
            for (uid, held, used) in borrowers {
                let of_each = lent
                    .entry(uid)
                    .or_insert_with(|| vec![Mib::ZERO; missing.len()]);
                of_each[at] = used.minus(held);
            }
        }
        // It is busy if it is on one of the cards.
        let idle = |uid: &str| {
            let cards = missing
                .iter()
                .filter_map(|(card, _)| node.gpus().get(*card));
            let used = cards.flat_map(|gpu| gpu.pods.iter().filter(|used| used.uid == uid));
            used.map(PodUse::idle)
                .reduce(|one, other| one.zip(other).map(|(one, other)| one.max(other)))
                .flatten()
                .unwrap_or(i64::MAX)
        };
        let was_asked = |uid: &Uid, pod: &PodFacts| {
            pod.deleting || pod.asked_back.is_some() || asked.contains(uid)
        };
        let ordered = lent.into_iter().filter_map(|(uid, of_each)| {
            let pod = self.books.pod(uid)?;
            let counts = !only_asked || asked.contains(uid);
            let sum: Mib = of_each.iter().copied().sum();
            let key = (
                !was_asked(uid, pod),
                pod.priority,
                Reverse(sum),
                idle(uid),
                uid,
            );
            counts.then_some((key, of_each))
        });
        let mut ordered: Vec<_> = ordered.collect();
        ordered.sort_unstable_by_key(|(key, _)| *key);
        let suffices = |chosen: &[&Vec<Mib>]| {
            missing.iter().enumerate().all(|(at, (_, mib))| {
                let back: Mib = chosen.iter().filter_map(|it| it.get(at)).copied().sum();
                back >= *mib
            })
        };
        let all: Vec<&Vec<Mib>> = ordered.iter().map(|(_, of_each)| of_each).collect();
        // The first so many, less those, the most precious first, without whom it suffices.
        let count = (0..=all.len()).find(|&count| suffices(&all[..count]))?;
        let mut chosen: Vec<usize> = (0..count).collect();
        for index in (0..count).rev() {
            let rest = chosen.iter().filter(|other| **other != index);
            if suffices(&rest.map(|other| all[*other]).collect::<Vec<_>>()) {
                chosen.retain(|other| *other != index);
            }
        }
        let uid = |index: usize| Some(ordered.get(index)?.0.4.clone());
        chosen.into_iter().map(uid).collect()
    }

    /// One call-back goes on, with others if need be, or ends.
    fn look_after(&mut self, uid: &Uid, now: Duration) {
        let called = self.queue.called_back(uid);
        let Some((name, what)) = called.map(|(name, what)| (name.clone(), what.clone())) else {
            return;
        };
        let pod = self.books.pod(uid).cloned();
        let wants = |pod: &Arc<PodFacts>| {
            let same = pod
                .request
                .as_ref()
                .is_ok_and(|request| what.is_for(request));
            same && may_hold(pod) && self.books.reservation(uid).is_none()
        };
        let Some(pod) = pod.filter(wants) else {
            self.queue.end_kept(uid, &self.books);
            return;
        };
        let goes_on = || {
            self.check(&name, now).ok()?;
            let node = self.books.node(&name)?;
            let missing = self.missing(&pod, &name, node, what.cards(), what.victims())?;
            let same = self.choose_borrowers(node, &missing, what.victims(), true);
            match same {
                Some(_) => Some(None),
                None => Some(Some(self.choose_borrowers(
                    node,
                    &missing,
                    what.victims(),
                    false,
                )?)),
            }
        };
        match goes_on() {
            Some(None) => {}
            Some(Some(victims)) => self.queue.call_others(uid, victims),
            None => self.queue.called_in_vain(uid, &self.books),
        }
    }

    /// The longest that one of these pods may take to end.
    pub(crate) fn grace(&self, victims: &[Uid]) -> Duration {
        let pods = victims.iter().filter_map(|uid| self.books.pod(uid));
        let longest = pods.map(|pod| pod.grace).max().unwrap_or_default();
        Duration::from_secs(longest.into()).min(LONGEST_GRACE)
    }

    /// What these victims of a call-back are about to give back on a card.
    pub(crate) fn coming_back(
        &self,
        node: &Node,
        gpu: &gpustow_api::gpunode::Gpu,
        what: &CalledBack,
        gone: impl Fn(&str) -> bool,
    ) -> Mib {
        let borrowers = node.borrowers(gpu);
        let victims = borrowers
            .filter(|(uid, ..)| what.victims().contains(uid) && !gone(uid) && what.has(&gpu.uuid));
        victims.map(|(_, held, used)| used.minus(held)).sum()
    }
}

/// May room be kept for this pod at all?
fn may_hold(pod: &PodFacts) -> bool {
    pod.node.is_none() && !pod.released && !pod.gated && !pod.deleting
}
