//! `why` for users who may not list the whole cluster: what a pod and its Events say, without GPUs and other pods.

use std::io::Write;

use anyhow::{Context as _, Result};
use gpustow_inspect::{age, last_seen, state};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;

use crate::Answer;
use crate::args::Global;
use crate::output::printable;

/// Events that are shown, the last first.
const EVENTS: usize = 4;

/// Is this the answer to a user without the right to list something?
pub(crate) fn is_forbidden(error: &gpustow_inspect::Error) -> bool {
    use gpustow_inspect::Error::List;
    use kube::Error::Api;
    matches!(error, List { source: Api(status), .. } if status.code == 403)
}

/// What the pod of this name says.
pub(crate) async fn why(
    global: &Global,
    name: &str,
    out: &mut (dyn Write + Send),
) -> Result<Answer> {
    let (client, own) = global.source.client().await?;
    let namespace = global.namespace.clone().unwrap_or(own);
    let pod = Api::<Pod>::namespaced(client.clone(), &namespace);
    let pod = pod.get(name).await.context("cannot read the pod")?;
    let node = pod.spec.as_ref().and_then(|it| it.node_name.as_deref());
    let summary = match node {
        Some(node) => format!("It is on {node}."),
        None => state::said(&pod).map_or("It waits.".to_owned(), |said| {
            format!("kube-scheduler said: {said}")
        }),
    };
    writeln!(out, "Pod {namespace}/{name}\n\n{}", printable(&summary))?;
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let about = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
    let events = Api::<Event>::namespaced(client, &namespace);
    let events = events.list(&about).await;
    let mut events = events.context("cannot list the pod's Events")?.items;
    let is_ours = |it: &Event| it.reason.as_deref().is_some_and(|it| it.starts_with("Gpu"));
    events.retain(is_ours);
    events.sort_by_key(|it| std::cmp::Reverse(last_seen(it)));
    for event in events.iter().take(EVENTS) {
        let passed = last_seen(event).map_or(0, |it| Timestamp::now().as_second() - it.as_second());
        let passed = age(u64::try_from(passed).unwrap_or(0));
        let text = [&event.reason, &event.message].map(|it| it.as_deref().unwrap_or_default());
        let text = format!("Event {}, {passed} ago: {}", text[0], text[1]);
        writeln!(out, "\n{}", printable(&text))?;
    }
    writeln!(
        out,
        "\nLeft out: GPUs and pods of others, because you may not list pods, nodes and gpunodes in the whole cluster. The \
         ClusterRole gpustow-viewer has these rights."
    )?;
    Ok(node.map_or(Answer::No, |_| Answer::Yes))
}
