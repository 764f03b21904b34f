//! What gpustow changes in a pod that asks for GPU memory when it is created: the same as the policies
//! gpustow-device-env and gpustow-pod-defaults, for API servers that change pods by webhooks alone. It works
//! on the pod as it came, so that fields stay that this version does not know. It refuses nothing: the policy
//! gpustow-requests judges what comes of it.

mod mps;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

use gpustow_api::config::Requests;
use gpustow_api::limit::{self, Enforce};
use gpustow_api::{QueueFrom, names, quantity};

use crate::adopt::{Terms, translate};

/// The most containers of all kinds that are looked at.
pub const MAX_CONTAINERS: usize = 256;
/// The most environment variables and limits in all of them.
pub const MAX_VARIABLES: usize = 2048;

/// One request to the API server.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// The pod as it would be.
    pub pod: &'a Value,
    /// The pod as it is, if it is there.
    pub before: Option<&'a Value>,
    /// Does the request bring ephemeral containers, and nothing else?
    pub debugs: bool,
}

/// The JSON patch for a pod, where gpu-mem is called `resource`; empty if there is nothing to change.
#[must_use]
pub fn patch(change: Change<'_>, resource: &str, requests: &Requests) -> Vec<Value> {
    let mut patch = Patch {
        pod: change.pod.clone(),
        operations: Vec::new(),
    };
    give(&mut patch, change, resource, requests);
    patch.operations
}

/// The JSON patch for a new pod of a namespace whose requests are translated on these terms: [`patch`] of the translated
/// pod is a part of it. Empty if nothing is translated, or if it cannot be: the policy gpustow-adopt refuses such pods.
#[must_use]
pub fn adopt(pod: &Value, terms: Terms, resource: &str, requests: &Requests) -> Vec<Value> {
    let read = serde_json::from_value::<Pod>(pod.clone()).ok();
    let read = read.filter(|_| is_bounded(pod));
    let new = read.and_then(|it| translate(&it, terms, resource).ok().flatten());
    let Some(new) = new.and_then(|it| serde_json::to_value(it).ok()) else {
        return Vec::new();
    };
    let mut patch = Patch {
        pod: pod.clone(),
        operations: Vec::new(),
    };
    patch.put(
        "add",
        "/metadata/annotations",
        new["metadata"]["annotations"].clone(),
    );
    if pod["spec"]["schedulerName"] != new["spec"]["schedulerName"] {
        let name = new["spec"]["schedulerName"].clone();
        patch.put("replace", "/spec/schedulerName", name);
    }
    for kind in ["initContainers", "containers"] {
        for path in paths(pod, kind, |_| true) {
            for list in ["limits", "requests"] {
                let at = format!("{path}/resources/{list}");
                if let Some(amounts) = new.pointer(&at)
                    && pod.pointer(&at) != Some(amounts)
                {
                    patch.put("add", &at, amounts.clone());
                }
            }
            // What is translated adds variables at the end.
            let at = format!("{path}/env");
            let count = |pod: &Value| pod.pointer(&at)?.as_array().map(Vec::len);
            let variables = new.pointer(&at).and_then(Value::as_array);
            let variables = variables.into_iter().flatten();
            for variable in variables.skip(count(pod).unwrap_or(0)) {
                patch.give_variable(&path, "-", variable.clone());
            }
        }
    }
    let change = Change {
        pod,
        before: None,
        debugs: false,
    };
    give(&mut patch, change, resource, requests);
    patch.operations
}

/// The JSON patch that has a pod queued; empty if it has the gate already, or none of the entries applies to it.
#[must_use]
pub fn gate(pod: &Value, resource: &str, from: &[QueueFrom]) -> Vec<Value> {
    let priority = pod["spec"]["priority"].as_i64();
    let priority = priority.and_then(|it| it.try_into().ok()).unwrap_or(0);
    let size = size(pod, resource);
    if !from.iter().any(|it| it.queues(priority, size)) {
        return Vec::new();
    }
    let ours = json!({ "name": names::GATE });
    let gates = list(pod, "schedulingGates");
    if gates.iter().any(|gate| gate["name"] == names::GATE) {
        return Vec::new();
    }
    let (path, value) = if gates.is_empty() {
        ("/spec/schedulingGates", json!([ours]))
    } else {
        ("/spec/schedulingGates/-", ours)
    };
    vec![json!({ "op": "add", "path": path, "value": value })]
}

