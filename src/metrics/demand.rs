//! The waiting pods, and the pods that would still fit. The reason why a pod waits comes from sums over the cluster,
//! not from its own constraints: node selectors and other constraints are ignored.

use std::collections::BTreeMap;
use std::convert::Infallible;

use gpustow_ledger::{CardView, NodeView};
use gpustow_pack::{Card, Lending, Mib, ModelId, Question, Refusal, Request, Starts, refusal};
use gpustow_serve::Scrape;
use strum::{IntoStaticStr, VariantNames};

use super::Totals;
use super::cluster::{NO_LABELS, bytes};
use super::models::Models;

const WHOLE: &str = "whole";

/// Why pods wait; as a string, the `reason` label. In the order of [`refusal`], with two states that only a cluster can
/// have: silent in part, or full of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
enum Why {
    /// No node has so many GPUs as large.
    TooLarge,
    /// No node has so many of which the driver could limit the memory.
    NoLimit,
    /// The GPUs that would fit are on silent nodes.
    Stale,
    /// The GPUs that would fit do not get pods.
    Unhealthy,
    /// All is full.
    NoRoom,
    /// The room is there, in pieces.
    Fragmented,
    /// The room is there, and too little of it for the pod's gang, or as for `Policy`.
    Group,
    /// The room is there, and something else about the pod stands against it.
    Policy,
}

/// The sizes of pods that [`placeable`] counts, each on one GPU.
const SIZES: [(&str, Mib); 4] = [
    ("4Gi", Mib(4 << 10)),
    ("8Gi", Mib(8 << 10)),
    ("16Gi", Mib(16 << 10)),
    ("32Gi", Mib(32 << 10)),
];

/// By number of cards, the largest piece that one node has on that number of cards at once: of any cards, and of cards
/// whose memory the driver can limit.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pieces([Vec<Mib>; 2]);

impl Pieces {
    /// Takes in these pieces of one node's cards.
    fn add<'a>(&mut self, cards: impl Iterator<Item = (&'a Card, Mib)>) {
        let (mut all, mut able) = (Vec::new(), Vec::new());
        for (card, mib) in cards {
            all.push(mib);
            able.extend((card.limit > Mib::ZERO).then_some(mib));
        }
        for (best, mut here) in self.0.iter_mut().zip([all, able]) {
            here.sort_unstable_by(|a, b| b.cmp(a));
            if best.len() < here.len() {
                best.resize(here.len(), Mib::ZERO);
            }
            for (best, here) in best.iter_mut().zip(here) {
                *best = here.max(*best);
            }
        }
    }

    /// Could some node take each container, though perhaps not all at once?
    fn has(&self, request: &Request) -> bool {
        self.are(request, request.limit() > Mib::ZERO)
    }

    /// The same on cards that can limit memory, or on any.
    fn are(&self, request: &Request, limited: bool) -> bool {
        let mut claims = request.claims.iter();
        claims.all(|claim| {
            let index = (claim.gpus as usize).saturating_sub(1);
            let best = self.0[usize::from(limited)].get(index);
            best.is_some_and(|best| *best >= claim.mib)
        })
    }
}

/// The memory of a cluster's cards.
#[derive(Debug, Default)]
struct Supply {
    most_cards: usize,
    /// All, as if they were empty.
    all: Pieces,
    /// The cards of nodes with a fresh report, as if they were empty.
    fresh: Pieces,
    /// The cards that get pods, as if they were empty.
    healthy: Pieces,
    /// The memory that is free now: of any card, and of cards that can be had whole.
    free: [Pieces; 2],
    /// The sum of the free memory.
    sum: Mib,
}

impl Supply {
    fn of(nodes: &[NodeView]) -> Self {
        let mut supply = Self::default();
        for node in nodes {
            // Other cards do not get pods that ask for memory alone.
            let whole = node.cards.iter().filter(|card| card.slices.is_none());
            let cards: Vec<Card> = whole.map(card).collect();
            supply.most_cards = supply.most_cards.max(cards.len());
            supply.all.add(emptied(&cards));
            if node.stale {
                continue;
            }
            supply.fresh.add(emptied(&cards));
            let healthy = emptied(&cards).filter(|(card, _)| card.usable);
            supply.healthy.add(healthy);
            for (pieces, exclusive) in supply.free.iter_mut().zip([false, true]) {
                let asks = Request {
                    exclusive,
                    ..Request::default()
                };
                pieces.add(
                    cards
                        .iter()
                        .filter_map(|card| Some((card, asks.room(card)?))),
                );
            }
            let free: Mib = cards
                .iter()
                .filter(|card| card.usable)
                .map(|card| card.free)
                .sum();
            supply.sum = supply.sum + free;
        }
        supply
    }

