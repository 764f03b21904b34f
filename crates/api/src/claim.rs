//! A ResourceClaim's consumption of devices, and the devices that drivers publish, in `resource.k8s.io/v1`. The code
//! reads everything as untyped JSON, because drivers write it. An unreadable value counts as the whole device.

use std::collections::HashMap;

use gpustow_pack::Mib;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

use crate::{names, quantity};

/// As many results of a claim are read; the API server allows 32.
const MAX_RESULTS: usize = 256;
/// No GPU has more memory.
const MAX_MIB: u64 = 16_777_216;

/// A device, as its driver calls it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device {
    /// The driver's name.
    pub driver: String,
    /// The pool's name.
    pub pool: String,
    /// The device's name in the pool.
    pub name: String,
}

/// A claim's consumption of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumed {
    /// It has administrative access alone.
    Nothing,
    /// So much of its memory.
    Mib(Mib),
    /// All of it, as far as is known.
    Whole,
}

impl Consumed {
    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Whole, _) | (_, Self::Whole) => Self::Whole,
            (Self::Nothing, it) | (it, Self::Nothing) => it,
            (Self::Mib(one), Self::Mib(two)) => Self::Mib(one + two),
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// An allocated claim's consumption of each of its devices; empty for a claim without an allocation. With more than
/// `MAX_RESULTS` results, each device counts as whole.
#[must_use]
pub fn consumed(claim: &Value) -> HashMap<Device, Consumed> {
    let results = &claim["status"]["allocation"]["devices"]["results"];
    let results = results.as_array().map_or(&[][..], Vec::as_slice);
    let mut consumed = HashMap::new();
    for result in results {
        let device = Device {
            driver: text(&result["driver"]),
            pool: text(&result["pool"]),
            name: text(&result["device"]),
        };
        let here = match result["adminAccess"].as_bool() {
            _ if results.len() > MAX_RESULTS => Consumed::Whole,
            Some(true) => Consumed::Nothing,
            _ => memory(&result["consumedCapacity"], &device.driver)
                .map_or(Consumed::Whole, Consumed::Mib),
        };
        let sum = consumed.entry(device).or_insert(Consumed::Nothing);
        *sum = sum.and(here);
    }
    consumed
}

/// A name without a domain is the driver's own.
fn memory(capacity: &Value, driver: &str) -> Option<Mib> {
    let own = || capacity.get(format!("{driver}/memory"));
    let quantity = capacity.get("memory").or_else(own)?.as_str()?;
    let bytes = quantity::rounded_up(&Quantity(quantity.to_owned()), 1);
    let mib = bytes.div_ceil(1 << 20);
    (1..=MAX_MIB).contains(&mib).then_some(Mib(mib))
}

/// The devices of a ResourceSlice, each with its own UUID and the UUID of its parent.
pub fn published(slice: &Value) -> impl Iterator<Item = (Device, Vec<String>)> {
    let spec = &slice["spec"];
    let devices = spec["devices"].as_array().into_iter().flatten();
    devices.map(|device| {
        let of = |key: &str| text(&device["attributes"][key]["string"]);
        let uuids = ["uuid", "parentUUID"].map(of).into_iter();
        let key = Device {
            driver: text(&spec["driver"]),
            pool: text(&spec["pool"]["name"]),
            name: text(&device["name"]),
        };
        (key, uuids.filter(|uuid| !uuid.is_empty()).collect())
    })
}

/// The API group of claims, slices and rules.
pub const GROUP: &str = "resource.k8s.io";
/// The versions in which API servers may serve DeviceTaintRules, the best first.
pub const RULE_VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];

/// A DeviceTaintRule of the extender: it keeps claims off one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Its resourceVersion.
    pub version: String,
    /// The last leader that saw kube-scheduler respect it; none as long as no leader has.
    pub epoch: Option<u64>,
    /// It is being deleted, and has an effect until its finalizer is gone.
    pub terminating: bool,
    /// Its device; none if it is not as the extender writes it.
    pub device: Option<Device>,
    /// The UUID of the GPU that the device is, or is a part of.
    pub gpu: String,
}

impl Rule {
    /// Reads one.
    #[must_use]
    pub fn of(rule: &Value) -> Self {
        let meta = &rule["metadata"];
        let noted = |key: &str| text(&meta["annotations"][key]);
        let selector = &rule["spec"]["deviceSelector"];
        let device = Device {
            driver: text(&selector["driver"]),
            pool: text(&selector["pool"]),
            name: text(&selector["device"]),
        };
        let taint = &rule["spec"]["taint"];
        let fields = selector.as_object().map_or(0, serde_json::Map::len);
        let is_ours =
            taint["key"] == names::CLAIMS_FENCE && taint["effect"] == EFFECT && fields == 3;
        Self {
            name: text(&meta["name"]),
            uid: text(&meta["uid"]),
            version: text(&meta["resourceVersion"]),
            epoch: noted(names::EPOCH).parse().ok(),
            terminating: meta["deletionTimestamp"].is_string(),
            device: Some(device).filter(|device| is_ours && device.is_named()),
            gpu: noted(names::FENCED_GPU),
        }
    }

    /// The rule for a device, as it is created. None if a part of the device's name is missing: a rule without it would keep
    /// claims off other devices too.
    #[must_use]
    pub fn object(version: &str, device: &Device, node: &str, gpu: &str) -> Option<Value> {
        device.is_named().then(|| {
            json!({
                "apiVersion": format!("{GROUP}/{version}"),
                "kind": "DeviceTaintRule",
                "metadata": {
                    "generateName": "gpustow-",
                    "labels": { names::CLAIMS_FENCE: "true" },
                    "finalizers": [names::CLAIMS_FENCE],
                    "annotations": { names::FENCED_NODE: node, names::FENCED_GPU: gpu },
                },
                "spec": {
                    "deviceSelector": { "driver": device.driver, "pool": device.pool, "device": device.name },
                    "taint": { "key": names::CLAIMS_FENCE, "effect": EFFECT },
                },
            })
        })
    }
}

