//! The reads and writes of the fence in the API server, each request with an end.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, stream};
use gpustow_api::claim::{self, Consumed, Device, GROUP, RULE_VERSIONS, Rule};
use gpustow_api::names;
use kube::api::{
    DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions,
};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::time::sleep;

use super::plan::Step;
use super::seen::{Claim, all, rule_of, rules};
use super::{LIST_TIMEOUT, TIMEOUT, WIDTH, consumed};
use crate::ask::{AskError, within};

/// Looks for rules that are left, and the pause between two.
const LOOKS: u32 = 60;
const LOOKS_AGAIN: Duration = Duration::from_secs(2);

/// In which version DeviceTaintRules are served, if at all.
pub(super) async fn served(client: &Client) -> Result<Option<&'static str>, AskError> {
    for version in RULE_VERSIONS {
        let version_of_group = format!("{GROUP}/{version}");
        let served = client.list_api_group_resources(&version_of_group);
        match within(TIMEOUT, served).await {
            Ok(list)
                if list
                    .resources
                    .iter()
                    .any(|it| it.name == "devicetaintrules") =>
            {
                return Ok(Some(version));
            }
            Ok(_) => {}
            Err(error) if error.status() == Some(404) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The consumption of claims, by the API server's own answer of now.
pub(super) async fn listed(client: &Client) -> Result<HashMap<Device, Consumed>, AskError> {
    let api = all(client, "ResourceClaim");
    let claims = within(LIST_TIMEOUT, api.list(&ListParams::default())).await?;
    let claims: Vec<Claim> = claims.items.iter().map(|it| Claim::of(&it.data)).collect();
    Ok(consumed(claims.iter()))
}

/// The DeviceClasses, each with its selectors. An empty text stands for everything.
pub(super) async fn classes(client: &Client) -> Result<HashMap<String, String>, AskError> {
    let api = all(client, "DeviceClass");
    let classes = within(LIST_TIMEOUT, api.list(&ListParams::default())).await?;
    let of = |class: DynamicObject| {
        let selectors = &class.data["spec"]["selectors"];
        let text = if selectors.is_array() {
            selectors.to_string()
        } else {
            String::new()
        };
        (class.name_any(), text)
    };
    Ok(classes.items.into_iter().map(of).collect())
}

pub(super) async fn write(
    api: &Api<DynamicObject>,
    version: &str,
    step: &Step,
    epoch: u64,
) -> Result<(), AskError> {
    match step {
        Step::Create(device, (node, gpu)) => {
            let object = claim::Rule::object(version, device, node, gpu);
            let object = object.and_then(|it| serde_json::from_value(it).ok());
            let Some(object) = object else {
                return Ok(());
            };
            within(TIMEOUT, api.create(&PostParams::default(), &object))
                .await
                .map(drop)
        }
        Step::Stamp(rule) => {
            let patch = json!({ "metadata": {
                "resourceVersion": rule.version, "annotations": { names::EPOCH: epoch.to_string() },
            } });
            patched(api, rule, patch).await
        }
        Step::Remove(rule) => remove(api, rule).await,
    }
}

async fn patched(
    api: &Api<DynamicObject>,
    rule: &Rule,
    patch: serde_json::Value,
) -> Result<(), AskError> {
    let params = PatchParams::default();
    let patch = Patch::Merge(patch);
    let patched = api.patch_metadata(&rule.name, &params, &patch);
    within(TIMEOUT, patched).await.map(drop)
}

/// Deletes this very copy of the rule, and then takes its finalizer off.
async fn remove(api: &Api<DynamicObject>, rule: &Rule) -> Result<(), AskError> {
    let mut version = rule.version.clone();
    if !rule.terminating {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                resource_version: Some(version),
                uid: Some(rule.uid.clone()),
            }),
            ..DeleteParams::default()
        };
        let deleted = match within(TIMEOUT, api.delete(&rule.name, &params)).await {
            Err(error) if error.status() == Some(404) => return Ok(()),
            deleted => deleted?,
        };
        let Some(object) = deleted.left() else {
            return Ok(());
        };
        version = object.resource_version().unwrap_or_default();
    }
    let patch = json!({ "metadata": { "resourceVersion": version, "finalizers": null } });
    match patched(api, rule, patch).await {
        Err(error) if error.status() == Some(404) => Ok(()),
        patched => patched,
    }
}

/// Removes every rule, and returns the number of rules.
pub(super) async fn remove_all(client: &Client) -> Result<usize, AskError> {
    let Some(version) = served(client).await? else {
        return Ok(0);
    };
    let api = &rules(client, version);
    let labelled = ListParams::default().labels(names::CLAIMS_FENCE);
    let left = within(LIST_TIMEOUT, api.list(&labelled)).await?.items;
    let removals = left.iter().map(rule_of);
    let removals = removals.map(|rule| async move { remove(api, &rule).await });
    let removals: Vec<_> = removals.collect();
    let removed = stream::iter(removals).buffer_unordered(WIDTH);
    let removed: Vec<_> = removed.collect().await;
    // One that has changed is read again.
    let mut failed = removed.into_iter().filter_map(Result::err);
    match failed.find(|error| error.status() != Some(409)) {
        Some(error) => Err(error),
        None => Ok(left.len()),
    }
}

/// Removes every rule, before gpustow is uninstalled: nothing else would.
///
/// # Errors
/// If the rules may not be listed or removed, or after two minutes.
pub(crate) async fn unfence_all(client: Client) -> Result<()> {
    let mut removed = 0;
    for look in 0..LOOKS {
        if look > 0 {
            sleep(LOOKS_AGAIN).await;
        }
        match remove_all(&client).await {
            Ok(0) => {
                println!("removed {removed} DeviceTaintRules; none is left");
                return Ok(());
            }
            Ok(count) => removed += count,
            Err(error) if error.is_final() => {
                return Err(error).context("cannot remove the DeviceTaintRules of gpustow");
            }
            Err(error) => println!("cannot remove DeviceTaintRules: {error}; trying again"),
        }
    }
    bail!(
        "there are DeviceTaintRules with the label {} again and again: first set spec.claims.fence of the GpustowConfig to false",
        names::CLAIMS_FENCE
    )
}
