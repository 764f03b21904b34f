//! The cluster's sums, and each card where that is asked for.

use std::collections::BTreeMap;

use gpustow_ledger::{Assumed, CardView, Mismatches, NodeView, Problem, Queued};
use gpustow_pack::Mib;
use gpustow_policies::admission::Weakness;
use gpustow_serve::Scrape;
use prometheus::{IntCounter, IntCounterVec, Opts};
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
    Cordoned,
    /// They are left to ResourceClaims.
    Claimed,
    /// No agent reports them.
    Unknown,
}

pub(super) const NO_LABELS: [&str; 0] = [];
/// The model of a card that no agent reports.
const UNKNOWN: &str = "unknown";

pub(super) fn bytes(mib: Mib) -> f64 {
    mib.bytes() as f64
}

/// The sums over the cluster at this scrape.
pub(super) fn cluster(
    scrape: &mut Scrape,
    totals: &Totals,
    models: &Models,
) -> Result<(), prometheus::Error> {
    let Assumed { waiting, binding } = totals.assumed;
    scrape.gauges(
        "gpustow_assumed_pods",
        "Pods between filter and bind, whose memory is assumed",
        NO_LABELS,
        [(NO_LABELS, (waiting + binding) as f64)],
    )?;
    let expirations = IntCounter::new(
        "gpustow_assumed_pods_expired_total",
        "Assumed pods whose bind did not come in time",
    )?;
    expirations.inc_by(totals.expirations);
    scrape.add(&expirations);
    scrape.gauges(
        "gpustow_unfenced_pods",
        "Pods that an earlier extender may still bind, because their status cannot be written",
        NO_LABELS,
        [(NO_LABELS, totals.unfenced as f64)],
    )?;
    let Queued {
        pods: queued,
        oldest,
    } = totals.queued;
    scrape.gauges(
        "gpustow_queued_pods",
        "Queued pods, which have gpustow's scheduling gate",
        NO_LABELS,
        [(NO_LABELS, queued as f64)],
    )?;
    scrape.gauges(
        "gpustow_placeholders",
        "Placeholder pods that wait for an autoscaler's nodes",
        NO_LABELS,
        [(NO_LABELS, totals.placeholders as f64)],
    )?;
    scrape.gauges(
        "gpustow_queue_oldest_timestamp_seconds",
        "When the oldest queued pod was created; absent if none is queued",
        NO_LABELS,
        oldest.map(|created| (NO_LABELS, created as f64)),
    )?;
    let holds = totals.policies.iter().map(|(policy, weak)| {
        let holds = !weak.as_ref().is_some_and(Weakness::is_open);
        ([*policy], f64::from(u8::from(holds)))
    });
    scrape.gauges(
        "gpustow_policy_holds",
        "1 for an admission policy that is in force, 0 for one that is missing, weak or another than this build's",
        ["policy"],
        holds,
    )?;
    earmarks(scrape, totals)?;
    starts(scrape, &totals.nodes)?;
    mismatches(scrape, &totals.nodes)?;
    memory(scrape, &totals.nodes, models)?;
    if totals.per_gpu {
        per_gpu(scrape, &totals.nodes, models)?;
    }
    Ok(())
}

fn earmarks(scrape: &mut Scrape, totals: &Totals) -> Result<(), prometheus::Error> {
    let earmarks = totals.earmarks.iter();
    scrape.gauges(
        "gpustow_earmarks",
        "Reservations of GPU memory that is not free yet, on the leader",
        ["cause"],
        earmarks.map(|(cause, count)| ([<&str>::from(cause)], *count as f64)),
    )?;
    let ended = IntCounterVec::new(
        Opts::new(
            "gpustow_earmarks_ended_total",
            "Reservations of GPU memory that ended",
        ),
        &["cause", "outcome"],
    )?;
    for (cause, how, count) in &totals.earmarks_ended {
        let labels = [<&str>::from(cause), how.into()];
        ended.with_label_values(&labels).inc_by(*count);
    }
    scrape.add(&ended);
    Ok(())
}

fn starts(scrape: &mut Scrape, nodes: &[NodeView]) -> Result<(), prometheus::Error> {
    let cards = nodes.iter().flat_map(|node| &node.cards);
    let starting = |card: &&CardView| card.pods.iter().any(|pod| pod.starting.is_some());
    scrape.gauges(
        "gpustow_gpus_with_starts",
        "GPUs on which a pod has not finished its start, once a pod with the annotation start: alone has come",
        NO_LABELS,
        [(NO_LABELS, cards.filter(starting).count() as f64)],
    )
}

