//! The agent's metrics for Prometheus. The agent makes the series of cards and pods at the scrape, from the last
//! sample. So a pod that is gone does not leave a series behind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use gpustow_api::gpunode::Gpu;
use gpustow_api::limit::Support;
use gpustow_pack::Mib;
use gpustow_serve::{BUCKETS, Scrape};
use prometheus::proto::MetricFamily;
use prometheus::{
    Gauge, Histogram, IntCounter, IntCounterVec, Registry, register_gauge_with_registry,
    register_histogram_with_registry, register_int_counter_vec_with_registry,
    register_int_counter_with_registry,
};
use strum::VariantArray as _;

use crate::clock::Now;
use crate::devices::{Fault, FaultKind};
use crate::limits::Limited;
use crate::pods::NodePods;
use crate::shares::CardUse;
use crate::state::{Seen, State};

/// The cards and pods of the last sample.
#[derive(Debug, Default)]
struct Snapshot {
    driver: String,
    headroom: Mib,
    cards: Vec<Seen>,
    shares: Vec<Share>,
    owners: Vec<(String, &'static str, f64)>,
    missing: Vec<Limited>,
}

/// The labels of a container on a card.
const CONTAINER: [&str; 5] = ["node", "gpu_uuid", "namespace", "pod", "container"];

/// A series' name, its help, and its value.
type Amount<T, V> = (&'static str, &'static str, fn(&T) -> V);

/// Who may have given out memory of a card.
const OWNERS: [&str; 7] = [
    "gpustow",
    "gpushare",
    "hami",
    "volcano",
    "kai",
    "whole",
    "unmanaged",
];

/// A container's memory on a card.
#[derive(Debug)]
struct Share {
    uuid: String,
    labels: [String; 3],
    requested: Option<f64>,
    limit: Option<f64>,
    used: f64,
}

/// The agent's series.
pub struct Metrics {
    node: String,
    registry: Registry,
    /// Time of a look at the cards.
    pub sample_seconds: Histogram,
    /// Looks that failed, by cause.
    pub sample_errors: IntCounterVec,
    /// When the last report was written.
    pub last_publish: Gauge,
    /// Writes to the API server that failed.
    pub write_errors: IntCounter,
    /// Processes to which the agent sent SIGTERM.
    pub killed: IntCounter,
    xids: IntCounterVec,
    snapshot: Mutex<Arc<Snapshot>>,
}

impl Metrics {
    /// Nothing sampled yet.
    ///
    /// # Errors
    /// If the registry refuses a series, which would be a mistake in this file.
    pub fn new(node: &str) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        gpustow_serve::about(&registry, "gpustow_agent_build_info")?;
        let metrics = Self {
            node: node.to_owned(),
            sample_seconds: register_histogram_with_registry!(
                "gpustow_agent_sample_duration_seconds",
                "Time to read all GPUs",
                BUCKETS.to_vec(),
                registry
            )?,
            sample_errors: register_int_counter_vec_with_registry!(
                "gpustow_agent_sample_errors_total",
                "Reads that failed, by cause",
                &["source"],
                registry
            )?,
            last_publish: register_gauge_with_registry!(
                "gpustow_agent_last_publish_timestamp_seconds",
                "When the last report was written",
                registry
            )?,
            write_errors: register_int_counter_with_registry!(
                "gpustow_agent_write_errors_total",
                "Writes to the API server that failed",
                registry
            )?,
            killed: register_int_counter_with_registry!(
                "gpustow_killed_processes_total",
                "Processes ended to reclaim GPU memory",
                registry
            )?,
            xids: register_int_counter_vec_with_registry!(
                "gpustow_gpu_xid_errors_total",
                "Errors that the driver reported, by NVIDIA's number; ecc is an uncorrectable memory error",
                &["node", "gpu_uuid", "xid"],
                registry
            )?,
            snapshot: Mutex::default(),
            registry,
        };
        for source in ["nvml", "pod_resources"] {
            metrics.sample_errors.with_label_values(&[source]);
        }
        Ok(metrics)
    }

