//! The search for seats: depth-first over the pods of a gang. It uses a stack of its own, because a tenant decides the
//! number of pods.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_books::{Budget, HashSet, Host, Left, Mark, NodeSet, Trial};
use gpustow_pack::{Choice, Mib, NodeGpus, Request};

/// Fits that one plan may try.
pub(super) const FITS: usize = 4096;
/// Nodes that one plan may look at for its pods; most of these looks cost much less than a fit.
const STEPS: usize = 1 << 20;
/// Sets of GPUs of one node that are tried for one pod.
const SETS: usize = 32;

/// Pods that are alike, and the nodes for them.
pub(super) struct Kind<'p> {
    pub(super) pod: &'p PodFacts,
    pub(super) request: &'p Arc<Request>,
    pub(super) among: Option<Arc<[Arc<str>]>>,
    /// The nodes that passed kube-scheduler's filters, if that is heeded.
    pub(super) passed: Option<NodeSet>,
    /// kube-scheduler has not offered all of the cluster.
    pub(super) is_narrow: bool,
    pub(super) nodes: Arc<[usize]>,
}

impl Kind<'_> {
    /// The sort key: the largest requests come first.
    pub(super) fn size(&self) -> (Reverse<Option<u32>>, Reverse<Option<Mib>>) {
        let claims = &self.request.claims;
        let gpus = claims.iter().map(|claim| claim.gpus).max();
        let mib = claims.iter().map(|claim| claim.mib).max();
        (Reverse(gpus), Reverse(mib))
    }
}

/// The parameters and the state of a search.
pub(super) struct Search<'s, 'p> {
    /// The nodes that may be used are its spots.
    pub(super) trial: Trial<'s>,
    pub(super) kinds: Vec<Kind<'p>>,
    /// The kind of each pod, in the order of the search.
    pub(super) order: Vec<usize>,
    /// The memory that each pod from this one on takes of one GPU at least.
    pub(super) least: Vec<Mib>,
    /// A pod has rules about its GPUs: then GPUs with equal free memory differ.
    pub(super) ruled: bool,
    /// Anti-affinity of a pod keeps others off its node: then it matters which pod is where.
    pub(super) keeps_off: bool,
    pub(super) wanted: usize,
    /// Fewer are of no use.
    pub(super) floor: usize,
    /// So many fits may be tried.
    pub(super) most: usize,
    pub(super) state: State,
}

/// How far the search is.
#[derive(Default)]
pub(super) struct State {
    taken: Found,
    pub(super) best: Found,
    pub(super) best_count: usize,
    /// `taken` is better than `best`.
    is_better: bool,
    /// Where the search has been.
    seen: HashSet<u64>,
    /// A digest of the free room of the nodes, and of the places of pods with rules.
    digest: u64,
    slots: Slots,
    pub(super) fits: usize,
    steps: usize,
}

/// For each pod its node and place there.
pub(super) type Found = Vec<Option<(usize, Choice)>>;

/// How many pods fit on each node at most that take so much of one GPU.
#[derive(Default)]
struct Slots {
    least: Mib,
    of: Vec<u64>,
}

impl Slots {
    fn on(&self, left: &Left) -> u64 {
        let cards = left.view().cards.iter().filter(|card| card.usable);
        let slots = cards.map(|card| card.free.0 / self.least.0);
        slots.fold(0, u64::saturating_add).min(left.pods())
    }
}

/// One pod's turn.
struct Frame {
    /// Pods before it that have a place.
    placed: usize,
    /// Nodes before this one are for equal pods before it.
    first: usize,
    /// The next node.
    next: usize,
    /// The policy's own choices were tried.
    is_second: bool,
    /// The node that was looked at last, and the choices that are left to try there, the best last.
    site: usize,
    choices: Vec<Choice>,
    /// The node where the pod has its place, and the time before.
    before: Option<(usize, Mark)>,
    is_left_out: bool,
}

impl Search<'_, '_> {
    /// Places the pods.
    pub(super) fn run(&mut self) {
        self.state.taken = vec![None; self.order.len()];
        self.state.best = vec![None; self.order.len()];
        self.state.digest = (0..self.trial.count()).fold(0, |all, it| all ^ self.digest_of(it));
        let mut stack: Vec<Frame> = self.enter(0, 0).into_iter().collect();
        while let Some(at) = stack.len().checked_sub(1)
            && !self.is_done()
        {
            let frame = &mut stack[at];
            self.leave(at, frame);
            let next = if let Some((site, choice)) = self.next_choice(at, frame) {
                self.take(at, site, choice, frame);
                self.enter(at + 1, frame.placed + 1)
            } else if !frame.is_left_out {
                frame.is_left_out = true;
                self.enter(at + 1, frame.placed)
            } else {
                stack.pop();
                continue;
            };
            stack.extend(next);
        }
        self.write_down();
    }

