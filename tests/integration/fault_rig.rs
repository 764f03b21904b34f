//! The common parts of the fault cases: control planes that they use in turn, and calls as kube-scheduler makes them.
//! Each replica of the extender has a proxy between it and the API server.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use futures::FutureExt as _;
use futures::future::select_all;
use gpustow_api::names;
use gpustow_testkit::{
    Action, ApiProxy, Case, ControlPlane, Extender, ExtenderOptions, Options, Rule, Scheduler,
    eventually,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard, OnceCell};

use crate::install::install;
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow, ledger_agrees, node_of, repository};

/// The control plane, for one case at a time: of two extenders on it, the second relieves the first.
pub(crate) struct Turn {
    pub(crate) cluster: &'static ControlPlane,
    _turn: MutexGuard<'static, ()>,
}

/// A control plane, and whose turn it is on it.
struct Lane {
    turn: Mutex<()>,
    cluster: OnceCell<ControlPlane>,
}

/// Control planes that cases use in turn. Each takes 350 MiB; more would not end the tests sooner on two cores.
const LANES: usize = 4;

/// Waits for the turn on one of the control planes.
pub(crate) async fn turn() -> Result<Turn> {
    static ALL: [Lane; LANES] = [const {
        Lane {
            turn: Mutex::const_new(()),
            cluster: OnceCell::const_new(),
        }
    }; LANES];
    let turns = ALL.iter().map(|lane| lane.turn.lock().boxed());
    let (_turn, at, _) = select_all(turns).await;
    let cluster = ALL[at].cluster.get_or_try_init(control_plane).await?;
    Ok(Turn { cluster, _turn })
}

/// A control plane with gpustow installed.
pub(crate) async fn control_plane() -> Result<ControlPlane> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    Ok(cluster)
}

/// An extender and the way from it to the API server.
pub(crate) struct Replica {
    pub(crate) proxy: ApiProxy,
    pub(crate) extender: Extender,
}

impl Replica {
    /// Starts one. Each of `settings` is a flag, or a field of the GpustowConfig.
    pub(crate) async fn start(
        cluster: &ControlPlane,
        identity: &str,
        settings: &[&str],
    ) -> Result<Replica> {
        Replica::of(gpustow(), cluster, identity, settings).await
    }

    /// Starts one of another build.
    pub(crate) async fn of(
        program: &Path,
        cluster: &ControlPlane,
        identity: &str,
        settings: &[&str],
    ) -> Result<Replica> {
        let proxy = ApiProxy::start(cluster).await?;
        let kubeconfig = cluster
            .kubeconfig(SYSTEM, ACCOUNT, Some(proxy.url()))
            .await?;
        let mut options = ExtenderOptions::default();
        options.args.push("--metrics-per-gpu".to_owned());
        options.args.push(format!("--identity={identity}"));
        let settings = settings.iter().map(ToString::to_string);
        let (flags, config): (Vec<_>, Vec<_>) = settings.partition(|it| it.starts_with("--"));
        options.args.extend(flags);
        options.config = Some(config);
        // An earlier build does not know this object. It reads from a variable for how long a report counts.
        let day = ("GPUSTOW_STALE_AFTER".to_owned(), "86400".to_owned());
        options.env.push(day);
        let extender = Extender::start(cluster, program, &kubeconfig, options).await?;
        Ok(Replica { proxy, extender })
    }

    /// Starts a kube-scheduler that calls it.
    pub(crate) async fn scheduler(&self, cluster: &ControlPlane) -> Result<Scheduler> {
        Scheduler::calling(cluster, &repository(""), &self.extender).await
    }

    /// SIGKILL and a new life.
    pub(crate) async fn restart(&self) -> Result<()> {
        self.extender.process.restart()?;
        self.extender.wait_ready().await
    }

    /// Calls a verb; an answer with an `Error` is one.
    pub(crate) async fn call(&self, verb: &str, body: &Value) -> Result<Value> {
        let (status, answer) = self.extender.call(verb, body.to_string()).await?;
        ensure!(status == 200, "/{verb}: status {status}");
        match answer["Error"].as_str() {
            Some(error) if !error.is_empty() => bail!("{error}"),
            _ => Ok(answer),
        }
    }

