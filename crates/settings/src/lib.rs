//! The meaning of a [`GpustowConfigSpec`] for the extender and for the plugin, so that both give the same answer: the
//! configuration of the ledger, and the permissions that its features need.

mod rights;

use gpustow_api::config::{Action, GpustowConfigSpec, QueueMode};
use gpustow_ledger::Config;

pub use rights::{Feature, Right, rights};

/// The configuration of the ledger. No field gets a default implicitly: a field that the object lacks is named here.
#[must_use]
pub fn ledger(spec: &GpustowConfigSpec) -> Config {
    let GpustowConfigSpec {
        scheduling,
        requests: _,
        queue,
        reclaim,
        preempt,
        reserve,
        defragment,
        provision,
        claims,
        disruptions,
    } = spec;
    let fixed = Config::default();
    let count = |it: u32| usize::try_from(it).unwrap_or(usize::MAX);
    Config {
        policy: scheduling.policy,
        stale_after: scheduling.stale_after.into(),
        reservation_ttl: fixed.reservation_ttl,
        slow_reservation_ttl: fixed.slow_reservation_ttl,
        start_timeout: scheduling.start_timeout.into(),
        wake_again_after: fixed.wake_again_after,
        claim_ttl: fixed.claim_ttl,
        reclaim: reclaim.action != Action::Off,
        reclaim_after: reclaim.after.into(),
        action: reclaim.action,
        owners_soften: reclaim.pods_may_soften,
        reclaim_for: reclaim.timeout.into(),
        over_limit_for: reclaim.over_limit_after.into(),
        queue: queue.mode != QueueMode::Off,
        ungate_for: fixed.ungate_for,
        reserve_after: reserve.after.0,
        reserve_give_up_after: reserve.give_up_after.into(),
        reserve_max: count(reserve.max),
        reserve_max_percent: count(reserve.max_percent),
        preempt_fragmented: preempt.fragmented,
        preempt_after: preempt.after.into(),
        defragment: defragment.evictions_per_hour > 0,
        empty_nodes: defragment.evictions_per_hour > 0 && defragment.empty_nodes,
        // All leave within a minute: the room of their replacements is not kept for much longer.
        empty_at_once: count(disruptions.per_minute.min(disruptions.per_node_per_minute)),
        provision: count(provision.max),
        fence: claims.fence,
        least_nodes: fixed.least_nodes,
        compute: scheduling.max_compute_percent,
        search_steps: fixed.search_steps,
    }
}

/// The defaults without anything that disrupts pods, for as long as the administrator's choice is unknown.
#[must_use]
pub fn cautious() -> GpustowConfigSpec {
    let mut spec = GpustowConfigSpec::default();
    spec.preempt.fragmented = false;
    spec
}
