//! Faults between our filter and the bind: another extender refuses our node, or takes a minute.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use axum::body::Bytes;
use axum::routing::post;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, ControlPlane, Options, eventually, wait_bound};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Volume};
use kube::api::Api;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{Rig, SOON, Setup, node_of, refused, rig};

/// An extender that refuses one node, its URL, and how often it has done so.
async fn refuser(node: String) -> Result<(String, Arc<AtomicUsize>)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let refusals = Arc::new(AtomicUsize::new(0));
    let count = refusals.clone();
    let filter = async move |body: Bytes| {
        let args: Value = serde_json::from_slice(&body).unwrap_or_default();
        let names = args["NodeNames"].as_array().cloned().unwrap_or_default();
        let (failed, passed): (Vec<_>, Vec<_>) = names.into_iter().partition(|n| *n == *node);
        count.fetch_add(failed.len(), Ordering::Relaxed);
        let failed: BTreeMap<_, _> = failed
            .iter()
            .filter_map(|name| Some((name.as_str()?, "refused by another")))
            .collect();
        axum::Json(json!({"NodeNames": passed, "FailedNodes": failed}))
    };
    let router = axum::Router::new().route("/filter", post(filter));
    tokio::spawn(axum::serve(listener, router).into_future());
    Ok((url, refusals))
}

#[tokio::test]
async fn a_pod_ends_elsewhere_when_a_later_extender_refuses_our_node() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let case = Case::new(&cluster, "second").await?;
    let (url, refusals) = refuser(case.node_name("tight")).await?;
    let after = json!({
        "urlPrefix": url,
        "filterVerb": "filter",
        "nodeCacheCapable": true,
    });
    let setup = Setup {
        after: Some(&after.to_string()),
        ..Setup::default()
    };
    let rig = Rig::start(&cluster, setup).await?;
    case.node("tight", &[8000]).create(&case.client).await?;
    case.node("wide", &[16000]).create(&case.client).await?;
    case.node("wider", &[24000]).create(&case.client).await?;

    for name in ["a", "b"] {
        let pod = case.pod(name).gpu_mem(8000).create(&case.client).await?;
        let created = Instant::now();
        let pod = wait_bound(&case.client, &pod, Duration::from_secs(60)).await?;
        println!(
            "{name} is bound {:?} after its first node was refused",
            created.elapsed()
        );
        assert_ne!(node_of(&pod), case.node_name("tight"));
    }
    assert!(
        refusals.load(Ordering::Relaxed) > 0,
        "the tightest node was never offered"
    );
    rig.end(case).await
}

/// Longer than a reservation lives that waits for nothing but its bind.
const SLOW: Duration = Duration::from_secs(60);

/// Waits until kube-scheduler has asked for a volume on its node; the node.
async fn selected_node(client: &Client, namespace: &str, claim: &str) -> Result<String> {
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
    eventually(SOON, "kube-scheduler asks for a volume", async || {
        let claim = claims.get(claim).await?;
        let node = claim
            .annotations()
            .get("volume.kubernetes.io/selected-node")
            .cloned();
        node.context("no node selected")
    })
    .await
}

#[tokio::test]
async fn a_reservation_outlives_a_volume_that_takes_a_minute() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "volume").await?;
    let class = &case.namespace;
    case.node("n", &[8000])
        .advertise(80_000)
        .create(&case.client)
        .await?;
    let object = |kind: &str, spec: Value| {
        let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": class}});
        object["spec"] = spec;
        object
    };
    let late = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": class},
        "provisioner": "testkit/late",
        "volumeBindingMode": "WaitForFirstConsumer",
    });
    let modes = json!(["ReadWriteOnce"]);
    let size = json!({"storage": "1Gi"});
    let mut claim = object(
        "PersistentVolumeClaim",
        json!({"storageClassName": class, "accessModes": modes, "resources": {"requests": size}}),
    );
    claim["metadata"]["namespace"] = json!(class);
    let both = json!({"apiVersion": "v1", "kind": "List", "items": [late, claim]});
    rig.cluster.apply(&both.to_string()).await?;
    let volume: Volume = serde_json::from_value(
        json!({"name": "data", "persistentVolumeClaim": {"claimName": class}}),
    )?;

    let slow = case
        .pod("slow")
        .gpu_mem(8000)
        .with(|spec| spec.volumes = Some(vec![volume]));
    let slow = slow.create(&case.client).await?;
    assert_eq!(
        selected_node(&case.client, class, class).await?,
        case.node_name("n")
    );
    let reason = "not enough free memory on any one GPU";
    let rival = refused(&case.client, case.pod("rival").gpu_mem(8000), reason).await?;
    // The provisioner takes its time. A pod that is asked for meanwhile, or only then, would take the
    // card if it could.
    let early = wait_bound(&case.client, &rival, SLOW).await;
    assert!(early.is_err(), "the reservation did not last");
    let late = refused(&case.client, case.pod("late").gpu_mem(8000), reason).await?;
    delete(&case.client, &late, 0).await?;
    let volume = object(
        "PersistentVolume",
        json!({
            "storageClassName": class,
            "accessModes": modes,
            "capacity": size,
            "claimRef": {"namespace": class, "name": class},
            "hostPath": {"path": "/nowhere"},
        }),
    );
    rig.cluster.apply(&volume.to_string()).await?;

    let slow = wait_bound(&case.client, &slow, SOON).await?;
    case.check().await?;
    delete(&case.client, &slow, 0).await?;
    wait_bound(&case.client, &rival, SOON).await?;
    rig.end(case).await
}