    /// Something went wrong with a card.
    pub fn fault(&self, fault: &Fault) {
        let xid = match fault.kind {
            FaultKind::Xid(xid) => xid.to_string(),
            FaultKind::Ecc => "ecc".to_owned(),
        };
        self.xids
            .with_label_values(&[&self.node, &fault.uuid, &xid])
            .inc();
    }

    /// A report was written.
    pub fn published(&self, now: Now) {
        self.last_publish.set(now.wall.as_duration().as_secs_f64());
    }

    /// Keeps the data that the next scrapes show.
    pub fn sampled(&self, driver: Option<&str>, state: &State, pods: &NodePods) {
        let cards: Vec<Seen> = state.cards().cloned().collect();
        let shares = cards.iter().flat_map(|seen| shares(seen, pods)).collect();
        let owners = cards.iter().flat_map(|seen| owners(seen, pods)).collect();
        let driver = driver.unwrap_or_default().to_owned();
        let snapshot = Arc::new(Snapshot {
            driver,
            headroom: state.headroom(),
            cards,
            shares,
            owners,
            missing: state.limits().missing().cloned().collect(),
        });
        *self.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    /// Every series at this moment.
    ///
    /// # Errors
    /// If a series cannot be made, which would be a mistake in this file.
    pub fn gather(&self) -> Result<Vec<MetricFamily>, prometheus::Error> {
        let snapshot = self
            .snapshot
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut scrape = Scrape::default();
        self.info(&mut scrape, &snapshot)?;
        self.cards(&mut scrape, &snapshot)?;
        self.pods(&mut scrape, &snapshot)?;
        Ok(scrape.beside(&self.registry))
    }

    fn info(&self, scrape: &mut Scrape, snapshot: &Snapshot) -> Result<(), prometheus::Error> {
        let info = snapshot.cards.iter().map(|seen| {
            let gpu: &Gpu = &seen.gpu;
            let place = gpu.place.as_deref();
            let text = |text: Option<&String>| text.cloned().unwrap_or_default();
            let labels = [
                self.node.clone(),
                gpu.uuid.clone(),
                gpu.index.to_string(),
                gpu.model.clone(),
                text(place.and_then(|place| place.pci_bus_id.as_ref())),
                snapshot.driver.clone(),
                text(place.and_then(|place| place.profile.as_ref())),
            ];
            (labels, 1.0)
        });
        scrape.gauges(
            "gpustow_gpu_info",
            "Properties of a GPU; always 1. Join the others with it",
            [
                "node",
                "gpu_uuid",
                "gpu",
                "model",
                "pci_bus_id",
                "driver_version",
                "mig_profile",
            ],
            info,
        )
    }

    fn cards(&self, scrape: &mut Scrape, snapshot: &Snapshot) -> Result<(), prometheus::Error> {
        let amounts: [Amount<Seen, f64>; 5] = [
            (
                "gpustow_gpu_memory_total_bytes",
                "All memory of the GPU",
                |seen| bytes(Mib(seen.gpu.total_mib)),
            ),
            (
                "gpustow_gpu_memory_reserved_bytes",
                "Memory that the driver keeps for itself",
                |seen| bytes(Mib(seen.gpu.reserved_mib)),
            ),
            (
                "gpustow_gpu_memory_used_bytes",
                "Memory in use, by any process",
                |seen| seen.used_bytes as f64,
            ),
            (
                "gpustow_gpu_memory_unmanaged_bytes",
                "GPU memory used by processes that are not gpustow pods, or unknown",
                |seen| bytes(Mib(seen.gpu.unmanaged_mib)),
            ),
            (
                "gpustow_gpu_healthy",
                "1 if the GPU takes new pods",
                |seen| f64::from(u8::from(seen.gpu.healthy)),
            ),
        ];
        for (name, help, amount) in amounts {
            let cards = snapshot.cards.iter();
            let series = cards.map(|seen| ([&self.node, &seen.gpu.uuid], amount(seen)));
            scrape.gauges(name, help, ["node", "gpu_uuid"], series)?;
        }
        let owners = snapshot.owners.iter().map(|(uuid, owner, bytes)| {
            let labels: [&str; 3] = [&self.node, uuid, owner];
            (labels, *bytes)
        });
        scrape.gauges(
            "gpustow_gpu_memory_held_bytes",
            "Memory of the GPU that each GPU sharer has given out: gpustow, gpushare, hami, volcano, kai, claims for ResourceClaims, or whole for \
             a device plugin's GPU; unmanaged is the memory of other processes",
            ["node", "gpu_uuid", "owner"],
            owners,
        )?;
        let capacity = snapshot.cards.iter().map(|seen| {
            let labels = [self.node.clone(), seen.gpu.uuid.clone()];
            (labels, bytes(seen.gpu.capacity(snapshot.headroom)))
        });
        scrape.gauges(
            "gpustow_gpu_memory_capacity_bytes",
            "Memory of the GPU that pods may hold: its total without the driver's reserve and the agent's headroom",
            ["node", "gpu_uuid"],
            capacity,
        )?;
        let limits = snapshot.cards.iter().map(|seen| {
            let word = seen.gpu.memory_limit.as_deref().unwrap_or_default();
            let holds = word == <&str>::from(Support::Holds);
            let labels: [&str; 3] = [&self.node, &seen.gpu.uuid, word];
            (labels, f64::from(u8::from(holds)))
        });
        scrape.gauges(
            "gpustow_gpu_memory_limit_holds",
            "1 if the driver would hold a container to a limit here, with the reason Holds, else 0 and why not",
            ["node", "gpu_uuid", "reason"],
            limits,
        )
    }

    fn pods(&self, scrape: &mut Scrape, snapshot: &Snapshot) -> Result<(), prometheus::Error> {
        let amounts: [Amount<Share, Option<f64>>; 3] = [
            (
                "gpustow_pod_gpu_memory_requested_bytes",
                "Memory that a container requests of the GPU",
                |share| share.requested,
            ),
            (
                "gpustow_pod_gpu_memory_limit_bytes",
                "Memory that a container may use of the GPU; its request if it sets no limit",
                |share| share.limit,
            ),
            (
                "gpustow_pod_gpu_memory_used_bytes",
                "Memory that a container's processes use of the GPU",
                |share| Some(share.used),
            ),
        ];
        for (name, help, amount) in amounts {
            let series = snapshot.shares.iter().filter_map(|share| {
                let [namespace, pod, container] = &share.labels;
                let labels = [&self.node, &share.uuid, namespace, pod, container];
                Some((labels, amount(share)?))
            });
            scrape.gauges(name, help, CONTAINER, series)?;
        }
        let missing = snapshot.missing.iter().map(|it| {
            let [namespace, pod, container] = &it.names;
            let labels: [&str; 5] = [&self.node, &it.uuid, namespace, pod, container];
            (labels, 1.0)
        });
        scrape.gauges(
            "gpustow_pod_gpu_memory_limit_missing",
            "1 for a container that runs without the limit that the driver should hold; absent for others",
            CONTAINER,
            missing,
        )
    }
}

/// Who gave out how many bytes of the card.
fn owners(seen: &Seen, pods: &NodePods) -> Vec<(String, &'static str, f64)> {
    let gpu = &seen.gpu;
    let mut held: BTreeMap<&'static str, u64> = BTreeMap::new();
    for pod in pods.iter() {
        let (owner, bytes) = match &pod.promise {
            Some(promise) => {
                let total = Mib(gpu.total_mib).bytes();
                let at = (gpu.uuid.as_str(), gpu.index);
                (promise.sharer, pods.promised(pod, at, total))
            }
            None => ("gpustow", pod.assigned(&gpu.uuid).bytes()),
        };
        let sum = held.entry(owner).or_default();
        *sum = sum.saturating_add(bytes);
    }
    if let Some(by) = &gpu.held_by {
        let owner = match by.pod.starts_with("kai-resource-reservation/") {
            true => "kai",
            false => "whole",
        };
        held.insert(owner, Mib(gpu.total_mib).bytes());
    }
    if !gpu.claims.is_empty() {
        let claimed: u64 = gpu.claims.iter().map(|it| it.held_mib).sum();
        held.insert("claims", Mib(claimed).bytes());
    }
    // Memory that pods of other sharers use beyond their promises is unmanaged.
    let theirs = held.iter().filter(|(owner, _)| **owner != "gpustow");
    let theirs = theirs.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
    let unmanaged = Mib(gpu.unmanaged_mib).bytes().saturating_sub(theirs);
    held.insert("unmanaged", unmanaged);
    let held = held.into_iter().filter(|(_, bytes)| *bytes > 0);
    held.map(|(owner, bytes)| (gpu.uuid.clone(), owner, bytes as f64))
        .collect()
}

/// Containers that hold memory of the card, and containers that use it.
fn shares(seen: &Seen, pods: &NodePods) -> Vec<Share> {
    let uuid = &seen.gpu.uuid;
    let mut shares = Vec::new();
    for pod in pods.iter().filter(|pod| !pod.facts.released) {
        let facts = &pod.facts;
        let labels =
            |container: &str| [&*facts.namespace, &*facts.name, container].map(str::to_owned);
        let mut users: Vec<(&str, Option<[f64; 2]>)> = Vec::new();
        if let (Some(request), Some(Ok(assignment))) = (facts.asks.request(), &facts.assignment) {
            let claims = request.claims.iter().zip(&pod.limits);
            for (name, (claim, limit)) in facts.containers.iter().zip(claims) {
                let mine = assignment.containers.iter().any(|(container, uuids)| {
                    container == name && uuids.iter().any(|card| **card == **uuid)
                });
                let all = pod.assigned(uuid);
                let [mib, limit] = match request.exclusive {
                    true => [all, all],
                    false => {
                        let mib = claim.on(seen.gpu.capacity(Mib::ZERO)).min(all);
                        [mib, (*limit).max(mib).min(Mib(seen.gpu.total_mib))]
                    }
                };
                users.extend(mine.then(|| (&**name, Some([mib, limit].map(bytes)))));
            }
        }
        let of_pod = seen
            .used
            .pods
            .iter()
            .filter(|((uid, _), _)| *uid == facts.uid);
        for ((_, name), _) in of_pod.clone() {
            if !users.iter().any(|(user, _)| *user == &**name) {
                users.push((name, None));
            }
        }
        for (container, may) in users {
            let used = of_pod.clone().find(|((_, name), _)| **name == *container);
            shares.push(Share {
                uuid: uuid.clone(),
                labels: labels(container),
                requested: may.map(|[requested, _]| requested),
                limit: may.map(|[_, limit]| limit),
                used: used.map_or(0.0, |(_, bytes)| *bytes as f64),
            });
        }
    }
    shares
}

fn bytes(mib: Mib) -> f64 {
    mib.bytes() as f64
}

/// Every series with each value of its labels that gpustow chooses, of a node with one container, for the reference.
///
/// # Errors
/// If a series cannot be made, which would be a mistake in this file.
pub fn every_series() -> Result<Vec<MetricFamily>, prometheus::Error> {
    const ANY: &str = "…";
    let metrics = Metrics::new(ANY)?;
    metrics.xids.with_label_values(&[ANY, ANY, ANY]);
    let cards = Support::VARIANTS.iter().map(|support| Seen {
        gpu: Gpu {
            uuid: <&str>::from(support).to_owned(),
            memory_limit: Some(<&str>::from(support).to_owned()),
            ..Gpu::default()
        },
        used: CardUse::default(),
        used_bytes: 0,
        past_mps: BTreeSet::new(),
    });
    let share = Share {
        uuid: ANY.to_owned(),
        labels: [ANY; 3].map(str::to_owned),
        requested: Some(0.0),
        limit: Some(0.0),
        used: 0.0,
    };
    let missing = Limited {
        uid: ANY.into(),
        names: [ANY; 3].map(Arc::from),
        container: ANY.into(),
        uuid: ANY.to_owned(),
        limit: Mib::ZERO,
        found: None,
    };
    *metrics
        .snapshot
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = Arc::new(Snapshot {
        headroom: Mib::ZERO,
        driver: ANY.to_owned(),
        cards: cards.collect(),
        shares: vec![share],
        owners: OWNERS.map(|owner| (ANY.to_owned(), owner, 0.0)).to_vec(),
        missing: vec![missing],
    });
    metrics.gather()
}
