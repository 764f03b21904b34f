//! A pod and the JSON patch that makes it of the one that came.

use gpustow_api::names;
use serde_json::{Value, json};

/// A pod and the changes to it.
#[derive(Debug)]
pub struct Patch {
    /// The pod as it is by now.
    pub pod: Value,
    /// The changes, as a JSON patch.
    pub operations: Vec<Value>,
}

impl Patch {
    pub(crate) fn new(pod: &Value) -> Self {
        Self {
            pod: pod.clone(),
            operations: Vec::new(),
        }
    }

    /// Puts `value` at `path`, whose last part is the key of an object, a place in a list, or `-`, its end.
    pub(crate) fn put(&mut self, operation: &str, path: &str, value: Value) {
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

    /// Sets a key of the object at `parent`, which is made if it is not there; nothing if the key has the value
    /// already.
    pub(crate) fn set(&mut self, parent: &str, key: &str, value: Value) {
        if !self.pod.pointer(parent).is_some_and(Value::is_object) {
            self.put("add", parent, json!({}));
        }
        let is = self.pod.pointer(parent).and_then(|it| it.get(key));
        if is != Some(&value) {
            let path = format!("{parent}/{}", escaped(key));
            self.put("add", &path, value);
        }
    }

    /// Takes a key out of the object at `parent`, if it is there.
    pub(crate) fn take(&mut self, parent: &str, key: &str) {
        let fields = self
            .pod
            .pointer_mut(parent)
            .and_then(|it| it.as_object_mut());
        if fields.is_some_and(|it| it.remove(key).is_some()) {
            let path = format!("{parent}/{}", escaped(key));
            self.operations
                .push(json!({ "op": "remove", "path": path }));
        }
    }

    pub(crate) fn annotate(&mut self, key: &str, value: &str) {
        self.set("/metadata/annotations", key, json!(value));
    }

    /// Sets a container's request and limit.
    pub(crate) fn request(&mut self, container: &str, resource: &str, amount: u64) {
        let resources = format!("{container}/resources");
        if !self.pod.pointer(&resources).is_some_and(Value::is_object) {
            self.put("add", &resources, json!({}));
        }
        for list in ["limits", "requests"] {
            let list = format!("{resources}/{list}");
            self.set(&list, resource, json!(amount.to_string()));
        }
    }

    /// Gives a container a variable, unless it has one of the name.
    pub(crate) fn give(&mut self, container: &str, place: &str, variable: Value) {
        let env = format!("{container}/env");
        if !self.pod.pointer(&env).is_some_and(Value::is_array) {
            self.put("add", &env, json!([]));
        }
        let all = self.pod.pointer(&env).and_then(Value::as_array);
        let name = &variable["name"];
        if !all.into_iter().flatten().any(|it| it["name"] == *name) {
            self.put("add", &format!("{env}/{place}"), variable);
        }
    }

    pub(crate) fn give_text(&mut self, container: &str, name: &str, value: &str) {
        self.give(container, "-", json!({ "name": name, "value": value }));
    }

    /// Gives a container a variable that reads its annotation with this beginning.
    pub(crate) fn tell(&mut self, container: &str, place: &str, name: &str, key: &str) {
        let own = self.pod.pointer(container);
        let own = own.and_then(|it| it["name"].as_str()).unwrap_or_default();
        let field = format!("metadata.annotations['{key}{own}']");
        let from = json!({ "fieldRef": { "apiVersion": "v1", "fieldPath": field } });
        let variable = json!({ "name": name, "valueFrom": from });
        self.give(container, place, variable);
    }

    /// Gives a container no device.
    pub(crate) fn give_void(&mut self, container: &str) {
        self.give_text(container, names::VISIBLE_DEVICES, "void");
    }
}

/// A key as a part of a path.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}
