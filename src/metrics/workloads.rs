//! The request and the advised request of the containers that request most beyond the advice.

use gpustow_pack::Mib;
use gpustow_serve::Scrape;

use super::cluster::bytes;
use crate::history::Figure;

const LABELS: [&str; 4] = ["namespace", "kind", "workload", "container"];

/// Of one GPU each.
pub(super) fn workloads(scrape: &mut Scrape, figures: &[Figure]) -> Result<(), prometheus::Error> {
    let of = |amount: fn(&Figure) -> Mib| {
        figures.iter().map(move |it| {
            let owner = &it.workload.owner;
            let labels = [
                &*it.workload.namespace,
                &*owner.kind,
                &*owner.name,
                &*it.container,
            ];
            (labels, bytes(amount(it)))
        })
    };
    scrape.gauges(
        "gpustow_workload_requested_bytes",
        "GPU memory that a container of a workload requests of each GPU",
        LABELS,
        of(|it| it.requested),
    )?;
    scrape.gauges(
        "gpustow_workload_advised_bytes",
        "GPU memory that it should request of each GPU: exceeded only in short peaks",
        LABELS,
        of(|it| it.advised),
    )
}
