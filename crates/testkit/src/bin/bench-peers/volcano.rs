//! Volcano: its scheduler with the deviceshare plugin, and its controllers, which make a group of each pod.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::{Launch, PodBuilder, Process, at_once, free_port};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::interval;

use crate::program::{Built, Running};
use crate::{CARDS, PART, Site, Size, WIDTH};

/// The configuration of its guide to vGPU, and the weight of the plugin's score: without it, nodes are not packed.
const CONFIG: &str = r#"
actions: "enqueue, allocate, backfill"
tiers:
- plugins:
  - name: predicates
  - name: deviceshare
    arguments:
      deviceshare.VGPUEnable: true
      deviceshare.SchedulePolicy: binpack
      deviceshare.ScheduleWeight: 10
"#;
/// Pods on a GPU at most, its device plugin's default.
const SPLIT: u64 = 10;

pub(crate) async fn install(site: &Site<'_>, build: &Built) -> Result<()> {
    let cluster = &site.cluster;
    // Its controllers wait for both.
    for definitions in ["config/crd/volcano/bases", "config/crd/jobflow/bases"] {
        let definitions = build.source.join(definitions).display().to_string();
        cluster
            .kubectl(&["apply", "--server-side", "-f", &definitions])
            .await?;
    }
    let wait = ["wait", "--for=condition=Established", "crd", "--all"];
    cluster.kubectl(&wait).await?;
    cluster
        .kubectl(&["create", "namespace", "volcano-system"])
        .await?;
    Ok(())
}

pub(crate) fn start(site: &Site<'_>, build: &Built) -> Result<Running> {
    let dir = site.cluster.dir();
    let config = dir.join("volcano.conf");
    std::fs::write(&config, CONFIG)?;
    let kubeconfig = site.cluster.admin_kubeconfig().display();
    let run = |program: &'static str, more: Vec<String>| -> Result<(&'static str, Process)> {
        let mut args = vec![
            format!("--kubeconfig={kubeconfig}"),
            "--leader-elect=false".to_owned(),
            "--kube-api-qps=5000".to_owned(),
            "--kube-api-burst=5000".to_owned(),
            format!("--listen-address=127.0.0.1:{}", free_port()?),
            format!("--healthz-address=127.0.0.1:{}", free_port()?),
        ];
        args.extend(more);
        let process = Process::start(Launch {
            program: build.bin.join(program),
            args,
            env: Vec::new(),
            log: dir.join(format!("volcano-{program}.log")),
        })?;
        Ok((program, process))
    };
    let config = format!("--scheduler-conf={}", config.display());
    let mut players = JoinSet::new();
    players.spawn(beat(site.case.client.clone()));
    Ok(Running {
        processes: vec![
            run("scheduler", vec![config])?,
            run("controller-manager", Vec::new())?,
        ],
        extender: None,
        _players: players,
    })
}

/// Plays the kubelets of the nodes that are filled. The scheduler has the plugin read a node's GPUs when the node changes, and not
/// before its first session: until then it binds by the node's sum. A kubelet writes its node's status every five minutes at least.
async fn beat(client: Client) -> Result<()> {
    let mut pace = interval(Duration::from_secs(10));
    loop {
        pace.tick().await;
        touch(&client, "few").await?;
    }
}

/// Has all other nodes change once.
pub(crate) async fn settle(site: &Site<'_>) -> Result<()> {
    touch(&site.case.client, "many").await?;
    // The scheduler does not report that it has seen them all.
    tokio::time::sleep(Duration::from_secs(5)).await;
    Ok(())
}

async fn touch(client: &Client, part: &str) -> Result<()> {
    let nodes = Api::<Node>::all(client.clone());
    let of_part = ListParams::default().labels(&format!("{PART}={part}"));
    let note = json!({ "bench/beat": format!("{:?}", SystemTime::now()) });
    let patch = Patch::Merge(json!({ "metadata": { "annotations": note } }));
    let found = nodes.list_metadata(&of_part).await?;
    let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
    at_once(WIDTH, names, |node| {
        let (nodes, patch) = (&nodes, &patch);
        async move { Ok(nodes.patch(&node, &PatchParams::default(), patch).await?) }
    })
    .await
}

pub(crate) fn resources() -> Vec<(&'static str, u64)> {
    let cards = CARDS.len() as u64;
    vec![
        ("volcano.sh/vgpu-number", cards * SPLIT),
        ("volcano.sh/vgpu-memory", CARDS.iter().sum()),
        ("volcano.sh/vgpu-cores", cards * 100),
    ]
}

/// The annotations that its device plugin writes on the node. The scheduler answers each report of the plugin by four
/// writes, at five a second for the whole cluster; it need not answer this report.
pub(crate) fn register(node: &mut Node, uuids: impl Iterator<Item = String>) {
    let gpus = uuids.zip(CARDS);
    let gpus =
        gpus.map(|(uuid, mib)| format!("{uuid},{SPLIT},{mib},NVIDIA-Testkit,true,hami-core:"));
    let key = "volcano.sh/node-vgpu-register".to_owned();
    let notes = node.annotations_mut();
    notes.insert(key, gpus.collect());
    let key = "volcano.sh/node-vgpu-handshake".to_owned();
    notes.insert(key, "Requesting_2099.01.01 00:00:00".to_owned());
}

pub(crate) fn request(pod: PodBuilder, size: Size) -> PodBuilder {
    pod.scheduler("volcano").with(|spec| {
        let resources = spec.containers[0].resources.get_or_insert_default();
        let limits = resources.limits.get_or_insert_default();
        for (resource, amount) in [("vgpu-number", size.gpus), ("vgpu-memory", size.mib)] {
            let key = format!("volcano.sh/{resource}");
            limits.insert(key, Quantity(amount.to_string()));
        }
    })
}

pub(crate) fn holds(pod: &Pod, node: &str) -> Result<Vec<(String, u64)>> {
    let note = |key: &str| {
        let value = pod.annotations().get(key).map(String::as_str);
        value.with_context(|| format!("bound without {key}"))
    };
    let chosen = note("volcano.sh/vgpu-node")?;
    ensure!(chosen == node, "bound to {node} with GPUs of {chosen}");
    let text = note("volcano.sh/vgpu-ids-new")?;
    let devices = text.split([':', ';']).filter(|it| !it.is_empty());
    let gpu = |device: &str| {
        let mut fields = device.split(',');
        let (uuid, mib) = (fields.next(), fields.nth(1));
        let mib = mib.with_context(|| format!("no memory: {text:?}"))?;
        Ok((uuid.unwrap_or_default().to_owned(), mib.parse()?))
    };
    devices.map(gpu).collect()
}
