//! Every series of the extender at once, for the reference.

use std::sync::Arc;

use gpustow_api::owner::Owner;
use gpustow_ledger::{CardView, Config, Ledger, Mismatches, NodeView};
use gpustow_pack::{Compute, Mib};
use prometheus::proto::MetricFamily;

use super::{Metrics, Totals};
use crate::history::{Figure, Workload};

/// Stands for what the cluster chooses.
const ANY: &str = "…";

/// Every series with each value of its labels that gpustow chooses, of a cluster with one GPU.
///
/// # Errors
/// If a series cannot be made, which is a mistake in these files.
pub fn every_series() -> Result<Vec<MetricFamily>, prometheus::Error> {
    let metrics = Metrics::new()?;
    metrics.watch_event(ANY);
    metrics.undecodable(ANY, 0);
    let ledger = Ledger::new(Config::default());
    let card = CardView {
        uuid: ANY.to_owned(),
        index: 0,
        model: ANY.to_owned(),
        total: Mib::ZERO,
        capacity: Mib::ZERO,
        held: Mib::ZERO,
        free: Mib::ZERO,
        unmanaged: Mib::ZERO,
        healthy: true,
        cordoned: false,
        limit: Mib::ZERO,
        compute: Compute::default(),
        slices: None,
        pods: Vec::new(),
    };
    let node = NodeView {
        name: ANY.into(),
        stale: false,
        cards: vec![card],
        problems: Vec::new(),
        mismatches: Mismatches::default(),
        unreported: 0,
    };
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
        nodes: vec![node],
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
