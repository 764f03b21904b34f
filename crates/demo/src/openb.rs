//! Pods of a list of Alibaba's openb trace, scaled to the demo's span and GPUs. It leaves out `gpu_spec`, CPU and host
//! memory: the demo's GPUs are all alike then, and each pod requests as much CPU as the demo's others.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_sim::trace::{self, TracePod};
use rand::RngExt as _;
use rand::rngs::StdRng;

use super::workload::{Arrival, Drawn, LOAD, SPAN, pod};

/// MiB of a whole GPU, on nodes with equal GPUs.
const GPU_MIB: u64 = 81_920;

pub(crate) const MISSING: &str = "--workload openb needs a list of pods: get openb_pod_list_default.csv from \
    https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023/csv, and add --openb FILE";

/// The GPU pods of a list, or of the default list in a folder, in the order of their creation.
///
/// # Errors
/// If the list cannot be read, or lacks such pods.
pub(crate) fn read(path: &Path) -> Result<Vec<TracePod>> {
    let list = path.join("openb_pod_list_default.csv");
    let path = if path.is_dir() { &list } else { path };
    let pods = trace::pods(&trace::read(path)?);
    let mut pods = pods.with_context(|| path.display().to_string())?;
    pods.retain(|pod| pod.gpus > 0 && pod.lived.is_some());
    let said = "no pod has num_gpu, creation_time and deletion_time";
    ensure!(!pods.is_empty(), "{}: {said}", path.display());
    pods.sort_by_key(|pod| pod.lived);
    Ok(pods)
}

/// So many consecutive pods, from a drawn one on.
pub(crate) fn draw(trace: &[TracePod], random: &mut StdRng, pods: usize) -> Drawn {
    let first = random.random_range(0..=trace.len().saturating_sub(pods));
    let drawn = trace.iter().skip(first).take(pods);
    let created = |pod: &TracePod| pod.lived.unwrap_or_default().0;
    let from = drawn.clone().next().map_or(0, created);
    let lasted = drawn.clone().next_back().map_or(0, created) - from;
    let arrival = |(number, of): (usize, &TracePod)| {
        let (created, deleted) = of.lived.unwrap_or_default();
        let kind = if of.gpu_milli < 1000 { "part" } else { "whole" };
        let name = format!("{kind}-{number:03}");
        // Rounded down: requests that share a GPU in the trace share one here.
        let mib = GPU_MIB * of.gpu_milli / 1000;
        let all = mib * of.gpus as u64;
        let arrival = Arrival {
            at: SPAN.mul_f64((created - from) as f64 / lasted.max(1) as f64),
            runs_for: Duration::from_secs(deleted.saturating_sub(created).max(1)),
            gpus: of.gpus,
            mib,
            priority: 0,
            pod: pod(&name, of.gpus, all, 0),
            name,
        };
        (arrival, all as f64)
    };
    let drawn: Vec<_> = drawn.enumerate().map(arrival).collect();
    let count = drawn.len();
    let parts = drawn.iter().filter(|(pod, _)| pod.mib < GPU_MIB).count();
    let text = format!(
        "{count} consecutive ones of {} GPU pods in the list, {} % of them with a part of a GPU. Their {:.1} h are \
         scaled to {hours} h, 1000 gpu_milli to 80 GiB. Run times are scaled to request {:.0} % of the GPUs' memory, \
         {hours} h at most.",
        trace.len(),
        100 * parts / count.max(1),
        lasted as f64 / 3600.0,
        100.0 * LOAD,
        hours = SPAN.as_secs() / 3600,
    );
    (drawn, text)
}