    /// The turn of the pod begins, if it may lead to something better.
    fn enter(&mut self, at: usize, placed: usize) -> Option<Frame> {
        if placed > self.state.best_count {
            (self.state.best_count, self.state.is_better) = (placed, true);
        }
        let (best, floor) = (self.state.best_count, self.floor);
        let may_come = |more: usize| {
            let most = placed.saturating_add(more);
            most > best && most >= floor
        };
        let is_open = !self.is_done()
            && may_come(self.order.len() - at)
            && may_come(self.slots(at))
            && self.is_new(at);
        is_open.then_some(())?;
        let before = at
            .checked_sub(1)
            .filter(|it| self.order[*it] == self.order[at]);
        let first = match before.map(|before| &self.state.taken[before]) {
            None => 0,
            Some(Some((site, _))) => {
                let nodes = &self.kinds[self.order[at]].nodes;
                nodes.iter().position(|it| it == site).unwrap_or(0)
            }
            // One that is equal to this one was left out.
            Some(None) => usize::MAX,
        };
        Some(Frame {
            placed,
            first,
            next: first,
            is_second: false,
            site: 0,
            choices: Vec::new(),
            before: None,
            is_left_out: false,
        })
    }

    /// The next place to try for a pod.
    fn next_choice(&mut self, at: usize, frame: &mut Frame) -> Option<(usize, Choice)> {
        loop {
            if let Some(choice) = frame.choices.pop() {
                return Some((frame.site, choice));
            }
            let nodes = &self.kinds[self.order[at]].nodes;
            let Some(&site) = nodes.get(frame.next).filter(|_| !self.is_done()) else {
                if frame.is_second {
                    return None;
                }
                (frame.is_second, frame.next) = (true, frame.first);
                continue;
            };
            frame.next += 1;
            frame.site = site;
            self.state.steps += 1;
            frame.choices = match frame.is_second {
                false => self.choice(at, site).into_iter().collect(),
                true => self.other_choices(at, site),
            };
        }
    }

    fn take(&mut self, at: usize, site: usize, choice: Choice, frame: &mut Frame) {
        frame.before = Some((site, self.trial.mark()));
        self.state.digest ^= self.digest_of(site) ^ self.digest_of_rules(at, site, &choice);
        let pod = self.kinds[self.order[at]].pod;
        self.trial.take_at(site, pod, &choice.placement.charges);
        self.changed(site);
        self.state.taken[at] = Some((site, choice));
    }

    /// The pod has its place no more.
    fn leave(&mut self, at: usize, frame: &mut Frame) {
        let Some((site, before)) = frame.before.take() else {
            return;
        };
        self.write_down();
        self.state.digest ^= self.digest_of(site);
        if let Some((_, choice)) = self.state.taken[at].take() {
            self.state.digest ^= self.digest_of_rules(at, site, &choice);
        }
        self.trial.back_to(before);
        self.changed(site);
    }

    fn changed(&mut self, site: usize) {
        self.state.digest ^= self.digest_of(site);
        let slots = &mut self.state.slots;
        if !slots.of.is_empty() {
            slots.of[site] = slots.on(self.trial.at(site));
        }
    }

    fn write_down(&mut self) {
        if std::mem::take(&mut self.state.is_better) {
            self.state.best.clone_from(&self.state.taken);
        }
    }

    /// No more of the pods from this one on fit: each takes at least so much of a GPU.
    fn slots(&mut self, at: usize) -> usize {
        let Some(least) = self.least.get(at).filter(|least| **least > Mib::ZERO) else {
            return usize::MAX;
        };
        let slots = &mut self.state.slots;
        if slots.least != *least {
            slots.least = *least;
            let sites = 0..self.trial.count();
            slots.of = sites.map(|site| slots.on(self.trial.at(site))).collect();
        }
        let all = slots.of.iter().copied().fold(0, u64::saturating_add);
        usize::try_from(all).unwrap_or(usize::MAX)
    }

