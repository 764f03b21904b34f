//! The fence: no Binding of an earlier epoch succeeds, whatever becomes of the Lease and whichever
//! pods cannot be written.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use axum::http::StatusCode;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_testkit::{Action, ApiProxy, Case, ControlPlane, Rule, eventually};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::fault_rig::{Replica, clear, control_plane, epoch, now, turn};
use crate::support::{ACCOUNT, SOON, SYSTEM, event, node_of, rounds};

const CARD: u64 = 8192;
const LEASE: &str = "gpustow-extender";

fn leases(case: &Case, namespace: &str) -> Api<Lease> {
    Api::namespaced(case.client.clone(), namespace)
}

async fn delete_lease(case: &Case) -> Result<()> {
    let (leases, params) = (leases(case, SYSTEM), DeleteParams::default());
    match leases.delete(LEASE, &params).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

/// The number of the epoch in the Lease.
async fn transitions(case: &Case, namespace: &str) -> Result<i32> {
    let lease = leases(case, namespace).get(LEASE).await?;
    let spec = lease.spec.context("a Lease without spec")?;
    spec.lease_transitions.context("a Lease without an epoch")
}

/// A rule for patches of the status of pods whose name begins like this. `which` picks the patches by their number.
fn on_status(
    proxy: &ApiProxy,
    name: &str,
    which: impl Fn(usize) -> bool + Send + Sync + 'static,
    action: Action,
) -> Rule {
    let part = format!("/pods/{name}");
    let count = AtomicUsize::new(0);
    proxy.rule(
        move |method, uri| {
            method.as_str() == "PATCH"
                && uri.path().ends_with("/status")
                && uri.path().contains(&part)
                && which(count.fetch_add(1, Ordering::SeqCst))
        },
        action,
    )
}

async fn create(case: &Case, name: &str, mib: u64) -> Result<Pod> {
    case.pod(name).gpu_mem(mib).create(&case.client).await
}

/// The first replica's Binding of a pod is held back, something happens, the second takes over and
/// gives the card to another pod, and the Binding arrives.
async fn outlived(
    cluster: &ControlPlane,
    identities: [&str; 2],
    args: &[&str],
    meanwhile: impl AsyncFn(&Case) -> Result<()>,
) -> Result<()> {
    let case = Case::new(cluster, "outlived").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        // Both begin at the first epoch of a Lease.
        meanwhile(&case).await?;
        let late = create(&case, &format!("late{round}"), CARD).await?;
        let other = create(&case, &format!("other{round}"), CARD).await?;
        let first = Replica::start(cluster, identities[0], args).await?;
        let second = Replica::start(cluster, identities[1], args).await?;
        let takeover = async || {
            meanwhile(&case).await?;
            second.place(&other, &n).await
        };
        first.bind_late(&case, &late, &n, takeover).await?;
        assert_eq!(node_of(&now(&case, &other).await?), n);
        second.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn an_old_binding_fails_though_the_lease_was_deleted() -> Result<()> {
    let turn = turn().await?;
    outlived(turn.cluster, ["before", "after"], &[], delete_lease).await
}

#[tokio::test]
async fn an_old_binding_fails_though_the_namespace_was_deleted() -> Result<()> {
    // That of the ServiceAccounts cannot be deleted below them: one of its own, which no policy knows.
    let cluster = control_plane().await?;
    let policy = ["validatingadmissionpolicybinding", "gpustow-extender"];
    cluster.kubectl(&["delete", policy[0], policy[1]]).await?;
    let namespace = "leases";
    let allowed = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace},
        "subjects": [{"kind": "ServiceAccount", "namespace": SYSTEM, "name": ACCOUNT}],
    });
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": namespace},
        "rules": [{
            "apiGroups": ["coordination.k8s.io"], "resources": ["leases"],
            "verbs": ["get", "create", "update"],
        }],
    });
    for object in [role, allowed] {
        cluster.apply(&object.to_string()).await?;
    }
    let renew = async |case: &Case| {
        let namespaces = Api::<Namespace>::all(case.client.clone());
        if let Some(mut old) = namespaces.get_opt(namespace).await? {
            // The namespace controller would do this, but does not run here.
            let (all, params) = (ListParams::default(), DeleteParams::default());
            leases(case, namespace)
                .delete_collection(&params, &all)
                .await?;
            namespaces.delete(namespace, &params).await?;
            old = namespaces.get(&old.name_any()).await?;
            old.spec = Some(Default::default());
            let params = PostParams::default();
            namespaces
                .replace_subresource("finalize", namespace, &params, &old)
                .await?;
        }
        let mut new = Namespace::default();
        new.metadata.name = Some(namespace.to_owned());
        namespaces.create(&PostParams::default(), &new).await?;
        Ok(())
    };
    let args = [&*format!("--lease={namespace}/gpustow-extender")];
    outlived(&cluster, ["there", "again"], &args, renew).await
}