    fn why(&self, request: &Request, of_gang: bool) -> Why {
        // The sums do not contain the instances that GPUs make.
        if request.isolated {
            return Why::NoRoom;
        }
        // These sizes do not show the memory of a percentage.
        if !request.is_relative() && self.free[usize::from(request.exclusive)].has(request) {
            return if of_gang { Why::Group } else { Why::Policy };
        }
        let answer = |question| {
            Ok::<_, Infallible>(match question {
                // Compute is not in these sizes.
                Question::FitsUnlimited | Question::FitsShared | Question::FitsWhole => {
                    self.all.are(request, false)
                }
                Question::AwaitsCompute | Question::AwaitsStarts => false,
                Question::FitsEmpty => self.all.has(request),
                // Otherwise one broken GPU would hide a shortage on all the others.
                Question::AwaitsHealth => !self.healthy.has(request),
            })
        };
        let Ok(refusal) = refusal(request, self.most_cards, answer);
        match refusal {
            Refusal::TooFewCards | Refusal::TooLarge => Why::TooLarge,
            // Of rules this does not know.
            Refusal::Unselected | Refusal::Neighbours | Refusal::Starting => Why::Policy,
            Refusal::NoMps | Refusal::OnlyMps | Refusal::NoCompute => Why::Policy,
            Refusal::NoMig | Refusal::OnlyMig | Refusal::NoSlices => Why::Policy,
            Refusal::NoLimit => Why::NoLimit,
            Refusal::Unhealthy if !self.fresh.has(request) => Why::Stale,
            Refusal::Unhealthy => Why::Unhealthy,
            Refusal::NoWholeCard | Refusal::NoRoom | Refusal::TooComplex => {
                match request.in_sum() <= self.sum {
                    true => Why::Fragmented,
                    false => Why::NoRoom,
                }
            }
        }
    }
}

fn card(card: &CardView) -> Card {
    Card {
        capacity: card.capacity,
        free: card.free,
        model: ModelId::default(),
        usable: card.healthy,
        limit: card.limit,
        lending: Lending::default(),
        compute: card.compute,
        slices: card.slices,
        starts: Starts::None,
    }
}

/// Each card with the memory that it has if no pod holds any.
fn emptied(cards: &[Card]) -> impl Iterator<Item = (&Card, Mib)> {
    cards.iter().map(|card| (card, card.capacity))
}

/// Pods that wait and pods that would fit, at this scrape.
pub(super) fn demand(
    scrape: &mut Scrape,
    totals: &Totals,
    models: &Models,
) -> Result<(), prometheus::Error> {
    let supply = Supply::of(&totals.nodes);
    let mut reasons: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    reasons.extend(Why::VARIANTS.iter().map(|reason| (*reason, [0.0; 2])));
    for (request, of_gang) in &totals.waiting {
        let why = supply.why(request, *of_gang);
        let [pods, memory] = reasons.entry(why.into()).or_default();
        *pods += 1.0;
        *memory += bytes(request.in_sum());
    }
    let of = |part: usize| {
        reasons
            .iter()
            .map(move |(&reason, sums)| ([reason], sums[part]))
    };
    scrape.gauges(
        "gpustow_pending_pods",
        "Pods that wait for GPU memory, queued ones included",
        ["reason"],
        of(0),
    )?;
    scrape.gauges(
        "gpustow_pending_memory_bytes",
        "GPU memory that waiting pods request",
        ["reason"],
        of(1),
    )?;
    scrape.gauges(
        "gpustow_pending_oldest_timestamp_seconds",
        "When the oldest waiting pod was created; absent if none waits",
        NO_LABELS,
        totals.oldest.map(|created| (NO_LABELS, created as f64)),
    )?;
    placeable(scrape, &totals.nodes, models)
}

