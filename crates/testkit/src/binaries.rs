//! The Kubernetes that is run: the minor that KUBERNETES names, built if need be.

use std::path::PathBuf;
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
    let mut version = Command::new(bin.join("kube-apiserver"));
    version.arg("--version");
    let version = output(version).await?;
    let minor = version.split('.').nth(1).and_then(|it| it.parse().ok());
    let minor = minor.with_context(|| format!("not a version: {version}"))?;
    Ok(Binaries { bin, minor })
}

/// The minor version of the Kubernetes 1 that the tests run, without starting it.
///
/// # Errors
/// If it cannot be built.
pub async fn kubernetes_minor() -> Result<u32> {
    Ok(binaries().await?.minor)
}

/// Flags of kube-apiserver by which policies may change pods where they do so by an administrator's
/// will alone.
pub(crate) fn beta_policies(minor: u32) -> Vec<String> {
    let flags: &[&str] = match minor {
        34 | 35 => &[
            "--feature-gates=MutatingAdmissionPolicy=true",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
        ],
        _ => &[],
    };
    flags.iter().map(ToString::to_string).collect()
}

/// The feature of Kubernetes by which it schedules groups of pods, where it is not on by itself.
pub(crate) fn pod_groups(minor: u32) -> Option<&'static str> {
    (minor == 37).then_some("GenericWorkload=true")
}

/// The feature of Kubernetes by which rules taint devices, where it is not on by itself but can be.
pub(crate) fn device_taints(minor: u32) -> Option<&'static str> {
    (minor == 36).then_some("DRADeviceTaintRules=true")
}

/// Flags of kube-apiserver about who may do what: where kubelets run the pods, as in a cluster in use.
/// TaintNodesByCondition would leave every node tainted, for want of node lifecycle; elsewhere
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
