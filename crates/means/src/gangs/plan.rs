//! Places for the pods of a gang at the same time.
//!
//! A depth-first search over the pods, the largest requests first ([`Search`]). Each pod tries its nodes, the best
//! first, with the GPUs that the policy would choose. Then it tries other GPUs there, and then the search leaves the
//! pod out. Of equal pods, the later pod goes to no node before the node of the earlier pod. The cost of the search is
//! bounded: on small nodes it is exhaustive.

use std::sync::Arc;

use gpustow_api::intree::Constraints;
use gpustow_api::{PodFacts, Regards};
use gpustow_books::{Budget, Evidence, HashMap, HashSet, Host, Trial, Uid};
use gpustow_pack::{Choice, Cost, Mib, Request};

use super::MOST_PODS;
use super::search::{FITS, Kind, Search, State};
use crate::sight::Sight;

/// Nodes that are tried for each of equal pods, in addition to one for each pod of the gang.
const NODES: usize = 64;
/// Nodes that one plan compares. Pods that differ from those before them then get any nodes that have room.
const COMPARED: usize = 4096;
/// The most sets of constraints for which such nodes are looked for.
const RESTS: usize = 16;

/// Where a pod of a gang is to go.
#[derive(Clone, Debug)]
pub struct Seat {
    pub(super) node: Arc<str>,
    pub(super) choice: Choice,
}

impl Seat {
    /// Where it is.
    pub fn node(&self) -> &Arc<str> {
        &self.node
    }

    /// The charged memory of the node's GPUs, by GPU index.
    pub fn charges(&self) -> &[(usize, Mib)] {
        &self.choice.placement.charges
    }

    /// Is it on this node?
    pub fn is_on(&self, node: &str) -> bool {
        *self.node == *node
    }

    /// The cost of the seat.
    pub fn cost(&self) -> Cost {
        self.choice.cost
    }

    /// The GPUs.
    pub fn into_choice(self) -> Choice {
        self.choice
    }
}

/// Where as many as possible are to go.
#[derive(Debug, Default)]
pub struct Seats {
    pub(super) seats: HashMap<Uid, Seat>,
    pub(super) count: usize,
    /// Fits that were tried.
    pub(super) fits: usize,
    /// The search ended because no more might be.
    pub(super) is_cut: bool,
}

impl Seats {
    /// How many pods have a place.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many fits were tried.
    pub fn fits(&self) -> usize {
        self.fits
    }

    /// Did the search end before its end?
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Has the pod a place?
    pub fn has(&self, uid: &str) -> bool {
        self.seats.contains_key(uid)
    }

    /// The place of the pod, which is its own from now on.
    pub fn take(&mut self, uid: &str) -> Option<Seat> {
        self.seats.swap_remove(uid)
    }

    /// The pods, and their nodes.
    pub fn into_nodes(self) -> impl Iterator<Item = (Uid, Arc<str>)> {
        self.seats.into_iter().map(|(uid, seat)| (uid, seat.node))
    }
}

/// A pod that wants a seat.
#[derive(Clone)]
pub struct Member<'p> {
    pod: &'p PodFacts,
    /// The nodes that kube-scheduler has offered, best first; none if it may be any.
    among: Option<Arc<[Arc<str>]>>,
    /// It goes to no node that kube-scheduler's own filters are known to have rejected for it.
    heeds: bool,
}

impl<'p> Member<'p> {
    /// It may go to these nodes alone.
    pub fn among(pod: &'p PodFacts, nodes: impl Into<Arc<[Arc<str>]>>) -> Self {
        Self {
            pod,
            among: Some(nodes.into()),
            heeds: false,
        }
    }

    /// It may go to any node.
    pub fn anywhere(pod: &'p PodFacts) -> Self {
        Self {
            pod,
            among: None,
            heeds: false,
        }
    }

    /// Sets whether the pod avoids nodes that kube-scheduler's own filters are known to have rejected for it.
    pub fn heeding(self, heeds: bool) -> Self {
        Self { heeds, ..self }
    }
}

