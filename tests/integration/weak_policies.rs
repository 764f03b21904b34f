//! The extender notices when an admission policy no longer holds a rule that the books rely on.

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, configure, eventually, pod};
use k8s_openapi::api::core::v1::Container;
use kubectl_gpustow::{Answer, Args, Screen, run};

use crate::fault_rig::{Replica, control_plane};
use crate::support::{ACCOUNT, SOON, SYSTEM, repository};

/// The answer of `kubectl gpustow check` to this account.
async fn check(cluster: &ControlPlane, account: &str) -> Result<(Answer, String)> {
    let kubeconfig = cluster.kubeconfig(SYSTEM, account, None).await?;
    let kubeconfig = kubeconfig.display().to_string();
    let args = Args::try_parse_from(["kubectl-gpustow", "--kubeconfig", &kubeconfig, "check"])?;
    let mut out = Vec::new();
    let answer = run(args, &mut out, Screen::default()).await?;
    Ok((answer, String::from_utf8(out)?))
}

#[tokio::test]
async fn a_policy_that_does_not_hold_is_told_and_stops_no_pod() -> Result<()> {
    let cluster = control_plane().await?;
    let (_, said) = check(&cluster, ACCOUNT).await?;
    ensure!(!said.contains("validatingadmissionpolicy/"), "{said}");

    let binding = "validatingadmissionpolicybinding/gpustow-annotations";
    let warns = r#"{"spec":{"validationActions":["Warn"]}}"#;
    let patch = ["patch", binding, "--type=merge", "--patch", warns];
    cluster.kubectl(&patch).await?;
    let least = "validatingadmissionpolicybinding/gpustow-placeholders";
    cluster.kubectl(&["delete", least]).await?;

    let agents = "validatingadmissionpolicy/gpustow-agent";
    let all = r#"[{"op":"replace","path":"/spec/validations/0/expression","value":"true"}]"#;
    let rewrite = ["patch", agents, "--type=json", "--patch", all];
    cluster.kubectl(&rewrite).await?;
    let requests = "validatingadmissionpolicy/gpustow-extender";
    let later = format!("{}=9999.0.0", names::MADE_FOR);
    let of_later = ["annotate", requests, "--overwrite", &later];
    cluster.kubectl(&of_later).await?;
    let more = r#"[{"op":"add","path":"/spec/validations/-","value":{"expression":"true"}}]"#;
    let add = ["patch", requests, "--type=json", "--patch", more];
    cluster.kubectl(&add).await?;

    let (answer, said) = check(&cluster, ACCOUNT).await?;
    ensure!(answer == Answer::No, "{said}");
    for (policy, problem) in [
        ("gpustow-annotations", "does not deny"),
        ("gpustow-placeholders", "has no binding"),
        (
            "gpustow-agent",
            "differs from this build: spec.validations[0].expression",
        ),
        (
            "gpustow-extender",
            "is that of version 9999.0.0, later than this build: spec.validations",
        ),
    ] {
        let object = format!("validatingadmissionpolicy/{policy}");
        let line = said.lines().find(|line| line.contains(&object));
        ensure!(line.is_some_and(|line| line.contains(problem)), "{said}");
    }

    let replica = Replica::start(&cluster, "a", &[]).await?;
    replica.extender.wait_ready().await?;
    eventually(SOON, "the extender tells of weak policies", async || {
        let metrics = replica.extender.metrics().await?;
        for (policy, holds) in [
            ("gpustow-annotations", 0),
            ("gpustow-placeholders", 0),
            ("gpustow-agent", 0),
            ("gpustow-extender", 1),
        ] {
            let series = format!("gpustow_policy_holds{{policy=\"{policy}\"}} {holds}");
            ensure!(metrics.contains(&series), "no {series} in:\n{metrics}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn policies_that_not_every_extender_needs_are_looked_at_where_one_does() -> Result<()> {
    let cluster = control_plane().await?;
    let account = ["create", "serviceaccount", "reader", "-n", SYSTEM];
    cluster.kubectl(&account).await?;
    let subject = format!("--serviceaccount={SYSTEM}:reader");
    let viewer = [
        "create",
        "clusterrolebinding",
        "reader",
        "--clusterrole=gpustow-viewer",
        &subject,
    ];
    cluster.kubectl(&viewer).await?;
    for (name, flag, file) in [
        (names::WEBHOOK, "--webhook-listen=0.0.0.0:1", "certificate"),
        (names::QUEUE, "--log=info", "queue"),
    ] {
        let policy = format!("validatingadmissionpolicy/{name}");
        let binding = format!("validatingadmissionpolicybinding/{name}");
        for installed in [&policy, &binding] {
            let delete = ["delete", installed, "--ignore-not-found"];
            cluster.kubectl(&delete).await?;
        }
        let told = async || {
            let (answer, said) = check(&cluster, "reader").await?;
            ensure!(!said.contains("policies were not checked"), "{said}");
            let line = said.lines().find(|line| line.contains(&policy));
            anyhow::Ok(line.map(|line| (answer == Answer::No, line.to_owned())))
        };
        ensure!(told().await?.is_none(), "no extender needs it");
        if name == names::QUEUE {
            configure(&cluster.admin()?, &["queue: {mode: Auto}".to_owned()]).await?;
        }

        let extender = |container: &mut Container| {
            container.name = "extender".to_owned();
            container.args = Some(vec![flag.to_owned()]);
        };
        let extender = pod(SYSTEM, name).with(|spec| spec.containers.iter_mut().for_each(extender));
        extender.create(&cluster.admin()?).await?;
        let (wrong, line) = told().await?.context("not told")?;
        ensure!(wrong && line.contains("is missing"), "{line}");

        let file = repository(&format!("manifests/{file}/policy.yaml"));
        let file = file.display().to_string();
        cluster
            .kubectl(&["apply", "--server-side", "-f", &file])
            .await?;
        ensure!(told().await?.is_none(), "{:?}", told().await?);

        cluster.kubectl(&["delete", &binding]).await?;
        let (wrong, line) = told().await?.context("not told")?;
        ensure!(wrong && line.contains("has no binding"), "{line}");
    }
    Ok(())
}
