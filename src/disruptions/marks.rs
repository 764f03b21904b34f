//! Marks on the nodes with a reservation, so that autoscalers keep them: such a node empties, and autoscalers look for
//! empty nodes. The marks are read from the nodes themselves, by their label; an extender that restarts goes on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::names;
use gpustow_ledger::{Action, Cause};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::TIMEOUT;
use crate::app::App;
use crate::ask::{AskError, within};
use crate::events::Kind;
use crate::leading::while_leading;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// The same if no node must be marked: only marks of an earlier leader are removed.
const RARE: Duration = Duration::from_secs(60);
/// After a look at which a node could not be written.
const PAUSE: Duration = Duration::from_secs(15);

/// Marks and unmarks nodes for as long as the process runs, while this replica leads. Without `reserve.markNodes` it only
/// unmarks.
pub(crate) async fn run(app: Arc<App>) {
    while_leading(app, LOOK, async |next: &mut Option<Instant>, app, epoch| {
        if next.is_none_or(|next| next <= Instant::now()) {
            *next = look(app, epoch).await.map(|pause| Instant::now() + pause);
        }
    })
    .await;
}

/// One look at all nodes; the pause after it, if it is longer than usual.
async fn look(app: &App, epoch: u64) -> Option<Duration> {
    let nodes: Api<Node> = Api::all(app.client.clone());
    let labelled = ListParams::default()
        .labels(names::RESERVED_LABEL)
        .match_any();
    let marked: BTreeSet<Arc<str>> = match within(TIMEOUT, nodes.list_metadata(&labelled)).await {
        Ok(list) => list.iter().map(|node| node.name_any().into()).collect(),
        Err(error) => {
            tracing::warn!(%error, "cannot see which nodes are marked for autoscalers");
            return None;
        }
    };
    let marks = app.config.spec().reserve.mark_nodes;
    let mut pause = (!marks).then_some(RARE);
    let reservations = match marks {
        true => app.ledger.lock().reserved(Cause::Reserve, app.ledger.now()),
        false => Vec::new(),
    };
    let kept: BTreeSet<Arc<str>> = reservations.into_iter().map(|it| it.node).collect();
    for node in kept.symmetric_difference(&marked) {
        let keeps = kept.contains(node);
        let (kind, note) = match keeps {
            true => (
                Kind::MemoryReserved,
                "Reserved for a pod that has waited long. Autoscalers must not remove this node.",
            ),
            false => (
                Kind::ReservationEnded,
                "The reservation ended. Autoscalers may remove this node.",
            ),
        };
        let outcome = match change(app, epoch, &nodes, node, keeps).await {
            Ok(false) => continue,
            Ok(true) => {
                tracing::info!(%node, keeps, "informed autoscalers whether GPUs are reserved there");
                app.events.tell(kind, node, note.to_owned());
                "done"
            }
            Err(error) => {
                tracing::warn!(%node, %error, "cannot inform autoscalers whether GPUs are reserved there");
                let note = format!(
                    "Cannot inform autoscalers whether GPUs are reserved on this node: {error}. Retrying. If the ClusterRole \
                     gpustow-disruptions is missing, apply it."
                );
                app.events.warn(kind, node, note);
                pause = Some(pause.map_or(PAUSE, |pause| pause.max(PAUSE)));
                "failed"
            }
        };
        app.metrics
            .disrupted(Cause::Reserve, Action::MarkNode, outcome);
    }
    pause
}

/// Marks a node, or removes our marks again. False if there is nothing to write, or another replica decides.
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

/// The patch for a node. None if the node is as it should be, or its owner has set all annotations already. Earlier
/// annotations stay as they are, now and later: the label names the autoscalers whose annotation is ours.
fn patch(node: &ObjectMeta, keeps: bool) -> Option<Value> {
    let labels = node.labels.as_ref();
    let ours = labels.and_then(|labels| labels.get(names::RESERVED_LABEL));
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
        "labels": { names::RESERVED_LABEL: label },
        "annotations": annotations,
    } }))
}
