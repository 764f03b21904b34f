//! The resources that a pod takes from a node.

use std::sync::Arc;

use gpustow_api::assignment::Instance;
use gpustow_api::{Assignment, PodFacts};
use gpustow_pack::{Bytes, Mib, Request, Rules, Starts};

/// The resources that a pod takes from a node, whether bound or only reserved.
#[derive(Clone, Debug, PartialEq)]
pub struct Hold {
    charges: Charges,
    /// No other pod on its cards, whatever size they turn out to have.
    pub(super) exclusive: bool,
    rules: Option<Arc<Rules>>,
    /// The amount that kube-scheduler counts in the node's sum of GPU memory.
    pub(super) in_sum: Mib,
    pub(super) cpu_milli: u64,
    pub(super) ram: Bytes,
    /// Hundredths of the compute of each of its cards.
    compute: u8,
    /// How it starts there now.
    pub(super) starts: Starts,
}

/// On which cards a pod holds memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Charges {
    /// On the cards of the assignment; nowhere if there is none.
    Assigned(Option<Arc<Assignment>>),
    /// Unknown: its assignment is unreadable. Charged on every card.
    Everywhere(Mib),
}

impl Charges {
    const NONE: Self = Self::Assigned(None);

    /// On every card the most that the request can take of one, whatever cards there are.
    pub(super) fn everywhere(request: &Request) -> Self {
        Self::Everywhere(match request.is_relative() {
            true => Mib(u64::MAX),
            false => request.claims.iter().map(|claim| claim.mib).sum(),
        })
    }

    fn on(&self, uuid: &str) -> Mib {
        match self {
            Self::Assigned(assignment) => assignment
                .iter()
                .flat_map(|assignment| &assignment.charges)
                .filter(|(card, _)| **card == *uuid)
                .map(|&(_, mib)| mib)
                .sum(),
            Self::Everywhere(mib) => *mib,
        }
    }
}

impl Hold {
    /// The memory that is held on a card.
    pub fn on(&self, uuid: &str) -> Mib {
        self.charges.on(uuid)
    }

    /// Hundredths of its compute that are held on a card.
    pub(crate) fn compute_on(&self, uuid: &str) -> u16 {
        match self.compute {
            0 => 0,
            compute if self.on(uuid) > Mib::ZERO => compute.into(),
            _ => 0,
        }
    }

    /// Memory slices that are held on a card where MIG instances are made. Who holds memory there without an instance is
    /// taken to hold all of them.
    pub(crate) fn slices_on(&self, uuid: &str) -> u8 {
        let instance = match &self.charges {
            Charges::Assigned(assigned) => assigned.as_ref().and_then(|it| it.instance.as_ref()),
            Charges::Everywhere(_) => None,
        };
        match self.on(uuid) {
            Mib::ZERO => 0,
            _ => instance.map_or(u8::MAX, Instance::mask),
        }
    }

    /// Whether it starts, and how.
    pub fn starts(&self) -> Starts {
        self.starts
    }

    pub(super) fn rules(&self) -> Option<&Rules> {
        self.rules.as_deref()
    }

    /// May the pod and one of this request not share a GPU?
    pub fn repels(&self, request: &Request) -> bool {
        let group = |rules: &Rules| rules.anti_affinity.clone();
        let theirs = request.rules.as_deref().and_then(group);
        theirs.is_some() && theirs == self.rules().and_then(group)
    }

    /// The cards that the pod holds by an assignment.
    pub fn cards(&self) -> impl Iterator<Item = &str> {
        let assigned = match &self.charges {
            Charges::Assigned(assigned) => assigned.as_deref(),
            Charges::Everywhere(_) => None,
        };
        let charges = assigned.into_iter().flat_map(|assigned| &assigned.charges);
        charges.map(|(uuid, _)| &**uuid)
    }

    /// GPU memory and compute alone.
    pub(super) fn of_charges(charges: Charges, compute: u8) -> Self {
        Self {
            charges,
            exclusive: false,
            rules: None,
            in_sum: Mib::ZERO,
            cpu_milli: 0,
            ram: Bytes::ZERO,
            compute,
            starts: Starts::None,
        }
    }

    /// The hold of a reserved pod with this request and this assignment.
    pub(super) fn reserved(
        assignment: &Arc<Assignment>,
        request: &Request,
        starts: Starts,
    ) -> Self {
        Self {
            charges: Charges::Assigned(Some(assignment.clone())),
            exclusive: request.exclusive,
            rules: request.rules.clone(),
            in_sum: request.in_sum(),
            cpu_milli: request.cpu_milli,
            ram: request.ram,
            compute: request.compute,
            starts,
        }
    }

    /// The hold of a bound pod that starts there like this. An unreadable request with a broken assignment takes whole
    /// cards.
    pub(super) fn of(pod: &PodFacts, starts: Starts) -> Self {
        let request = pod.asks.readable().ok();
        let charges = match &pod.assignment {
            _ if pod.released => Charges::NONE,
            None => Charges::NONE,
            Some(Ok(assignment)) => Charges::Assigned(Some(assignment.clone())),
            Some(Err(_)) => request.map_or(Charges::Everywhere(Mib(u64::MAX)), |request| {
                Charges::everywhere(request)
            }),
        };
        let none = Arc::default();
        let counted = request.filter(|_| !pod.released).unwrap_or(&none);
        // The annotation may have changed since the bind; the assignment cannot.
        let assigned = pod
            .assignment
            .as_ref()
            .and_then(|it| it.as_ref().ok()?.exclusive);
        let asked = || request.is_some_and(|request| request.exclusive);
        Self {
            charges,
            exclusive: assigned.unwrap_or_else(asked),
            in_sum: counted.in_sum(),
            cpu_milli: counted.cpu_milli,
            ram: counted.ram,
            rules: counted.rules.clone(),
            compute: match &pod.assignment {
                Some(Ok(assignment)) => assignment.compute,
                _ => counted.compute,
            },
            starts,
        }
    }
}
