//! Kinds of nodes, and which pods one node of them takes.

use std::cell::Cell;

use gpustow_api::gpunode::Gpu;
use gpustow_api::intree;
use gpustow_books::{Budget, HashSet, Node, Scores, left_of_new};
use gpustow_means::Sight;
use gpustow_pack::{Card, Mib, NodeGpus, Traits};

use super::{EXACT, Need, Placeholder, instance_type, seem_to_hold};

/// The most kinds that are distinguished.
const KINDS: usize = 32;
/// Nodes of a kind that are asked whether a pod may go to the kind.
const NODES: usize = 16;
/// Placements that one look tries in addition to the placements that the policy prefers.
const TRIES: usize = 10_000;

/// The kinds of nodes that are there, and the pods that need such a node.
pub(super) struct Kinds<'a> {
    all: Vec<Kind<'a>>,
    needs: &'a [Need],
    scores: &'a Scores,
    /// So many placements may still be tried.
    tries: Cell<usize>,
    fits: Cell<usize>,
}

struct Kind<'a> {
    instance_type: Option<&'a str>,
    /// A new node, of which pods have nothing.
    empty: NodeGpus,
    nodes: Vec<&'a Node>,
}

impl<'a> Kinds<'a> {
    pub(super) fn of(sight: &Sight<'a>, needs: &'a [Need]) -> Self {
        let mut kinds: Vec<Kind<'a>> = Vec::new();
        for (_, node) in sight.books.nodes() {
            let (Some(facts), Some(_)) = (node.facts(), node.status()) else {
                continue;
            };
            if node.gpus().is_empty() {
                continue;
            }
            let instance_type = instance_type(facts);
            let models = |node: &'a Node| node.gpus().iter().map(|gpu| &gpu.model);
            let sizes = |view: &NodeGpus| -> Vec<Mib> {
                view.cards.iter().map(|card| card.capacity).collect()
            };
            let same = kinds.iter().position(|kind| {
                kind.instance_type == instance_type
                    && models(kind.nodes[0]).eq(models(node))
                    && sizes(&kind.empty) == sizes(node.view())
            });
            if let Some(same) = same {
                let nodes = &mut kinds[same].nodes;
                if nodes.len() < NODES {
                    nodes.push(node);
                }
            } else if kinds.len() < KINDS {
                let mut empty = node.view().clone();
                for card in &mut empty.cards {
                    *card = card.emptied();
                }
                empty.cpu_free_milli = facts.cpu_milli;
                empty.ram_free = facts.ram;
                kinds.push(Kind {
                    instance_type,
                    empty,
                    nodes: vec![node],
                });
            }
        }
        // The smallest first.
        kinds.sort_by_key(|kind| kind.empty.free());
        Self {
            all: kinds,
            needs,
            scores: sight.scores,
            tries: Cell::new(TRIES),
            fits: Cell::new(0),
        }
    }

    /// The cost of the walk through all nodes for the kinds, and of the placement of pods on the kinds.
    pub(super) fn spent(&self, sight: &Sight<'_>) -> u64 {
        let mut budget = Budget::of_look();
        budget.charge(sight.books.nodes().len() / 8);
        budget.charge_fits(self.fits.get());
        budget.spent()
    }

    /// The kind of a node that does not report yet, if its instance type is known.
    pub(super) fn of_unknown(&self, name: &str, sight: &Sight<'_>) -> Option<usize> {
        let node = sight.books.node(name)?;
        if node.status().is_some() {
            return None;
        }
        let its = instance_type(node.facts()?)?;
        let mut kinds = self.all.iter();
        kinds.position(|kind| kind.instance_type == Some(its))
    }
}

impl Kind<'_> {
    /// May the pod go to such a node, and to its GPUs?
    fn admits(&self, need: &Need) -> bool {
        let gpus = self.nodes.first().map_or(&[][..], |node| node.gpus());
        let suits = |gpu: &Gpu| {
            let new = Traits {
                model: &gpu.model,
                ..Traits::default()
            };
            let rules = need.request.rules.as_ref();
            rules.is_none_or(|rules| rules.selects(&new))
        };
        if !gpus.iter().all(suits) {
            return false;
        }
        let mut facts = self.nodes.iter().filter_map(|node| node.facts());
        facts.any(|facts| {
            let mut facts = facts.clone();
            facts.cordoned = false;
            intree::refuses_once_started(&facts, &need.pod.constraints).is_none()
        })
    }
}

/// One node that comes, and the pods for it.
#[derive(Clone)]
pub(super) struct Bin {
    pods: Vec<usize>,
    /// The kinds that the node may be of, with the room that would be left.
    views: Vec<(usize, NodeGpus)>,
}