/// Differences between the ledger, NVML and the data that others wrote.
fn mismatches(scrape: &mut Scrape, nodes: &[NodeView]) -> Result<(), prometheus::Error> {
    let sum = |of: fn(&Mismatches) -> usize| {
        let sum: usize = nodes.iter().map(|node| of(&node.mismatches)).sum();
        sum as f64
    };
    scrape.gauges(
        "gpustow_ledger_mismatches",
        "Pods that are not seen on their GPUs (unconfirmed) or are seen on others (wrong_gpu), and processes of pods that are gone (orphan)",
        ["kind"],
        [
            (["unconfirmed"], sum(|found| found.unconfirmed)),
            (["wrong_gpu"], sum(|found| found.wrong_gpu)),
            (["orphan"], sum(|found| found.orphan)),
        ],
    )?;
    let problems = nodes.iter().flat_map(|node| &node.problems);
    let problems = problems.map(|problem| ([<&str>::from(problem)], 1.0));
    scrape.gauges(
        "gpustow_problems",
        "Problems that need a person's attention, as in `kubectl gpustow check`",
        ["kind"],
        Problem::VARIANTS
            .iter()
            .map(|kind| ([*kind], 0.0))
            .chain(problems),
    )
}

/// GPUs and their memory by model.
fn memory(
    scrape: &mut Scrape,
    nodes: &[NodeView],
    models: &Models,
) -> Result<(), prometheus::Error> {
    // Summed before they become series: looking a series up for each card would be most of a scrape.
    let mut sums: BTreeMap<&str, [Mib; 4]> = BTreeMap::new();
    let mut cards: BTreeMap<(&str, State), usize> = BTreeMap::new();
    for node in nodes {
        for card in &node.cards {
            let state = match (node.stale, card.healthy) {
                (true, _) => State::Stale,
                (false, true) => State::Ready,
                (false, false) if card.cordoned => State::Cordoned,
                (false, false) if card.claimed => State::Claimed,
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
            let amounts = [card.capacity, card.held, free, card.unmanaged];
            sum.iter_mut()
                .zip(amounts)
                .for_each(|(sum, amount)| *sum = *sum + amount);
        }
    }
    let unreported = nodes.iter().map(|node| node.unreported).sum();
    cards.insert((UNKNOWN, State::Unknown), unreported);
    let states = sums.keys().flat_map(|&model| {
        State::VARIANTS
            .iter()
            .map(move |state| ([model, *state], 0.0))
    });
    let cards = cards
        .iter()
        .map(|(&(model, state), &cards)| ([model, state.into()], cards as f64));
    scrape.gauges(
        "gpustow_gpus",
        "GPUs by model and state. unknown: pods hold it and no agent reports it",
        ["model", "state"],
        states.chain(cards),
    )?;
    for (index, (what, help)) in [
        ("capacity", "GPU memory that pods may hold"),
        ("requested", "GPU memory promised to pods"),
        ("available", "GPU memory that new pods can take"),
        (
            "unmanaged",
            "GPU memory used by processes that are not gpustow pods",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        scrape.gauges(
            &format!("gpustow_cluster_memory_{what}_bytes"),
            help,
            ["model"],
            sums.iter()
                .map(|(&model, sum)| ([model], bytes(sum[index]))),
        )?;
    }
    Ok(())
}

fn per_gpu(
    scrape: &mut Scrape,
    nodes: &[NodeView],
    models: &Models,
) -> Result<(), prometheus::Error> {
    let cards = nodes
        .iter()
        .flat_map(|node| node.cards.iter().map(move |card| (node, card)));
    let cards: Vec<_> = cards
        .map(|(node, card)| {
            let index = card.index.to_string();
            let amounts = [card.capacity, card.held, card.free];
            (node, card, index, amounts)
        })
        .collect();
    let series = [
        ("capacity", "GPU memory that pods may hold on this GPU"),
        ("requested", "GPU memory promised to pods on this GPU"),
        ("available", "GPU memory that new pods can take on this GPU"),
    ];
    for (index, (what, help)) in series.into_iter().enumerate() {
        let values = cards.iter().map(|(node, card, number, amounts)| {
            let labels = [&*node.name, &*card.uuid, number, models.label(&card.model)];
            (labels, bytes(amounts[index]))
        });
        scrape.gauges(
            &format!("gpustow_extender_gpu_memory_{what}_bytes"),
            help,
            ["node", "gpu_uuid", "gpu", "model"],
            values,
        )?;
    }
    Ok(())
}
