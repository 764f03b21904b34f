//! What waits, and what would still fit. Why a pod waits is told from sums over the cluster, not
//! from its own constraints: node selectors and the like are not looked at.

use gpustow_ledger::NodeView;
use gpustow_pack::{Mib, Request};
use prometheus::Registry;

use super::{bytes, gauges};

/// Sizes of the pods that are counted as placeable; `whole` is an empty GPU.
const SIZES: [(&str, Mib); 4] = [
    ("4Gi", Mib(4096)),
    ("8Gi", Mib(8192)),
    ("16Gi", Mib(16384)),
    ("32Gi", Mib(32768)),
];
const WHOLE: &str = "whole";

/// Why pods wait, from the most lasting reason to the most passing.
const REASONS: [&str; 5] = ["too_large", "stale", "unhealthy", "no_room", "fragmented"];

/// What the cards of a cluster come to.
#[derive(Default)]
struct Supply {
    free: Mib,
    largest: Mib,
    largest_stale: Mib,
    largest_unhealthy: Mib,
}

impl Supply {
    fn of(nodes: &[NodeView]) -> Self {
        let mut supply = Self::default();
        for node in nodes {
            for card in &node.cards {
                let largest = match (node.stale, card.healthy) {
                    (true, _) => &mut supply.largest_stale,
                    (false, false) => &mut supply.largest_unhealthy,
                    (false, true) => {
                        supply.free = supply.free + card.free;
                        &mut supply.largest
                    }
                };
                *largest = card.capacity.max(*largest);
            }
        }
        supply
    }

    /// The one of [`REASONS`] for which a request waits.
    fn reason(&self, request: &Request) -> &'static str {
        let piece = request.claims.iter().map(|claim| claim.mib).max();
        let piece = piece.unwrap_or_default();
        if piece <= self.largest {
            if asked(request) <= self.free {
                "fragmented"
            } else {
                "no_room"
            }
        } else if piece <= self.largest_unhealthy {
            "unhealthy"
        } else if piece <= self.largest_stale {
            "stale"
        } else {
            "too_large"
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
pub(super) fn demand<'r>(
    registry: &Registry,
    nodes: &[NodeView],
    waiting: impl Iterator<Item = &'r Request>,
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
    for reason in REASONS {
        pods.with_label_values(&[reason]).set(0);
        memory.with_label_values(&[reason]).set(0);
    }
    let supply = Supply::of(nodes);
    for request in waiting {
        let reason = supply.reason(request);
        pods.with_label_values(&[reason]).inc();
        memory
            .with_label_values(&[reason])
            .add(bytes(asked(request)));
    }
    let placeable = gauges(
        registry,
        "gpustow_placeable_pods",
        "Pods of this size that would still fit, one GPU each; whole: empty GPUs",
        &["model", "size"],
    )?;
    for node in nodes.iter().filter(|node| !node.stale) {
        for card in &node.cards {
            let model = card.model.as_str();
            let free = if card.healthy { card.free } else { Mib::ZERO };
            let whole = free == card.capacity && free > Mib::ZERO;
            placeable
                .with_label_values(&[model, WHOLE])
                .add(i64::from(whole));
            for (size, mib) in SIZES {
                let count = i64::try_from(free.0 / mib.0).unwrap_or(i64::MAX);
                placeable.with_label_values(&[model, size]).add(count);
            }
        }
    }
    Ok(())
}
