//! One node's room, offered to those who wait in the order of their turns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts};

use super::price;
use crate::books::Uid;
use crate::budget::Budget;
use crate::queue::kind::KindId;
use crate::queue::turn::Turn;
use crate::sight::{Sight, Waking};
use crate::trial::{Host, Left, Trial};

/// A node whose room is being offered.
#[derive(Debug)]
pub(super) struct Offering {
    pub(super) node: Arc<str>,
    /// Its room less what was promised.
    left: Left,
    /// How many more may be offered all of it.
    extra: u32,
    /// The kinds whose first pods stand behind this have not been looked at.
    after: Option<Turn>,
    /// The next pods of the others.
    next: BTreeMap<Turn, KindId>,
}

/// What a pod makes of an offer.
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

impl Waking<'_> {
    pub(super) fn offer_room(
        &mut self,
        limit: usize,
        work: &mut usize,
        woken: &mut Vec<Arc<PodFacts>>,
    ) {
        while *work > 0 && woken.len() < limit && self.queue.waiting.has_credit() {
            let under_way = self.queue.wakes.offering.take();
            let Some(mut offering) = under_way.or_else(|| self.next_offering(work)) else {
                return;
            };
            if self.offer_of(&mut offering, limit, work, woken) {
                self.queue.waiting.offers().done(&offering.node);
            } else {
                self.queue.wakes.offering = Some(offering);
            }
        }
    }

    /// The node that gained room first, unless that helps nobody.
    fn next_offering(&mut self, work: &mut usize) -> Option<Offering> {
        while *work > 0 {
            let node = self.queue.waiting.offers().next()?;
            *work -= 1;
            let least = self.queue.waiting.least().unwrap_or_default();
            let room = |left: &Left| left.view().largest() >= least;
            if let Some(left) = self.sight().unpromised(&node).filter(room) {
                let extra = self.queue.waiting.offers().extra(&node);
                return Some(Offering {
                    node,
                    left,
                    extra,
                    after: None,
                    next: BTreeMap::new(),
                });
            }
            self.queue.waiting.offers().done(&node);
        }
        None
    }

    /// Offers a node's room in the order of turns. False if it has to stop before the end.
    fn offer_of(
        &mut self,
        offering: &mut Offering,
        limit: usize,
        work: &mut usize,
        woken: &mut Vec<Arc<PodFacts>>,
    ) -> bool {
        let interval = self.config.wake_again_after;
        loop {
            let least = self.queue.waiting.least().unwrap_or_default();
            if offering.extra == 0 && offering.left.view().largest() < least {
                return true;
            }
            if *work == 0 || woken.len() >= limit || !self.queue.waiting.has_credit() {
                return false;
            }
            *work -= 1;
            let Some((turn, kind)) = self.next_turn(offering) else {
                return true;
            };
            let next = match self.answer(offering, turn.uid(), work) {
                Answer::Comes(pod) => {
                    self.promise(&pod, &offering.node, interval);
                    woken.push(pod);
                    self.next_of(kind, &turn)
                }
                Answer::Together(pods) => {
                    for (pod, node) in pods {
                        self.promise(&pod, &node, interval);
                        woken.push(pod);
                    }
                    self.next_of(kind, &turn)
                }
                Answer::Passes => self.next_of(kind, &turn),
                Answer::None => self.next_preferred(&offering.node, kind, &turn),
            };
            if let Some(next) = next {
                offering.next.insert(next, kind);
            }
        }
    }

    /// Room is promised to a pod that is woken; for one that is ungated it is kept from all others.
    fn promise(&mut self, pod: &PodFacts, node: &Arc<str>, interval: Duration) {
        let lasts = match pod.queued {
            true => self.config.ungate_for,
            false => interval,
        };
        let queue = &mut self.queue;
        queue
            .waiting
            .promise(&pod.uid, node, self.now, interval, lasts);
        if pod.queued {
            let earmarks = &mut self.earmarks;
            earmarks.earmark_for_ungated(pod, node, self.now + lasts, self.books);
            queue.gain(earmarks);
        }
    }

    /// The pod that stands after `turn` among its kind.
    fn next_of(&self, kind: KindId, turn: &Turn) -> Option<Turn> {
        self.queue.waiting.kind(kind)?.after(turn).cloned()
    }

    fn next_turn(&self, offering: &mut Offering) -> Option<(Turn, KindId)> {
        let head = self.queue.waiting.head_after(offering.after.as_ref());
        let next = offering.next.first_key_value();
        match (head, next) {
            (Some((head, kind)), next) if next.is_none_or(|(next, _)| head < next) => {
                let (head, kind) = (head.clone(), kind);
                offering.after = Some(head.clone());
                Some((head, kind))
            }
            _ => offering.next.pop_first(),
        }
    }

    /// What one pod makes of the offer.
    fn answer(&mut self, offering: &mut Offering, uid: &Uid, work: &mut usize) -> Answer {
        let name = &offering.node;
        if self.queue.waiting.is_spoken_for(uid, name) {
            return Answer::Passes;
        }
        let Some(pod) = self.sight().asleep(uid) else {
            return Answer::Passes;
        };
        let Some(request) = pod.asks.request() else {
            return Answer::None;
        };
        let alone = offering.extra > 0;
        if !(request.may_fit(offering.left.view()) || alone) || !self.sight().may_fit(name, &pod) {
            return Answer::None;
        }
        *work = work.saturating_sub(price(&pod));
        if self.sight().fits(name, &offering.left, &pod) {
            if let Some(answer) = self.answer_of_gang(&pod, work) {
                return answer;
            }
            if !pod.queued {
                let left = self.sight().left_beside(name, &offering.left, &pod);
                offering.left = left.unwrap_or(offering.left.clone());
            }
            Answer::Comes(pod)
        } else if alone
            && !self.books.gang(&pod).is_some_and(Group::is_in_tree)
            && self.fits_alone(name, &pod)
        {
            offering.extra -= 1;
            Answer::Comes(pod)
        } else {
            Answer::None
        }
    }

    /// What the pod's gang makes of the offer, if it is of one: a cycle tries all of its pods, so that one is woken.
    fn answer_of_gang(&mut self, pod: &Arc<PodFacts>, work: &mut usize) -> Option<Answer> {
        let gang = self.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let moment = (self.books.copies(), self.queue.gains());
        if !self.queue.gangs.is_to_be_asked(gang, moment, self.now) {
            return Some(Answer::Passes);
        }
        let mut budget = Budget::of_gang();
        let seats = self.sight().seats_of_gang(pod, &mut budget);
        let spent = usize::try_from(budget.spent()).unwrap_or(usize::MAX);
        *work = work.saturating_sub(spent);
        let seats = seats?;
        let Ok(seats) = seats else {
            self.queue.gangs.does_not_fit(gang, moment);
            return Some(Answer::Passes);
        };
        let until = self.now + self.config.wake_again_after;
        self.queue.gangs.is_woken(gang, until);
        let gated = seats.into_nodes().filter_map(|(uid, node)| {
            let pod = self.sight().asleep(&uid).filter(|pod| pod.queued)?;
            Some((pod, node))
        });
        let gated: Vec<_> = gated.collect();
        (!gated.is_empty()).then_some(Answer::Together(gated))
    }

    /// Would the pod fit if nobody else came for the room that is offered?
    fn fits_alone(&mut self, name: &str, pod: &PodFacts) -> bool {
        self.queue.waiting.set_extra(Some(&pod.uid));
        let fits = self.sight().choose(name, pod).is_ok();
        self.queue.waiting.set_extra(None);
        fits
    }

    /// The next pod of a kind that room on the node is kept for, or from which none is kept since
    /// its priority is higher: it may fit where one before it does not.
    fn next_preferred(&self, node: &str, kind: KindId, turn: &Turn) -> Option<Turn> {
        if !self.earmarks.has_earmarks(node) {
            return None;
        }
        let kept = self.earmarks.pods_with_earmarks(node);
        let turns = kept.filter_map(|uid| self.queue.waiting.turn(kind, uid));
        let behind = turns.filter(|behind| *behind > turn);
        let higher = self.queue.waiting.kind(kind)?.higher(turn);
        behind.chain(higher).min().cloned()
    }
}

impl Sight<'_> {
    /// A node's room less what is promised there; `None` if nobody may go there.
    pub(super) fn unpromised(&self, name: &str) -> Option<Left> {
        self.check(name).ok()?;
        let mut trial = self.trial().keeping_nothing();
        let promised = self.queue.waiting.promised_on(name).iter();
        // What is kept is looked at on its own.
        let promised = promised.filter(|uid| !self.earmarks.has_more_than_reservation(uid));
        for pod in promised.filter_map(|uid| self.books.pod(uid)) {
            come(&mut trial, name, pod);
        }
        trial.left_for_all(name)
    }

    /// The same once the pod has come, too.
    fn left_beside(&self, name: &str, left: &Left, pod: &PodFacts) -> Option<Left> {
        let mut trial = self.trial().with(name, left);
        come(&mut trial, name, pod);
        trial.left_for_all(name)
    }
}

/// The pod comes, if there is room for it.
fn come(trial: &mut Trial<'_>, name: &str, pod: &PodFacts) {
    if let Ok(choice) = trial.fit(pod, name, None, Host::Beside, &mut Budget::all()) {
        trial.take(pod, name, &choice.placement.charges);
    }
}
