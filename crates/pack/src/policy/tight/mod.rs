//! Tight: put a pod where it spoils the least of the resources that other pods could use.
//!
//! The policy knows which requests the cluster sees (a mix of [`Class`]es). Resources that are free on a node but not
//! expected to be used count as waste. Examples are pieces of cards that no combination of requests fills, and cards
//! whose node is short of CPU or host memory. A placement costs the waste that it adds, and more where it takes scarce
//! resources. docs/packing.md has the formula and the worth of each part. The policy does not know time, names, or
//! later pods.

mod mix;
mod pieces;
mod prices;
mod scarcity;

use std::collections::{BTreeMap, BTreeSet};

use super::{Policy, Survey};
use crate::{Card, Mib, NodeGpus, Request};
use pieces::Pieces;
use scarcity::{Bound, SLACK, Wide};

pub use mix::Class;

/// Costs are counted in sixteenths of a MiB.
const SCALE: f64 = 16.0;
/// Card sizes that the policy distinguishes; a card of another size is taken for the nearest.
const MAX_SIZES: usize = 16;
/// The weight of free memory whose node is without free CPU, or without free host memory, to use it with.
const STRANDED: f64 = 0.5;
/// The worth of a place for a pod of several cards beyond its memory, where such places are scarce.
const RESERVE: f64 = 0.2;

/// A mean over a number of pods is off by about this share over the root of the number. The gain of a pod on a node
/// that no pod uses counts beyond that share of the node's memory.
const UNSURE: f64 = 0.25;
/// The first pod on a node costs this part of that share in any case.
const OPENING: f64 = 0.25;

/// The policy with its learnt values. The default has learnt nothing and takes every free MiB for useful.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tight {
    /// By size of card.
    pieces: Vec<Pieces>,
    wide: Vec<Wide>,
    bound: Vec<Bound>,
    /// Thousandths of a core per MiB of GPU memory asked for.
    cpu: f64,
    /// MiB of host memory per MiB of GPU memory asked for.
    ram: f64,
    /// MiB that a pod asks for on average.
    mean: f64,
    /// The possible error of the learnt values, as a share.
    unsure: f64,
}

impl Tight {
    /// Learns from the pods there are, `mix`, on these nodes, each kind of node with their number;
    /// then [`Tight::look`]s at them.
    #[must_use]
    pub fn learn<'a>(
        mix: &[Class],
        nodes: impl Iterator<Item = (&'a NodeGpus, u32)> + Clone,
    ) -> Self {
        let mut sizes = BTreeSet::new();
        let mut free_cpu: BTreeMap<u32, u64> = BTreeMap::new();
        let (mut whole, mut cards) = (0.0, 0_u32);
        for (node, count) in nodes.clone() {
            let most = free_cpu
                .entry(u32::try_from(node.cards.len()).unwrap_or(u32::MAX))
                .or_default();
            if node.cards.iter().all(Card::is_whole) {
                *most = node.cpu_free_milli.max(*most);
            }
            for card in &node.cards {
                whole += card.capacity.0 as f64 * f64::from(count);
                cards += count;
                sizes.insert(card.capacity.0);
            }
        }
        let sizes: Vec<u64> = sizes
            .iter()
            .step_by(sizes.len().div_ceil(MAX_SIZES).max(1))
            .copied()
            .collect();
        let whole = whole / f64::from(cards.max(1));
        let pods: usize = mix.iter().map(|class| class.pods).sum();
        let asked: f64 = mix.iter().map(|class| class.asked(whole)).sum();
        let per_mib = |of: fn(&Class) -> u64| -> f64 {
            let all = mix.iter().map(|class| of(class) as f64 * class.pods as f64);
            all.sum::<f64>() / asked.max(1.0)
        };
        let mut tight = Self {
            pieces: sizes.iter().map(|&size| Pieces::new(size, mix)).collect(),
            wide: scarcity::wide(mix, &free_cpu),
            bound: scarcity::bound(mix, whole, &sizes),
            cpu: per_mib(|class| class.cpu_milli),
            ram: per_mib(|class| class.ram.0),
            mean: asked / pods.max(1) as f64,
            unsure: UNSURE / (pods.max(1) as f64).sqrt(),
        };
        tight.look(nodes);
        tight
    }