    /// The answer of `/filter` for one node, whether it passes or not.
    pub(crate) async fn ask(&self, pod: &Pod, node: &str) -> Result<Value> {
        let body = json!({ "Pod": pod, "Nodes": null, "NodeNames": [node] });
        self.call("filter", &body).await
    }

    /// `/filter` for one node; an error if it does not pass.
    pub(crate) async fn filter(&self, pod: &Pod, node: &str) -> Result<()> {
        let answer = self.ask(pod, node).await?;
        ensure!(answer["NodeNames"] == json!([node]), "refused: {answer}");
        Ok(())
    }

    /// `/filter` for one node; an error if it passes.
    pub(crate) async fn refuses(&self, pod: &Pod, node: &str) -> Result<()> {
        let answer = self.ask(pod, node).await?;
        ensure!(answer["NodeNames"] == json!([]), "offered: {answer}");
        Ok(())
    }

    /// How many nodes the replica offers to kube-scheduler that asks whether the pod fits on this one once the victims are
    /// gone.
    pub(crate) async fn preempt(&self, pod: &Pod, node: &str, victims: &[&Pod]) -> Result<usize> {
        let uids = victims.iter().map(|pod| json!({ "UID": pod.uid() }));
        let victims = json!({ "Pods": uids.collect::<Vec<_>>(), "NumPDBViolations": 0 });
        let body = json!({ "Pod": pod, "NodeNameToMetaVictims": { node: victims } });
        let answer = self.call("preempt", &body).await?;
        let nodes = answer["NodeNameToMetaVictims"].as_object();
        Ok(nodes.map_or(0, |nodes| nodes.len()))
    }

    /// `/bind`.
    pub(crate) async fn bind(&self, pod: &Pod, node: &str) -> Result<()> {
        let body = json!({
            "PodName": pod.name_any(),
            "PodNamespace": pod.namespace(),
            "PodUID": pod.uid(),
            "Node": node,
        });
        self.call("bind", &body).await.map(drop)
    }

    /// `/filter`, then `/bind`. A filter is answered with an error until the watches have delivered the case's latest
    /// objects.
    pub(crate) async fn place(&self, pod: &Pod, node: &str) -> Result<()> {
        self.until_fits(pod, node).await?;
        self.bind(pod, node).await
    }

    /// `/filter` until the node passes.
    pub(crate) async fn until_fits(&self, pod: &Pod, node: &str) -> Result<()> {
        let what = format!("{} fits on {node}", pod.name_any());
        eventually(SOON, &what, async || self.filter(pod, node).await).await
    }

    /// Does something to the first Binding of the pod that comes by.
    pub(crate) fn on_first_bind(&self, pod: &Pod, action: Action) -> Result<Rule> {
        let namespace = pod.namespace().context("pod without a namespace")?;
        let name = pod.name_any();
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/binding");
        let met = AtomicBool::new(false);
        let first = move || !met.swap(true, Ordering::SeqCst);
        let rule = self.proxy.rule(
            move |method, uri| method.as_str() == "POST" && uri.path() == path && first(),
            action,
        );
        Ok(rule)
    }

    /// `/bind` of which the Binding arrives late: after `overtaken`. It must fail, and the pod stay
    /// unbound.
    pub(crate) async fn bind_late(
        &self,
        case: &Case,
        pod: &Pod,
        node: &str,
        overtaken: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        self.until_fits(pod, node).await?;
        let rule = self.on_first_bind(pod, Action::Hold)?;
        let meanwhile = async {
            rule.seen(1, SOON).await?;
            overtaken().await?;
            rule.release();
            rule.answered(1, SOON).await
        };
        let (bind, meanwhile) = tokio::join!(self.bind(pod, node), meanwhile);
        meanwhile?;
        ensure!(bind.is_err(), "/bind said that it bound the pod");
        let pod = now(case, pod).await?;
        let on = node_of(&pod);
        ensure!(on.is_empty(), "the late Binding bound the pod to {on}");
        Ok(())
    }

