//! Places for the pods of a gang at the same time.
//!
//! A depth-first search over the pods, those that want most first. Each tries its nodes, the best first, with the GPUs that
//! the policy would choose; then other GPUs there; then it is left out. Of equal pods the later goes to no node before that
//! of the earlier. What the search may cost is bounded: on small nodes it is exhaustive.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, Cost, Mib, NodeGpus, Request, Rules};

use super::sites::{Site, Sites};
use crate::Budget;
use crate::books::Uid;
use crate::maps::{HashMap, HashSet};
use crate::queue::{Evidence, NodeSet};
use crate::sight::Sight;

/// Fits that one plan may try.
const FITS: usize = 4096;
/// Sets of GPUs of one node that are tried for one pod.
const SETS: usize = 32;
/// Nodes that are tried for each of equal pods, beside one for each pod of the gang.
const NODES: usize = 64;

/// Where a pod of a gang is to go.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(super) node: Arc<str>,
    pub(super) choice: Choice,
}

impl Seat {
    pub(crate) fn is_on(&self, node: &str) -> bool {
        *self.node == *node
    }

    pub(crate) fn cost(&self) -> Cost {
        self.choice.cost
    }

    pub(crate) fn into_choice(self) -> Choice {
        self.choice
    }
}

/// Where as many as possible are to go.
#[derive(Debug, Default)]
pub(crate) struct Seats {
    pub(super) seats: HashMap<Uid, Seat>,
    pub(super) count: usize,
    /// Fits that were tried.
    pub(super) fits: usize,
    /// The search ended because no more might be.
    pub(super) is_cut: bool,
}

impl Seats {
    /// The pods, and their nodes.
    pub(crate) fn into_nodes(self) -> impl Iterator<Item = (Uid, Arc<str>)> {
        self.seats.into_iter().map(|(uid, seat)| (uid, seat.node))
    }
}

/// A pod that wants a seat.
#[derive(Clone)]
pub(crate) struct Member<'p> {
    pod: &'p PodFacts,
    /// The nodes that kube-scheduler has offered, best first; none if it may be any.
    among: Option<Vec<Arc<str>>>,
    /// It goes to no node that kube-scheduler's own filters are known to have rejected for it.
    heeds: bool,
}

impl<'p> Member<'p> {
    pub(crate) fn among(pod: &'p PodFacts, nodes: Vec<Arc<str>>) -> Self {
        Self {
            pod,
            among: Some(nodes),
            heeds: false,
        }
    }

    pub(crate) fn anywhere(pod: &'p PodFacts) -> Self {
        Self {
            pod,
            among: None,
            heeds: false,
        }
    }

    pub(crate) fn heeding(self, heeds: bool) -> Self {
        Self { heeds, ..self }
    }
}

/// Pods that cannot be told apart, and the nodes for them.
struct Kind<'p> {
    pod: &'p PodFacts,
    request: &'p Arc<Request>,
    among: Option<Vec<Arc<str>>>,
    /// The nodes that passed kube-scheduler's filters, if that is heeded.
    passed: Option<NodeSet>,
    /// kube-scheduler has not offered all of the cluster.
    is_narrow: bool,
    nodes: Vec<usize>,
}

impl Kind<'_> {
    /// What it takes of one GPU at least.
    fn hardest(&self) -> Mib {
        self.request
            .hardest()
            .map(|claim| claim.mib)
            .unwrap_or_default()
    }
}

/// For each pod its node and place there.
type Found = Vec<Option<(usize, Choice)>>;

struct Search<'s, 'p> {
    sight: &'s Sight<'s>,
    gone: &'s HashSet<Uid>,
    sites: Vec<Site<'s>>,
    kinds: Vec<Kind<'p>>,
    /// The kind of each pod, in the order of the search.
    order: Vec<usize>,
    /// What each pod from this one on takes of one GPU at least.
    least: Vec<Mib>,
    /// A pod says which GPUs it may get: then GPUs with as much free differ.
    ruled: bool,
    taken: Found,
    best: Found,
    best_count: usize,
    wanted: usize,
    seen: HashSet<u64>,
    fits: usize,
    /// So many may be tried.
    most: usize,
}

