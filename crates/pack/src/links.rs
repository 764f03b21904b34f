//! How close the cards of a node are to each other, and the closest of equally good placements.

use std::sync::Arc;

use crate::search::MAX_STEPS;
use crate::{Card, Choice, Mib, NodeGpus, Request};

/// The best path between two cards, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// So many NVLinks.
    NvLink(u8),
    /// One PCIe switch.
    PcieSwitch,
    /// Several PCIe switches, without the host.
    PcieSwitches,
    /// A PCIe host bridge.
    HostBridge,
    /// Host bridges of one NUMA node.
    NumaNode,
    /// The link between NUMA nodes.
    System,
}

/// The distance between cards of which nothing is known: the middle of the scale, so that they are
/// neither sought nor avoided.
const UNKNOWN: u8 = 65;
/// The distance of [`Link::System`].
const FAR: u8 = 90;

impl Link {
    const ALL: [Self; 5] = [
        Self::PcieSwitch,
        Self::PcieSwitches,
        Self::HostBridge,
        Self::NumaNode,
        Self::System,
    ];

    /// Any NVLink is nearer than any PCIe path, and more of them are nearer than fewer.
    fn distance(self) -> u8 {
        match self {
            Self::NvLink(links) => 40 - links.min(36),
            Self::PcieSwitch => 50,
            Self::PcieSwitches => 60,
            Self::HostBridge => 70,
            Self::NumaNode => 80,
            Self::System => FAR,
        }
    }

    /// The connection between two cards, for people.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::NvLink(_) => "NVLink",
            Self::PcieSwitch => "one PCIe switch",
            Self::PcieSwitches => "PCIe switches",
            Self::HostBridge => "one PCIe host bridge",
            Self::NumaNode => "one NUMA node",
            Self::System => "the link between NUMA nodes",
        }
    }
}

/// The distances between the cards of one node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Links {
    cards: usize,
    /// Row by row.
    distances: Box<[u8]>,
    /// All pairs are equally far.
    uniform: bool,
}

impl Links {
    /// The links between `cards` cards, as `link` returns them in either direction; none if it does not know any pair.
    #[must_use]
    pub fn new(cards: usize, link: impl Fn(usize, usize) -> Option<Link>) -> Option<Arc<Self>> {
        let mut distances = vec![UNKNOWN; cards * cards];
        let pairs = || (0..cards).flat_map(|one| (0..one).map(move |other| (one, other)));
        let mut known = false;
        for (one, other) in pairs() {
            if let Some(link) = link(one, other).into_iter().chain(link(other, one)).min() {
                known = true;
                distances[one * cards + other] = link.distance();
                distances[other * cards + one] = link.distance();
            }
        }
        let first = distances.get(1).copied();
        let uniform = pairs().all(|(one, other)| Some(distances[one * cards + other]) == first);
        known.then(|| {
            Arc::new(Self {
                cards,
                distances: distances.into(),
                uniform,
            })
        })
    }

    fn between(&self, one: usize, other: usize) -> u8 {
        let known = one < self.cards && other < self.cards;
        let at = known.then(|| one * self.cards + other);
        at.and_then(|at| self.distances.get(at).copied())
            .unwrap_or(UNKNOWN)
    }

    /// The slowest link between any two of these cards, if every pair is known.
    #[must_use]
    pub fn slowest(&self, cards: &[usize]) -> Option<Link> {
        let distances = || pairs(cards).map(|(one, other)| self.between(one, other));
        let worst = distances()
            .max()
            .filter(|_| distances().all(|it| it != UNKNOWN))?;
        let slower = Link::ALL.into_iter().find(|link| link.distance() == worst);
        Some(slower.unwrap_or(Link::NvLink(40_u8.saturating_sub(worst))))
    }

    /// The loss of others if these cards are taken. It is the closeness of the wholly free ones among them to the cards
    /// that stay wholly free.
    pub(crate) fn lost(&self, node: &NodeGpus, taken: &[usize]) -> u32 {
        let whole =
            |card: &Card| card.usable && card.free == card.capacity && card.capacity > Mib::ZERO;
        let stays = |card: &usize| whole(&node.cards[*card]) && !taken.contains(card);
        let broken = taken.iter().filter(|&&card| whole(&node.cards[card]));
        broken
            .flat_map(|&card| {
                (0..node.cards.len())
                    .filter(stays)
                    .map(move |it| (card, it))
            })
            .map(|(card, other)| u32::from(FAR.saturating_sub(self.between(card, other))))
            .sum()
    }
}

fn pairs(cards: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    let of = |(at, &one): (usize, &usize)| cards[..at].iter().map(move |&other| (one, other));
    cards.iter().enumerate().flat_map(of)
}

/// How far a pod's cards are from each other: the slowest pair first, then the sum over pairs.
fn apart(worst: u8, sum: u32) -> u32 {
    u32::from(worst) << 24 | sum.min((1 << 24) - 1)
}

