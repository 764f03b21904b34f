//! GPUs that are shared with ResourceClaims of DRA drivers.

use gpustow_api::{config, names};
use gpustow_inspect::Cluster;

use super::{Findings, Level};

/// Reports the effect of the fence, where it is on.
pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    if !cluster.spec().claims.fence {
        return;
    }
    let views = cluster.views();
    let cards = || views.iter().flat_map(|view| &view.cards);
    let left = cards().filter(|card| card.claimed).count();
    findings.add(
        Level::Info,
        format!("gpustowconfig/{}", config::NAME),
        format!(
            "the fence is on: pods may get {} GPUs, and {left} are left to ResourceClaims until these end",
            cards().count() - left
        ),
        format!("nothing; kubectl get devicetaintrules -l {} lists it", names::CLAIMS_FENCE),
    );
}
