//! Removes gpustow's scheduling gate from every pod, before gpustow is uninstalled: a pod that keeps it waits for ever.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt, stream};
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::sleep;

use crate::ask::{AskError, within};

/// Pods of one answer.
const PAGE: u32 = 500;
/// Patches under way at once.
const WIDTH: usize = 16;
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Looks at all pods, and the pause between two.
const LOOKS: u32 = 60;
const PAUSE: Duration = Duration::from_secs(2);

fn is_gated(pod: &Pod) -> bool {
    let gates = pod
        .spec
        .iter()
        .flat_map(|spec| spec.scheduling_gates.iter().flatten());
    gates.into_iter().any(|gate| gate.name == names::GATE)
}

/// Every pod that has the gate.
async fn gated(pods: &Api<Pod>) -> Result<Vec<Pod>, AskError> {
    // A bound pod is not gated.
    let mut params = ListParams::default().fields("spec.nodeName=").limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = within(TIMEOUT, pods.list(&params)).await?;
        let next = page
            .metadata
            .continue_
            .clone()
            .filter(|next| !next.is_empty());
        all.extend(page.into_iter().filter(is_gated));
        match next {
            Some(next) => params = params.continue_token(&next),
            None => return Ok(all),
        }
    }
}

/// Removes our gate from this very copy of the pod, and leaves the gates of others.
async fn ungate(client: &Client, pod: &Pod) -> Result<(), AskError> {
    let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let patch = json!({
        "metadata": { "uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version },
        "spec": { "schedulingGates": [{ "$patch": "delete", "name": names::GATE }] },
    });
    let (name, params, patch) = (
        pod.name_any(),
        PatchParams::default(),
        Patch::Strategic(patch),
    );
    let ungated = pods.patch_metadata(&name, &params, &patch);
    within(TIMEOUT, ungated).await.map(drop)
}

/// Removes the gate from all pods, until none has it.
///
/// # Errors
/// If the extender may not remove it from a pod, or after two minutes.
pub(crate) async fn run(client: Client) -> Result<()> {
    let pods = Api::<Pod>::all(client.clone());
    let mut ungated = 0;
    for look in 0..LOOKS {
        if look > 0 {
            sleep(PAUSE).await;
        }
        let gated = match gated(&pods).await {
            Ok(gated) if gated.is_empty() => {
                println!(
                    "removed the gate {} from {ungated} pods; no pod has it",
                    names::GATE
                );
                return Ok(());
            }
            Ok(gated) => gated,
            // The pages of a list do not last for ever.
            Err(error) if error.is_final() && error.status() != Some(410) => {
                return Err(error).context("cannot list pods");
            }
            Err(error) => {
                println!("cannot list pods: {error}; trying again");
                continue;
            }
        };
        println!("{} pods have the gate {}", gated.len(), names::GATE);
        let patches = gated
            .iter()
            .map(async |pod| (pod, ungate(&client, pod).await));
        let mut patches = stream::iter(patches).buffer_unordered(WIDTH);
        let mut refused = Vec::new();
        while let Some((pod, answer)) = patches.next().await {
            let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
            match answer {
                Ok(()) => ungated += 1,
                // It has changed, or is gone: the next look knows.
                Err(error) if matches!(error.status(), Some(404 | 409)) => {}
                // That is no reason to leave the others where they are.
                Err(error) if error.is_final() => refused.push((name, error)),
                Err(error) => println!("cannot remove the gate from {name}: {error}; trying again"),
            }
        }
        if refused.len() == gated.len() {
            refused.sort_by(|(a, _), (b, _)| a.cmp(b));
            let more = match refused.len() - 1 {
                0 => String::new(),
                others => format!(" and {others} more"),
            };
            let (name, error) = refused.swap_remove(0);
            return Err(error).context(format!(
                "the gate {} stays on {name}{more}: the ClusterRole gpustow-queue gives the permission to remove it, \
                 and the policy gpustow-extender allows that for pods that request GPU memory; remove it from others \
                 yourself",
                names::GATE
            ));
        }
    }
    bail!(
        "pods still have the gate {}: new pods get it from the webhook: first set spec.queue.mode of the GpustowConfig to Off, or \
         delete the MutatingWebhookConfiguration {}",
        names::GATE,
        names::WEBHOOK_CONFIGURATION
    )
}
