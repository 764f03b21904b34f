//! Takes gpustow's scheduling gate off every pod that waits, for when gpustow goes: whoever bears it would wait for ever.

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

/// Every pod that bears the gate.
async fn gated(pods: &Api<Pod>) -> Result<Vec<Pod>, AskError> {
    // Whoever is bound bears no gate.
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

/// Takes the gate off this very copy of the pod, and leaves those of others.
async fn lift(client: &Client, pod: &Pod) -> Result<(), AskError> {
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
    let lifted = pods.patch(&name, &params, &patch);
    within(TIMEOUT, lifted).await.map(drop)
}

/// Takes the gate off all pods, until none bears it.
///
/// # Errors
/// If pods bear the gate off which it may not be taken, or after two minutes.
pub(crate) async fn run(client: Client) -> Result<()> {
    let pods = Api::<Pod>::all(client.clone());
    let mut lifted = 0;
    for look in 0..LOOKS {
        if look > 0 {
            sleep(PAUSE).await;
        }
        let gated = match gated(&pods).await {
            Ok(gated) if gated.is_empty() => {
                println!(
                    "the gate {} was taken off {lifted} pods; no pod bears it",
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
        println!("{} pods bear the gate {}", gated.len(), names::GATE);
        let lifts = gated
            .iter()
            .map(async |pod| (pod, lift(&client, pod).await));
        let mut lifts = stream::iter(lifts).buffer_unordered(WIDTH);
        let mut refused = Vec::new();
        while let Some((pod, answer)) = lifts.next().await {
            let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
            match answer {
                Ok(()) => lifted += 1,
                // It has changed, or is gone: the next look knows.
                Err(error) if matches!(error.status(), Some(404 | 409)) => {}
                // That is no reason to leave the others where they are.
                Err(error) if error.is_final() => refused.push((name, error)),
                Err(error) => println!("cannot take the gate off {name}: {error}; trying again"),
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
                "the gate {} stays on {name}{more}: the ClusterRole gpustow-line gives the right to take it off, \
                 and the policy gpustow-extender lets it through for pods that ask for GPU memory; off others \
                 their owners take it",
                names::GATE
            ));
        }
    }
    bail!(
        "pods still bear the gate {}: they get it from the MutatingAdmissionPolicy or the webhook gpustow-line; \
         delete that first, or set {}'s {} to false",
        names::GATE,
        names::LINE,
        names::LINE_KEY
    )
}
