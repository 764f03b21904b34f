//! An earmark: the holder of the room, the cause, and the pods that it waits for.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::Group;
use gpustow_pack::{Mib, Request};
use strum::{IntoStaticStr, VariantArray};

use crate::books::Uid;

/// Memory of GPUs, by UUID.
pub type Cards = Vec<(Arc<str>, Mib)>;

/// Whose room it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// One pod.
    Pod(Uid),
    /// The pod that the controller of this one makes when it is evicted.
    Replacement(Uid),
}

/// Room that is earmarked for a pod.
#[derive(Clone, Debug)]
pub struct Earmark {
    pub(super) node: Arc<str>,
    pub(super) cause: Cause,
    want: Want,
    pub(super) waits_for: Box<[Uid]>,
    /// The gang for all of which others are evicted: it lasts until the pod is bound.
    gang: Option<Group>,
    /// Nodes that gained room before this, on the clock of such gains, were looked at for the pod.
    pub(super) looked: u64,
    /// When it ends; that of a pod which is nominated lasts as long as the nomination, and then so long.
    pub(super) until: Duration,
}

/// Why room is earmarked; as a string, the value of metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Cause {
    /// kube-scheduler nominated the pod there. It may ask for the pod before the watch shows that the victim is gone, take the
    /// refusal for the end of the preemption and clear the nomination: this outlives that for a while.
    Nominated,
    /// The pod was ungated for the room, and its filter call is awaited.
    Ungated,
    /// Others use the room beyond their requests and were asked to give it back.
    Reclaim,
    /// The pod has waited long, and memory that becomes free on these GPUs is for it.
    Reserve,
    /// Pods of lower priority were chosen to be evicted for it.
    Preempt,
    /// Others are evicted for it whose replacements have room elsewhere.
    Defragment,
    /// The room of one of these replacements.
    Replacement,
    /// A pod cannot grow to its request, or the headroom is not free, because others use more than they requested. Nothing is
    /// earmarked for it.
    Pressure,
    /// A pod has been over its limit for too long. Nothing is earmarked for it.
    OverLimit,
}

impl Cause {
    /// The causes for which room is earmarked.
    pub const EARMARKS: [Self; 7] = [
        Self::Nominated,
        Self::Ungated,
        Self::Reclaim,
        Self::Reserve,
        Self::Preempt,
        Self::Defragment,
        Self::Replacement,
    ];

    /// Are other pods evicted for it?
    pub fn evicts(self) -> bool {
        matches!(self, Self::Preempt | Self::Defragment)
    }
}

/// The room that the pod is to get.
#[derive(Clone, Debug)]
enum Want {
    /// The placement that its next filter call finds.
    WhatFits,
    /// These GPUs, for the pod's request when the earmark was put.
    Cards { request: Arc<Request>, cards: Cards },
}

/// How an earmark ends; as a string, the value of metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Ended {
    /// The pod has its memory, there or elsewhere.
    Taken,
    /// The pod is gone, or requests something else.
    Gone,
    /// Other room is earmarked for the pod.
    Replaced,
    /// The feature is off, or the pod that was to be evicted stays.
    Needless,
    /// The pod could not be woken or ungated.
    Failed,
    /// A better node was found.
    Better,
    /// The awaited room did not come in time, or is of no use.
    Late,
    /// The node does not take the pod.
    Unfit,
    /// A bound is reached, and others come first.
    Overtaken,
}

impl Ended {
    /// The ways in which a reservation is given up.
    pub const GIVEN_UP: [Self; 4] = [Self::Better, Self::Late, Self::Unfit, Self::Overtaken];
}

impl Earmark {
    /// For whatever the pod's next filter call finds on the node.
    pub(super) fn of_node(node: &Arc<str>, cause: Cause, until: Duration) -> Self {
        Self {
            node: node.clone(),
            cause,
            want: Want::WhatFits,
            waits_for: Box::default(),
            gang: None,
            looked: 0,
            until,
        }
    }

    /// For these GPUs of the node, once these pods have given memory back or are gone.
    pub fn of_cards(
        node: &Arc<str>,
        cause: Cause,
        request: &Arc<Request>,
        cards: Cards,
        waits_for: Vec<Uid>,
        until: Duration,
    ) -> Self {
        Self {
            node: node.clone(),
            cause,
            want: Want::Cards {
                request: request.clone(),
                cards,
            },
            waits_for: waits_for.into(),
            gang: None,
            looked: 0,
            until,
        }
    }

    /// As a part of the room of a gang.
    pub fn of_gang(self, gang: &Group) -> Self {
        Self {
            gang: Some(gang.clone()),
            ..self
        }
    }

    /// The gang for which it is, if it is for one.
    pub fn gang(&self) -> Option<&Group> {
        self.gang.as_ref()
    }

    /// Where.
    pub fn node(&self) -> &Arc<str> {
        &self.node
    }

    /// Why.
    pub fn cause(&self) -> Cause {
        self.cause
    }

    /// Gains of room before this were looked at for it.
    pub fn looked(&self) -> u64 {
        self.looked
    }

    /// When it ends.
    pub fn until(&self) -> Duration {
        self.until
    }

    /// The GPUs that the pod is to get, by UUID, and the memory that it will hold of each. None if its filter call
    /// decides.
    pub fn cards(&self) -> &[(Arc<str>, Mib)] {
        match &self.want {
            Want::WhatFits => &[],
            Want::Cards { cards, .. } => cards,
        }
    }

    /// Is it for a pod with this request?
    pub fn is_for(&self, request: &Request) -> bool {
        match &self.want {
            Want::WhatFits => true,
            Want::Cards { request: its, .. } => **its == *request,
        }
    }

    /// Is it for memory of this GPU?
    pub fn has(&self, uuid: &str) -> bool {
        self.cards().iter().any(|(card, _)| **card == *uuid)
    }

    /// The pods that were chosen to give memory back or to be evicted, or must finish first.
    pub fn waits_for(&self) -> &[Uid] {
        &self.waits_for
    }

    /// Is the room awaited, and no pod terminates for it?
    pub fn is_awaited(&self) -> bool {
        matches!(self.cause, Cause::Reclaim | Cause::Reserve)
    }
}
