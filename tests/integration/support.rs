//! The rig: an extender and a kube-scheduler with the ServiceAccount and RBAC of `manifests/`, and functions with which
//! cases check pods.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{Assignment, names};
use gpustow_testkit::{
    ApiProxy, Case, ControlPlane, Extender, ExtenderOptions, PodBuilder, Scheduler,
    SchedulerConfig, eventually, held, shared, wait_bound, wait_refused,
};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use tokio::sync::OnceCell;

use crate::install::apply;

/// Bound on waits that end at once when all is well.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// Namespace of gpustow's own objects.
pub(crate) const SYSTEM: &str = "gpustow-system";
/// ServiceAccount of scheduler and extender.
pub(crate) const ACCOUNT: &str = "gpustow-scheduler";

/// The built extender.
pub(crate) fn gpustow() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_gpustow"))
}

/// A file of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A control plane with an extender and a scheduler of name `gpustow-scheduler`.
pub(crate) struct Rig<'a> {
    pub(crate) cluster: &'a ControlPlane,
    pub(crate) extender: Extender,
    /// Ends with the rig.
    _scheduler: Scheduler,
}

/// The special parts of a rig.
#[derive(Default)]
pub(crate) struct Setup<'a> {
    /// The extender, not the scheduler, reaches the API server through this.
    pub(crate) proxy: Option<&'a ApiProxy>,
    /// An extender that is called after ours, in YAML.
    pub(crate) after: Option<&'a str>,
    /// Fields of the GpustowConfig.
    pub(crate) config: &'a [&'a str],
}

impl<'a> Rig<'a> {
    /// Installs gpustow and starts extender and scheduler. A cluster takes one rig: of two extenders
    /// on one cluster, the second relieves the first.
    pub(crate) async fn start(cluster: &'a ControlPlane, setup: Setup<'_>) -> Result<Rig<'a>> {
        apply(cluster, "manifests/base", &[]).await?;
        // Extender and scheduler are processes here.
        cluster
            .kubectl(&[
                "scale",
                "--replicas=0",
                "deployment/gpustow-scheduler",
                "-n",
                SYSTEM,
            ])
            .await?;
        let proxy = setup.proxy.map(ApiProxy::url);
        let through = cluster.kubeconfig(SYSTEM, ACCOUNT, proxy).await?;
        // The choices of `tight` depend on the mix of requests, and so on the other cases.
        let config = ["scheduling: {policy: binpack}"].iter().chain(setup.config);
        let options = ExtenderOptions {
            args: vec!["--metrics-per-gpu".to_owned()],
            config: Some(config.map(ToString::to_string).collect()),
            ..ExtenderOptions::default()
        };
        let extender = Extender::start(cluster, gpustow(), &through, options).await?;
        let mut config =
            SchedulerConfig::load(&repository("scheduler-config/gpustow-scheduler.yaml"))?
                .with_extender(&extender.url)?;
        if let Some(yaml) = setup.after {
            config = config.with_another_extender(yaml)?;
        }
        let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
        let _scheduler = Scheduler::start(cluster, config, &kubeconfig).await?;
        Ok(Rig {
            cluster,
            extender,
            _scheduler,
        })
    }

    /// Waits until [`ledger_agrees`], then ends the case.
    pub(crate) async fn end(&self, case: Case) -> Result<()> {
        ledger_agrees(&self.extender, &case).await?;
        case.end().await
    }
}

/// Waits until the extender's ledger agrees with the API server about the case's cards.
pub(crate) async fn ledger_agrees(extender: &Extender, case: &Case) -> Result<()> {
    let ours = format!("GPU-{}-", case.namespace);
    eventually(SOON, "the ledger agrees with the API server", async || {
        let mut ledger = extender.held().await?;
        ledger.retain(|uuid, mib| uuid.starts_with(&ours) && *mib > 0);
        let pods = held(&case.client, &case.namespace).await?;
        ensure!(ledger == pods, "ledger {ledger:?}, API server {pods:?}");
        Ok(())
    })
    .await
}