impl Bin {
    /// A node of some kind for these pods.
    pub(super) fn with(pods: &[usize], kinds: &Kinds<'_>) -> Self {
        let views = kinds.all.iter().enumerate();
        let mut bin = Self {
            pods: Vec::new(),
            views: views.map(|(kind, it)| (kind, it.empty.clone())).collect(),
        };
        for pod in pods {
            bin.put(*pod, kinds);
        }
        bin
    }

    /// A node of this kind.
    pub(super) fn of(kind: usize, kinds: &Kinds<'_>) -> Self {
        let empty = kinds.all.get(kind).map(|it| (kind, it.empty.clone()));
        Self {
            pods: Vec::new(),
            views: empty.into_iter().collect(),
        }
    }

    /// The pod is for this node, whether a known kind takes it or not.
    fn put(&mut self, index: usize, kinds: &Kinds<'_>) {
        if !self.take(index, kinds) {
            self.pods.push(index);
            self.views.clear();
        }
    }

    /// Takes the pod if a kind has room for it together with the others, in whatever order they are placed.
    pub(super) fn take(&mut self, index: usize, kinds: &Kinds<'_>) -> bool {
        let need = &kinds.needs[index];
        let mut with = self.pods.clone();
        with.push(index);
        let is_few = with.len() <= EXACT;
        let beside = |kind: usize, view: &NodeGpus| {
            let left = kinds.placed(view, need, None);
            left.or_else(|| is_few.then(|| kinds.left(kind, &with))?)
        };
        let left = self.views.iter().filter_map(|(kind, view)| {
            let admits = kinds.all[*kind].admits(need);
            Some((*kind, admits.then(|| beside(*kind, view))??))
        });
        let left: Vec<_> = left.collect();
        if left.is_empty() {
            return false;
        }
        self.views = left;
        self.pods = with;
        true
    }

    pub(super) fn placeholder(self, kinds: &Kinds<'_>, sight: &Sight<'_>) -> Placeholder {
        let needs = kinds.needs;
        let mut pods = self.pods;
        pods.sort_unstable();
        let all = || pods.iter().map(|index| &needs[*index]);
        let takes: HashSet<usize> = self.views.iter().map(|(kind, _)| *kind).collect();
        let types = |is_one: bool| {
            let kinds = kinds.all.iter().enumerate();
            let kinds = kinds.filter(|(kind, _)| takes.contains(kind) == is_one);
            let types = kinds.filter_map(|(_, kind)| kind.instance_type.map(Box::from));
            let mut types: Vec<Box<str>> = types.collect();
            types.sort_unstable();
            types.dedup();
            types
        };
        let types_that_do = types(true);
        let mut others = types(false);
        others.retain(|it| !types_that_do.contains(it));
        let mib = all().map(|need| need.request.in_sum()).sum();
        Placeholder {
            pod: needs[pods[0]].pod.clone(),
            pods: all().map(|need| need.pod.uid.clone()).collect(),
            mib,
            cpu_milli: all().fold(0, |sum: u64, need| {
                sum.saturating_add(need.request.cpu_milli)
            }),
            ram: all().map(|need| need.request.ram).sum(),
            gpus: all().map(Need::gpus).max().unwrap_or_default(),
            gpu_mib: all().map(Need::gpu_mib).max().unwrap_or_default(),
            is_counted: !self.views.is_empty(),
            types: types_that_do,
            others,
            present: seem_to_hold(sight, mib),
        }
    }
}

impl Kinds<'_> {
    fn placed(&self, view: &NodeGpus, need: &Need, only: Option<&[usize]>) -> Option<NodeGpus> {
        self.fits.set(self.fits.get() + 1);
        left_of_new(view, &need.request, only, self.scores)
    }

    /// The room that is left on a node of this kind with all of these pods, if it takes them.
    fn left(&self, kind: usize, pods: &[usize]) -> Option<NodeGpus> {
        let empty = &self.all[kind].empty;
        let needs = pods.iter().map(|it| &self.needs[*it]);
        let asked: Mib = needs.map(|need| need.request.in_sum()).sum();
        let may = asked <= empty.free();
        may.then(|| self.left_of(empty, pods))?
    }

    fn left_of(&self, view: &NodeGpus, pods: &[usize]) -> Option<NodeGpus> {
        let Some((first, rest)) = pods.split_first() else {
            return Some(view.clone());
        };
        let need = &self.needs[*first];
        // The preferred one is mostly right.
        let preferred = self.placed(view, need, None)?;
        if let Some(left) = self.left_of(&preferred, rest) {
            return Some(left);
        }
        let others = cards_of(view, need).into_iter().filter_map(|cards| {
            self.tries.set(self.tries.get().checked_sub(1)?);
            self.placed(view, need, Some(&cards))
        });
        let mut others = others.filter_map(|left| self.left_of(&left, rest));
        others.next()
    }
}

