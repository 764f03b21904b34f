//! KAI Scheduler: scheduler, binder and podgrouper. Its admission webhook does not run: pods are created with its
//! additions.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use futures::TryStreamExt as _;
use gpustow_testkit::{Launch, PodBuilder, Process, free_port};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;
use tokio::task::JoinSet;

use crate::program::{Built, Running};
use crate::{CARDS, Site, Size};

/// Where the pods are that reserve a GPU each.
const RESERVATIONS: &str = "kai-resource-reservation";
/// Label of a GPU's pods.
const GROUP: &str = "runai-gpu-group";
const MEMORY: &str = "gpu-memory";
const WHOLE: &str = "nvidia.com/gpu";

pub(crate) async fn install(site: &Site<'_>, build: &Built) -> Result<()> {
    let cluster = &site.cluster;
    let definitions = build.source.join("deployments/kai-scheduler/crds");
    let definitions = definitions.display().to_string();
    cluster
        .kubectl(&["apply", "--server-side", "-f", &definitions])
        .await?;
    let wait = ["wait", "--for=condition=Established", "crd", "--all"];
    cluster.kubectl(&wait).await?;
    for namespace in ["kai-scheduler", RESERVATIONS, "kai-scale-adjust"] {
        cluster.kubectl(&["create", "namespace", namespace]).await?;
    }
    // As its chart makes them.
    let any = json!({ "quota": 0, "limit": -1, "overQuotaWeight": 1 });
    for (name, parent) in [
        ("default-parent-queue", None),
        ("default-queue", Some("default-parent-queue")),
    ] {
        let queue = json!({
            "apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": { "name": name },
            "spec": { "parentQueue": parent, "resources": { "cpu": any, "gpu": any, "memory": any } },
        });
        cluster.apply(&queue.to_string()).await?;
    }
    Ok(())
}

pub(crate) fn start(site: &Site<'_>, build: &Built) -> Result<Running> {
    let kubeconfig = site.cluster.admin_kubeconfig().display().to_string();
    let run = |program: &'static str, more: Vec<String>| -> Result<(&'static str, Process)> {
        let mut args = vec!["--qps=5000".to_owned(), "--burst=5000".to_owned()];
        args.extend(more);
        let process = Process::start(Launch {
            program: build.bin.join(program),
            args,
            env: vec![("KUBECONFIG".to_owned(), kubeconfig.clone())],
            log: site.cluster.dir().join(format!("kai-{program}.log")),
        })?;
        Ok((program, process))
    };
    let probes = || -> Result<Vec<String>> {
        Ok(vec![
            "--metrics-bind-address=0".to_owned(),
            format!("--health-probe-bind-address=127.0.0.1:{}", free_port()?),
        ])
    };
    let scheduler = vec![
        format!("--listen-address=127.0.0.1:{}", free_port()?),
        format!("--plugin-server-port={}", free_port()?),
    ];
    let mut players = JoinSet::new();
    let pods = Api::namespaced(site.case.client.clone(), RESERVATIONS);
    players.spawn(play(pods));
    Ok(Running {
        processes: vec![
            run("scheduler", scheduler)?,
            run("binder", probes()?)?,
            run("podgrouper", probes()?)?,
        ],
        extender: None,
        _players: players,
    })
}

/// Plays the device plugin and the reservation pods: each pod reports at once which GPU of its node it got.
async fn play(pods: Api<Pod>) -> Result<()> {
    let events = watcher(pods.clone(), watcher::Config::default()).default_backoff();
    let mut events = std::pin::pin!(events);
    let mut taken: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
    while let Some(event) = events.try_next().await? {
        let (pod, gone) = match event {
            Event::Apply(pod) | Event::InitApply(pod) => (pod, false),
            Event::Delete(pod) => (pod, true),
            Event::Init | Event::InitDone => continue,
        };
        let spec = pod.spec.as_ref();
        let node = spec.and_then(|spec| spec.node_name.clone());
        let taken = taken.entry(node.unwrap_or_default()).or_default();
        let name = pod.name_any();
        if gone {
            taken.retain(|_, by| *by != name);
            continue;
        }
        if taken.values().any(|by| *by == name) {
            continue;
        }
        let mut cards = 0..CARDS.len();
        // A kubelet refuses a pod for which there is no GPU.
        let Some(card) = cards.find(|card| !taken.contains_key(card)) else {
            continue;
        };
        taken.insert(card, name.clone());
        let note = json!({ "run.ai/reserve_for_gpu_index": card.to_string() });
        let patch = json!({ "metadata": { "annotations": note } });
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        match pods.patch(&name, &params, &patch).await {
            // It was deleted meanwhile.
            Err(kube::Error::Api(problem)) if problem.code == 404 => {}
            other => drop(other?),
        }
    }
    Ok(())
}

pub(crate) fn resources() -> Vec<(&'static str, u64)> {
    vec![(WHOLE, CARDS.len() as u64)]
}

/// The labels that GPU feature discovery writes on the node.
pub(crate) fn register(node: &mut Node) {
    let labels = node.labels_mut();
    labels.insert("nvidia.com/gpu.memory".to_owned(), CARDS[0].to_string());
    labels.insert("nvidia.com/gpu.count".to_owned(), CARDS.len().to_string());
}

/// Whole GPUs are a resource, as with NVIDIA's device plugin.
pub(crate) fn request(pod: PodBuilder, size: Size) -> PodBuilder {
    let pod = pod
        .scheduler("kai-scheduler")
        .label("kai.scheduler/queue", "default-queue");
    if size.mib == CARDS[0] {
        return pod.with(|spec| {
            let resources = spec.containers[0].resources.get_or_insert_default();
            let limits = resources.limits.get_or_insert_default();
            limits.insert(WHOLE.to_owned(), Quantity(size.gpus.to_string()));
        });
    }
    let shared = format!("shared-{:016x}", rand::random::<u64>());
    pod.annotation(MEMORY, &size.mib.to_string())
        .annotation("runai/shared-gpu-configmap", &shared)
}

/// KAI distinguishes GPUs by the group of pods that share one; kubelet chooses whole ones.
pub(crate) fn holds(pod: &Pod) -> Result<Vec<(String, u64)>> {
    let spec = pod.spec.as_ref().context("no spec")?;
    let resources = spec.containers.first().and_then(|it| it.resources.as_ref());
    let limits = resources.and_then(|it| it.limits.as_ref());
    if let Some(whole) = limits.and_then(|limits| limits.get(WHOLE)) {
        let gpu = |gpu: u64| (format!("{}-{gpu}", pod.name_any()), CARDS[0]);
        return Ok((0..whole.0.parse()?).map(gpu).collect());
    }
    let group = pod.labels().get(GROUP);
    let group = group.with_context(|| format!("bound without {GROUP}"))?;
    let mib = pod.annotations().get(MEMORY);
    let mib = mib.with_context(|| format!("bound without {MEMORY}"))?;
    Ok(vec![(group.clone(), mib.parse()?)])
}