/// Exchanges cards of the placement for cards that are equal to the policy: in the same state, held by the same
/// containers. The pod's cards then are closest: the slowest pair decides first, then the sum over pairs. A pair counts
/// once for the pod and once more for every container that has both. Then the least memory is lent, then others lose
/// least; then the lowest indices decide.
pub(crate) fn closest(node: &NodeGpus, request: &Request, choice: &mut Choice, steps: &mut u64) {
    let Some(links) = &node.links else {
        if choice.placement.charges.len() > 1 {
            choice.cost.apart = apart(UNKNOWN, 0);
        }
        return;
    };
    let placement = &choice.placement;
    let slots: Vec<UsedCard> = placement
        .charges
        .iter()
        .map(|&(card, charge)| UsedCard {
            card,
            charge,
            claims: (0..placement.cards.len())
                .filter(|&claim| placement.cards[claim].contains(&card))
                .collect(),
        })
        .collect();
    let mut search = Exchange {
        node,
        request,
        links,
        claims: placement.cards.len(),
        slots: &slots,
        chosen: Vec::with_capacity(slots.len()),
        best: None,
        steps: 0,
    };
    search.start();
    *steps += u64::from(search.steps);
    let Some(best) = search.best else { return };
    choice.cost.apart = best.apart;
    choice.placement.cards = best.cards;
    let charges = best.chosen.iter().zip(&slots);
    choice.placement.charges = charges.map(|(&card, slot)| (card, slot.charge)).collect();
    choice.placement.charges.sort_unstable();
}

/// A card that the pod uses: any other in the same state would do, whatever is lent there.
struct UsedCard {
    card: usize,
    charge: Mib,
    claims: Vec<usize>,
}

struct Exchange<'a> {
    node: &'a NodeGpus,
    request: &'a Request,
    links: &'a Links,
    claims: usize,
    slots: &'a [UsedCard],
    /// The cards of the first slots.
    chosen: Vec<usize>,
    best: Option<Best>,
    steps: u32,
}

struct Best {
    apart: u32,
    lending: u16,
    lost: u32,
    cards: Vec<Vec<usize>>,
    chosen: Vec<usize>,
}

impl Exchange<'_> {
    /// Looks at the placement as it is, then at the others.
    fn start(&mut self) {
        let (mut worst, mut sum) = (0, 0);
        for slot in self.slots {
            (worst, sum) = self.with(slot.card, worst, sum);
            self.chosen.push(slot.card);
        }
        self.consider(apart(worst, sum));
        self.chosen.clear();
        if !self.links.uniform {
            self.choose(0, 0);
        }
    }

    /// Worst and sum once the next slot has this card.
    fn with(&self, card: usize, mut worst: u8, mut sum: u32) -> (u8, u32) {
        let own = &self.slots[self.chosen.len()].claims;
        for (slot, &other) in self.slots.iter().zip(&self.chosen) {
            let distance = self.links.between(card, other);
            let both = slot.claims.iter().filter(|claim| own.contains(claim));
            worst = worst.max(distance);
            sum += u32::from(distance) * (1 + both.fold(0, |count, _| count + 1));
        }
        (worst, sum)
    }

    fn choose(&mut self, worst: u8, sum: u32) {
        let at = self.chosen.len();
        let Some(slot) = self.slots.get(at) else {
            return self.consider(apart(worst, sum));
        };
        let (cards, slots) = (&self.node.cards, self.slots);
        let state = &cards[slot.card];
        // Equal slots take their cards in order.
        let alike =
            |other: &UsedCard| cards[other.card].is_alike(state) && other.claims == slot.claims;
        let from = slots[..at].iter().rposition(alike);
        let from = from.map_or(0, |alike| self.chosen[alike] + 1);
        for (card, candidate) in cards.iter().enumerate().skip(from) {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return;
            }
            if !candidate.is_alike(state) || self.chosen.contains(&card) {
                continue;
            }
            let (worst, sum) = self.with(card, worst, sum);
            let hopeless = |best: &Best| apart(worst, sum) > best.apart;
            if !self.best.as_ref().is_some_and(hopeless) {
                self.chosen.push(card);
                self.choose(worst, sum);
                self.chosen.pop();
            }
        }
    }

    fn consider(&mut self, apart: u32) {
        // The lent memory is a part of the cost. The loss of others decides only between places of equal cost.
        let lending = self
            .request
            .lending(&self.node.cards, self.chosen.iter().copied());
        let lost = self.links.lost(self.node, &self.chosen);
        if let Some(best) = &self.best
            && (best.apart, best.lending, best.lost) < (apart, lending, lost)
        {
            return;
        }
        let of = |claim: usize| {
            let slots = self.slots.iter().zip(&self.chosen);
            let held = slots.filter(|(slot, _)| slot.claims.contains(&claim));
            let mut cards: Vec<usize> = held.map(|(_, &card)| card).collect();
            cards.sort_unstable();
            cards
        };
        let cards: Vec<Vec<usize>> = (0..self.claims).map(of).collect();
        let better = |best: &Best| {
            (apart, lending, lost, &cards) < (best.apart, best.lending, best.lost, &best.cards)
        };
        if self.best.as_ref().is_none_or(better) {
            self.best = Some(Best {
                apart,
                lending,
                lost,
                cards,
                chosen: self.chosen.clone(),
            });
        }
    }
}
