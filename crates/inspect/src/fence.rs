//! Which GPUs the fence between pods and ResourceClaims leaves to claims.

use std::collections::HashSet;

use gpustow_api::claim::{self, Device, Rule};
use serde_json::Value;

/// The UUIDs of GPUs with a device that drivers publish and no rule of a leader fences, by these ResourceSlices and
/// DeviceTaintRules.
pub(crate) fn unfenced(objects: &[Value]) -> HashSet<String> {
    let (slices, rules): (Vec<_>, Vec<_>) = objects
        .iter()
        .partition(|it| it["spec"]["devices"].is_array());
    let rules = rules.into_iter().map(Rule::of);
    let rules = rules.filter(|it| it.epoch.is_some());
    let fenced: HashSet<Device> = rules.filter_map(|it| it.device).collect();
    let devices = slices.into_iter().flat_map(claim::published);
    let open = devices.filter(|(device, _)| !fenced.contains(device));
    open.flat_map(|(_, uuids)| uuids).collect()
}
