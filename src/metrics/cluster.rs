//! The cluster's sums, and each card where that is asked for.

use std::collections::BTreeMap;

use gpustow_api::admission::Weakness;
use gpustow_ledger::{Mismatches, NodeView, Problem};
use gpustow_pack::Mib;
use prometheus::{IntCounter, IntGauge, IntGaugeVec, Opts, Registry};
use strum::{IntoStaticStr, VariantNames};

use super::Totals;
use super::models::Models;

/// States of GPUs; as a string, the `state` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
enum State {
    Ready,
    Stale,
    Unhealthy,
    /// Nobody reports them.
    Unknown,
}

/// The model of a card that nobody reports.
const UNKNOWN: &str = "unknown";

pub(super) fn gauges(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntGaugeVec, prometheus::Error> {
    let gauges = IntGaugeVec::new(Opts::new(name, help), labels)?;
    registry.register(Box::new(gauges.clone()))?;
    Ok(gauges)
}

pub(super) fn bytes(mib: Mib) -> i64 {
    i64::try_from(mib.bytes()).unwrap_or(i64::MAX)
}

fn count(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// What the cluster comes to at this scrape.
pub(super) fn cluster(
    registry: &Registry,
    totals: &Totals,
    models: &Models,
) -> Result<(), prometheus::Error> {
    let reservations = IntGauge::new("gpustow_reservations", "Pods between filter and bound")?;
    let (waiting, binding) = totals.reservations;
    reservations.set(count(waiting + binding));
    registry.register(Box::new(reservations))?;
    let expirations = IntCounter::new(
        "gpustow_reservation_expirations_total",
        "Reservations that ended because no bind came in time",
    )?;
    expirations.inc_by(totals.expirations);
    registry.register(Box::new(expirations))?;
    let unfenced = IntGauge::new(
        "gpustow_unfenced_pods",
        "Pods that an earlier extender may still bind, because their status cannot be written",
    )?;
    unfenced.set(count(totals.unfenced));
    registry.register(Box::new(unfenced))?;
    let holds = gauges(
        registry,
        "gpustow_policy_holds",
        "1 for an admission policy that is in force, 0 for one that is missing, weak or another than this build's",
        &["policy"],
    )?;
    for (policy, weak) in &totals.policies {
        let holds = holds.with_label_values(&[*policy]);
        holds.set(i64::from(!weak.as_ref().is_some_and(Weakness::is_open)));
    }
    mismatches(registry, &totals.nodes)?;
    memory(registry, &totals.nodes, models)?;
    if totals.per_gpu {
        per_gpu(registry, &totals.nodes, models)?;
    }
    Ok(())
}

/// Where books, NVML and what others wrote differ.
fn mismatches(registry: &Registry, nodes: &[NodeView]) -> Result<(), prometheus::Error> {
    let mismatches = gauges(
        registry,
        "gpustow_ledger_mismatches",
        "Pods that are not seen on the GPUs they were assigned, or are seen on others",
        &["kind"],
    )?;
    let sum = |of: fn(&Mismatches) -> usize| nodes.iter().map(|node| of(&node.mismatches)).sum();
    for (kind, sum) in [
        ("unconfirmed", sum(|found| found.unconfirmed)),
        ("wrong_gpu", sum(|found| found.wrong_gpu)),
        ("orphan", sum(|found| found.orphan)),
    ] {
        mismatches.with_label_values(&[kind]).set(count(sum));
    }
    let problems = gauges(
        registry,
        "gpustow_problems",
        "What needs a person's attention, as `kubectl gpustow` names it",
        &["kind"],
    )?;
    for kind in Problem::VARIANTS {
        problems.with_label_values(&[kind]).set(0);
    }
    for problem in nodes.iter().flat_map(|node| &node.problems) {
        problems.with_label_values(&[<&str>::from(problem)]).inc();
    }
    Ok(())
}

/// GPUs and their memory by model.
fn memory(
    registry: &Registry,
    nodes: &[NodeView],
    models: &Models,
) -> Result<(), prometheus::Error> {
    let gpus = gauges(
        registry,
        "gpustow_gpus",
        "GPUs by model and state",
        &["model", "state"],
    )?;
    let memory = |what: &str, help: &str| {
        gauges(
            registry,
            &format!("gpustow_cluster_memory_{what}_bytes"),
            help,
            &["model"],
        )
    };
    let capacity = memory("capacity", "GPU memory that pods may hold")?;
    let requested = memory("requested", "GPU memory promised to pods")?;
    let room = memory("room", "GPU memory that new pods may take")?;
    let strangers = memory("unattributed", "GPU memory used outside of gpustow's pods")?;
    // Summed before they become series: looking a series up for each card would be most of a scrape.
    let mut sums: BTreeMap<&str, [Mib; 4]> = BTreeMap::new();
    let mut cards: BTreeMap<(&str, State), usize> = BTreeMap::new();
    for node in nodes {
        for card in &node.cards {
            let state = match (node.stale, card.healthy) {
                (true, _) => State::Stale,
                (false, true) => State::Ready,
                (false, false) => State::Unhealthy,
            };
            let model = models.label(&card.model);
            *cards.entry((model, state)).or_default() += 1;
            let free = if state == State::Ready {
                card.free
            } else {
                Mib::ZERO
            };
            let sum = sums.entry(model).or_default();
            let amounts = [card.capacity, card.held, free, card.strangers];
            sum.iter_mut()
                .zip(amounts)
                .for_each(|(sum, amount)| *sum = *sum + amount);
        }
    }
    let unreported = nodes.iter().map(|node| node.unreported).sum();
    cards.insert((UNKNOWN, State::Unknown), unreported);
    for (model, sum) in sums {
        for state in State::VARIANTS {
            gpus.with_label_values(&[model, state]);
        }
        for (gauge, amount) in [&capacity, &requested, &room, &strangers]
            .into_iter()
            .zip(sum)
        {
            gauge.with_label_values(&[model]).set(bytes(amount));
        }
    }
    for ((model, state), cards) in cards {
        let gpus = gpus.with_label_values(&[model, state.into()]);
        gpus.set(count(cards));
    }
    Ok(())
}

fn per_gpu(
    registry: &Registry,
    nodes: &[NodeView],
    models: &Models,
) -> Result<(), prometheus::Error> {
    let labels = ["node", "gpu_uuid", "gpu", "model"];
    let gauge = |what: &str, help: &str| {
        gauges(
            registry,
            &format!("gpustow_extender_gpu_memory_{what}_bytes"),
            help,
            &labels,
        )
    };
    let capacity = gauge("capacity", "GPU memory that pods may hold on this GPU")?;
    let requested = gauge("requested", "GPU memory promised to pods on this GPU")?;
    let room = gauge("room", "GPU memory that new pods may take on this GPU")?;
    for node in nodes {
        for card in &node.cards {
            let index = card.index.to_string();
            let labels = [
                &*node.name,
                card.uuid.as_str(),
                index.as_str(),
                models.label(&card.model),
            ];
            capacity
                .with_label_values(&labels)
                .set(bytes(card.capacity));
            requested.with_label_values(&labels).set(bytes(card.held));
            room.with_label_values(&labels).set(bytes(card.free));
        }
    }
    Ok(())
}
