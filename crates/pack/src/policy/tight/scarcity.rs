//! The scarce resources of the cluster: whole cards side by side, cards of certain models, and cards as large as some
//! pods need.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Class;
use crate::{Card, ModelId, NodeGpus};

/// This multiple of the expected requests counts as plenty.
pub(super) const SLACK: f64 = 1.2;
/// Share of the cluster that is worth keeping whatever is expected: expectations are means.
const SPARE: f64 = 0.1;
/// The most that a MiB of scarce cards costs beyond itself.
const PREMIUM: f64 = 1.0;
/// The worth of a place that is all but there, relative to one that is.
const PART: f64 = 0.5;
/// Nodes of one make differ by their load. This percentage of the CPU of the best of them counts as all of it.
const ALL_CPU_PERCENT: u64 = 90;
/// The kinds of pods for which places or cards can be scarce: the kinds with the most pods, or the most demand. A look
/// takes as many steps for each node.
const MAX_KINDS: usize = 64;
/// Scarcity has this number of steps, so that costs, which callers remember, seldom change.
const STEPS: f64 = 8.0;

/// Pods that take several cards of one node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wide {
    pub(super) gpus: u32,
    cpu_milli: u64,
    /// That they are bound to; empty for any.
    models: Vec<ModelId>,
    /// Share of all pods that ask for as much or more.
    share: f64,
    /// How scarce places for them are, 0 to 1.
    pub(super) scarcity: f64,
}

impl Wide {
    /// [`Self::places`], plus a part of a place by its square where only cards are wanting. Nodes that are nearly a
    /// place are kept, and nodes that are far from it are filled.
    pub(super) fn hope(&self, whole_cards: u32, cpu: u64) -> f64 {
        let places = self.places(whole_cards, cpu);
        let part = match self.by_cpu(cpu) > places {
            true => f64::from(whole_cards % self.gpus) / f64::from(self.gpus),
            false => 0.0,
        };
        places as f64 + PART * part * part
    }

    /// Are all cards of the node of models that will do?
    pub(super) fn may_use(&self, node: &NodeGpus) -> bool {
        let mut cards = node.cards.iter();
        self.models.is_empty() || cards.all(|card| self.models.contains(&card.model))
    }

    /// How many such pods would find a place together.
    pub(super) fn places(&self, whole_cards: u32, cpu: u64) -> u64 {
        u64::from(whole_cards / self.gpus).min(self.by_cpu(cpu))
    }

    fn by_cpu(&self, cpu: u64) -> u64 {
        cpu.checked_div(self.cpu_milli).unwrap_or(u64::MAX)
    }
}

/// The kinds of pods that take several cards: the kinds in the mix, and two for every number of cards that `nodes`
/// have. One takes all the cards. The other takes all CPU as well, which is the most that a node with as many wholly
/// free cards has. Such a pod may not have come yet, and once small pods have spread it would not find a place. Among
/// many pods these kinds hardly count.
pub(super) fn wide(mix: &[Class], nodes: &BTreeMap<u32, u64>) -> Vec<Wide> {
    let pods: usize = mix.iter().map(|class| class.pods).sum();
    let mut seen: BTreeMap<(u32, u64, &[ModelId]), usize> = BTreeMap::new();
    for class in mix.iter().filter(|class| class.gpus > 1) {
        let kind = (class.gpus, class.cpu_milli, &class.models[..]);
        *seen.entry(kind).or_default() += class.pods;
    }
    let mut seen: Vec<_> = seen.into_iter().collect();
    seen.sort_by_key(|&(_, pods)| Reverse(pods));
    seen.truncate(MAX_KINDS);
    let seen = seen
        .iter()
        .map(|&((gpus, cpu_milli, models), pods)| (gpus, cpu_milli, models, pods));
    let possible = nodes.iter().flat_map(|(&cards, &cpu)| {
        let all_cpu = cpu / 100 * ALL_CPU_PERCENT;
        [(cards, 0, &[][..], 1), (cards, all_cpu, &[][..], 1)]
    });
    let several: Vec<_> = seen.chain(possible).filter(|kind| kind.0 > 1).collect();
    let wide = several.iter().map(|&(gpus, cpu_milli, models, _)| {
        let more = several
            .iter()
            .filter(|other| other.0 >= gpus && other.1 >= cpu_milli && is_within(other.2, models));
        let more: usize = more.map(|(.., pods)| pods).sum();
        Wide {
            gpus,
            cpu_milli,
            models: models.to_vec(),
            share: more as f64 / (pods + 1) as f64,
            scarcity: 0.0,
        }
    });
    wide.collect()
}

/// Cards that some pods cannot do without: of certain models, or so large.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bound {
    /// Empty for any.
    models: Vec<ModelId>,
    /// MiB of the smallest card that does.
    size: u64,
    /// MiB of the smallest piece that does.
    piece: u64,
    /// Only wholly free cards do.
    whole: bool,
    /// Share of all demand that is bound to these cards or to some of them.
    share: f64,
    /// The cost of each MiB on them beyond itself.
    pub(super) premium: f64,
}

impl Bound {
    /// Could such a pod use the card as it is?
    pub(super) fn has(&self, card: &Card) -> bool {
        card.capacity.0 >= self.size
            && card.free.0
                >= if self.whole {
                    card.capacity.0
                } else {
                    self.piece
                }
            && self.would_have(card)
    }

