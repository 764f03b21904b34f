//! One node's room, offered to waiting pods in the order of their turns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, Left, Turn, Uid};
use gpustow_means::Parts;
use gpustow_queue::KindId;

use super::Wakes;
use super::left::{fits, left_beside, price, unoffered};

/// A node whose room is being offered.
#[derive(Debug)]
pub(super) struct Offering {
    pub(super) node: Arc<str>,
    /// Its room less the offered room.
    left: Left,
    /// How many more may be offered all of it.
    extra: u32,
    /// The kinds whose first pods stand behind this have not been looked at.
    after: Option<Turn>,
    /// The next pods of the others.
    next: BTreeMap<Turn, KindId>,
}

/// The answer of a pod to an offer.
enum Answer {
    /// It is to be woken.
    Comes(Arc<PodFacts>),
    /// The offer is not for this pod, but may be for others of its kind.
    Passes,
    /// Its gang fits, and all of these are ungated, each for the room on its node.
    Together(Vec<(Arc<PodFacts>, Arc<str>)>),
    /// Nor is it for others.
    None,
}

impl Wakes {
    pub(super) fn offer_room(
        &mut self,
        parts: &mut Parts,
        limit: usize,
        work: &mut usize,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        while *work > 0 && woken.len() < limit && parts.queue.waiting().has_credit() {
            let under_way = self.offering.take();
            let Some(mut offering) = under_way.or_else(|| self.next_offering(parts, work)) else {
                return;
            };
            if self.offer_of(parts, &mut offering, limit, work, woken) {
                parts.queue.waiting_mut().offer_done(&offering.node);
            } else {
                self.offering = Some(offering);
            }
        }
    }

    /// The node that gained room first, unless that helps no pod.
    fn next_offering(&mut self, parts: &mut Parts, work: &mut usize) -> Option<Offering> {
        while *work > 0 {
            let node = parts.queue.waiting_mut().offers().next()?;
            *work -= 1;
            let least = parts.queue.waiting().least().unwrap_or_default();
            let room = |left: &Left| left.view().largest() >= least;
            if let Some(left) = unoffered(&parts.sight(), &node).filter(room) {
                let extra = parts.queue.waiting_mut().offers().extra(&node);
                return Some(Offering {
                    node,
                    left,
                    extra,
                    after: None,
                    next: BTreeMap::new(),
                });
            }
            parts.queue.waiting_mut().offer_done(&node);
        }
        None
    }

    /// Offers a node's room in the order of turns. False if it has to stop before the end.
    fn offer_of(
        &mut self,
        parts: &mut Parts,
        offering: &mut Offering,
        limit: usize,
        work: &mut usize,
        woken: &mut Vec<Arc<PodFacts>>,
    ) -> bool {
        let interval = parts.config.wake_again_after;
        loop {
            let least = parts.queue.waiting().least().unwrap_or_default();
            if offering.extra == 0 && offering.left.view().largest() < least {
                return true;
            }
            if *work == 0 || woken.len() >= limit || !parts.queue.waiting().has_credit() {
                return false;
            }
            *work -= 1;
            let Some((turn, kind)) = self.next_turn(parts, offering) else {
                return true;
            };
            let next = match self.answer(parts, offering, turn.uid(), work) {
                Answer::Comes(pod) => {
                    self.offer_to(parts, &pod, &offering.node, interval);
                    woken.push(pod);
                    self.next_of(parts, kind, &turn)
                }
                Answer::Together(pods) => {
                    for (pod, node) in pods {
                        self.offer_to(parts, &pod, &node, interval);
                        woken.push(pod);
                    }
                    self.next_of(parts, kind, &turn)
                }
                Answer::Passes => self.next_of(parts, kind, &turn),
                Answer::None => self.next_preferred(parts, &offering.node, kind, &turn),
            };
            if let Some(next) = next {
                offering.next.insert(next, kind);
            }
        }
    }

    /// Room is offered to a pod that is woken; for one that is ungated it is kept from all others.
    fn offer_to(&mut self, parts: &mut Parts, pod: &PodFacts, node: &Arc<str>, interval: Duration) {
        let lasts = match pod.queued {
            true => parts.config.ungate_for,
            false => interval,
        };
        let waiting = parts.queue.waiting_mut();
        waiting.offer(&pod.uid, node, parts.now, interval, lasts);
        if pod.queued {
            let earmarks = &mut parts.earmarks;
            earmarks.earmark_for_ungated(pod, node, parts.now + lasts, &parts.books);
            parts.queue.gain(earmarks);
        }
    }

