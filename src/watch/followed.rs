//! The followed objects, and the calls to the ledger for their changes.

use std::sync::Arc;

use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{DisruptionBudget, GpuNode, NodeFacts, PodFacts, PodObject, Shared};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Resource as _;

use super::{Change, Follower, config};
use crate::app::App;
use crate::decode::Each;
use crate::locked::Locked;

/// Starts the four watches; they run until the process ends.
pub(crate) fn spawn(app: &App) {
    pods(app);
    nodes(app);
    gpunodes(app);
    budgets(app);
}

fn pods(app: &App) {
    // A Succeeded or Failed pod does not hold memory. It leaves this list as if it were deleted.
    let unfinished = config().fields("status.phase!=Succeeded,status.phase!=Failed");
    let resource = app.args.resource_name.clone();
    let mut shared = Shared::default();
    let known = app.uses.clone();
    let facts = move |pod: Each<PodObject>| {
        let mut facts = pod.facts(&resource)?;
        shared.share(&mut facts);
        if let Each::Whole(pod) = &pod {
            known.know(pod, &facts);
        }
        Some(Arc::new(facts))
    };
    let known = app.uses.clone();
    let change = move |ledger: &Locked, change: Change<Arc<PodFacts>>| match change {
        Change::Apply(pod) => ledger.lock().apply_pod(pod),
        Change::Delete(pod) => {
            known.forget(&pod.uid);
            ledger.lock().delete_pod(&pod.uid);
        }
        Change::Reset(pods, began) => {
            known.keep(&pods);
            ledger.lock().reset_pods(pods, began);
        }
    };
    Follower::spawn(app, &app.lists.pods, unfinished, facts, change);
}

/// Of a broken Node its name: nothing is known of its resources.
fn nodes(app: &App) {
    let mut shared = Shared::default();
    let facts = move |node: Each<Node>| {
        let mut facts = match node {
            Each::Whole(node) => NodeFacts::from_node(&node),
            Each::Broken(remains) => NodeFacts {
                name: remains.meta.name.as_deref()?.into(),
                ..NodeFacts::default()
            },
        };
        shared.share_node(&mut facts);
        Some(facts)
    };
    let change = |ledger: &Locked, change| match change {
        Change::Apply(node) => ledger.lock().apply_node(node),
        Change::Delete(node) => ledger.lock().delete_node(&node.name),
        Change::Reset(nodes, _) => ledger.lock().reset_nodes(nodes),
    };
    Follower::spawn(app, &app.lists.nodes, config(), facts, change);
}

/// A broken GpuNode is as good as none.
fn gpunodes(app: &App) {
    let uses = app.uses.clone();
    let facts = move |node: Each<GpuNode>| {
        let name = node.meta().name.clone()?;
        let status = node.whole().map(|node| node.status.unwrap_or_default());
        let report = |status: &GpuNodeStatus| uses.reported(&name, status);
        status.iter().for_each(report);
        Some((name, status))
    };
    let change = |ledger: &Locked, change: Change<(String, Option<GpuNodeStatus>)>| match change {
        Change::Apply((name, Some(status))) => {
            ledger.lock().apply_gpunode(&name, status, ledger.now());
        }
        Change::Apply((name, None)) | Change::Delete((name, _)) => {
            ledger.lock().delete_gpunode(&name);
        }
        Change::Reset(list, _) => {
            let readable = list.into_iter();
            let readable = readable.filter_map(|(name, status)| Some((name, status?)));
            ledger
                .lock()
                .reset_gpunodes(readable.collect(), ledger.now());
        }
    };
    Follower::spawn(app, &app.lists.gpunodes, config(), facts, change);
}

/// A broken disruption budget protects all pods of its namespace.
fn budgets(app: &App) {
    let facts = |budget: Each<PodDisruptionBudget>| {
        Some(match &budget {
            Each::Whole(budget) => DisruptionBudget::of(budget),
            Each::Broken(remains) => DisruptionBudget::unreadable(&remains.meta),
        })
    };
    let change = |ledger: &Locked, change| match change {
        Change::Apply(budget) => ledger.lock().apply_budget(budget),
        Change::Delete(budget) => ledger.lock().delete_budget(&budget),
        Change::Reset(budgets, _) => ledger.lock().reset_budgets(budgets),
    };
    Follower::spawn(app, &app.lists.budgets, config(), facts, change);
}
