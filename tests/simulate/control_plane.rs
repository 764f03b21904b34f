//! Compares the simulated kube-scheduler with the real one. Both play the same scripts, and an extender that records
//! its requests must get equal requests from both.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use futures::future::LocalBoxFuture;
use gpustow_testkit::{ControlPlane, Options, Scheduler as Real, SchedulerConfig};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::json;
use tokio::net::TcpListener;

use crate::net::{Link, NAMESPACE};
use crate::scheduler::{Beside, Scheduler};
use crate::server::Server;
use crate::stage::{Cluster, RANKS, Stage};
use crate::story::Story;

type Script = for<'s> fn(&'s Stage) -> LocalBoxFuture<'s, Result<()>>;

macro_rules! scripts {
    ($(#[$doc:meta])* $all:ident: $($name:ident($stage:ident) $body:block)*) => {
        $(#[$doc])*
        const $all: &[(&str, Script)] = &[$((stringify!($name), |$stage| Box::pin(async move {
            $body
            Ok(())
        }))),*];
    };
}

scripts! {
    /// Each with its name.
    SCRIPTS:
    of_two_nodes_the_better_one_is_taken(stage) {
        stage.node("a", 8000).await?;
        stage.node("b", 8000).await?;
        stage.order(|it| it.likes = "b".to_owned());
        stage.pod("p", 1000, "").await?;
        stage.bound("p", "b").await?;
    }
    a_node_whose_sum_is_too_small_is_not_asked_about(stage) {
        stage.node("a", 500).await?;
        stage.node("b", 8000).await?;
        stage.pod("p", 1000, "").await?;
        stage.bound("p", "b").await?;
    }
    a_pod_that_no_sum_holds_is_asked_about_when_a_node_comes(stage) {
        stage.node("a", 500).await?;
        stage.pod("p", 1000, "").await?;
        stage.sleeps("p").await?;
        stage.node("b", 8000).await?;
        stage.bound("p", "b").await?;
    }
    a_refused_pod_sleeps_until_another_leaves(stage) {
        stage.node("a", 8000).await?;
        stage.pod("q", 1000, "").await?;
        stage.bound("q", "a").await?;
        stage.refuse("p", "a");
        stage.pod("p", 1000, "").await?;
        stage.asked_again("p", 0).await?;
        stage.sleeps("p").await?;
        stage.allow();
        stage.sleeps("p").await?;
        stage.end("q").await?;
        stage.bound("p", "a").await?;
    }
    a_refused_pod_is_woken_by_a_change_of_its_own(stage) {
        stage.node("a", 8000).await?;
        stage.refuse("p", "a");
        stage.pod("p", 1000, "").await?;
        stage.sleeps("p").await?;
        let before = stage.asked("p");
        stage.allow();
        stage.patch("p", json!({ "metadata": { "labels": { "note": "1" } } })).await?;
        stage.asked_again("p", before).await?;
        stage.bound("p", "a").await?;
    }
    a_refused_pod_is_woken_when_another_is_bound(stage) {
        stage.node("a", 8000).await?;
        stage.refuse("p", "a");
        stage.pod("p", 1000, "").await?;
        stage.sleeps("p").await?;
        let before = stage.asked("p");
        stage.pod("q", 1000, "").await?;
        stage.bound("q", "a").await?;
        stage.asked_again("p", before).await?;
    }
    a_filter_that_fails_is_asked_again(stage) {
        stage.node("a", 8000).await?;
        stage.fail("filter", "p", 2);
        stage.pod("p", 1000, "").await?;
        stage.bound("p", "a").await?;
    }
    a_bind_that_fails_is_tried_again(stage) {
        stage.node("a", 8000).await?;
        stage.fail("bind", "p", 1);
        stage.pod("p", 1000, "").await?;
        stage.bound("p", "a").await?;
    }
    what_is_being_bound_holds_its_room_until_that_fails(stage) {
        stage.node("a", 4000).await?;
        stage.order(|it| it.binds_after = Duration::from_secs(3));
        stage.fail("bind", "p", 1);
        stage.pod("p", 3000, "").await?;
        stage.asked_again("p", 0).await?;
        stage.pod("q", 1000, "").await?;
        stage.bound("q", "a").await?;
        stage.bound("p", "a").await?;
    }
    a_gated_pod_is_asked_about_when_its_gate_is_gone(stage) {
        stage.node("a", 8000).await?;
        stage.pod_with("p", 1000, "", json!({ "schedulingGates": [{ "name": "example.com/wait" }] })).await?;
        stage.sleeps("p").await?;
        ensure!(stage.asked("p") == 0, "it was asked about");
        stage.patch("p", json!({ "spec": { "schedulingGates": [] } })).await?;
        stage.bound("p", "a").await?;
    }
    the_victim_that_matters_least_goes(stage) {
        stage.node("a", 4000).await?;
        stage.pod("x", 3000, "middle").await?;
        stage.bound("x", "a").await?;
        stage.node("b", 4000).await?;
        stage.pod("y", 3000, "low").await?;
        stage.bound("y", "b").await?;
        stage.pod("p", 3000, "high").await?;
        stage.ending("y").await?;
        // Its room is promised: by their sums no node has any for one that comes after it.
        stage.pod("q", 1500, "").await?;
        stage.sleeps("q").await?;
        stage.end("y").await?;
        stage.bound("p", "b").await?;
    }
    a_node_that_the_extender_spares_is_left_alone(stage) {
        stage.node("a", 4000).await?;
        stage.pod("x", 3000, "middle").await?;
        stage.bound("x", "a").await?;
        stage.node("b", 4000).await?;
        stage.pod("y", 3000, "low").await?;
        stage.bound("y", "b").await?;
        stage.order(|it| it.spares = "b".to_owned());
        stage.pod("p", 3000, "high").await?;
        stage.ending("x").await?;
        stage.sleeps("p").await?;
        stage.end("x").await?;
        stage.bound("p", "a").await?;
    }
    no_more_victims_go_than_the_sum_needs(stage) {
        stage.node("a", 4000).await?;
        for (name, mib, rank) in [("x", 1000, ""), ("y", 2000, "middle"), ("z", 1000, "low")] {
            stage.pod(name, mib, rank).await?;
            stage.bound(name, "a").await?;
        }
        stage.pod("p", 2000, "high").await?;
        for name in ["x", "z"] {
            stage.ending(name).await?;
        }
        stage.sleeps("p").await?;
        stage.end("x").await?;
        stage.sleeps("p").await?;
        stage.end("z").await?;
        stage.bound("p", "a").await?;
    }
    a_node_that_the_extender_refused_is_no_candidate(stage) {
        stage.node("a", 8000).await?;
        stage.pod("x", 1000, "").await?;
        stage.bound("x", "a").await?;
        stage.node("b", 2000).await?;
        stage.order(|it| it.likes = "b".to_owned());
        stage.pod("y", 1500, "").await?;
        stage.bound("y", "b").await?;
        stage.refuse("p", "a");
        stage.pod("p", 1000, "high").await?;
        stage.ending("y").await?;
        stage.sleeps("p").await?;
        stage.end("y").await?;
        stage.bound("p", "b").await?;
    }
    no_pod_of_equal_priority_goes(stage) {
        stage.node("a", 4000).await?;
        stage.pod("x", 3000, "high").await?;
        stage.bound("x", "a").await?;
        stage.pod("p", 3000, "high").await?;
        stage.sleeps("p").await?;
        stage.end("x").await?;
        stage.bound("p", "a").await?;
    }
    who_never_preempts_waits(stage) {
        stage.node("a", 4000).await?;
        stage.pod("x", 3000, "").await?;
        stage.bound("x", "a").await?;
        stage.pod("p", 3000, "never").await?;
        stage.sleeps("p").await?;
        stage.end("x").await?;
        stage.bound("p", "a").await?;
    }
}

scripts! {
    /// Gangs, each with its name.
    GANGS:
    a_gang_that_fits_is_bound(stage) {
        stage.node("a", 8000).await?;
        stage.node("b", 8000).await?;
        stage.order(|it| it.likes = "b".to_owned());
        stage.gang("fits", 2).await?;
        for name in ["p", "q"] {
            stage.member("fits", name, 3000, "").await?;
        }
        for name in ["p", "q"] {
            stage.bound(name, "b").await?;
        }
    }
    a_gang_waits_for_enough_pods(stage) {
        stage.node("a", 8000).await?;
        stage.gang("waits", 2).await?;
        stage.member("waits", "p", 1000, "").await?;
        stage.sleeps("p").await?;
        ensure!(stage.asked("p") == 0, "it was asked about");
        stage.member("waits", "q", 1000, "").await?;
        for name in ["p", "q"] {
            stage.bound(name, "a").await?;
        }
    }
    pods_wait_for_their_group(stage) {
        stage.node("a", 8000).await?;
        stage.member("late", "p", 1000, "").await?;
        stage.sleeps("p").await?;
        ensure!(stage.asked("p") == 0, "it was asked about");
        stage.gang("late", 1).await?;
        stage.bound("p", "a").await?;
    }
    a_gang_is_given_up_at_the_pod_without_which_it_is_too_small(stage) {
        stage.node("a", 8000).await?;
        stage.refuse("q", "a");
        stage.gang("small", 3).await?;
        for name in ["p", "q", "r"] {
            stage.member("small", name, 1000, "").await?;
        }
        stage.asked_again("q", 0).await?;
        // It holds nothing.
        stage.pod("lone", 7500, "").await?;
        stage.bound("lone", "a").await?;
        stage.end("lone").await?;
        stage.allow();
        for name in ["p", "q", "r"] {
            stage.bound(name, "a").await?;
        }
    }
    a_gang_that_was_refused_is_asked_about_again_though_nothing_happens(stage) {
        stage.node("a", 8000).await?;
        stage.refuse("q", "a");
        stage.gang("again", 2).await?;
        for name in ["p", "q"] {
            stage.member("again", name, 1000, "").await?;
        }
        stage.asked_again("q", 3).await?;
        stage.allow();
        for name in ["p", "q"] {
            stage.bound(name, "a").await?;
        }
    }
    pods_beyond_the_least_number_wait_alone(stage) {
        stage.node("a", 5000).await?;
        stage.gang("beyond", 2).await?;
        for name in ["p", "q", "r"] {
            stage.member("beyond", name, 2000, "").await?;
        }
        for name in ["p", "q"] {
            stage.bound(name, "a").await?;
        }
        stage.sleeps("r").await?;
        stage.end("p").await?;
        stage.bound("r", "a").await?;
    }
    a_pod_whose_bind_failed_comes_again_without_the_others(stage) {
        stage.node("a", 8000).await?;
        stage.fail("bind", "q", 1);
        stage.gang("fails", 2).await?;
        for name in ["p", "q"] {
            stage.member("fails", name, 1000, "").await?;
        }
        for name in ["p", "q"] {
            stage.bound(name, "a").await?;
        }
    }
}

/// Plays the script with the simulated kube-scheduler; the stage records the requests to the extender.
fn simulated(script: Script) -> Result<Stage> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?;
    runtime.block_on(async {
        let story = Story::new();
        let server = Arc::new(Mutex::new(Server::new(story.clone())));
        let stage = Stage::new(Cluster::Simulated(server.clone()));
        let beside = Beside::new(Link::new(&server, 1), stage.extender());
        let scheduler = Scheduler::new(
            &server,
            beside,
            false,
            &[gpustow_api::names::SCHEDULER],
            &story,
            1,
        );
        scheduler.leads.send_replace(true);
        tokio::spawn(scheduler.run());
        script(&stage).await?;
        Ok(stage)
    })
}

/// Takes everything off the real cluster.
async fn clear(cluster: &ControlPlane) -> Result<()> {
    let client = cluster.admin()?;
    let now = DeleteParams::default().grace_period(0);
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    pods.delete_collection(&now, &ListParams::default()).await?;
    Api::<Node>::all(client)
        .delete_collection(&now, &ListParams::default())
        .await?;
    Ok(())
}

/// Plays the script with the real kube-scheduler.
async fn real(cluster: &ControlPlane, script: Script) -> Result<Stage> {
    let stage = Stage::new(Cluster::Real(cluster.admin()?));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let extender = stage.extender();
    let serving = tokio::spawn(async { axum::serve(listener, extender).await });
    let config = SchedulerConfig::load("scheduler-config/gpustow-scheduler.yaml".as_ref())?;
    let config = config.with_extender(&url)?;
    let scheduler = Real::start(cluster, config, cluster.admin_kubeconfig()).await?;
    let played = script(&stage).await;
    scheduler.process.kill9();
    serving.abort();
    clear(cluster).await?;
    played.map(|()| stage)
}

/// A cluster with the priority classes of the pods.
async fn cluster() -> Result<ControlPlane> {
    let cluster = ControlPlane::start(Options::default()).await?;
    cluster.kubectl(&["create", "namespace", NAMESPACE]).await?;
    cluster
        .kubectl(&["create", "serviceaccount", "default", "-n", NAMESPACE])
        .await
        .ok();
    for (name, value) in RANKS {
        let policy = if name == "never" {
            "Never"
        } else {
            "PreemptLowerPriority"
        };
        let class = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": { "name": name }, "value": value, "preemptionPolicy": policy,
        });
        cluster.apply(&class.to_string()).await?;
    }
    Ok(cluster)
}

