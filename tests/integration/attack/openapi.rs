//! This API server's own description: its doors, and the fields behind them.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kube::Client;
use serde_json::{Value, json};

/// The OpenAPI document of the core group.
pub(crate) struct Document(Value);

impl Document {
    pub(crate) async fn read(client: &Client) -> Result<Document> {
        Document::read_at(client, "/openapi/v3/api/v1").await
    }

    pub(crate) async fn read_at(client: &Client, url: &str) -> Result<Document> {
        let request = axum::http::Request::get(url).body(Vec::new())?;
        Ok(Document(client.request(request).await?))
    }

    pub(crate) async fn get(&self, client: &Client, path: &str) -> Result<Value> {
        let request = axum::http::Request::get(path).body(Vec::new())?;
        Ok(client.request(request).await?)
    }

    pub(crate) fn schema(&self, name: &str) -> Option<&Value> {
        self.0["components"]["schemas"].get(name)
    }

    /// The paths at and below this path that accept a patch.
    pub(crate) fn doors(&self, below: &str) -> Result<Vec<String>> {
        let paths = self.0["paths"].as_object().context("no paths")?;
        let patched = paths.iter().filter(|(_, verbs)| !verbs["patch"].is_null());
        let doors = patched.filter_map(|(path, _)| path.strip_prefix(below));
        Ok(doors.map(str::to_owned).collect())
    }

    /// The names of all schemas that this part of the document refers to, directly or through other schemas.
    pub(crate) fn reached(&self, from: &Value) -> BTreeSet<String> {
        let mut reached = BTreeSet::new();
        let mut waiting = references(from);
        while let Some(name) = waiting.pop() {
            if reached.insert(name.clone()) {
                waiting.extend(self.schema(&name).map(references).unwrap_or_default());
            }
        }
        reached
    }

    /// Every path, and its methods.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.0["paths"].as_object().into_iter().flatten()
    }

    /// Tries to change every field of the status of `which`. Fields that are not `allowed` stay as they were, or the
    /// API server refuses.
    pub(crate) async fn only(
        &self,
        client: &Client,
        path: &str,
        which: &str,
        allowed: &[&str],
    ) -> Result<()> {
        let fields = self
            .schema(which)
            .and_then(|schema| schema["properties"].as_object());
        let fields = fields.with_context(|| format!("{which} is not in the document"))?;
        let object = path
            .strip_suffix("/status")
            .context("no path of a status")?;
        let is = self.get(client, object).await?;
        let mut wrong = Vec::new();
        for (field, schema) in fields
            .iter()
            .filter(|(field, _)| !allowed.contains(&field.as_str()))
        {
            let change = json!({ "status": { field: sample(self, field, schema, 0) } });
            let url = format!("{path}?dryRun=All");
            let request = axum::http::Request::patch(url)
                .header("content-type", "application/merge-patch+json")
                .body(change.to_string().into_bytes())?;
            match client.request::<Value>(request).await {
                // Some that are there no more are left out without a word.
                Ok(would) if would["status"][field] == is["status"][field] => {}
                Ok(_) => wrong.push(change.to_string()),
                Err(kube::Error::Api(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        ensure!(wrong.is_empty(), "{path} takes\n{}", wrong.join("\n"));
        Ok(())
    }
}

/// The names of the schemas that are referred to here.
fn references(value: &Value) -> Vec<String> {
    match value {
        Value::Array(list) => list.iter().flat_map(references).collect(),
        Value::Object(fields) => {
            let own = fields.get("$ref").and_then(Value::as_str);
            let own = own.and_then(|path| path.rsplit('/').next());
            let inner = fields.values().flat_map(references);
            own.map(str::to_owned).into_iter().chain(inner).collect()
        }
        _ => Vec::new(),
    }
}

/// A value of this type that an object does not have yet.
pub(crate) fn sample(document: &Document, field: &str, schema: &Value, depth: usize) -> Value {
    let named = schema["$ref"]
        .as_str()
        .or_else(|| schema["allOf"][0]["$ref"].as_str());
    if let Some(name) = named.and_then(|path| path.rsplit('/').next()) {
        let schema = document.schema(name).cloned().unwrap_or_default();
        return sample(document, field, &schema, depth);
    }
    let text = || match field {
        "phase" => "Failed".to_owned(),
        "status" => "True".to_owned(),
        "ip" | "podIP" | "hostIP" => "10.9.8.7".to_owned(),
        _ => "x".to_owned(),
    };
    match schema["type"].as_str() {
        Some("string") if schema["format"] == "date-time" => json!("2026-01-01T00:00:00Z"),
        Some("string") => json!(text()),
        Some("integer") => json!(1),
        Some("boolean") => json!(true),
        Some("array") => json!([sample(document, field, &schema["items"], depth)]),
        _ if depth > 4 => json!({}),
        Some("object") if schema["properties"].is_object() => {
            let fields = schema["properties"].as_object().into_iter().flatten();
            let sampled = fields
                .map(|(field, schema)| (field.clone(), sample(document, field, schema, depth + 1)));
            Value::Object(sampled.collect())
        }
        Some("object") => {
            json!({ "x": sample(document, field, &schema["additionalProperties"], depth + 1) })
        }
        // A quantity, or a number or string.
        _ => json!("5"),
    }
}
