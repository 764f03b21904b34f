//! Who of a gang is placed or fits now, for people.

use std::sync::Arc;

use gpustow_api::{Group, GroupPolicy, PodFacts};
use gpustow_books::{Budget, may_come};

use super::plan::Member;
use super::{Extent, MOST_PODS, Shortfall};
use crate::sight::Sight;

/// The pods of a gang.
#[derive(Clone, Debug, PartialEq)]
pub struct GangView {
    /// Its group.
    pub group: Group,
    /// So many pods must be placed; none if no PodGroup describes the group.
    pub min_count: Option<usize>,
    /// The CompositePodGroup of which it is a part.
    pub part_of: Option<Arc<str>>,
    /// Its pods that are not being deleted.
    pub pods: Vec<(Arc<PodFacts>, Standing)>,
}

/// How a pod of a gang stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is bound to this node, or assumed to be.
    Placed(Arc<str>),
    /// The pod fits on this node together with all others that fit.
    Fits(Arc<str>),
    /// It requests no GPU memory, so that it counts as one that fits.
    NoGpuMemory,
    /// A scheduling gate that is not gpustow's holds it.
    Gated,
    /// The pod does not fit together with the others.
    Waits,
}

impl GangView {
    /// How many pods are placed or fit now.
    #[must_use]
    pub fn fit(&self) -> usize {
        let fits = |it: &Standing| !matches!(it, Standing::Gated | Standing::Waits);
        self.pods.iter().filter(|(_, it)| fits(it)).count()
    }

    /// How many pods must be created before kube-scheduler tries the gang.
    #[must_use]
    pub fn missing(&self) -> usize {
        let min_count = self.min_count.unwrap_or_default();
        min_count.saturating_sub(self.pods.len())
    }

    /// Too few of the pods that are there fit.
    #[must_use]
    pub fn shortfall(&self) -> Option<Shortfall> {
        let of = self.min_count?;
        let waits = self.pods.iter().any(|(_, it)| *it == Standing::Waits);
        (waits && self.fit() < of).then(|| Shortfall {
            group: self.group.clone(),
            fit: self.fit(),
            of,
            search: match of > MOST_PODS {
                true => Extent::TooMany,
                false => Extent::Whole,
            },
        })
    }
}

impl Sight<'_> {
    /// The gang of a pod without a node, if a PodGroup describes the gang or should.
    pub fn gang_view(&self, pod: &PodFacts) -> Option<GangView> {
        let gang = self.books.gang(pod).filter(|gang| gang.is_in_tree())?;
        let described = self.books.pod_group(gang);
        let min_count = match described.map(|facts| facts.policy) {
            None => None,
            Some(GroupPolicy::Gang(min_count)) => Some(min_count),
            Some(GroupPolicy::Basic | GroupPolicy::Unknown) => return None,
        };
        let others = self.books.members(gang);
        let others = others.filter(|it| !it.deleting && it.uid != pod.uid);
        let pods = std::iter::once(Arc::new(pod.clone())).chain(others.cloned());
        let node = |it: &PodFacts| {
            let assumed = self.books.assumed(&it.uid).map(|held| held.node());
            it.node.as_ref().or(assumed).cloned()
        };
        let pods: Vec<_> = pods.map(|it| (node(&it), it)).collect();
        let open = pods
            .iter()
            .filter(|(node, it)| node.is_none() && may_come(it));
        let open: Vec<_> = open.map(|(_, it)| Member::anywhere(it)).collect();
        let wanted = open.len().min(MOST_PODS);
        let seats = self.seats(open, wanted, &mut Budget::all()).seats;
        let stands = |(node, it): (Option<Arc<str>>, Arc<PodFacts>)| {
            let standing = match (node, seats.get(&it.uid)) {
                (Some(node), _) => Standing::Placed(node),
                (None, Some(seat)) => Standing::Fits(seat.node.clone()),
                (None, None) if !it.may_be_placed() => Standing::Gated,
                (None, None) if !it.requests_memory() => Standing::NoGpuMemory,
                (None, None) => Standing::Waits,
            };
            (it, standing)
        };
        Some(GangView {
            group: gang.clone(),
            min_count,
            part_of: described.and_then(|facts| facts.part_of.clone()),
            pods: pods.into_iter().map(stands).collect(),
        })
    }

    /// Must more pods of this group be placed before any is bound?
    pub fn waits_for_others(&self, gang: &Group) -> bool {
        let roll = self.roll(gang, None, None);
        roll.is_some_and(|roll| roll.wanted() > 0)
    }
}
