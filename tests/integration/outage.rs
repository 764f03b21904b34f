//! The webhook while a replica, all replicas, or their certificate are of no use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow_api::names;
use gpustow_testkit::{ControlPlane, Options, Webhook, certificate, configure, eventually};
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{Api, PostParams};
use kubectl_gpustow::{Args, Screen, run};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::install::install;
use crate::support::{SOON, gpustow};
use crate::webhook::created;
use crate::webhook_certificate::Rig;

fn asks() -> Value {
    let limits = json!({ "limits": { names::GPU_MEM: "1" } });
    let container = json!({ "name": "c", "image": "cuda", "resources": limits });
    json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } })
}

#[tokio::test]
async fn no_pod_is_refused_while_a_replica_is_down_or_replicas_are_replaced() -> Result<()> {
    let rig = Rig::start().await?;
    let client = rig.client.clone();
    let create = async || {
        let made = created(&client, &asks()).await?;
        let made = made.map_err(anyhow::Error::msg)?;
        ensure!(made["spec"]["schedulerName"] == names::SCHEDULER, "{made}");
        anyhow::Ok(())
    };
    eventually(SOON, "the webhook answers", create).await?;
    let ended = AtomicBool::new(false);
    let load = async {
        let mut count = 0;
        while !ended.load(Ordering::SeqCst) {
            create().await?;
            count += 1;
        }
        anyhow::Ok(count)
    };
    let rollout = async {
        for replica in &rig.replicas {
            replica.process.term()?;
            ensure!(replica.process.wait_exit(SOON).await?.success());
            replica.process.restart()?;
            replica.wait_ready().await?;
        }
        ended.store(true, Ordering::SeqCst);
        anyhow::Ok(())
    };
    let (created, rolled) = tokio::join!(load, rollout);
    rolled?;
    let created = created?;
    println!("{created} pods were created during a rolling update");
    ensure!(created > 20, "{created}");

    rig.replicas[0].process.kill9();
    // A connection to a dead replica is not tried twice; the kubelet has noticed by now.
    rig.balancer.cut().await?;
    for _ in 0..20 {
        rig.create().await?;
    }
    Ok(())
}

/// A certificate that was good for a day, long ago.
fn expired(folder: &std::path::Path) -> Result<String> {
    let key = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()])?;
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2020, 1, 2);
    let pem = params.self_signed(&key)?.pem();
    std::fs::write(folder.join("tls.crt"), &pem)?;
    std::fs::write(folder.join("tls.key"), key.serialize_pem())?;
    Ok(pem)
}

#[tokio::test]
async fn certificate_that_has_expired_is_named_and_another_one_is_taken_up() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let webhook = Webhook::start(&cluster, gpustow(), &[]).await?;
    let client = cluster.admin()?;
    let refused = async |text: &str| {
        let made = created(&client, &asks()).await?;
        let said = made.err().context("a pod that asks is created")?;
        ensure!(said.contains(text), "{said}");
        Ok(())
    };
    let trusted = expired(&webhook.folder)?;
    webhook.trusted(&cluster, &trusted).await?;
    eventually(SOON, "the certificate has expired", async || {
        refused("certificate has expired").await
    })
    .await?;
    // Who requests nothing does not notice.
    let mut plain = asks();
    plain["spec"]["containers"][0]["resources"] = json!({});
    created(&client, &plain)
        .await?
        .map_err(anyhow::Error::msg)?;
    let kubeconfig = cluster.admin_kubeconfig().display().to_string();
    let args = ["kubectl-gpustow", "--kubeconfig", &kubeconfig, "check"];
    let mut out = Vec::new();
    run(Args::try_parse_from(args)?, &mut out, Screen::default()).await?;
    let said = String::from_utf8(out)?;
    let line = said
        .lines()
        .find(|it| it.contains("mutatingwebhookconfiguration"));
    ensure!(
        line.is_some_and(|it| it.contains("certificate has expired") && it.contains("caBundle")),
        "{said}"
    );

    let trusted = certificate(&webhook.folder, "127.0.0.1")?;
    webhook.trusted(&cluster, &trusted).await?;
    eventually(SOON, "pods are created again", async || {
        created(&client, &asks()).await?.map_err(anyhow::Error::msg)
    })
    .await?;
    Ok(())
}

/// As long as in the documentation.
const OUTAGE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn deployment_that_is_made_in_an_outage_is_complete_after_it() -> Result<()> {
    let options = Options {
        controllers: true,
        ..Options::default()
    };
    let cluster = ControlPlane::start(options).await?;
    install(&cluster, "manifests/base").await?;
    let webhook = Webhook::start(&cluster, gpustow(), &[]).await?;
    let client = cluster.admin()?;
    configure(&client, &[]).await?;
    eventually(SOON, "the webhook answers", async || {
        created(&client, &asks()).await?.map_err(anyhow::Error::msg)
    })
    .await?;
    webhook.process.kill9();
    let labels = json!({ "app": "fifty" });
    let object = json!({ "metadata": { "name": "fifty" }, "spec": { "replicas": 50, "selector": { "matchLabels": labels },
        "template": { "metadata": { "labels": labels }, "spec": asks()["spec"] } } });
    let deployments = Api::<Deployment>::namespaced(client.clone(), "default");
    let object = serde_json::from_value(object)?;
    deployments.create(&PostParams::default(), &object).await?;
    sleep(OUTAGE).await;
    let replicas = async || {
        let status = deployments.get("fifty").await?.status;
        anyhow::Ok(status.and_then(|it| it.replicas).unwrap_or(0))
    };
    ensure!(replicas().await? == 0, "pods are created in an outage");
    webhook.process.restart()?;
    let back = Instant::now();
    eventually(4 * OUTAGE, "all pods are created", async || {
        let count = replicas().await?;
        ensure!(count == 50, "{count}");
        Ok(())
    })
    .await?;
    println!(
        "50 pods were created {} s after an outage of 60 s",
        back.elapsed().as_secs()
    );
    Ok(())
}
