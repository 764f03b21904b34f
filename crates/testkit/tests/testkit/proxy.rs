use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::TryStreamExt as _;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Action, ApiProxy, Case, client, eventually, shared, wait_bound};
use hyper::StatusCode;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, ResourceExt as _};

const SOON: Duration = Duration::from_secs(20);

/// A case, a proxy, and a ServiceAccount's client behind the proxy that may do anything.
async fn rig(name: &str) -> Result<(Case, ApiProxy, Client)> {
    let cluster = shared().await?;
    let case = Case::new(cluster, name).await?;
    let proxy = ApiProxy::start(cluster).await?;
    let ns = case.namespace.as_str();
    cluster
        .kubectl(&["-n", ns, "create", "serviceaccount", "user"])
        .await?;
    let account = format!("--serviceaccount={ns}:user");
    let role = [
        "create",
        "clusterrolebinding",
        ns,
        "--clusterrole=cluster-admin",
        &account,
    ];
    cluster.kubectl(&role).await?;
    let behind = client(&cluster.kubeconfig(ns, "user", Some(proxy.url())).await?).await?;
    let pods = Api::<Pod>::namespaced(behind.clone(), ns);
    eventually(SOON, "the role works", async || {
        Ok(pods.list(&ListParams::default()).await?)
    })
    .await?;
    Ok((case, proxy, behind))
}

async fn bind(client: Client, pod: Pod, node: String) -> Result<()> {
    let mut binding = Binding {
        target: ObjectReference::default(),
        ..Binding::default()
    };
    binding.target.name = Some(node);
    binding.metadata.name = pod.metadata.name.clone();
    let api = Api::<Pod>::namespaced(client, &pod.namespace().context("no namespace")?);
    let params = PostParams::default();
    let _: serde_json::Value = api
        .create_subresource("binding", &pod.name_any(), &params, &binding)
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_held_write_outlives_its_sender() -> Result<()> {
    let (case, proxy, behind) = rig("hold").await?;
    case.node("n", &[8192]).create(&case.client).await?;
    let pod = case.pod("p").create(&case.client).await?;
    let rule = proxy.on_bind(&case.namespace, "p", Action::Hold);
    let sender = tokio::spawn(bind(behind, pod.clone(), case.node_name("n")));
    rule.seen(1, SOON).await?;
    sender.abort();
    assert!(sender.await.is_err_and(|error| error.is_cancelled()));
    let held = case.pods().get("p").await?;
    assert_eq!(held.spec.and_then(|spec| spec.node_name), None);

    rule.release();
    rule.answered(1, SOON).await?;
    wait_bound(&case.client, &pod, SOON).await?;
    case.end().await
}

#[tokio::test]
async fn a_reply_is_lost_and_the_write_is_not() -> Result<()> {
    let (case, proxy, behind) = rig("lost").await?;
    case.node("n", &[8192]).create(&case.client).await?;
    let pod = case.pod("p").create(&case.client).await?;
    let rule = proxy.on_bind(&case.namespace, "p", Action::DropReply);
    match bind(behind.clone(), pod.clone(), case.node_name("n")).await {
        Err(error)
            if error
                .downcast_ref::<kube::Error>()
                .is_some_and(is_transport) => {}
        other => bail!("expected a broken connection, got {other:?}"),
    }
    rule.answered(1, SOON).await?;
    wait_bound(&case.client, &pod, SOON).await?;
    drop(rule);
    // Without the rule an answer arrives, and it reports that the pod is bound.
    match bind(behind, pod, case.node_name("n")).await {
        Err(error) => assert!(error.to_string().contains("already assigned"), "{error:#}"),
        Ok(()) => bail!("bound twice"),
    }
    case.end().await
}

fn is_transport(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Service(_) | kube::Error::HyperError(_))
}

#[tokio::test]
async fn requests_fail_as_told() -> Result<()> {
    let (case, proxy, behind) = rig("fail").await?;
    let pods = Api::<Pod>::namespaced(behind, &case.namespace);
    let namespace = case.namespace.clone();
    let busy = proxy.rule(
        move |_, uri| uri.path().contains(&namespace),
        Action::Answer(StatusCode::SERVICE_UNAVAILABLE, ""),
    );
    match pods.list(&ListParams::default()).await {
        Err(kube::Error::Api(status)) => assert_eq!(status.code, 503),
        other => bail!("expected 503, got {other:?}"),
    }
    drop(busy);
    let cut = proxy.rule(|_, _| true, Action::Cut);
    assert!(
        pods.list(&ListParams::default())
            .await
            .is_err_and(|error| is_transport(&error))
    );
    drop(cut);
    pods.list(&ListParams::default()).await?;
    case.end().await
}

#[tokio::test]
async fn a_watch_is_late_and_complete() -> Result<()> {
    const DELAY: Duration = Duration::from_millis(500);
    let (case, proxy, behind) = rig("late").await?;
    let rule = proxy.on_pod_watch(Action::DelayReply(DELAY));
    let start = Api::<Pod>::all(behind.clone())
        .list(&ListParams::default())
        .await?;
    let version = start
        .metadata
        .resource_version
        .context("a list without a version")?;
    let params = WatchParams::default();
    let watch = Api::<Pod>::all(behind).watch(&params, &version).await?;
    let mut watch = std::pin::pin!(watch.try_filter(|event| {
        let ours = matches!(event, WatchEvent::Added(pod) | WatchEvent::Deleted(pod)
            if pod.namespace().as_deref() == Some(case.namespace.as_str()));
        std::future::ready(ours)
    }));
    rule.seen(1, SOON).await?;

    let begun = tokio::time::Instant::now();
    let pod = case.pod("p").create(&case.client).await?;
    delete(&case.client, &pod, 0).await?;
    let events = async { anyhow::Ok((watch.try_next().await?, watch.try_next().await?)) };
    let (first, second) = tokio::time::timeout(SOON, events).await??;
    ensure!(matches!(first, Some(WatchEvent::Added(_))), "{first:?}");
    ensure!(matches!(second, Some(WatchEvent::Deleted(_))), "{second:?}");
    ensure!(begun.elapsed() >= DELAY, "the watch was not delayed");

    proxy.cut_connections();
    let end = tokio::time::timeout(SOON, watch.try_next()).await?;
    ensure!(
        !matches!(end, Ok(Some(WatchEvent::Added(_)))),
        "the watch survived the cut"
    );
    case.end().await
}
