//! The Kubernetes that is run: the minor that KUBERNETES names, built if need be.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use tokio::process::Command;

/// Built programs.
pub(crate) struct Binaries {
    /// Their folder.
    pub(crate) bin: PathBuf,
    /// Of Kubernetes 1.
    pub(crate) minor: u32,
}

/// Builds them first if that was not done yet.
pub(crate) async fn binaries() -> Result<Binaries> {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/control-plane/build.sh"
    );
    let bin = PathBuf::from(output(Command::new(script)).await?);
    let minor = minor_of(&bin, "kube-apiserver").await?;
    Ok(Binaries { bin, minor })
}

/// The minor version of this program of Kubernetes 1.
pub(crate) async fn minor_of(bin: &Path, program: &str) -> Result<u32> {
    let mut version = Command::new(bin.join(program));
    version.arg("--version");
    let version = output(version).await?;
    let minor = version.split('.').nth(1).and_then(|it| it.parse().ok());
    minor.with_context(|| format!("not a version: {version}"))
}

/// The minor version of the Kubernetes 1 that the tests run, without starting it.
///
/// # Errors
/// If it cannot be built.
pub async fn kubernetes_minor() -> Result<u32> {
    Ok(binaries().await?.minor)
}

/// A feature that a minor of Kubernetes has and does not turn on by itself.
pub(crate) struct Feature {
    gate: &'static str,
    /// The API that it needs.
    api: &'static str,
    /// kube-scheduler has it too.
    of_scheduler: bool,
}

impl Feature {
    /// Policies that change pods on 1.34 and 1.35, rules that taint devices on 1.36, groups of pods on 1.37.
    fn of(minor: u32) -> Option<Self> {
        let (gate, api, of_scheduler) = match minor {
            34 | 35 => (
                "MutatingAdmissionPolicy",
                "admissionregistration.k8s.io/v1beta1",
                false,
            ),
            36 => ("DRADeviceTaintRules", "resource.k8s.io/v1beta2", true),
            37 => ("GenericWorkload", "scheduling.k8s.io/v1beta1", true),
            _ => return None,
        };
        Some(Self {
            gate,
            api,
            of_scheduler,
        })
    }

    /// Flags of kube-apiserver.
    pub(crate) fn of_api_server(minor: u32) -> impl Iterator<Item = String> {
        let all = Self::of(minor).into_iter();
        all.flat_map(|Self { gate, api, .. }| {
            [
                format!("--feature-gates={gate}=true"),
                format!("--runtime-config={api}=true"),
            ]
        })
    }

    /// Flags of kube-scheduler.
    pub(crate) fn of_scheduler(minor: u32) -> impl Iterator<Item = String> {
        let all = Self::of(minor).into_iter().filter(|it| it.of_scheduler);
        all.map(|it| format!("--feature-gates={}=true", it.gate))
    }
}

/// Authorization and admission flags of kube-apiserver. Where kubelets run the pods, the flags are as in a cluster
/// in use. TaintNodesByCondition would leave every node tainted, because node lifecycle does not run. Elsewhere
/// ServiceAccount would hold pods back until the controller made the account.
pub(crate) fn admission(kubelets: bool) -> impl Iterator<Item = String> {
    let flags: &[&str] = match kubelets {
        true => &[
            "--disable-admission-plugins=TaintNodesByCondition",
            "--enable-admission-plugins=NodeRestriction",
            "--authorization-mode=Node,RBAC",
            "--kubelet-preferred-address-types=InternalIP",
            // Nothing routes addresses of Services here: webhooks are called at their pods.
            "--enable-aggregator-routing=true",
        ],
        false => &[
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--authorization-mode=RBAC",
        ],
    };
    flags.iter().map(ToString::to_string)
}

async fn output(mut command: Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).kill_on_drop(true);
    let output = output
        .output()
        .await
        .with_context(|| format!("run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: its complaint is above"
    );
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}