/// A pod and what was done to it.
struct Patch {
    pod: Value,
    operations: Vec<Value>,
}

impl Patch {
    /// Puts `value` at `path`, whose last part is the key of an object, a place in a list, or `-`, its
    /// end.
    fn put(&mut self, operation: &str, path: &str, value: Value) {
        let Some((parent, key)) = path.rsplit_once('/') else {
            return;
        };
        match self.pod.pointer_mut(parent) {
            Some(Value::Array(list)) => {
                let at = key.parse().unwrap_or(list.len()).min(list.len());
                match list.get_mut(at).filter(|_| operation == "replace") {
                    Some(old) => *old = value.clone(),
                    None => list.insert(at, value.clone()),
                }
            }
            Some(Value::Object(fields)) => {
                fields.insert(key.replace("~1", "/").replace("~0", "~"), value.clone());
            }
            _ => return,
        }
        self.operations
            .push(json!({ "op": operation, "path": path, "value": value }));
    }

    fn give_variable(&mut self, container: &str, place: &str, variable: Value) {
        let env = format!("{container}/env");
        if !self.pod.pointer(&env).is_some_and(Value::is_array) {
            self.put("add", &env, json!([]));
        }
        self.put("add", &format!("{env}/{place}"), variable);
    }

    /// The variable `name`, which reads the annotation `key` of the container.
    fn variable(&self, container: &str, name: &str, key: &str) -> Value {
        let own = self
            .pod
            .pointer(container)
            .and_then(|it| it["name"].as_str());
        let field = format!("metadata.annotations['{key}{}']", own.unwrap_or_default());
        let from = json!({ "fieldRef": { "apiVersion": "v1", "fieldPath": field } });
        json!({ "name": name, "valueFrom": from })
    }

    /// A container that was given no devices gets those that it requests.
    fn give_instead_of_void(&mut self, container: &str) {
        let env = format!("{container}/env");
        let is_void = |it: &Value| it["name"] == names::VISIBLE_DEVICES && it["value"] == "void";
        let all = self.pod.pointer(&env).and_then(Value::as_array);
        if let Some(index) = all.and_then(|all| all.iter().position(is_void)) {
            let variable = self.variable(container, names::VISIBLE_DEVICES, names::DEVICES_OF);
            self.put("replace", &format!("{env}/{index}"), variable);
        }
    }

    /// Gives a container that variable.
    fn tell(&mut self, container: &str, place: &str, name: &str, key: &str) {
        let variable = self.variable(container, name, key);
        self.give_variable(container, place, variable);
    }
}

/// What every pod that asks is given.
fn give(patch: &mut Patch, change: Change<'_>, resource: &str, requests: &Requests) {
    let applies = |pod: &Value| is_bounded(pod) && asks(pod, resource);
    if applies(&patch.pod) {
        give_devices(patch, change, resource);
    }
    if !change.debugs && applies(&patch.pod) {
        give_defaults(patch, resource, requests);
    }
}