    /// Looks again at the scarce resources on these nodes. True if that changes any cost.
    pub fn look<'a>(&mut self, nodes: impl Iterator<Item = (&'a NodeGpus, u32)>) -> bool {
        let before = (self.wide.clone(), self.bound.clone());
        let (wide, bound) = (&mut self.wide, &mut self.bound);
        scarcity::look(wide, bound, self.mean, self.cpu, nodes);
        before.0 != self.wide || before.1 != self.bound
    }

    fn pieces(&self, capacity: u64) -> Option<&Pieces> {
        self.pieces
            .iter()
            .min_by_key(|pieces| pieces.capacity.abs_diff(capacity))
    }

    /// Free memory that CPU and host memory are too short to use, in MiB.
    fn stranded(&self, room: &Room) -> f64 {
        let short = |free: u64, per_mib: f64| {
            let plenty = SLACK * per_mib * room.useful;
            let short = if plenty > 0.0 {
                1.0 - free as f64 / plenty
            } else {
                0.0
            };
            short.max(0.0) * short.max(0.0)
        };
        STRANDED * room.useful * (short(room.cpu, self.cpu) + short(room.ram, self.ram))
    }

    /// The waste of the first pod on a node where CPU or host memory is short, if it leaves `after`. Any first pod can
    /// make up for the shortage of the node. The part that a mean pod of its size makes up, too, is no gain of this
    /// one.
    fn stranded_by_first(&self, before: &Room, after: &Room) -> f64 {
        let used = before.useful - after.useful;
        let left = |free: u64, per_mib: f64| free.saturating_sub((per_mib * used) as u64);
        let mean = Room {
            cpu: left(before.cpu, self.cpu),
            ram: left(before.ram, self.ram),
            ..*after
        };
        let more = self.stranded(after) - self.stranded(&mean);
        more.max((more + self.unsure * before.whole).min(0.0))
    }

    /// The worth of the scarcest places on the node, in MiB.
    fn reserve(&self, node: &NodeGpus, room: &Room) -> f64 {
        if room.whole_cards == 0 {
            return 0.0;
        }
        let card = room.whole / f64::from(room.whole_cards);
        let scarce = self.wide.iter();
        let scarce = scarce.filter(|wide| wide.scarcity > 0.0 && wide.may_use(node));
        let worth = scarce.map(|wide| {
            let places = wide.hope(room.whole_cards, room.cpu);
            wide.scarcity * card * f64::from(wide.gpus) * places
        });
        RESERVE * worth.fold(0.0, f64::max)
    }
}

/// The free resources of a node, as far as they are of use.
#[derive(Clone, Copy, Debug, Default)]
struct Room {
    cpu: u64,
    ram: u64,
    /// MiB in pieces that are worth something.
    useful: f64,
    /// MiB on cards that are wholly free.
    whole: f64,
    whole_cards: u32,
}

impl Room {
    /// Counts a card in, or out if `sign` is negative.
    fn count(&mut self, card: &Card, free: u64, pieces: &Pieces, sign: f64) {
        self.useful += sign * pieces.useful(free);
        if free == card.capacity.0 {
            self.whole += sign * free as f64;
            self.whole_cards = match sign > 0.0 {
                true => self.whole_cards + 1,
                false => self.whole_cards.saturating_sub(1),
            };
        }
    }
}

/// The cost of a placement, in MiB.
#[derive(Default)]
struct Terms {
    pieces: f64,
    stranded: f64,
    reserve: f64,
    premium: f64,
    opening: f64,
    /// Charged beyond the request.
    surplus: f64,
    /// Free memory on the node and, once more, on the chosen cards.
    tightness: Mib,
}

/// A node as it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Before {
    room: Room,
    /// All usable cards are wholly free.
    empty: bool,
    stranded: f64,
    reserve: f64,
}