/// The kinds of a gang's pods, as they are found.
struct Kinds<'s, 'p> {
    sight: &'s Sight<'s>,
    trial: Trial<'s>,
    /// A pod may go to any node.
    roams: bool,
    /// Nodes for one kind at most.
    most: usize,
    all: Vec<Kind<'p>>,
    by_request: HashMap<(&'p Arc<Request>, &'p Arc<Constraints>), Vec<usize>>,
    compared: usize,
    /// Nodes for pods that came when enough nodes were compared.
    rest: HashMap<&'p Arc<Constraints>, Arc<[usize]>>,
}

impl<'s, 'p> Kinds<'s, 'p> {
    fn new(sight: &'s Sight<'s>, trial: Trial<'s>, roams: bool, most: usize) -> Self {
        Self {
            sight,
            trial,
            roams,
            most,
            all: Vec::new(),
            by_request: HashMap::default(),
            compared: 0,
            rest: HashMap::default(),
        }
    }

    fn of(&mut self, member: Member<'p>, request: &'p Arc<Request>, budget: &mut Budget) -> usize {
        let Member { pod, among, heeds } = member;
        let passed = if heeds { self.sight.passed(pod) } else { None };
        let is_same = |kind: &Kind<'_>| {
            (kind.among == among || among.is_none() && !kind.is_narrow) && kind.passed == passed
        };
        let alike = self.by_request.entry((request, &pod.constraints));
        let alike = alike.or_default();
        if let Some(kind) = alike.iter().find(|kind| is_same(&self.all[**kind])) {
            return *kind;
        }
        alike.push(self.all.len());
        let heeds = passed.is_some();
        let roomy = match self.roams {
            true if self.compared < COMPARED || among.is_some() => {
                let (found, compared) = self.sight.roomy(pod, request, heeds, self.most, budget);
                self.compared += compared;
                found
            }
            _ => Vec::new(),
        };
        let is_narrow = |among: &Arc<[Arc<str>]>| roomy.iter().any(|it| !among.contains(it));
        let is_narrow = among.as_ref().is_some_and(is_narrow);
        let nodes = match &among {
            None if self.roams && self.compared >= COMPARED => self.rest_for(pod),
            among => {
                let names = among.as_deref().unwrap_or(&roomy);
                self.sites(names, pod)
            }
        };
        self.all.push(Kind {
            pod,
            request,
            among,
            passed,
            is_narrow,
            nodes,
        });
        self.all.len() - 1
    }

    /// Where these nodes are in the trial.
    fn sites(&mut self, names: &[Arc<str>], pod: &PodFacts) -> Arc<[usize]> {
        let (trial, budget) = (&mut self.trial, &mut Budget::all());
        let names = names.iter().take(self.most);
        let sites = names.filter_map(|name| trial.spot(name, pod, budget).ok());
        sites.collect()
    }

    /// The nodes that would take such a pod, apart from its room, the nodes with the least room first.
    fn rest_for(&mut self, pod: &'p PodFacts) -> Arc<[usize]> {
        if let Some(known) = self.rest.get(&pod.constraints) {
            return known.clone();
        }
        let nodes = self.sight.books.with_room(Mib::ZERO);
        let nodes = nodes.filter(|name| self.sight.may_fit(name, pod));
        let most = if self.rest.len() < RESTS {
            self.most
        } else {
            0
        };
        let names: Vec<Arc<str>> = nodes.take(most).cloned().collect();
        let nodes = self.sites(&names, pod);
        self.rest.insert(&pod.constraints, nodes.clone());
        nodes
    }
}