fn give_devices(patch: &mut Patch, change: Change<'_>, resource: &str) {
    if !change.debugs {
        if !patch.pod["metadata"]["labels"].is_object() {
            patch.put("add", "/metadata/labels", json!({}));
        }
        let label = names::MANAGED_LABEL.replace('~', "~0").replace('/', "~1");
        patch.put("add", &format!("/metadata/labels/{label}"), json!("true"));
        if patch.pod["spec"]["schedulerName"] == "default-scheduler" {
            patch.put("replace", "/spec/schedulerName", json!(names::SCHEDULER));
        }
    }
    let brought = if change.debugs {
        let old = change.before.map(|pod| list(pod, "ephemeralContainers"));
        let old = old.unwrap_or_default();
        let is_new = |it: &Value| !old.iter().any(|old| old["name"] == it["name"]);
        paths(&patch.pod, "ephemeralContainers", is_new)
    } else {
        let init = paths(&patch.pod, "initContainers", |_| true);
        let main = paths(&patch.pod, "containers", |_| true);
        [init, main].concat()
    };
    let of = |path: &String| patch.pod.pointer(path).cloned().unwrap_or_default();
    let told = brought.iter().filter(|path| {
        let it = of(path);
        !change.debugs && wants(&it, resource) && !asks_nvidia(&it)
    });
    let told: Vec<_> = told.cloned().collect();
    let open = brought.into_iter().filter(|path| {
        let it = of(path);
        !has_variable(&it, names::VISIBLE_DEVICES) && !asks_nvidia(&it)
    });
    // Those that ask come first, as the policy has it.
    let (asking, idle): (Vec<_>, Vec<_>) = open.partition(|path| wants(&of(path), resource));
    // The API server may translate a request of another sharer after its container was given no devices.
    if note(&patch.pod, names::ADOPTED).is_some() {
        for path in &told {
            patch.give_instead_of_void(path);
        }
    }
    for (name, key) in [
        (names::MEM_SHARE, names::SHARE_OF),
        (names::MEM_MIB, names::MIB_OF),
    ] {
        for path in &told {
            let it = patch.pod.pointer(path);
            if !it.is_some_and(|it| has_variable(it, name)) {
                patch.tell(path, "0", name, key);
            }
        }
    }
    for path in asking {
        patch.tell(&path, "-", names::VISIBLE_DEVICES, names::DEVICES_OF);
    }
    for path in idle {
        let variable = json!({ "name": names::VISIBLE_DEVICES, "value": "void" });
        patch.give_variable(&path, "-", variable);
    }
    if note(&patch.pod, names::ENFORCE) == Some(Enforce::Driver.into()) && !is_exclusive(&patch.pod)
    {
        give_limits(patch, &told, resource);
    }
    mps::give(patch, &told);
}

/// Gives each of these containers its limit, in MiB of each of its GPUs.
fn give_limits(patch: &mut Patch, told: &[String], resource: &str) {
    let mut literals = Vec::new();
    for path in told {
        let it = patch.pod.pointer(path).cloned().unwrap_or_default();
        let of = |own: &str, all: &str| {
            let own = format!("{own}{}", it["name"].as_str().unwrap_or_default());
            note(&patch.pod, &own).or_else(|| note(&patch.pod, all))
        };
        let gpus = of(names::GPU_COUNT_OF, names::GPU_COUNT).unwrap_or("1");
        let gpus = gpus.parse().ok().filter(|gpus| *gpus > 0).unwrap_or(1);
        let asked = it["resources"]["limits"][resource].as_str();
        let asked = asked.and_then(|it| quantity::whole(&Quantity(it.to_owned())));
        let said = of(names::MEM_LIMIT_OF, names::MEM_LIMIT);
        literals.extend(limit::literal(said, asked, gpus).map(|mib| (path, mib)));
    }
    for (path, mib) in &literals {
        give_literal(patch, path, names::MEMORY_LIMIT, mib);
    }
    for (path, _) in &literals {
        give_literal(patch, path, names::MEMORY_REQUEST, "0");
    }
}

fn give_literal(patch: &mut Patch, path: &str, name: &str, value: &str) {
    let it = patch.pod.pointer(path);
    if !it.is_some_and(|it| has_variable(it, name)) {
        patch.give_variable(path, "-", json!({ "name": name, "value": value }));
    }
}

/// The value of an annotation.
fn note<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod["metadata"]["annotations"][key].as_str()
}

fn is_exclusive(pod: &Value) -> bool {
    note(pod, names::EXCLUSIVE) == Some("true")
}