/// Both kube-schedulers must send equal requests in all of these scripts. Three control planes play them side by side:
/// the real scheduler mostly waits.
fn compare(scripts: &[(&str, Script)]) -> Result<()> {
    let third = scripts.len().div_ceil(3);
    std::thread::scope(|scope| {
        let parts = scripts.chunks(third).map(|part| scope.spawn(|| play(part)));
        let parts: Vec<_> = parts.collect();
        parts
            .into_iter()
            .try_for_each(|part| part.join().map_err(|_| anyhow!("a part panicked"))?)
    })
}

/// Plays these scripts with both, one after another.
fn play(scripts: &[(&str, Script)]) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let cluster = runtime.block_on(cluster())?;
    let mut differ = Vec::new();
    for (name, script) in scripts {
        let model = simulated(*script)
            .with_context(|| format!("{name}, simulated"))?
            .heard();
        let played = runtime.block_on(real(&cluster, *script));
        let truth = played.with_context(|| format!("{name}, really"))?.heard();
        ensure!(!truth.is_empty(), "{name}: nothing was heard");
        if model != truth {
            differ.push(format!(
                "{name}:\n  simulated {model:?}\n  really    {truth:?}"
            ));
        }
    }
    ensure!(differ.is_empty(), "{}", differ.join("\n"));
    Ok(())
}

#[test]
fn the_simulated_scheduler_asks_what_the_real_one_asks() -> Result<()> {
    compare(SCRIPTS)
}

/// `make test-cluster` leaves this out before Kubernetes 1.37.
#[test]
fn gangs_are_asked_about_as_by_the_real_scheduler() -> Result<()> {
    compare(GANGS)
}