    /// Are all placed, or enough and no more is to be spent?
    fn is_done(&self) -> bool {
        self.state.best_count == self.order.len() || self.is_spent()
    }

    fn is_spent(&self) -> bool {
        let State { fits, steps, .. } = self.state;
        let part = match self.state.best_count < self.wanted {
            true => 1,
            false => 8,
        };
        fits >= self.most.min(FITS / part) || steps >= STEPS / part
    }

    /// Did the search end because no more might be?
    pub(super) fn is_cut(&self) -> bool {
        self.state.best_count < self.order.len() && self.is_spent()
    }

    /// Has the search not been here before, with the same free in all nodes?
    fn is_new(&mut self, at: usize) -> bool {
        let before = at.checked_sub(1);
        let site = before.and_then(|before| self.state.taken[before].as_ref());
        let key = (at, site.map(|(site, _)| *site), self.state.digest);
        self.state.seen.insert(hash_of(&key))
    }

    fn digest_of(&self, site: usize) -> u64 {
        let left = self.trial.at(site);
        let mut hasher = DefaultHasher::new();
        (site, left.pods()).hash(&mut hasher);
        left.view()
            .cards
            .iter()
            .for_each(|it| it.free.hash(&mut hasher));
        hasher.finish()
    }

    /// The pod's part of the digest at its place, if more than its size counts.
    fn digest_of_rules(&self, at: usize, site: usize, choice: &Choice) -> u64 {
        let rules = self.kinds[self.order[at]].request.rules.as_deref();
        let rules = rules.map_or(0, |rules| {
            hash_of(&(site, rules, &choice.placement.charges))
        });
        match self.keeps_off {
            true => rules ^ hash_of(&(site, at)),
            false => rules,
        }
    }

    /// Where the policy puts the pod on a node.
    fn choice(&mut self, at: usize, site: usize) -> Option<Choice> {
        let request = self.kinds[self.order[at]].request;
        self.trial.at(site).may_fit(request).then_some(())?;
        self.state.fits += 1;
        self.fit(at, site, None)
    }

    fn fit(&self, at: usize, site: usize, only: Option<&[usize]>) -> Option<Choice> {
        let pod = self.kinds[self.order[at]].pod;
        let all = &mut Budget::all();
        let choice = self.trial.fit_at(site, pod, only, Host::Whole, all);
        choice.ok()
    }

    /// Other sets of GPUs for the pod on the node, the best last. Of GPUs that are alike, the search takes the first.
    fn other_choices(&mut self, at: usize, site: usize) -> Vec<Choice> {
        let Some(first) = self.choice(at, site) else {
            return Vec::new();
        };
        let request = self.kinds[self.order[at]].request;
        let view = self.trial.at(site).view();
        let usable: Vec<usize> = (0..view.cards.len())
            .filter(|&card| request.room(&view.cards[card]).is_some())
            .collect();
        let mut found = Vec::new();
        for set in subsets(view, self.ruled, &usable, first.placement.charges.len()) {
            self.state.fits += 1;
            if let Some(choice) = self.fit(at, site, Some(&set))
                && choice.placement != first.placement
            {
                found.push(choice);
            }
        }
        found.sort_by_key(|choice| choice.cost);
        found.reverse();
        found
    }
}

fn hash_of(it: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    it.hash(&mut hasher);
    hasher.finish()
}

/// Sets of `size` of these cards, at most [`SETS`], in order. Where no pod is `ruled`, a set takes the first of cards
/// that are alike.
fn subsets(view: &NodeGpus, ruled: bool, cards: &[usize], size: usize) -> Vec<Vec<usize>> {
    let mut found = Vec::new();
    // Places in `cards`, in ascending order; the last one is the next to be tried.
    let mut chosen = vec![0];
    while let Some(at) = chosen.pop()
        && found.len() < SETS
    {
        let missing = size - chosen.len();
        if missing == 0 {
            found.push(chosen.iter().map(|it| cards[*it]).collect());
        }
        if missing == 0 || cards.len() < at + missing {
            // The one before is replaced by the next.
            if let Some(last) = chosen.last_mut() {
                *last += 1;
            }
            continue;
        }
        let from = chosen.last().map_or(0, |last| last + 1);
        let is_alike = |before: &usize| view.cards[*before] == view.cards[cards[at]];
        if !ruled && cards[from..at].iter().any(is_alike) {
            chosen.push(at + 1);
            continue;
        }
        chosen.extend([at, at + 1]);
    }
    found
}
