//! Every series of the extender at once, for the reference.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::owner::Owner;
use gpustow_ledger::{Config, Ledger};
use gpustow_pack::Mib;
use prometheus::proto::MetricFamily;

use super::{Metrics, Totals};
use crate::history::{Figure, Workload};

/// Stands for a value that the cluster chooses.
const ANY: &str = "…";

/// Every series with each value of its labels that gpustow chooses, of a cluster with one GPU.
///
/// # Errors
/// If a series cannot be made, which is a mistake in these files.
pub fn every_series() -> Result<Vec<MetricFamily>, prometheus::Error> {
    let metrics = Metrics::new()?;
    metrics.watch_event(ANY);
    metrics.undecodable(ANY, 0);
    let mut ledger = Ledger::new(Config::default());
    let gpu = Gpu {
        uuid: ANY.to_owned(),
        model: ANY.to_owned(),
        ..Gpu::default()
    };
    let mut status = GpuNodeStatus::default();
    status.gpus.push(gpu);
    ledger.apply_gpunode(ANY, status, Duration::ZERO);
    let owner = Owner {
        kind: ANY.to_owned(),
        name: ANY.to_owned(),
    };
    let namespace = ANY.into();
    let figure = Figure {
        workload: Workload { namespace, owner },
        container: ANY.into(),
        requested: Mib::ZERO,
        advised: Mib::ZERO,
    };
    let mut queued = ledger.queued();
    queued.oldest = Some(0);
    metrics.gather(&Totals {
        nodes: ledger.snapshot(Duration::ZERO),
        assumed: ledger.assumed(),
        expirations: 0,
        earmarks: ledger.earmarks().collect(),
        earmarks_ended: ledger.earmarks_ended().collect(),
        unfenced: 0,
        waiting: Vec::new(),
        oldest: Some(0),
        queued,
        placeholders: 0,
        policies: vec![(ANY, None)],
        figures: Arc::new([figure]),
        leads: true,
        per_gpu: true,
    })
}
