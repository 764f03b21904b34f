//! Workloads as people name them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use gpustow_api::owner::of;
use gpustow_api::sharers::{Promise, requested, volcano_unit};
use gpustow_api::{PodFacts, names};
use gpustow_ledger::{CardView, PodShare};
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

use crate::{Cluster, memory};

/// The kind of workload that a word means, as kubectl takes it.
pub fn kind(word: &str) -> Option<&'static str> {
    Some(match word.split('.').next().unwrap_or_default() {
        "deploy" | "deployment" | "deployments" => "Deployment",
        "rs" | "replicaset" | "replicasets" => "ReplicaSet",
        "sts" | "statefulset" | "statefulsets" => "StatefulSet",
        "ds" | "daemonset" | "daemonsets" => "DaemonSet",
        "job" | "jobs" => "Job",
        "cj" | "cronjob" | "cronjobs" => "CronJob",
        _ => return None,
    })
}

/// A pod that has its GPUs from another GPU sharer.
#[derive(Clone, Debug)]
pub struct Other {
    /// `namespace/name`.
    pub pod: String,
    /// Where it is.
    pub node: Arc<str>,
    /// The sharer's promise to the pod.
    pub promise: Promise,
    /// Its request of gpushare, in gpushare's unit.
    pub units: u64,
}

impl Other {
    /// A pod that is bound and has not finished, if another sharer placed it.
    pub(crate) fn of(pod: &Pod, facts: &PodFacts) -> Option<Self> {
        let node = facts.node.clone().filter(|_| !facts.released)?;
        Some(Self {
            pod: format!("{}/{}", facts.namespace, facts.name),
            node,
            promise: Promise::of(pod)?,
            units: requested(pod, names::GPUSHARE_MEM),
        })
    }

    fn on(&self, card: &CardView, unit: u64) -> Mib {
        let total = card.total.bytes();
        let bytes = self.promise.on(&card.uuid, card.index, total, unit);
        Mib(bytes.div_ceil(1 << 20))
    }
}

impl Cluster {
    /// MiB of a unit of Volcano's on the node, if it has some.
    pub fn volcano_unit(&self, node: &str) -> Option<u64> {
        let gpus = self.reports.get(node)?.gpus.iter();
        let amounts = self.nodes.get(node)?.status.as_ref()?.capacity.as_ref();
        volcano_unit(amounts, gpus.map(|gpu| gpu.total_mib).sum())
    }
}

/// A holder of a part of a card, and the size of that part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// `namespace/name`; none for processes of no pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The held memory, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Where it has it from, if not from gpustow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub through: Option<String>,
    /// Until when it is reserved for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
}

impl Holder {
    /// A pod of gpustow that holds so much.
    pub fn of(pod: &PodShare, held: Mib) -> Self {
        Self {
            pod: Some(format!("{}/{}", pod.namespace, pod.name)),
            bytes: Some(held.bytes()),
            ..Self::default()
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pod.as_deref().unwrap_or("host processes"))?;
        if let Some(bytes) = self.bytes {
            write!(f, " {}", memory(Mib(bytes >> 20)))?;
        }
        let through = self.through.iter().map(|it| format!(" ({it})"));
        let until = self.until.iter().map(|it| format!(" until {it}"));
        through.chain(until).try_for_each(|it| f.write_str(&it))
    }
}

/// The holders of each GPU and their parts.
pub struct Owners<'a> {
    cluster: &'a Cluster,
    others: HashMap<&'a str, Vec<&'a Other>>,
}

impl<'a> Owners<'a> {
    /// Of all GPUs of a cluster.
    pub fn of(cluster: &'a Cluster) -> Self {
        let mut others: HashMap<&str, Vec<&Other>> = HashMap::new();
        for other in cluster.others.values() {
            others.entry(&other.node).or_default().push(other);
        }
        Self { cluster, others }
    }

    /// Who holds something of a card: gpustow's pods, then all others.
    pub fn on(&self, node: &str, card: &CardView) -> Vec<String> {
        let mut owners = grouped(self.cluster, card);
        owners.extend(self.others(node, card).iter().map(Holder::to_string));
        owners
    }

    /// The memory of a card that is promised to pods of other sharers and to claims.
    pub fn promised(&self, node: &str, card: &CardView) -> Mib {
        let pods = self.others.get(node).into_iter().flatten();
        let unit = self.cluster.volcano_unit(node).unwrap_or(1);
        let gpu = self.cluster.gpu(node, &card.uuid);
        let claims = gpu.into_iter().flat_map(|gpu| &gpu.claims);
        let claimed = claims.map(|it| Mib(it.held_mib));
        pods.map(|it| it.on(card, unit)).chain(claimed).sum()
    }

    /// Pods that have their share from another sharer or a device plugin, and processes of no pod.
    pub fn others(&self, node: &str, card: &CardView) -> Vec<Holder> {
        let pods = self.others.get(node).into_iter().flatten();
        let unit = self.cluster.volcano_unit(node).unwrap_or(1);
        let held = pods.map(|it| (it, it.on(card, unit)));
        let held = held.filter(|(_, mib)| *mib > Mib::ZERO);
        let held = held.map(|(it, mib)| Holder {
            pod: Some(it.pod.clone()),
            bytes: Some(mib.bytes()),
            through: Some(it.promise.sharer.to_string()),
            until: None,
        });
        let mut owners: Vec<Holder> = held.collect();
        let gpu = self.cluster.gpu(node, &card.uuid);
        if let Some(by) = gpu.and_then(|gpu| gpu.held_by.as_ref()) {
            owners.push(Holder {
                pod: Some(by.pod.clone()),
                through: Some(by.through.clone()),
                ..Holder::default()
            });
        }
        let claims = gpu.iter().flat_map(|gpu| &gpu.claims);
        owners.extend(claims.map(|it| Holder {
            pod: Some(it.pod.clone()),
            bytes: Some(Mib(it.held_mib).bytes()),
            through: Some(format!("claim {}", it.claim)),
            until: None,
        }));
        let gone = gpu.iter().flat_map(|gpu| &gpu.pods);
        let gone = gone.filter(|it| !self.cluster.pods.contains_key(it.uid.as_str()));
        owners.extend(gone.map(|it| Holder {
            pod: Some(it.uid.clone()),
            through: Some("a pod that is gone".to_owned()),
            bytes: Some(Mib(it.used_mib).bytes()),
            ..Holder::default()
        }));
        let host = gpu.map_or(0, |gpu| gpu.host_mib);
        if host > 0 {
            owners.push(Holder {
                bytes: Some(Mib(host).bytes()),
                ..Holder::default()
            });
        }
        owners
    }
}

/// The pods of a card as texts for people: one text per owner, with the number and the memory of its pods.
fn grouped(cluster: &Cluster, card: &CardView) -> Vec<String> {
    let mut groups: Vec<(String, usize, Mib)> = Vec::new();
    for share in &card.pods {
        let pod = cluster.pods.get(&share.uid);
        let owner = pod.and_then(|pod| of(&pod.object).pop());
        let name = owner.map_or_else(|| share.name.to_string(), |owner| owner.name);
        let name = format!("{}/{name}", share.namespace);
        match groups.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, count, held)) => (*count, *held) = (*count + 1, *held + share.charged),
            None => groups.push((name, 1, share.charged)),
        }
    }
    let text = |(name, count, held): &(String, usize, Mib)| match count {
        1 => format!("{name} {}", memory(*held)),
        _ => format!("{name} ({count}) {}", memory(*held)),
    };
    groups.iter().map(text).collect()
}