/// The sets of GPUs that differ and that may take the pod. None if it has several containers: it goes only to the GPUs that
/// the policy prefers.
fn cards_of(view: &NodeGpus, need: &Need) -> Vec<Vec<usize>> {
    let [claim] = need.request.claims.as_slice() else {
        return Vec::new();
    };
    let mut sets = vec![Vec::new()];
    for _ in 0..claim.gpus.max(1) {
        let mut seen = HashSet::default();
        let longer = sets.iter().flat_map(|set: &Vec<usize>| {
            let next = set.last().map_or(0, |last| last + 1);
            let cards = next..view.cards.len();
            cards.map(|card| set.iter().copied().chain([card]).collect::<Vec<_>>())
        });
        let cards = |set: &[usize]| -> Vec<Card> { set.iter().map(|it| view.cards[*it]).collect() };
        sets = longer.filter(|set| seen.insert(cards(set))).collect();
    }
    sets
}

/// The fewest nodes for these pods: exactly if they are few, else the largest first.
pub(super) fn fewest(open: &[usize], kinds: &Kinds<'_>, times: impl Fn(usize) -> u32) -> Vec<Bin> {
    let alone = |index: usize| Bin::with(&[index], kinds);
    let mut order = open.to_vec();
    order.sort_by_key(|index| std::cmp::Reverse(kinds.needs[*index].request.in_sum()));
    let (known, unknown): (Vec<usize>, Vec<usize>) = order
        .iter()
        .partition(|index| !alone(**index).views.is_empty());
    let mut bins = match known.len() <= EXACT {
        true => partition(&known, kinds),
        false => {
            let mut bins: Vec<Bin> = Vec::new();
            for &index in &known {
                if !bins.iter_mut().any(|bin| bin.take(index, kinds)) {
                    bins.push(alone(index));
                }
            }
            bins
        }
    };
    bins.extend(unknown.into_iter().map(alone));
    // The pods that are first in turn get the first nodes. Pods that no node answered, or that no known kind takes,
    // come after all others.
    bins.sort_by_key(|bin| {
        let first = bin.pods.iter().min().copied();
        (first.map_or(0, &times), bin.views.is_empty(), first)
    });
    bins
}

/// The fewest nodes, by looking at every set of these few pods.
fn partition(pods: &[usize], kinds: &Kinds<'_>) -> Vec<Bin> {
    let all = (1_usize << pods.len()) - 1;
    let members = |set: usize| -> Vec<usize> {
        let indices = pods.iter().enumerate();
        let indices = indices.filter(|(nth, _)| set >> nth & 1 == 1);
        indices.map(|(_, index)| *index).collect()
    };
    let mut takes: Vec<Vec<usize>> = vec![Vec::new(); all + 1];
    for set in 1..=all {
        let of = members(set);
        let without_first = set & (set - 1);
        let may = |kind: &usize| without_first == 0 || takes[without_first].contains(kind);
        let candidates = (0..kinds.all.len()).filter(may);
        let holding = candidates.filter(|kind| {
            let it = &kinds.all[*kind];
            let admits = of.iter().all(|index| it.admits(&kinds.needs[*index]));
            admits && kinds.left(*kind, &of).is_some()
        });
        takes[set] = holding.collect();
    }
    // Of each set the fewest nodes, and the one that takes its first pod.
    let mut best: Vec<Option<(usize, usize)>> = vec![None; all + 1];
    best[0] = Some((0, 0));
    for set in 1..=all {
        let first = set & set.wrapping_neg();
        let mut part = set;
        while part > 0 {
            if part & first != 0
                && !takes[part].is_empty()
                && let Some((nodes, _)) = best[set ^ part]
                && best[set].is_none_or(|(fewest, _)| nodes + 1 < fewest)
            {
                best[set] = Some((nodes + 1, part));
            }
            part = (part - 1) & set;
        }
    }
    let mut bins = Vec::new();
    let mut left = all;
    while left > 0
        && let Some((_, part)) = best[left]
    {
        let views = takes[part].iter();
        bins.push(Bin {
            pods: members(part),
            views: views
                .map(|kind| (*kind, kinds.all[*kind].empty.clone()))
                .collect(),
        });
        left ^= part;
    }
    bins
}
