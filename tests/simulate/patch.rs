//! What writes make of objects.

use serde_json::{Map, Value};

use crate::server::{Refusal, conflict};

/// The UID and the version that a write says must be those of the object.
pub(crate) fn preconditions(meta: &Value, now: &Value) -> Result<(), Refusal> {
    for field in ["uid", "resourceVersion"] {
        let (wanted, is) = (&meta[field], &now["metadata"][field]);
        if wanted.as_str().is_some_and(|text| !text.is_empty()) && wanted != is {
            return Err(conflict(&format!("Precondition failed: {field} {is}")));
        }
    }
    Ok(())
}

pub(crate) fn conditions_of(old: &Value, new: &[Value]) -> Value {
    let old = old.as_array().into_iter().flatten();
    let kept = old.filter(|it| !new.iter().any(|new| new["type"] == it["type"]));
    kept.chain(new).cloned().collect()
}

/// RFC 7396.
pub(crate) fn merge(into: &mut Value, patch: &Value) {
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