impl Sight<'_> {
    /// Seats for at least `wanted` of the members, for more of them if that is easy to find. The first is the one that
    /// kube-scheduler asks about.
    pub(crate) fn seats(
        &self,
        members: Vec<Member<'_>>,
        wanted: usize,
        budget: &mut Budget,
    ) -> Seats {
        self.seats_without(members, wanted, &HashSet::default(), budget)
    }

    /// The same as if these bound pods were gone.
    pub(crate) fn seats_without(
        &self,
        members: Vec<Member<'_>>,
        wanted: usize,
        gone: &HashSet<Uid>,
        budget: &mut Budget,
    ) -> Seats {
        let Some(asking) = members.first().map(|member| member.pod) else {
            return Seats::default();
        };
        let most = NODES + members.len();
        let mut sites = Sites::new(self, gone, asking);
        let roams = members.iter().any(|member| member.among.is_none());
        let mut kinds: Vec<Kind<'_>> = Vec::new();
        let mut pods = Vec::new();
        for Member { pod, among, heeds } in members {
            let Some(request) = pod.asks.request() else {
                continue;
            };
            let passed = if heeds { self.passed(pod) } else { None };
            let is_same = |kind: &Kind<'_>| {
                (kind.among == among || among.is_none() && !kind.is_narrow)
                    && kind.passed == passed
                    && kind.request == request
                    && kind.pod.constraints == pod.constraints
            };
            let kind = kinds.iter().position(is_same).unwrap_or_else(|| {
                let roomy = match roams {
                    true => self.roomy(pod, request, passed.is_some(), most, budget),
                    false => Vec::new(),
                };
                let is_narrow = |among: &Vec<Arc<str>>| roomy.iter().any(|it| !among.contains(it));
                kinds.push(Kind {
                    pod,
                    request,
                    is_narrow: among.as_ref().is_some_and(is_narrow),
                    nodes: sites.of(among.as_ref().unwrap_or(&roomy), most),
                    among,
                    passed,
                });
                kinds.len() - 1
            });
            pods.push((kind, &pod.uid));
        }
        pods.sort_by_key(|(kind, _)| {
            let claims = &kinds[*kind].request.claims;
            let gpus = claims.iter().map(|claim| claim.gpus).max();
            let mib = claims.iter().map(|claim| claim.mib).max();
            (Reverse(gpus), Reverse(mib), *kind)
        });
        budget.charge(sites.all.len());
        let order: Vec<usize> = pods.iter().map(|(kind, _)| *kind).collect();
        let mut least: Vec<Mib> = order.iter().map(|it| kinds[*it].hardest()).collect();
        for at in (1..least.len()).rev() {
            least[at - 1] = least[at - 1].min(least[at]);
        }
        let mut search = Search {
            sight: self,
            gone,
            sites: sites.all,
            order,
            least,
            ruled: kinds.iter().any(|kind| kind.request.rules.is_some()),
            kinds,
            taken: vec![None; pods.len()],
            best: vec![None; pods.len()],
            best_count: 0,
            wanted,
            seen: HashSet::default(),
            fits: 0,
            most: budget.fits_left().min(FITS),
        };
        search.place(0, 0);
        budget.charge_fits(search.fits);
        let found = pods.into_iter().zip(search.best);
        let seats = found.filter_map(|((_, uid), seat)| {
            let (site, choice) = seat?;
            let node = search.sites[site].name.clone();
            Some((uid.clone(), Seat { node, choice }))
        });
        Seats {
            seats: seats.collect(),
            count: search.best_count,
            fits: search.fits,
            is_cut: search.fits >= search.most,
        }
    }

    /// Nodes of the cluster that have room for such a pod, at most so many, best first; none that was rejected for it if
    /// it `heeds` that.
    fn roomy(
        &self,
        pod: &PodFacts,
        request: &Request,
        heeds: bool,
        most: usize,
        budget: &mut Budget,
    ) -> Vec<Arc<str>> {
        let least = request.hardest().map(|claim| claim.mib).unwrap_or_default();
        let mut found = Vec::new();
        for name in self.books.with_room(least) {
            budget.charge(1);
            if budget.is_spent() || found.len() == most {
                break;
            }
            let is_rejected = || heeds && self.evidence(pod, name) == Evidence::Rejected;
            if let Some(node) = self.books.node(name)
                && self.may_fit(name, pod)
                && !is_rejected()
                && let Ok(choice) = self.fit_on(name, node, node.view(), pod, |_| false, budget)
            {
                let is_kept = self.queue.goes_first(pod, name);
                found.push((!is_kept, choice.cost, name));
            }
        }
        found.sort_unstable();
        found.into_iter().map(|(.., name)| name.clone()).collect()
    }

    /// Is the room of this seat free still, and do the pod's rules allow it beside others that have come?
    pub(crate) fn is_free(&self, seat: &Seat, pod: &PodFacts) -> bool {
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

    /// Does the pod fit on one of these nodes?
    pub(crate) fn fits_among(&self, pod: &PodFacts, names: &[&str]) -> bool {
        let Some(request) = pod.asks.request() else {
            return false;
        };
        let mut names = names.iter();
        names.any(|name| self.may_fit(name, pod) && self.choose(name, pod, request).is_ok())
    }
}

