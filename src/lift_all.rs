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
/// If the right is missing, or pods still bear the gate after two minutes.
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
            Err(error) if error.is_final() => return Err(error).context("cannot list pods"),
            Err(error) => {
                println!("cannot list pods: {error}; trying again");
                continue;
            }
        };
        println!("{} pods bear the gate {}", gated.len(), names::GATE);
        let lifts = gated.iter().map(|pod| lift(&client, pod));
        let mut lifts = stream::iter(lifts).buffer_unordered(WIDTH);
        while let Some(answer) = lifts.next().await {
            match answer {
                Ok(()) => lifted += 1,
                // It has changed, or is gone: the next look knows.
                Err(error) if matches!(error.status(), Some(404 | 409)) => {}
                Err(error) if error.is_final() => {
                    return Err(error).context(
                        "cannot take the gate off: the ClusterRole gpustow-line gives the right to, and the \
                         policy gpustow-extender must let it through",
                    );
                }
                Err(error) => println!("cannot take a gate off: {error}; trying again"),
            }
        }
    }
    bail!(
        "pods still bear the gate {}: they get it from the MutatingAdmissionPolicy gpustow-line; delete that \
         first, or set {}'s {} to false",
        names::GATE,
        names::LINE,
        names::LINE_KEY
    )
}