/// The effect of the rules: claims that are allocated stay.
const EFFECT: &str = "NoSchedule";

impl Device {
    /// Has each part a name?
    #[must_use]
    pub fn is_named(&self) -> bool {
        ![&self.driver, &self.pool, &self.name].contains(&&String::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rule without one of the three keeps claims off devices of the whole cluster.
    #[test]
    fn rule_names_driver_pool_and_device_or_there_is_none() {
        let device = |driver: &str, pool: &str, name: &str| Device {
            driver: driver.to_owned(),
            pool: pool.to_owned(),
            name: name.to_owned(),
        };
        for missing in [
            device("", "p", "n"),
            device("d", "", "n"),
            device("d", "p", ""),
        ] {
            assert_eq!(Rule::object("v1", &missing, "node", "GPU-0"), None);
        }
        let whole = device("d", "p", "n");
        let object = Rule::object("v1", &whole, "node", "GPU-0").unwrap();
        assert_eq!(Rule::of(&object).device, Some(whole));
        for change in [
            json!({ "deviceSelector": null }),
            json!({ "deviceSelector": { "driver": null } }),
            json!({ "deviceSelector": { "pool": null } }),
            json!({ "deviceSelector": { "device": null } }),
            json!({ "deviceSelector": { "deviceClassName": "c" } }),
            json!({ "taint": { "effect": "NoExecute" } }),
            json!({ "taint": { "key": "other" } }),
        ] {
            let mut changed = object.clone();
            let patch = json!({ "spec": change });
            merge(&mut changed, &patch);
            assert_eq!(Rule::of(&changed).device, None, "{patch}");
        }
    }

    fn merge(into: &mut Value, patch: &Value) {
        for (key, value) in patch.as_object().unwrap() {
            match value {
                Value::Object(_) => merge(&mut into[key], value),
                _ => into[key] = value.clone(),
            }
        }
    }

    fn claim(results: Vec<Value>) -> Value {
        json!({ "status": { "allocation": { "devices": { "results": results } } } })
    }

    fn result(capacity: Value) -> Value {
        json!({ "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0", "request": "r",
                "consumedCapacity": capacity })
    }

    fn of(results: Vec<Value>) -> Option<Consumed> {
        let mut consumed = consumed(&claim(results)).into_values();
        let first = consumed.next();
        assert_eq!(consumed.next(), None);
        first
    }

    #[test]
    fn capacity_of_a_claim_counts_in_mib_rounded_up() {
        for (memory, mib) in [
            ("1Gi", 1024),
            ("1", 1),
            ("1048577", 2),
            ("10G", 9537),
            ("16Ti", 16_777_216),
        ] {
            let one = result(json!({ "memory": memory }));
            assert_eq!(of(vec![one]), Some(Consumed::Mib(Mib(mib))), "{memory}");
        }
        let named = result(json!({ "gpu.nvidia.com/memory": "2Gi", "cores": "5" }));
        let two = vec![named, result(json!({ "memory": "1Gi" }))];
        assert_eq!(of(two), Some(Consumed::Mib(Mib(3072))));
    }

    #[test]
    fn what_cannot_be_read_is_the_whole_device() {
        for capacity in [
            json!(null),
            json!({}),
            json!([]),
            json!("8Gi"),
            json!({ "memory": null }),
            json!({ "memory": 8 }),
            json!({ "memory": "" }),
            json!({ "memory": "0" }),
            json!({ "memory": "-1Gi" }),
            json!({ "memory": "8 GiB" }),
            json!({ "memory": "1e400" }),
            json!({ "memory": "17Ti" }),
            json!({ "memory": "9".repeat(10_000) }),
            json!({ "example.com/memory": "8Gi" }),
        ] {
            let both = vec![
                result(json!({ "memory": "1Gi" })),
                result(capacity.clone()),
                result(json!({ "memory": "1Gi" })),
            ];
            assert_eq!(of(both), Some(Consumed::Whole), "{capacity}");
        }
        for claim in [
            json!(null),
            json!({ "status": { "allocation": { "devices": { "results": {} } } } }),
            json!({ "status": [] }),
        ] {
            assert_eq!(consumed(&claim).len(), 0, "{claim}");
        }
        let rubbish = claim(vec![json!(1), json!(null), json!({ "driver": [] })]);
        assert_eq!(consumed(&rubbish).len(), 1);
    }

    #[test]
    fn administrative_access_consumes_nothing() {
        let mut admin = result(json!(null));
        admin["adminAccess"] = json!(true);
        assert_eq!(of(vec![admin.clone()]), Some(Consumed::Nothing));
        let both = vec![admin.clone(), result(json!({ "memory": "1Gi" }))];
        assert_eq!(of(both), Some(Consumed::Mib(Mib(1024))));
        admin["adminAccess"] = json!("true");
        assert_eq!(of(vec![admin]), Some(Consumed::Whole));
    }

    #[test]
    fn thousands_of_results_hold_the_whole_device() {
        let many = vec![result(json!({ "memory": "1Gi" })); 5000];
        assert_eq!(of(many), Some(Consumed::Whole));
        let most = vec![result(json!({ "memory": "16Ti" })); 32];
        assert_eq!(of(most), Some(Consumed::Mib(Mib(32 * 16_777_216))));
    }
}
