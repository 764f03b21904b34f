//! A control plane with gpustow and a neighbour.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{
    Case, ControlPlane, Extender, ExtenderOptions, Options, Scheduler, Webhook, eventually,
    wait_bound,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;

/// MiB of each card, and of each pod's request.
pub(crate) const CARD: u64 = 8192;
/// Bound on waits for the neighbours' decisions: they batch, and back off.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A program that was built, and where its source is.
pub(crate) struct Neighbour {
    pub(crate) program: PathBuf,
    pub(crate) source: PathBuf,
}

impl Neighbour {
    pub(crate) async fn built(name: &str) -> Result<Neighbour> {
        let script = repository("tests/neighbours/build.sh");
        let output = tokio::process::Command::new(&script)
            .arg(name)
            .stderr(Stdio::inherit())
            .output()
            .await?;
        ensure!(output.status.success(), "{} {name}", script.display());
        let said = String::from_utf8(output.stdout)?;
        let (program, source) = said.trim_end().split_once('\n').context(said.clone())?;
        Ok(Neighbour {
            program: program.into(),
            source: source.into(),
        })
    }
}

/// Everything but the neighbour.
pub(crate) struct Site {
    pub(crate) cluster: ControlPlane,
    pub(crate) case: Case,
    pub(crate) extender: Extender,
    /// It ends with the site.
    _scheduler: Scheduler,
}

impl Site {
    /// One node with so many GPUs.
    pub(crate) async fn start(overlay: &str, cards: usize, config: &[&str]) -> Result<Site> {
        let cluster = ControlPlane::start(Options {
            controllers: true,
            ..Options::default()
        })
        .await?;
        for kustomization in [overlay, "manifests/provision"] {
            let path = repository(kustomization).display().to_string();
            cluster.kubectl(&["apply", "-k", &path]).await?;
        }
        let program = Path::new(env!("CARGO_BIN_EXE_gpustow"));
        Webhook::keep(&cluster, program).await?;
        let kubeconfig = cluster
            .kubeconfig("gpustow-system", "gpustow-scheduler", None)
            .await?;
        let options = ExtenderOptions {
            config: Some(config.iter().map(ToString::to_string).collect()),
            ..ExtenderOptions::default()
        };
        let extender = Extender::start(&cluster, program, &kubeconfig, options).await?;
        let _scheduler = Scheduler::calling(&cluster, &repository(""), &extender).await?;
        let case = Case::new(&cluster, "neighbour").await?;
        case.node("n", &vec![CARD; cards])
            .create(&case.client)
            .await?;
        Ok(Site {
            cluster,
            case,
            extender,
            _scheduler,
        })
    }

    /// As above, and every pod that requests GPU memory is queued. The returned pod has a GPU already.
    pub(crate) async fn with_queue(cards: usize, config: &[&str]) -> Result<(Site, Pod)> {
        let config = ["queue: {mode: Always}"].iter().chain(config);
        let config: Vec<_> = config.copied().collect();
        let site = Self::start("manifests/overlays/queue", cards, &config).await?;
        let case = &site.case;
        let occupant = case.pod("occupant").gpu_mem(CARD);
        let occupant = occupant.create(&case.client).await?;
        let occupant = wait_bound(&case.client, &occupant, SOON).await?;
        eventually(SOON, "a pod that asks is queued", async || {
            let dry = PostParams {
                dry_run: true,
                ..PostParams::default()
            };
            let probe = case.pod("probe").gpu_mem(CARD).build();
            let probe = case.pods().create(&dry, &probe).await?;
            ensure!(gates(&probe) == [names::GATE], "{:?}", gates(&probe));
            Ok(())
        })
        .await?;
        Ok((site, occupant))
    }
}

/// The names of the gates on the pod.
pub(crate) fn gates(pod: &Pod) -> Vec<&str> {
    let spec = pod.spec.as_ref();
    let gates = spec.and_then(|spec| spec.scheduling_gates.as_ref());
    gates
        .into_iter()
        .flatten()
        .map(|gate| gate.name.as_str())
        .collect()
}

/// Whether the pod has a node.
pub(crate) fn is_bound(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_some_and(|spec| spec.node_name.is_some())
}

pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
