//! What waits, and what would still fit. Why a pod waits is told from sums over the cluster, not
//! from its own constraints: node selectors and the like are not looked at.

use std::collections::BTreeMap;
use std::str::FromStr;

use gpustow_ledger::NodeView;
use gpustow_pack::{Mib, Request};
use prometheus::{Gauge, Registry};
use strum::{IntoStaticStr, VariantNames};

use super::Totals;
use super::cluster::{bytes, gauges};
use super::models::Models;

const WHOLE: &str = "whole";

/// Why pods wait; as a string, the `reason` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
enum Why {
    /// No GPU is as large.
    TooLarge,
    /// Those that are have stale reports.
    Stale,
    /// Those that are have failed.
    Unhealthy,
    /// All is full.
    NoRoom,
    /// The room is there, in pieces.
    Fragmented,
    /// The room is there, and something else about the pod stands against it.
    Policy,
}

/// The size of a pod whose places are counted, as an operator wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    name: String,
    mib: Mib,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let amount = match (text.strip_suffix("Gi"), text.strip_suffix("Mi")) {
            (Some(number), _) => number
                .parse()
                .ok()
                .and_then(|gib: u64| gib.checked_mul(1024)),
            (_, Some(number)) => number.parse().ok(),
            _ => None,
        };
        let mib = amount.filter(|mib| (1..=1 << 30).contains(mib));
        let mib = mib.ok_or_else(|| "give an amount of memory like 8Gi or 512Mi".to_owned())?;
        Ok(Self {
            name: text.to_owned(),
            mib: Mib(mib),
        })
    }
}

/// By number of cards, the largest piece that one node has on so many cards at once.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pieces(Vec<Mib>);

impl Pieces {
    /// Takes in the cards of one node.
    fn add(&mut self, cards: impl Iterator<Item = Mib>) {
        let mut cards: Vec<Mib> = cards.collect();
        cards.sort_unstable_by(|a, b| b.cmp(a));
        if self.0.len() < cards.len() {
            self.0.resize(cards.len(), Mib::ZERO);
        }
        for (best, here) in self.0.iter_mut().zip(cards) {
            *best = here.max(*best);
        }
    }

    /// Does some node have `gpus` cards of `mib`?
    fn has(&self, gpus: u32, mib: Mib) -> bool {
        let index = (gpus as usize).saturating_sub(1);
        self.0.get(index).is_some_and(|best| *best >= mib)
    }
}

/// What the cards of a cluster come to.
#[derive(Debug, Default)]
struct Supply {
    sum: Mib,
    free: Pieces,
    wholly_free: Pieces,
    healthy: Pieces,
    fresh: Pieces,
    all: Pieces,
}

impl Supply {
    fn of(nodes: &[NodeView]) -> Self {
        let mut supply = Self::default();
        for node in nodes {
            let cards = || node.cards.iter();
            supply.all.add(cards().map(|card| card.capacity));
            if node.stale {
                continue;
            }
            supply.fresh.add(cards().map(|card| card.capacity));
            let healthy = || cards().filter(|card| card.healthy);
            supply.healthy.add(healthy().map(|card| card.capacity));
            supply.free.add(healthy().map(|card| card.free));
            let whole = healthy().filter(|card| card.free == card.capacity);
            supply.wholly_free.add(whole.map(|card| card.capacity));
            let sum: Mib = healthy().map(|card| card.free).sum();
            supply.sum = supply.sum + sum;
        }
        supply
    }

    fn why(&self, request: &Request) -> Why {
        let claims = || request.claims.iter();
        let mib = claims().map(|claim| claim.mib).max().unwrap_or_default();
        let gpus = claims().map(|claim| claim.gpus).max().unwrap_or_default();
        let free = match request.exclusive {
            true => &self.wholly_free,
            false => &self.free,
        };
        if !self.all.has(gpus, mib) {
            Why::TooLarge
        } else if !self.fresh.has(gpus, mib) {
            Why::Stale
        } else if !self.healthy.has(gpus, mib) {
            Why::Unhealthy
        } else if free.has(gpus, mib) {
            Why::Policy
        } else if asked(request) <= self.sum {
            Why::Fragmented
        } else {
            Why::NoRoom
        }
    }
}

fn asked(request: &Request) -> Mib {
    let claims = request.claims.iter();
    claims
        .map(|claim| Mib(claim.mib.0.saturating_mul(claim.gpus.into())))
        .sum()
}

/// Pods that wait and pods that would fit, at this scrape.
pub(super) fn demand(
    registry: &Registry,
    totals: &Totals,
    sizes: &[Size],
    models: &Models,
) -> Result<(), prometheus::Error> {
    let pods = gauges(
        registry,
        "gpustow_pending_pods",
        "Pods refused for want of room",
        &["reason"],
    )?;
    let memory = gauges(
        registry,
        "gpustow_pending_memory_bytes",
        "GPU memory that these pods ask for",
        &["reason"],
    )?;
    for reason in Why::VARIANTS {
        pods.with_label_values(&[reason]).set(0);
        memory.with_label_values(&[reason]).set(0);
    }
    let supply = Supply::of(&totals.nodes);
    for request in &totals.waiting {
        let reason: &str = supply.why(request).into();
        pods.with_label_values(&[reason]).inc();
        let asked = bytes(asked(request));
        memory.with_label_values(&[reason]).add(asked);
    }
    if let Some(created) = totals.oldest {
        let oldest = Gauge::new(
            "gpustow_pending_oldest_timestamp_seconds",
            "When the oldest of these pods was created; absent if there is none",
        )?;
        oldest.set(created as f64);
        registry.register(Box::new(oldest))?;
    }
    placeable(registry, &totals.nodes, sizes, models)
}

fn placeable(
    registry: &Registry,
    nodes: &[NodeView],
    sizes: &[Size],
    models: &Models,
) -> Result<(), prometheus::Error> {
    let placeable = gauges(
        registry,
        "gpustow_placeable_pods",
        "Pods of this size that would still fit, one GPU each; whole: empty GPUs",
        &["model", "size"],
    )?;
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for node in nodes {
        for card in &node.cards {
            let model = models.label(&card.model);
            let takes_pods = card.healthy && !node.stale;
            let free = if takes_pods { card.free } else { Mib::ZERO };
            let whole = free == card.capacity && free > Mib::ZERO;
            *counts.entry((model, WHOLE)).or_default() += u64::from(whole);
            for Size { name, mib } in sizes {
                *counts.entry((model, name)).or_default() += free.0 / mib.0;
            }
        }
    }
    for ((model, size), count) in counts {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        placeable.with_label_values(&[model, size]).set(count);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpustow_ledger::{CardView, Mismatches};
    use gpustow_pack::{Claim, ClaimKind};

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
            strangers: Mib::ZERO,
            healthy,
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
            claims: vec![Claim {
                kind: ClaimKind::Main,
                gpus,
                mib: Mib(mib),
            }],
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
            assert_eq!(supply.why(&request), reason, "{request:?}");
        }
    }

    #[test]
    fn sizes_are_written_as_in_kubernetes() {
        let mib = |text: &str| text.parse().map(|size: Size| size.mib.0);
        assert_eq!(mib("24Gi"), Ok(24576));
        assert_eq!(mib("512Mi"), Ok(512));
        for bad in ["", "8", "8G", "0Gi", "-1Gi", "99999999999999999999Gi", "Gi"] {
            let error = mib(bad).unwrap_err();
            assert_eq!(error, "give an amount of memory like 8Gi or 512Mi", "{bad}");
        }
    }
}
