//! Waiting for a condition, with an error that contains the last observation.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::runtime::wait::{Condition, await_condition};
use kube::{Client, ResourceExt as _};

/// Asks `probe` until it succeeds; its last error is the last observation.
pub async fn eventually<T>(
    deadline: Duration,
    what: &str,
    mut probe: impl AsyncFnMut() -> Result<T>,
) -> Result<T> {
    let end = tokio::time::Instant::now() + deadline;
    let mut pause = Duration::from_millis(5);
    let mut last = anyhow!("the first look did not end in time");
    loop {
        match tokio::time::timeout_at(end, probe()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => last = error,
            Err(_) => bail!("{what}: not within {deadline:?}; last seen: {last:#}"),
        }
        if tokio::time::timeout_at(end, tokio::time::sleep(pause))
            .await
            .is_err()
        {
            bail!("{what}: not within {deadline:?}; last seen: {last:#}");
        }
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Waits by a watch until `condition` holds for the pod; the pod as it then was.
pub async fn wait_condition(
    client: &Client,
    pod: &Pod,
    what: &str,
    deadline: Duration,
    condition: impl Condition<Pod>,
) -> Result<Pod> {
    let namespace = pod.namespace().context("pod without a namespace")?;
    let (pods, name) = (
        Api::<Pod>::namespaced(client.clone(), &namespace),
        pod.name_any(),
    );
    match tokio::time::timeout(deadline, await_condition(pods.clone(), &name, condition)).await {
        Ok(seen) => seen?.with_context(|| format!("pod {namespace}/{name} {what}: it is gone")),
        Err(_) => {
            let last = match pods.get_opt(&name).await? {
                Some(pod) => describe(&pod),
                None => "gone".to_owned(),
            };
            bail!("pod {namespace}/{name} {what}: not within {deadline:?}; last seen: {last}")
        }
    }
}

/// Waits until the pod has a node.
pub async fn wait_bound(client: &Client, pod: &Pod, deadline: Duration) -> Result<Pod> {
    let bound = |pod: Option<&Pod>| pod.is_some_and(|pod| node_of(pod).is_some());
    wait_condition(client, pod, "is bound", deadline, bound).await
}

/// Waits until kube-scheduler reports the pod as unschedulable, with `text` in its reason. Returns the whole reason.
pub async fn wait_refused(
    client: &Client,
    pod: &Pod,
    text: &str,
    deadline: Duration,
) -> Result<String> {
    let what = format!("is refused: {text}");
    let refused = |pod: Option<&Pod>| {
        pod.and_then(refusal)
            .is_some_and(|reason| reason.contains(text))
    };
    let seen = wait_condition(client, pod, &what, deadline, refused).await?;
    Ok(refusal(&seen).unwrap_or_default().to_owned())
}

/// Why kube-scheduler finds no node for the pod.
#[must_use]
pub fn refusal(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|c| c.type_ == "PodScheduled")?;
    let refused = scheduled.reason.as_deref() == Some("Unschedulable");
    scheduled.message.as_deref().filter(|_| refused)
}

/// Waits until the pod does not exist any more; one recreated under its name is another pod.
pub async fn wait_gone(client: &Client, pod: &Pod, deadline: Duration) -> Result<()> {
    let namespace = pod.namespace().context("pod without a namespace")?;
    let (pods, name) = (
        Api::<Pod>::namespaced(client.clone(), &namespace),
        pod.name_any(),
    );
    eventually(
        deadline,
        &format!("pod {namespace}/{name} is gone"),
        async || match pods.get_opt(&name).await? {
            Some(there) if there.uid() == pod.uid() => bail!("{}", describe(&there)),
            _ => Ok(()),
        },
    )
    .await
}

/// Waits until `done` accepts the namespace's list of pods; the list as it then was.
pub async fn wait_pods(
    client: &Client,
    namespace: &str,
    what: &str,
    deadline: Duration,
    done: impl Fn(&[Pod]) -> bool,
) -> Result<Vec<Pod>> {
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    eventually(
        deadline,
        &format!("pods of {namespace}: {what}"),
        async || {
            let pods = pods.list(&ListParams::default()).await?.items;
            if done(&pods) {
                return Ok(pods);
            }
            let waiting: Vec<_> = pods.iter().filter(|pod| node_of(pod).is_none()).collect();
            let first = waiting
                .first()
                .map_or_else(String::new, |pod| describe(pod));
            bail!(
                "{} pods, {} of them not bound; {first}",
                pods.len(),
                waiting.len()
            )
        },
    )
    .await
}

/// The node that the pod is bound to.
#[must_use]
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec
        .as_ref()?
        .node_name
        .as_deref()
        .filter(|node| !node.is_empty())
}

fn describe(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let conditions: Vec<_> = status
        .conditions
        .unwrap_or_default()
        .into_iter()
        .map(|c| format!("{}={} {}", c.type_, c.status, c.message.unwrap_or_default()))
        .collect();
    format!(
        "{} on {:?}, phase {:?}, {}",
        pod.name_any(),
        node_of(pod),
        status.phase.unwrap_or_default(),
        conditions.join("; ")
    )
}