impl Search<'_, '_> {
    /// Places the pods from this one on.
    fn place(&mut self, at: usize, placed: usize) {
        if placed > self.best_count {
            self.best_count = placed;
            self.best.clone_from(&self.taken);
        }
        let may_come = |more: usize| placed.saturating_add(more) > self.best_count;
        if self.is_done() || !may_come(self.order.len() - at) || !may_come(self.slots(at)) {
            return;
        }
        if !self.is_new(at) {
            return;
        }
        let before = at
            .checked_sub(1)
            .filter(|it| self.order[*it] == self.order[at]);
        let first = match before.map(|before| &self.taken[before]) {
            None => 0,
            Some(Some((site, _))) => {
                let nodes = &self.kinds[self.order[at]].nodes;
                nodes.iter().position(|it| it == site).unwrap_or(0)
            }
            // One that is equal to this one was left out.
            Some(None) => usize::MAX,
        };
        for others in [false, true] {
            let nodes = self.kinds[self.order[at]].nodes.len();
            for position in first..nodes {
                let site = self.kinds[self.order[at]].nodes[position];
                let choices = match others {
                    false => self.choice(at, site).into_iter().collect(),
                    true => self.other_choices(at, site),
                };
                for choice in choices {
                    self.take(at, site, choice, placed);
                    if self.is_done() {
                        return;
                    }
                }
            }
        }
        self.place(at + 1, placed);
    }