impl Tight {
    fn terms(
        &self,
        node: &NodeGpus,
        survey: &Survey,
        request: &Request,
        charges: &[(usize, Mib)],
    ) -> Terms {
        let before = &survey.tight;
        let mut after = Room {
            cpu: before.room.cpu.saturating_sub(request.cpu_milli),
            ram: before
                .room
                .ram
                .saturating_sub(request.ram.mib_rounded_up().0),
            ..before.room
        };
        let asked = if request.exclusive {
            request.held(|_| true)
        } else {
            Mib(u64::MAX)
        };
        let mut terms = Terms {
            tightness: survey.free,
            ..Terms::default()
        };
        for &(index, charge) in charges {
            let card = &node.cards[index];
            let left = card.free.minus(charge);
            terms.tightness = terms.tightness + left;
            if let Some(pieces) = self.pieces(card.capacity.0) {
                terms.pieces += pieces.waste(left.0) - pieces.waste(card.free.0);
                after.count(card, card.free.0, pieces, -1.0);
                after.count(card, left.0, pieces, 1.0);
            }
            let then = Card {
                free: left,
                ..*card
            };
            let lost = self
                .bound
                .iter()
                .map(|bound| bound.worth(card) - bound.worth(&then));
            terms.premium += lost.fold(0.0, f64::max);
            terms.surplus += charge.minus(asked).0 as f64;
        }
        if before.empty {
            terms.stranded = self.stranded_by_first(&before.room, &after);
            terms.opening = OPENING * self.unsure * before.room.whole;
        } else {
            terms.stranded = self.stranded(&after) - before.stranded;
        }
        terms.reserve = before.reserve - self.reserve(node, &after);
        terms
    }

    /// The waste of a placement, in words.
    pub(crate) fn found(
        &self,
        node: &NodeGpus,
        request: &Request,
        charges: &[(usize, Mib)],
    ) -> String {
        let terms = self.terms(node, &self.survey(node), request, charges);
        let parts = [
            (terms.pieces, "in pieces of little use"),
            (terms.stranded, "short of CPU or host memory"),
            (terms.reserve, "for want of places for several GPUs"),
            (terms.premium, "as such GPUs are scarce"),
            (terms.opening, "as the node was empty"),
            (terms.surplus, "beyond what was asked"),
        ];
        let parts = parts.map(|(mib, what)| (mib.round() as i64, what));
        let told: Vec<_> = parts.iter().filter(|(mib, _)| *mib != 0).collect();
        let sum = told
            .iter()
            .fold(0_i64, |sum, (mib, _)| sum.saturating_add(*mib));
        let parts = match told.as_slice() {
            [] => return "it wastes nothing".to_owned(),
            [(_, what)] if sum > 0 => format!(" {what}"),
            [_] => String::new(),
            several => {
                let parts = several.iter().map(|(mib, what)| format!("{mib} {what}"));
                format!(" ({})", parts.collect::<Vec<_>>().join(", "))
            }
        };
        match sum < 0 {
            true => format!("it makes {} MiB usable again{parts}", sum.saturating_neg()),
            false => format!("it wastes {sum} MiB{parts}"),
        }
    }
}

impl Policy for Tight {
    fn survey(&self, node: &NodeGpus) -> Survey {
        let mut room = Room {
            cpu: node.cpu_free_milli,
            ram: node.ram_free.whole_mib().0,
            ..Room::default()
        };
        let (mut free, mut all) = (Mib::ZERO, Mib::ZERO);
        let mut pieces = None;
        for card in node
            .cards
            .iter()
            .filter(|card| card.usable && card.capacity > Mib::ZERO)
        {
            free = free + card.free;
            all = all + card.capacity;
            let known = pieces.filter(|known: &&Pieces| known.capacity == card.capacity.0);
            pieces = known.or_else(|| self.pieces(card.capacity.0));
            if let Some(pieces) = pieces {
                room.count(card, card.free.0, pieces, 1.0);
            }
        }
        let tight = Before {
            room,
            empty: free == all,
            stranded: self.stranded(&room),
            reserve: self.reserve(node, &room),
        };
        Survey { free, tight }
    }

    fn cost(
        &self,
        node: &NodeGpus,
        survey: &Survey,
        request: &Request,
        charges: &[(usize, Mib)],
    ) -> (i64, i64) {
        let terms = self.terms(node, survey, request, charges);
        let kept = terms.stranded + terms.reserve + terms.premium + terms.opening;
        let cost = terms.pieces + terms.surplus + kept;
        (
            (cost * SCALE).round() as i64,
            super::cost_of(terms.tightness),
        )
    }
}