    /// The worth of the card to such pods beyond its memory, in MiB.
    pub(super) fn worth(&self, card: &Card) -> f64 {
        match self.premium > 0.0 && self.has(card) {
            true => self.premium * card.free.0 as f64,
            false => 0.0,
        }
    }

    /// Could it use the card if that were free?
    fn would_have(&self, card: &Card) -> bool {
        card.capacity.0 >= self.size
            && (self.models.is_empty() || self.models.contains(&card.model))
    }
}

/// The sets of cards that pods are bound to, on cards of these `sizes` (ascending).
pub(super) fn bound(mix: &[Class], whole: f64, sizes: &[u64]) -> Vec<Bound> {
    let asked: f64 = mix.iter().map(|class| class.asked(whole)).sum();
    // A size that every card has binds no pod.
    let smallest = sizes.first().copied().unwrap_or(0);
    let size = |class: &Class| {
        let fits = sizes.iter().find(|size| **size >= class.mib.0);
        fits.copied().filter(|size| *size > smallest).unwrap_or(0)
    };
    let mut sets: BTreeMap<(&[ModelId], u64, bool), f64> = BTreeMap::new();
    for class in mix.iter().filter(|class| class.gpus > 0) {
        let size = size(class);
        if !class.models.is_empty() || size > 0 {
            let set = (&class.models[..], size, class.exclusive && size > 0);
            *sets.entry(set).or_default() += class.asked(whole);
        }
    }
    let mut sets: Vec<_> = sets.into_iter().collect();
    sets.sort_by(|a, b| b.1.total_cmp(&a.1));
    sets.truncate(MAX_KINDS);
    let bound = sets.into_iter().map(|((models, least, whole_card), _)| {
        let needs_them = |class: &&Class| {
            is_within(&class.models, models)
                && size(class) >= least
                && (class.exclusive || !whole_card)
        };
        let within = || mix.iter().filter(needs_them);
        let share: f64 = within().map(|class| class.asked(whole)).sum();
        let pieces = within().map(|class| class.mib.0);
        Bound {
            models: models.to_vec(),
            size: least,
            piece: pieces.min().unwrap_or(0),
            whole: whole_card,
            share: share / asked.max(1.0),
            premium: 0.0,
        }
    });
    bound.collect()
}

/// Are pods that are bound to `narrow` bound to `wide` as well? Empty stands for any.
fn is_within(narrow: &[ModelId], wide: &[ModelId]) -> bool {
    wide.is_empty() || !narrow.is_empty() && narrow.iter().all(|model| wide.contains(model))
}

/// The scarcity of a resource, of which `free` of `all` are there, when `expected` are expected to be asked for.
fn scarcity(free: f64, expected: f64, all: f64) -> f64 {
    let plenty = SLACK * expected + SPARE * all;
    let scarcity = if plenty > 0.0 {
        (1.0 - free / plenty).max(0.0)
    } else {
        0.0
    };
    (scarcity * STEPS).ceil() / STEPS
}

/// The free and the total amount.
#[derive(Clone, Copy, Default)]
struct Room {
    free: f64,
    all: f64,
}

/// Sets the scarcity of places for `wide` pods and the premium on the cards that others are `bound` to. Pods request
/// `mean` MiB and, for each of these, `cpu` thousandths of a core.
pub(super) fn look<'a>(
    wide: &mut [Wide],
    bound: &mut [Bound],
    mean: f64,
    cpu: f64,
    nodes: impl Iterator<Item = (&'a NodeGpus, u32)>,
) {
    let mut places = vec![Room::default(); wide.len()];
    let mut cards = vec![Room::default(); bound.len()];
    let mut free = 0.0;
    for (node, count) in nodes {
        let count = f64::from(count);
        let whole = node.cards.iter().filter(|card| card.is_whole()).count();
        let whole = u32::try_from(whole).unwrap_or(0);
        let all = places.iter_mut().zip(&*wide);
        for (places, wide) in all.filter(|(_, wide)| wide.may_use(node)) {
            places.free += wide.places(whole, node.cpu_free_milli) as f64 * count;
            places.all += f64::from(u8::from(node.cards.len() >= wide.gpus as usize)) * count;
        }
        let wanted = SLACK * cpu * node.free().0 as f64;
        let there = node.cpu_free_milli as f64;
        let with_cpu = if there < wanted { there / wanted } else { 1.0 };
        for card in &node.cards {
            let usable = if card.usable {
                card.free.0 as f64 * count
            } else {
                0.0
            };
            free += usable;
            for (room, bound) in cards.iter_mut().zip(&*bound) {
                if bound.would_have(card) {
                    room.all += card.capacity.0 as f64 * count;
                    room.free += if bound.has(card) {
                        usable * with_cpu
                    } else {
                        0.0
                    };
                }
            }
        }
    }
    let to_come = free / mean.max(1.0);
    for (places, wide) in places.iter().zip(wide) {
        wide.scarcity = scarcity(places.free, wide.share * to_come, places.all);
    }
    for (room, bound) in cards.iter().zip(bound) {
        bound.premium = PREMIUM * scarcity(room.free, bound.share * free, room.all);
    }
}