/// Does a container ask for a part of its GPUs, whatever their size?
fn is_relative(pod: &Value) -> bool {
    let all = list(pod, "containers")
        .iter()
        .chain(list(pod, "initContainers"));
    let mut own = all.filter_map(|it| it["name"].as_str());
    note(pod, names::GPU_MEM_PERCENTAGE).is_some()
        || own.any(|name| note(pod, &format!("{}{name}", names::GPU_MEM_PERCENTAGE_OF)).is_some())
}

fn give_defaults(patch: &mut Patch, resource: &str, requests: &Requests) {
    if !requests.runtime_class_name.is_empty() && patch.pod["spec"]["runtimeClassName"].is_null() {
        let class = json!(requests.runtime_class_name);
        patch.put("add", "/spec/runtimeClassName", class);
    }
    let enforce = requests.enforce;
    if enforce != Enforce::default()
        && note(&patch.pod, names::ENFORCE).is_none()
        && !is_exclusive(&patch.pod)
        && !is_relative(&patch.pod)
    {
        if !patch.pod["metadata"]["annotations"].is_object() {
            patch.put("add", "/metadata/annotations", json!({}));
        }
        let key = names::ENFORCE.replace('~', "~0").replace('/', "~1");
        patch.put(
            "add",
            &format!("/metadata/annotations/{key}"),
            json!(enforce.to_string()),
        );
        if enforce == Enforce::Driver {
            let told = |it: &Value| wants(it, resource) && !asks_nvidia(it);
            let init = paths(&patch.pod, "initContainers", told);
            let main = paths(&patch.pod, "containers", told);
            give_limits(patch, &[init, main].concat(), resource);
        }
    }
    if requests.driver_capabilities.is_empty() {
        return;
    }
    let open = |it: &Value| wants(it, resource) && !has_variable(it, names::DRIVER_CAPABILITIES);
    let init = paths(&patch.pod, "initContainers", open);
    let main = paths(&patch.pod, "containers", open);
    for path in [init, main].concat() {
        let variable =
            json!({ "name": names::DRIVER_CAPABILITIES, "value": requests.driver_capabilities });
        patch.give_variable(&path, "-", variable);
    }
}

/// The containers of a kind, or what else is a list of `spec`.
fn list<'a>(pod: &'a Value, kind: &str) -> &'a [Value] {
    pod["spec"][kind].as_array().map_or(&[], Vec::as_slice)
}

/// The paths of those for which `of` is true.
fn paths(pod: &Value, kind: &str, of: impl Fn(&Value) -> bool) -> Vec<String> {
    let all = list(pod, kind).iter().enumerate();
    all.filter(|(_, it)| of(it))
        .map(|(index, _)| format!("/spec/{kind}/{index}"))
        .collect()
}

fn limits(container: &Value) -> Option<&Map<String, Value>> {
    container["resources"]["limits"].as_object()
}

fn wants(container: &Value, resource: &str) -> bool {
    let limit = limits(container).and_then(|limits| limits.get(resource));
    limit.is_some_and(|limit| limit != "0")
}

fn asks(pod: &Value, resource: &str) -> bool {
    asking(pod, resource).next().is_some()
}

fn asking<'a>(pod: &'a Value, resource: &str) -> impl Iterator<Item = &'a Value> {
    let all = list(pod, "containers").iter();
    let all = all.chain(list(pod, "initContainers"));
    all.filter(move |it| wants(it, resource))
}