    /// The pod that stands after `turn` among its kind.
    fn next_of(&self, parts: &Parts, kind: KindId, turn: &Turn) -> Option<Turn> {
        parts.queue.waiting().kind(kind)?.after(turn).cloned()
    }

    fn next_turn(&self, parts: &Parts, offering: &mut Offering) -> Option<(Turn, KindId)> {
        let head = parts.queue.waiting().head_after(offering.after.as_ref());
        let next = offering.next.first_key_value();
        match (head, next) {
            (Some((head, kind)), next) if next.is_none_or(|(next, _)| head < next) => {
                offering.after = Some(head.clone());
                Some((head.clone(), kind))
            }
            _ => offering.next.pop_first(),
        }
    }

    /// The answer of one pod to the offer.
    fn answer(
        &mut self,
        parts: &mut Parts,
        offering: &mut Offering,
        uid: &Uid,
        work: &mut usize,
    ) -> Answer {
        let name = &offering.node;
        if parts.queue.waiting().is_spoken_for(uid, name) {
            return Answer::Passes;
        }
        let Some(pod) = parts.sight().asleep(uid) else {
            return Answer::Passes;
        };
        let Some(request) = pod.asks.request() else {
            return Answer::None;
        };
        let alone = offering.extra > 0;
        if !(request.may_fit(offering.left.view()) || alone) || !parts.sight().may_fit(name, &pod) {
            return Answer::None;
        }
        *work = work.saturating_sub(price(&pod));
        if fits(&parts.sight(), name, &offering.left, &pod) {
            if let Some(answer) = self.answer_of_gang(parts, &pod, work) {
                return answer;
            }
            if !pod.queued {
                let left = left_beside(&parts.sight(), name, &offering.left, &pod);
                offering.left = left.unwrap_or(offering.left.clone());
            }
            Answer::Comes(pod)
        } else if alone
            && !parts.books.gang(&pod).is_some_and(Group::is_in_tree)
            && self.fits_alone(parts, name, &pod)
        {
            offering.extra -= 1;
            Answer::Comes(pod)
        } else {
            Answer::None
        }
    }

    /// The answer of the pod's gang to the offer, if the pod is of one. A cycle tries all pods of the gang, so one pod
    /// is woken.
    fn answer_of_gang(
        &mut self,
        parts: &mut Parts,
        pod: &Arc<PodFacts>,
        work: &mut usize,
    ) -> Option<Answer> {
        let gang = parts.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let moment = (parts.books.copies(), parts.queue.gains());
        if !self.gangs.is_to_be_asked(gang, moment, parts.now) {
            return Some(Answer::Passes);
        }
        let mut budget = Budget::of_gang();
        let seats = parts.sight().seats_of_gang(pod, &mut budget);
        let spent = usize::try_from(budget.spent()).unwrap_or(usize::MAX);
        *work = work.saturating_sub(spent);
        let seats = seats?;
        let Ok(seats) = seats else {
            self.gangs.does_not_fit(gang, moment);
            return Some(Answer::Passes);
        };
        let until = parts.now + parts.config.wake_again_after;
        self.gangs.is_woken(gang, until);
        let gated = seats.into_nodes().filter_map(|(uid, node)| {
            let pod = parts.sight().asleep(&uid).filter(|pod| pod.queued)?;
            Some((pod, node))
        });
        let gated: Vec<_> = gated.collect();
        (!gated.is_empty()).then_some(Answer::Together(gated))
    }

    /// Would the pod fit if no other pod came for the room that is offered?
    fn fits_alone(&mut self, parts: &mut Parts, name: &str, pod: &PodFacts) -> bool {
        parts.queue.waiting_mut().set_extra(Some(&pod.uid));
        let fits = parts.sight().choose(name, pod).is_ok();
        parts.queue.waiting_mut().set_extra(None);
        fits
    }

    /// The next pod of a kind that room on the node is kept for, or from which none is kept since
    /// its priority is higher: it may fit where one before it does not.
    fn next_preferred(&self, parts: &Parts, node: &str, kind: KindId, turn: &Turn) -> Option<Turn> {
        if !parts.earmarks.has_earmarks(node) {
            return None;
        }
        let kept = parts.earmarks.pods_with_earmarks(node);
        let turns = kept.filter_map(|uid| parts.queue.waiting().turn(kind, uid));
        let behind = turns.filter(|behind| *behind > turn);
        let higher = parts.queue.waiting().kind(kind)?.higher(turn);
        behind.chain(higher).min().cloned()
    }
}