#[tokio::test]
async fn a_replica_whose_lease_was_deleted_binds_nothing_that_it_knew() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "knew").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    delete_lease(&case).await?;
    let first = Replica::start(turn.cluster, "knows", &[]).await?;
    let second = Replica::start(turn.cluster, "relieves", &[]).await?;
    let bound = create(&case, "bound", CARD / 4).await?;
    let late = create(&case, "late", CARD / 2).await?;
    let other = create(&case, "other", CARD / 2).await?;
    first.until_fits(&late, &n).await?;
    // The look at the Lease for this bind answers for the others.
    first.place(&bound, &n).await?;
    // It hears of nothing that happens from now on.
    let deaf = first.proxy.on_pod_watch(Action::Hold);
    first.proxy.cut_connections();
    deaf.seen(1, SOON).await?;
    delete_lease(&case).await?;
    second.place(&other, &n).await?;
    assert!(first.bind(&late, &n).await.is_err());
    assert_eq!(node_of(&now(&case, &late).await?), "");
    second.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_successor_of_the_same_name_under_a_new_lease_is_another() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "twins").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    delete_lease(&case).await?;
    let first = Replica::start(turn.cluster, "twin", &[]).await?;
    let probe = create(&case, "probe", 1).await?;
    first.until_fits(&probe, &n).await?;
    delete_lease(&case).await?;
    let second = Replica::start(turn.cluster, "twin", &[]).await?;
    second.place(&probe, &n).await?;
    let fresh = create(&case, "fresh", 1).await?;
    first.until_fits(&fresh, &n).await?;
    assert!(first.bind(&fresh, &n).await.is_err());
    assert_eq!(node_of(&now(&case, &fresh).await?), "");
    case.end().await
}

#[tokio::test]
async fn a_new_lease_counts_on_from_what_the_pods_bear() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "counts").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let mut last = 0;
    for life in ["one", "two", "three"] {
        let pod = create(&case, life, 1).await?;
        let replica = Replica::start(turn.cluster, life, &[]).await?;
        replica.until_fits(&pod, &n).await?;
        let epoch: i32 = epoch(&now(&case, &pod).await?)
            .context("no epoch")?
            .parse()?;
        ensure!(epoch > last, "epoch {epoch} after {last}");
        assert_eq!(transitions(&case, SYSTEM).await?, epoch);
        last = epoch;
        delete_lease(&case).await?;
    }
    case.end().await
}

#[tokio::test]
async fn the_last_number_of_an_epoch_is_no_end() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "last").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let first = Replica::start(turn.cluster, "max", &[]).await?;
    first.place(&create(&case, "a", 1).await?, &n).await?;
    let last = json!({"spec": {"leaseTransitions": i32::MAX}});
    leases(&case, SYSTEM)
        .patch(LEASE, &PatchParams::default(), &Patch::Merge(last))
        .await?;
    let second = Replica::start(turn.cluster, "maxi", &[]).await?;
    second.place(&create(&case, "b", 1).await?, &n).await?;
    let third = Replica::start(turn.cluster, "maximum", &[]).await?;
    third.place(&create(&case, "c", 1).await?, &n).await?;
    let late = create(&case, "d", 1).await?;
    assert!(second.bind(&late, &n).await.is_err());
    delete_lease(&case).await?;
    clear(&case).await?;
    case.end().await
}