/// MiB per GPU and GPUs of a pod that requests both in numbers and for one container.
fn size(pod: &Value, resource: &str) -> Option<(u64, u64)> {
    let mut asking = asking(pod, resource);
    let (Some(one), None) = (asking.next(), asking.next()) else {
        return None;
    };
    let name = one["name"].as_str().unwrap_or_default();
    let notes = &pod["metadata"]["annotations"];
    let of = [names::GPU_COUNT_OF, names::GPU_MEM_PERCENTAGE_OF].map(|of| format!("{of}{name}"));
    let others = [names::EXCLUSIVE, names::GPU_MEM_PERCENTAGE].into_iter();
    if others
        .chain(of.iter().map(String::as_str))
        .any(|key| notes.get(key).is_some())
    {
        return None;
    }
    let gpus = notes
        .get(names::GPU_COUNT)
        .map_or(Some("1"), Value::as_str)?;
    let is_number = gpus.len() <= 2 && gpus.bytes().all(|it| it.is_ascii_digit());
    let gpus = is_number
        .then(|| gpus.parse().ok())?
        .filter(|gpus| *gpus > 0)?;
    // The API server writes 5000 as 5k.
    let mib = limits(one)?.get(resource)?.as_str()?;
    let mib = quantity::whole(&Quantity(mib.to_owned()))?;
    Some((mib / gpus, gpus))
}

fn asks_nvidia(container: &Value) -> bool {
    let mut limits = limits(container).into_iter().flatten();
    limits.any(|(name, limit)| name.starts_with("nvidia.com/") && limit != "0")
}

fn has_variable(container: &Value, name: &str) -> bool {
    let mut env = container["env"].as_array().into_iter().flatten();
    env.any(|it| it["name"] == name)
}

fn is_bounded(pod: &Value) -> bool {
    let kinds = ["containers", "initContainers", "ephemeralContainers"];
    let all = kinds.map(|kind| list(pod, kind));
    let brought = all.iter().copied().flatten().map(|it| {
        let env = it["env"].as_array().map_or(0, Vec::len);
        env + limits(it).map_or(0, Map::len)
    });
    all.iter().map(|list| list.len()).sum::<usize>() <= MAX_CONTAINERS
        && brought.sum::<usize>() <= MAX_VARIABLES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pod: &Value) -> Vec<Value> {
        let change = Change {
            pod,
            before: None,
            debugs: false,
        };
        let requests = Requests {
            runtime_class_name: "nvidia".to_owned(),
            driver_capabilities: "compute".to_owned(),
            ..Requests::default()
        };
        patch(change, names::GPU_MEM, &requests)
    }

    #[test]
    fn it_writes_its_own_paths_alone_and_leaves_what_it_does_not_know() {
        let asking = json!({
            "name": "a", "resources": { "limits": { names::GPU_MEM: "1" }, "later": {} },
            "fieldOfALaterVersion": { "x": [1] },
        });
        let pod = json!({ "metadata": { "later": 1 }, "spec": {
            "schedulerName": "default-scheduler", "containers": [asking, { "name": "b" }],
            "alsoLater": true,
        }});
        let written: Vec<_> = of(&pod)
            .into_iter()
            .map(|it| it["path"].as_str().unwrap_or_default().to_owned())
            .collect();
        let expected = [
            "/metadata/labels",
            "/metadata/labels/gpustow.dev~1managed",
            "/spec/schedulerName",
            "/spec/containers/0/env",
            "/spec/containers/0/env/0",
            "/spec/containers/0/env/0",
            "/spec/containers/0/env/-",
            "/spec/containers/1/env",
            "/spec/containers/1/env/-",
            "/spec/runtimeClassName",
            "/spec/containers/0/env/-",
        ];
        assert_eq!(written, expected);
    }

    #[test]
    fn whatever_it_is_given_it_answers() {
        for pod in [
            json!(null),
            json!([]),
            json!({ "spec": { "containers": {} } }),
            json!({ "spec": { "containers": [null, 1, { "env": 1, "resources": [] }] } }),
            json!({ "spec": { "containers": [{ "name": "plain" }] } }),
        ] {
            assert_eq!(of(&pod), Vec::<Value>::new(), "{pod}");
        }
        let asks = json!({ "resources": { "limits": { names::GPU_MEM: 1 } } });
        let odd = json!({ "spec": { "containers": [asks, { "env": "no list" }, null] } });
        assert!(!of(&odd).is_empty());
    }
}