    /// How often it took over.
    pub(crate) async fn takeovers(&self) -> Result<u64> {
        let metrics = self.extender.metrics().await?;
        let counter = |line: &str| Some(line.strip_prefix("gpustow_takeovers_total ")?.to_owned());
        let count = metrics
            .lines()
            .find_map(counter)
            .context("no such counter")?;
        Ok(count.parse()?)
    }

    /// Waits until its ledger agrees with the API server, and checks the case's cards.
    pub(crate) async fn settled(&self, case: &Case) -> Result<()> {
        self.has_no_reservation().await?;
        ledger_agrees(&self.extender, case).await?;
        case.check().await
    }

    /// Waits until it holds nothing back for pods that are not bound.
    pub(crate) async fn has_no_reservation(&self) -> Result<()> {
        eventually(SOON, "no reservation is left", async || {
            let metrics = self.extender.metrics().await?;
            let counts = metrics
                .lines()
                .filter(|line| line.starts_with("gpustow_assumed_pods "));
            let left: Vec<_> = counts.filter(|line| !line.ends_with(" 0")).collect();
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })
        .await
    }

    /// How many disruptions it has done for this cause.
    pub(crate) async fn disruptions(&self, action: &str, cause: &str) -> Result<String> {
        let metrics = self.extender.metrics().await?;
        let all = metrics.lines();
        let all = all.filter(|line| line.starts_with("gpustow_disruptions_total"));
        // A test that fails shows the disruptions that were counted instead.
        println!(
            "{:?}",
            all.filter(|line| !line.ends_with(" 0")).collect::<Vec<_>>()
        );
        let series = format!(
            "gpustow_disruptions_total{{action=\"{action}\",cause=\"{cause}\",outcome=\"done\"}} "
        );
        let count = metrics.lines().find_map(|line| line.strip_prefix(&series));
        Ok(count.context("no such series")?.to_owned())
    }

    /// It was frozen while the heir took over: its late write arrives, it runs again, and it sees in the Lease that it
    /// does not lead before it would act again.
    pub(crate) async fn thaws(
        &self,
        late: &Rule,
        waits: &Pod,
        node: &str,
        heir: &str,
    ) -> Result<()> {
        late.release();
        late.answered(1, SOON).await?;
        self.extender.process.cont()?;
        eventually(SOON, "it knows that it does not lead", async || {
            let told = self.filter(waits, node).await;
            ensure!(told.is_err_and(|told| told.to_string().contains(heir)));
            Ok(())
        })
        .await
    }
}

/// The pod as it is now.
pub(crate) async fn now(case: &Case, pod: &Pod) -> Result<Pod> {
    Ok(case.pods().get(&pod.name_any()).await?)
}

/// The epoch that was written into an unbound pod.
pub(crate) fn epoch(pod: &Pod) -> Option<&str> {
    pod.annotations().get(names::EPOCH).map(String::as_str)
}

/// Deletes the case's pods.
pub(crate) async fn clear(case: &Case) -> Result<()> {
    let at_once = kube::api::DeleteParams::default().grace_period(0);
    case.pods()
        .delete_collection(&at_once, &kube::api::ListParams::default())
        .await?;
    Ok(())
}

/// Deletes of pods that reach the replica's proxy, the `which`-th among them.
pub(crate) fn on_delete(replica: &Replica, which: usize, action: Action) -> Rule {
    nth(
        replica,
        "DELETE",
        |path| path.contains("/pods/"),
        which,
        action,
    )
}

/// Evictions that reach the replica's proxy, the `which`-th among them.
pub(crate) fn on_eviction(replica: &Replica, which: usize, action: Action) -> Rule {
    nth(
        replica,
        "POST",
        |path| path.ends_with("/eviction"),
        which,
        action,
    )
}

fn nth(
    replica: &Replica,
    method: &'static str,
    is_it: fn(&str) -> bool,
    which: usize,
    action: Action,
) -> Rule {
    let count = AtomicUsize::new(0);
    replica.proxy.rule(
        move |asked, uri| {
            asked.as_str() == method
                && is_it(uri.path())
                && count.fetch_add(1, Ordering::SeqCst) == which
        },
        action,
    )
}
