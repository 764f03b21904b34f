//! Marks on the nodes on which a place is kept, so that autoscalers let them be: such a node empties, which is what they
//! look for. What was marked is read from the nodes themselves, by their label; an extender that starts anew goes on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::names;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Map, Value, json};
use tokio::time::sleep;

use crate::app::App;
use crate::ask::{AskError, within};
use crate::metrics::MARK;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// The same if no node is to be marked: only marks of an earlier extender are taken off.
const RARE: Duration = Duration::from_secs(60);
/// After one at which a node could not be written.
const PAUSE: Duration = Duration::from_secs(15);
/// For an answer of the API server.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Marks and unmarks nodes for as long as the process runs. Without `reserve.markNodes` it only unmarks.
pub(crate) async fn run(app: Arc<App>) {
    let nodes: Api<Node> = Api::all(app.client.clone());
    let labelled = ListParams::default().labels(names::KEPT_LABEL).match_any();
    let mut pause = LOOK;
    loop {
        sleep(pause).await;
        pause = LOOK;
        let Some(epoch) = app.epoch.held() else {
            continue;
        };
        if !app.lists.missing().is_empty() || app.is_draining() {
            continue;
        }
        let marked: BTreeSet<Arc<str>> = match within(TIMEOUT, nodes.list_metadata(&labelled)).await
        {
            Ok(list) => list.iter().map(|node| node.name_any().into()).collect(),
            Err(error) => {
                tracing::warn!(%error, "cannot see which nodes are marked for autoscalers");
                continue;
            }
        };
        let marks = app.config.spec().reserve.mark_nodes;
        let between = if marks { LOOK } else { RARE };
        let places = match marks {
            true => app.ledger.lock().places(),
            false => Vec::new(),
        };
        let kept: BTreeSet<Arc<str>> = places.into_iter().map(|place| place.node).collect();
        pause = between;
        for node in kept.symmetric_difference(&marked) {
            let keeps = kept.contains(node);
            let outcome = match change(&app, epoch, &nodes, node, keeps).await {
                Ok(false) => continue,
                Ok(true) => {
                    tracing::info!(%node, keeps, "told autoscalers whether a place is kept there");
                    app.events.marked(node, keeps);
                    "done"
                }
                Err(error) => {
                    tracing::warn!(%node, %error, "cannot tell autoscalers whether a place is kept there");
                    app.events.not_marked(node, &error);
                    pause = PAUSE.max(between);
                    "failed"
                }
            };
            app.metrics.acts.with_label_values(&[MARK, outcome]).inc();
        }
    }
}

/// Marks a node, or takes what was written off again. False if there is nothing to write, or somebody else decides.
async fn change(
    app: &App,
    epoch: u64,
    nodes: &Api<Node>,
    name: &str,
    keeps: bool,
) -> Result<bool, AskError> {
    let node = match within(TIMEOUT, nodes.get_metadata(name)).await {
        Ok(node) => node,
        Err(error) if error.status() == Some(404) => return Ok(false),
        Err(error) => return Err(error),
    };
    let Some(patch) = patch(&node.metadata, keeps) else {
        return Ok(false);
    };
    if app.epoch.confirm(epoch).await.is_err() {
        return Ok(false);
    }
    let params = PatchParams::default();
    match within(
        TIMEOUT,
        nodes.patch_metadata(name, &params, &Patch::Merge(patch)),
    )
    .await
    {
        Ok(_) => Ok(true),
        // It has changed since: the next look sees it as it is.
        Err(error) if matches!(error.status(), Some(404 | 409)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What is to be written on a node; nothing where it is as it should be, or its owner says it all already. What was there
/// before stays as it is, now and later: the label names the autoscalers whose annotation is ours.
fn patch(node: &ObjectMeta, keeps: bool) -> Option<Value> {
    let labels = node.labels.as_ref();
    let ours = labels.and_then(|labels| labels.get(names::KEPT_LABEL));
    let has = |key| {
        node.annotations
            .as_ref()
            .is_some_and(|all| all.contains_key(key))
    };
    let (label, annotations): (Value, Map<String, Value>) = match (keeps, ours) {
        (true, Some(_)) | (false, None) => return None,
        (true, None) => {
            let absent = names::SPARE_NODE.into_iter().filter(|(_, key)| !has(*key));
            let (who, keys): (Vec<_>, Vec<_>) = absent.unzip();
            if who.is_empty() {
                return None;
            }
            let keys = keys.into_iter().map(|key| (key.to_owned(), json!("true")));
            (who.join("_").into(), keys.collect())
        }
        (false, Some(ours)) => {
            let ours = names::SPARE_NODE
                .into_iter()
                .filter(|(who, _)| ours.split('_').any(|it| it == *who));
            (
                Value::Null,
                ours.map(|(_, key)| (key.to_owned(), Value::Null)).collect(),
            )
        }
    };
    Some(json!({ "metadata": {
        "resourceVersion": node.resource_version,
        "labels": { names::KEPT_LABEL: label },
        "annotations": annotations,
    } }))
}