/// The rig that cases share which leave extender, scheduler and API server alone.
pub(crate) async fn rig() -> Result<&'static Rig<'static>> {
    static RIG: OnceCell<Rig<'static>> = OnceCell::const_new();
    RIG.get_or_try_init(async || Rig::start(shared().await?, Setup::default()).await)
        .await
}

/// How often the cases that look for races are repeated.
pub(crate) fn rounds() -> Result<usize> {
    match std::env::var("GPUSTOW_ROUNDS") {
        Ok(rounds) => rounds
            .parse()
            .with_context(|| format!("GPUSTOW_ROUNDS={rounds}")),
        Err(_) => Ok(3),
    }
}

/// The assignment of a bound pod.
pub(crate) fn assignment(pod: &Pod) -> Result<Assignment> {
    let text = pod.annotations().get(names::ASSIGNMENT);
    let text = text.with_context(|| format!("{}: no assignment", pod.name_any()))?;
    Ok(Assignment::decode(text)?)
}

/// The charges of a bound pod: UUID and MiB of each card, by UUID.
pub(crate) fn charges(pod: &Pod) -> Result<Vec<(String, u64)>> {
    let charges = assignment(pod)?.charges;
    let mut charges: Vec<_> = charges
        .into_iter()
        .map(|(uuid, mib)| (uuid.to_string(), mib.0))
        .collect();
    charges.sort_unstable();
    Ok(charges)
}

/// Creates the pod, waits until it is bound, and returns its charges.
pub(crate) async fn placed(client: &Client, pod: PodBuilder) -> Result<Vec<(String, u64)>> {
    charges(&bound(client, pod).await?)
}

/// Creates the pod and waits until it is bound.
pub(crate) async fn bound(client: &Client, pod: PodBuilder) -> Result<Pod> {
    let pod = pod.create(client).await?;
    wait_bound(client, &pod, SOON).await
}

/// Creates the pod and waits until it is refused for a reason with `text` in it.
pub(crate) async fn refused(client: &Client, pod: PodBuilder, text: &str) -> Result<Pod> {
    let pod = pod.create(client).await?;
    wait_refused(client, &pod, text, SOON).await?;
    Ok(pod)
}

/// Waits for an Event of this reason on the pod; its text.
pub(crate) async fn event(client: &Client, pod: &Pod, reason: &str) -> Result<String> {
    let namespace = pod.namespace().context("pod without a namespace")?;
    event_in(client, &namespace, "Pod", &pod.name_any(), reason, "").await
}

/// As above, where one reason has several texts: an Event whose text contains `part`.
pub(crate) async fn event_saying(
    client: &Client,
    pod: &Pod,
    reason: &str,
    part: &str,
) -> Result<String> {
    let namespace = pod.namespace().context("pod without a namespace")?;
    event_in(client, &namespace, "Pod", &pod.name_any(), reason, part).await
}

/// As above, of a node, as `kubectl describe node` finds it.
pub(crate) async fn node_event(client: &Client, node: &str, reason: &str) -> Result<String> {
    event_in(client, "default", "Node", node, reason, "").await
}

async fn event_in(
    client: &Client,
    namespace: &str,
    kind: &str,
    name: &str,
    reason: &str,
    part: &str,
) -> Result<String> {
    let events = Api::<Event>::namespaced(client.clone(), namespace);
    let mut about =
        format!("involvedObject.kind={kind},involvedObject.name={name},reason={reason}");
    if kind == "Node" {
        about += &format!(",involvedObject.uid={name}");
    }
    let about = ListParams::default().fields(&about);
    eventually(SOON, &format!("Event {reason} on {name}"), async || {
        let told = events.list(&about).await?.items.into_iter();
        let told: Vec<_> = told.filter_map(|event| event.message).collect();
        let says = told.iter().find(|message| message.contains(part));
        says.cloned()
            .with_context(|| format!("no Event says {part:?}: {told:?}"))
    })
    .await
}

/// The name of the node that the pod is bound to.
pub(crate) fn node_of(pod: &Pod) -> &str {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default()
}