    /// No more of the pods from this one on fit: each takes at least so much of a GPU.
    fn slots(&self, at: usize) -> usize {
        let Some(least) = self.least.get(at).filter(|least| **least > Mib::ZERO) else {
            return usize::MAX;
        };
        let on = |site: &Site<'_>| {
            let cards = site.view.cards.iter().filter(|card| card.usable);
            let slots: u64 = cards.map(|card| card.free.0 / least.0).sum();
            slots.min(site.pods)
        };
        let slots = self.sites.iter().map(on).fold(0, u64::saturating_add);
        usize::try_from(slots).unwrap_or(usize::MAX)
    }

    fn take(&mut self, at: usize, site: usize, choice: Choice, placed: usize) {
        let request = self.kinds[self.order[at]].request;
        let (view, pods) = (self.sites[site].view.clone(), self.sites[site].pods);
        self.sites[site].take(request, &choice);
        self.taken[at] = Some((site, choice));
        self.place(at + 1, placed + 1);
        self.taken[at] = None;
        (self.sites[site].view, self.sites[site].pods) = (view, pods);
    }

    /// Are all placed, or enough and no more is to be spent?
    fn is_done(&self) -> bool {
        let most = if self.best_count < self.wanted {
            self.most
        } else {
            self.most.min(FITS / 8)
        };
        self.best_count == self.order.len() || self.fits >= most
    }

    /// Has the search not been here before, with the same free in all nodes?
    fn is_new(&mut self, at: usize) -> bool {
        let mut hasher = DefaultHasher::new();
        let site = at
            .checked_sub(1)
            .and_then(|before| self.taken[before].as_ref());
        (at, site.map(|(site, _)| *site)).hash(&mut hasher);
        for (index, site) in self.sites.iter().enumerate() {
            let free = site.view.cards.iter().map(|card| card.free);
            (index, site.pods).hash(&mut hasher);
            free.for_each(|free| free.hash(&mut hasher));
        }
        for (site, rules, choice) in self.planned(at) {
            (site, rules, &choice.placement.charges).hash(&mut hasher);
        }
        self.seen.insert(hasher.finish())
    }

    /// Where the policy puts the pod on a node.
    fn choice(&mut self, at: usize, site: usize) -> Option<Choice> {
        let site = &self.sites[site];
        let may = site.may_fit(self.kinds[self.order[at]].request);
        may.then_some(())?;
        self.fits += 1;
        self.fit(at, site, &site.view)
    }

    fn fit(&self, at: usize, site: &Site<'_>, view: &NodeGpus) -> Option<Choice> {
        let Kind { pod, request, .. } = self.kinds[self.order[at]];
        let node = self.sight.books.node(site.name)?;
        let all = &mut Budget::all();
        let gone = |uid: &str| self.gone.contains(uid);
        let mut here = Vec::new();
        if let Some(own) = &request.rules {
            for (index, rules, choice) in self.planned(at) {
                let is_here = self.sites[index].name == site.name;
                if !is_here && own.affinity.is_some() && own.affinity == rules.affinity {
                    return None;
                }
                here.extend(is_here.then_some((rules, choice)));
            }
        }
        let sight = self.sight;
        let choice = sight.fit_beside(site.name, node, view, pod, gone, &here, all);
        choice.ok()
    }

    /// The pods before this one that have a place and rules.
    fn planned(&self, at: usize) -> impl Iterator<Item = (usize, &Rules, &Choice)> {
        let taken = self.order.iter().zip(&self.taken).take(at);
        taken.filter_map(|(kind, taken)| {
            let (site, choice) = taken.as_ref()?;
            let rules = self.kinds[*kind].request.rules.as_deref()?;
            Some((*site, rules, choice))
        })
    }

    /// Other GPUs for it there, of those that cannot be told apart the first.
    fn other_choices(&mut self, at: usize, site: usize) -> Vec<Choice> {
        let Some(first) = self.choice(at, site) else {
            return Vec::new();
        };
        let request = self.kinds[self.order[at]].request;
        let view = &self.sites[site].view;
        let usable: Vec<usize> = (0..view.cards.len())
            .filter(|&card| request.room(&view.cards[card]).is_some())
            .collect();
        let mut sets = Vec::new();
        subsets(
            view,
            self.ruled,
            &usable,
            first.placement.charges.len(),
            &mut Vec::new(),
            &mut sets,
        );
        let mut found = Vec::new();
        for set in sets {
            let mut view = view.clone();
            for (card, state) in view.cards.iter_mut().enumerate() {
                state.usable &= set.contains(&card);
            }
            self.fits += 1;
            if request.may_fit(&view)
                && let Some(choice) = self.fit(at, &self.sites[site], &view)
                && choice.placement != first.placement
            {
                found.push(choice);
            }
        }
        found.sort_by_key(|choice| choice.cost);
        found
    }
}

/// Sets of so many of these cards, until there are [`SETS`]; where no pod is `ruled`, of those that are alike the first.
fn subsets(
    view: &NodeGpus,
    ruled: bool,
    cards: &[usize],
    size: usize,
    chosen: &mut Vec<usize>,
    found: &mut Vec<Vec<usize>>,
) {
    if chosen.len() == size {
        found.push(chosen.clone());
        return;
    }
    for (at, &card) in cards.iter().enumerate() {
        let is_alike = |before: &usize| view.cards[*before] == view.cards[card];
        if found.len() >= SETS || cards.len() - at < size - chosen.len() {
            return;
        }
        if !ruled && cards[..at].iter().any(is_alike) {
            continue;
        }
        chosen.push(card);
        subsets(view, ruled, &cards[at + 1..], size, chosen, found);
        chosen.pop();
    }
}