fn placeable(
    scrape: &mut Scrape,
    nodes: &[NodeView],
    models: &Models,
) -> Result<(), prometheus::Error> {
    let mut counts: BTreeMap<[&str; 2], u64> = BTreeMap::new();
    for node in nodes {
        for card in &node.cards {
            let model = models.label(&card.model);
            let takes_pods = card.healthy && !node.stale;
            let free = if takes_pods { card.free } else { Mib::ZERO };
            let whole = free == card.capacity && free > Mib::ZERO;
            *counts.entry([model, WHOLE]).or_default() += u64::from(whole);
            for (name, mib) in SIZES {
                *counts.entry([model, name]).or_default() += free.0 / mib.0;
            }
        }
    }
    scrape.gauges(
        "gpustow_placeable_pods",
        "Pods of this size that would still fit, one GPU each; whole: empty GPUs",
        ["model", "size"],
        counts
            .into_iter()
            .map(|(labels, count)| (labels, count as f64)),
    )
}

#[cfg(test)]
mod tests {
    use gpustow_ledger::Mismatches;
    use gpustow_pack::{Claim, ClaimKind, Compute};

    use super::*;

    fn node(stale: bool, cards: &[(u64, u64, bool)]) -> NodeView {
        let card = |&(capacity, free, healthy): &(u64, u64, bool)| CardView {
            uuid: String::new(),
            index: 0,
            model: String::new(),
            total: Mib(capacity),
            capacity: Mib(capacity),
            held: Mib(capacity - free),
            free: Mib(free),
            unmanaged: Mib::ZERO,
            healthy,
            cordoned: false,
            claimed: false,
            limit: Mib::ZERO,
            compute: Compute::default(),
            slices: None,
            pods: Vec::new(),
        };
        NodeView {
            name: "n".into(),
            stale,
            cards: cards.iter().map(card).collect(),
            problems: Vec::new(),
            mismatches: Mismatches::default(),
            unreported: 0,
        }
    }

    fn asks(gpus: u32, mib: u64, exclusive: bool) -> Request {
        Request {
            claims: vec![Claim::new(ClaimKind::Main, gpus, Mib(mib))],
            exclusive,
            ..Request::default()
        }
    }

    #[test]
    fn a_waiting_pod_is_counted_under_what_keeps_it_waiting() {
        let supply = Supply::of(&[
            node(false, &[(100, 30, true), (100, 30, true)]),
            node(false, &[(100, 20, true), (200, 200, false)]),
            node(true, &[(400, 400, true)]),
        ]);
        for (request, reason) in [
            (asks(1, 500, false), Why::TooLarge),
            (asks(3, 50, false), Why::TooLarge),
            (asks(1, 300, false), Why::Stale),
            (asks(1, 150, false), Why::Unhealthy),
            (asks(1, 90, false), Why::NoRoom),
            (asks(1, 70, false), Why::Fragmented),
            (asks(2, 31, false), Why::Fragmented),
            (asks(1, 30, true), Why::Fragmented),
            (asks(2, 30, false), Why::Policy),
            (asks(1, 10, false), Why::Policy),
        ] {
            assert_eq!(supply.why(&request, false), reason, "{request:?}");
            // For a gang the reason is only another one where there is room for one pod.
            let reason = if reason == Why::Policy {
                Why::Group
            } else {
                reason
            };
            assert_eq!(supply.why(&request, true), reason, "{request:?}");
        }
    }

    #[test]
    fn a_pod_that_needs_a_limit_is_counted_by_the_cards_that_can_hold_one() {
        let mut able = node(false, &[(100, 20, true), (100, 20, true)]);
        able.cards[0].limit = Mib(100);
        let supply = Supply::of(&[able, node(false, &[(200, 200, true)])]);
        for (gpus, mib, reason) in [
            (1, 300, Why::TooLarge),
            (1, 150, Why::NoLimit),
            (2, 10, Why::NoLimit),
            (1, 50, Why::Fragmented),
            (1, 20, Why::Policy),
        ] {
            let mut request = asks(gpus, mib, false);
            request.claims[0].driver_limit = Mib(mib);
            assert_eq!(supply.why(&request, false), reason, "{request:?}");
        }
    }
}