impl Sight<'_> {
    /// Seats for at least `wanted` of the members, for more of them if that is easy to find. The first is the one that
    /// kube-scheduler asks about.
    pub fn seats(&self, members: Vec<Member<'_>>, wanted: usize, budget: &mut Budget) -> Seats {
        let trial = self.trial().while_others_start();
        self.search_seats(members, wanted, 0, trial, budget)
    }

    /// Seats as if these bound pods were gone. The result has too few seats as soon as it is certain that `wanted` pods
    /// do not fit.
    pub(crate) fn seats_for_all(
        &self,
        members: Vec<Member<'_>>,
        wanted: usize,
        gone: &HashSet<Uid>,
        budget: &mut Budget,
    ) -> Seats {
        let mut trial = self.trial();
        trial.leave(gone.iter().cloned());
        self.search_seats(members, wanted, wanted, trial, budget)
    }

    fn search_seats(
        &self,
        members: Vec<Member<'_>>,
        wanted: usize,
        floor: usize,
        trial: Trial<'_>,
        budget: &mut Budget,
    ) -> Seats {
        let Some(asking) = members.first().map(|member| member.pod) else {
            return Seats::default();
        };
        let count = members.len().min(MOST_PODS);
        if wanted > count {
            return Seats::default();
        }
        let roams = members.iter().any(|member| member.among.is_none());
        let trial = trial.for_all_of(asking);
        let mut kinds = Kinds::new(self, trial, roams, NODES + count);
        let mut pods = Vec::new();
        for member in members.into_iter().take(MOST_PODS) {
            let pod = member.pod;
            if let Some(request) = pod.asks.request() {
                pods.push((kinds.of(member, request, budget), &pod.uid));
            }
        }
        let Kinds {
            all: kinds, trial, ..
        } = kinds;
        pods.sort_by_cached_key(|(kind, _)| (kinds[*kind].size(), *kind));
        budget.charge(trial.count());
        let order: Vec<usize> = pods.iter().map(|(kind, _)| *kind).collect();
        let mut least: Vec<Mib> = order.iter().map(|it| kinds[*it].request.least()).collect();
        for at in (1..least.len()).rev() {
            least[at - 1] = least[at - 1].min(least[at]);
        }
        let mut search = Search {
            trial,
            order,
            least,
            ruled: kinds.iter().any(|kind| kind.request.rules.is_some()),
            keeps_off: kinds.iter().any(|it| it.pod.repels > Regards::NoPod),
            kinds,
            wanted,
            floor,
            most: budget.fits_left().min(FITS),
            state: State::default(),
        };
        search.run();
        budget.charge_fits(search.state.fits);
        let is_cut = search.is_cut();
        let State {
            best,
            best_count,
            fits,
            ..
        } = search.state;
        let found = pods.into_iter().zip(best);
        let seats = found.filter_map(|((_, uid), seat)| {
            let (site, choice) = seat?;
            let node = search.trial.name(site)?.clone();
            Some((uid.clone(), Seat { node, choice }))
        });
        Seats {
            seats: seats.collect(),
            count: best_count,
            fits,
            is_cut,
        }
    }

    /// At most `most` nodes of the cluster that have room for such a pod, best first, and the number of compared nodes.
    /// With `heeds`, nodes that were rejected for the pod are left out.
    fn roomy(
        &self,
        pod: &PodFacts,
        request: &Request,
        heeds: bool,
        most: usize,
        budget: &mut Budget,
    ) -> (Vec<Arc<str>>, usize) {
        let least = request.least();
        let (mut found, mut compared) = (Vec::new(), 0);
        let mut trial = self.trial().keeping_nothing();
        let first = self.goes_first(pod);
        for name in self.books.with_room(least) {
            compared += 1;
            budget.charge(1);
            if budget.is_spent() || found.len() == most {
                break;
            }
            let is_rejected = || heeds && self.evidence(pod, name) == Evidence::Rejected;
            if self.may_fit(name, pod)
                && !is_rejected()
                && let Ok(choice) = trial.fit(pod, name, None, Host::Beside, budget)
            {
                let is_kept = first == Some(name);
                found.push((!is_kept, choice.cost, name));
            }
        }
        found.sort_unstable();
        let names = found.into_iter().map(|(.., name)| name.clone());
        (names.collect(), compared)
    }

    /// Is the room of this seat still free, and do the pod's rules allow it together with pods that have come since?
    pub fn is_free(&self, seat: &Seat, pod: &PodFacts) -> bool {
        let node = self.books.node(&seat.node);
        node.zip(pod.asks.request()).is_some_and(|(node, request)| {
            let mut charges = seat.choice.placement.charges.iter();
            let room = |card: usize| request.room(node.view().cards.get(card)?);
            let rules = request.rules.as_ref();
            self.may_fit(&seat.node, pod)
                && rules.is_none_or(|rules| self.allow(rules, seat, pod, node))
                && charges.all(|&(card, mib)| room(card).is_some_and(|room| mib <= room))
        })
    }
}
