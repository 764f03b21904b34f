//! Who of a gang is where, and whether enough of it fit.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpustow_api::{Group, GroupPolicy, PodFacts};
use gpustow_books::{Budget, Turn, Uid, may_come};

use super::plan::{Member, Seats};
use super::{Extent, MOST_PODS, Shortfall};
use crate::sight::Sight;

/// Who of a gang is where.
pub struct Roll {
    min_count: usize,
    /// Bound, or assumed.
    placed: usize,
    /// They request no GPU memory: kube-scheduler does not ask about them here.
    others: usize,
    /// Pods that may come and are without a place.
    pub(super) open: Vec<Arc<PodFacts>>,
}

impl Roll {
    /// Its pods without a place, in turn.
    pub fn open(&self) -> &[Arc<PodFacts>] {
        &self.open
    }

    /// The number of pods without a place that must get one.
    pub fn wanted(&self) -> usize {
        self.min_count.saturating_sub(self.placed + self.others)
    }

    /// The shortfall if `count` of these pods get a place.
    pub fn shortfall(&self, gang: &Group, count: usize) -> Shortfall {
        Shortfall {
            group: gang.clone(),
            fit: self.min_count.saturating_sub(self.wanted()) + count,
            of: self.min_count,
            search: match self.wanted() > MOST_PODS {
                true => Extent::TooMany,
                false => Extent::Whole,
            },
        }
    }

    /// The shortfall if the pods get these seats.
    pub fn shortfall_of(&self, gang: &Group, seats: &Seats) -> Shortfall {
        let shortfall = self.shortfall(gang, seats.count);
        match seats.is_cut && seats.count < self.wanted() {
            true => Shortfall {
                search: Extent::Part,
                ..shortfall
            },
            false => shortfall,
        }
    }
}

impl Sight<'_> {
    /// Who of the gang is where, if it is known how many must be placed. Of the pods without a place `asking` counts, and
    /// those about which this cycle has not been asked yet.
    pub fn roll(
        &self,
        gang: &Group,
        asking: Option<&PodFacts>,
        asked: Option<&BTreeSet<Uid>>,
    ) -> Option<Roll> {
        let GroupPolicy::Gang(min_count) = self.books.pod_group(gang)?.policy else {
            return None;
        };
        let mut roll = Roll {
            min_count,
            placed: 0,
            others: 0,
            open: Vec::new(),
        };
        for pod in self.books.members(gang) {
            let is_asking = asking.is_some_and(|it| it.uid == pod.uid);
            if pod.node.is_some() || !is_asking && self.books.assumed(&pod.uid).is_some() {
                roll.placed += 1;
            } else if pod.deleting || is_asking {
            } else if !pod.requests_memory() {
                roll.others += usize::from(!pod.gated);
            } else if may_come(pod) && !asked.is_some_and(|asked| asked.contains(&pod.uid)) {
                roll.open.push(pod.clone());
            }
        }
        if let Some(asking) = asking {
            roll.open.insert(0, Arc::new(asking.clone()));
        }
        Some(roll)
    }

    /// The pods of the pod's gang that may come and are without a place, and how many of them must get one.
    pub(crate) fn open_of_gang(&self, pod: &PodFacts) -> Option<(Vec<Arc<PodFacts>>, usize)> {
        let gang = self.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let roll = self.roll(gang, None, None)?;
        let wanted = roll.wanted();
        Some((roll.open, wanted))
    }

    /// The pods that the gang must place and that do not fit together with its fitting pods. The smallest requests are
    /// chosen first, and equal requests in turn. The list is empty if too few pods of the gang exist.
    pub fn unseated(&self, gang: &Group, budget: &mut Budget) -> Vec<Arc<PodFacts>> {
        let Some(mut roll) = self.roll(gang, None, None) else {
            return Vec::new();
        };
        let wanted = roll.wanted();
        if wanted > roll.open.len() {
            return Vec::new();
        }
        roll.open.sort_by_cached_key(|pod| Turn::of(pod));
        let members = roll.open.iter().map(|it| Member::anywhere(it)).collect();
        let Seats { seats, count, .. } = self.seats(members, wanted, budget);
        roll.open.retain(|pod| !seats.contains_key(&pod.uid));
        let request = |pod: &Arc<PodFacts>| pod.asks.request().map(|it| it.in_sum());
        roll.open.sort_by_key(request);
        roll.open.truncate(wanted.saturating_sub(count));
        roll.open
    }

    /// Do enough of the pod's gang fit now, as far as is known? Not if some would go to a node of which only a report is left:
    /// Kubernetes deletes that some time after the node.
    pub fn has_seats(&self, pod: &PodFacts, budget: &mut Budget) -> bool {
        let Some(seats) = self.seats_of_gang(pod, budget) else {
            return true;
        };
        seats.is_ok_and(|seats| {
            seats
                .into_nodes()
                .all(|(_, node)| self.books.is_there(&node))
        })
    }

    /// Seats for the pod's gang if enough of it fit now, or how many do; none if it is of no gang whose size is known. If
    /// fewer pods exist than must fit, they fit no node: kube-scheduler waits for the others.
    pub fn seats_of_gang(
        &self,
        pod: &PodFacts,
        budget: &mut Budget,
    ) -> Option<Result<Seats, Shortfall>> {
        let gang = self.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let roll = self.roll(gang, Some(pod), None)?;
        let wanted = roll.wanted();
        let members = roll.open.iter().map(|it| Member::anywhere(it)).collect();
        let seats = self.seats(members, wanted, budget);
        Some(match seats.count < wanted {
            true => Err(roll.shortfall_of(gang, &seats)),
            false => Ok(seats),
        })
    }
}