#[tokio::test]
async fn a_pod_that_cannot_be_fenced_holds_up_no_other_and_over_commits_nothing() -> Result<()> {
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "unfenced").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    for round in 0..rounds()? {
        let stuck = create(&case, &format!("stuck{round}"), CARD / 2).await?;
        let other = create(&case, &format!("other{round}"), CARD / 2).await?;
        let third = create(&case, &format!("third{round}"), CARD / 2).await?;
        let first = Replica::start(turn.cluster, &format!("sends{round}"), &[]).await?;
        let second = Replica::start(turn.cluster, &format!("cannot{round}"), &[]).await?;
        let refused = Action::Answer(StatusCode::FORBIDDEN, "");
        let unwritable = on_status(&second.proxy, "stuck", |_| true, refused);
        first.until_fits(&stuck, &n).await?;
        let rule = first.on_first_bind(&stuck, Action::Hold)?;
        let takeover = async {
            rule.seen(1, SOON).await?;
            first.extender.process.kill9();
            second.place(&other, &n).await?;
            // The rest of the card may be the stuck pod's any moment.
            assert!(second.filter(&third, &n).await.is_err());
            assert!(second.filter(&stuck, &n).await.is_err());
            let told = event(&case.client, &stuck, "GpuFenceFailed").await?;
            assert!(told.contains("403"), "{told}");
            assert_eq!(unfenced(&second).await?, 1);
            anyhow::Ok(())
        };
        let (_, takeover) = tokio::join!(first.bind(&stuck, &n), takeover);
        takeover?;
        if round % 2 == 0 {
            rule.release();
            rule.answered(1, SOON).await?;
            assert_eq!(node_of(&now(&case, &stuck).await?), n);
        } else {
            // An administrator corrects the cause of the refusal.
            drop(unwritable);
            second.until_fits(&third, &n).await?;
            rule.release();
            rule.answered(1, SOON).await?;
            assert_eq!(node_of(&now(&case, &stuck).await?), "");
            second.bind(&third, &n).await?;
        }
        let released = async || {
            ensure!(unfenced(&second).await? == 0, "still counted as unfenced");
            Ok(())
        };
        eventually(SOON, "no pod is unfenced", released).await?;
        second.settled(&case).await?;
        clear(&case).await?;
    }
    case.end().await
}

async fn unfenced(replica: &Replica) -> Result<u64> {
    let metrics = replica.extender.metrics().await?;
    let value = |line: &str| Some(line.strip_prefix("gpustow_unfenced_pods ")?.to_owned());
    let value = metrics.lines().find_map(value).context("no such gauge")?;
    Ok(value.parse()?)
}

#[tokio::test]
async fn a_takeover_goes_on_where_single_patches_fail() -> Result<()> {
    const PODS: usize = 200;
    let turn = turn().await?;
    let case = Case::new(turn.cluster, "hundred").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let pods = stream::iter(0..PODS).map(|i| {
        let case = &case;
        async move { create(case, &format!("waits{i}"), 1).await }
    });
    let pods: Vec<_> = pods.buffer_unordered(16).try_collect().await?;
    for status in [429, 500, 403, 504] {
        let before = transitions(&case, SYSTEM).await.unwrap_or(0);
        let replica = Replica::start(turn.cluster, &format!("fails{status}"), &[]).await?;
        let all = Arc::new(AtomicUsize::new(0));
        let seen = all.clone();
        let hundredth = move |number| {
            seen.fetch_add(1, Ordering::SeqCst);
            number % 100 == 7
        };
        let fails = Action::Answer(StatusCode::from_u16(status)?, "");
        let rule = on_status(&replica.proxy, "waits", hundredth, fails);
        replica.until_fits(&pods[0], &n).await?;
        rule.seen(2, SOON).await?;
        assert_eq!(replica.takeovers().await?, 1);
        assert_eq!(unfenced(&replica).await?, 0);
        let after = transitions(&case, SYSTEM).await?;
        assert_eq!(after, before + 1);
        for pod in case.pods().list(&ListParams::default()).await? {
            assert_eq!(epoch(&pod), Some(&*after.to_string()));
        }
        // Only failed patches were sent again.
        let (sent, failed) = (all.load(Ordering::SeqCst), PODS.div_ceil(100) + 1);
        ensure!(sent <= PODS + failed, "{sent} patches of {PODS} pods");
        replica.extender.process.kill9();
    }
    case.end().await
}
