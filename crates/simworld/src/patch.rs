//! The effect of writes on objects.

use serde_json::{Map, Value};

use crate::objects::{Refusal, conflict};

/// The UID and the version in a write must match the object.
pub(crate) fn preconditions(meta: &Value, now: &Value) -> Result<(), Refusal> {
    for field in ["uid", "resourceVersion"] {
        let (wanted, is) = (&meta[field], &now["metadata"][field]);
        if wanted.as_str().is_some_and(|text| !text.is_empty()) && wanted != is {
            return Err(conflict(&format!("Precondition failed: {field} {is}")));
        }
    }
    Ok(())
}

/// A strategic merge: a condition of the same type keeps the fields that the patch does not name.
pub(crate) fn conditions_of(old: &Value, new: &[Value]) -> Value {
    let mut all = old.as_array().cloned().unwrap_or_default();
    for patch in new {
        match all.iter_mut().find(|it| it["type"] == patch["type"]) {
            Some(condition) => merge(condition, patch),
            None => all.push(patch.clone()),
        }
    }
    Value::Array(all)
}

/// RFC 7396.
pub fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        if !patch.is_null() {
            *into = patch.clone();
        }
        return;
    };
    if !into.is_object() {
        *into = Value::Object(Map::new());
    }
    let Some(into) = into.as_object_mut() else {
        return;
    };
    for (key, value) in patch {
        // Of preconditions nothing is written.
        match value {
            Value::Null => drop(into.remove(key)),
            value => merge(into.entry(key.clone()).or_insert(Value::Null), value),
        }
    }
}
