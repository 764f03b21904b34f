//! The fields of the GpustowConfig, from the schema of its resource.

use anyhow::{Context as _, Result};
use gpustow_api::GpustowConfig;
use kube::CustomResourceExt as _;
use serde_json::{Map, Value};

use super::{Table, code, sentence, titled};

/// The page.
pub(super) fn page() -> Result<String> {
    let crd = serde_json::to_value(GpustowConfig::crd())?;
    let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let intro = "These are the fields of `spec` of the `GpustowConfig` named `gpustow`. Times are Go durations such as `90s`, \
                 `10m` or `1h30m`. A field that you leave out has its default. [Configuration](../configuration.md) shows how to \
                 choose them.";
    let title = "Fields of the GpustowConfig";
    let mut page = titled(title, "crates/api/src/config.rs", intro);
    for (group, schema) in properties(spec)? {
        page += &format!(
            "\n## {group}\n\n{}\n",
            sentence(text(schema, "description"))
        );
        let mut table = Table::new(["field", "default", "values", "effect"]);
        for (field, schema) in properties(schema)? {
            let about = sentence(text(schema, "description"));
            let default = &spec["properties"][group]["default"][field];
            table.row([
                code(&format!("{group}.{field}")),
                code(&as_written(default)),
                values(schema),
                about,
            ]);
        }
        page += &table.0;
    }
    Ok(page)
}

fn properties(schema: &Value) -> Result<&Map<String, Value>> {
    schema["properties"]
        .as_object()
        .context("the schema has no properties")
}

fn text<'a>(schema: &'a Value, key: &str) -> &'a str {
    schema[key].as_str().unwrap_or_default()
}

/// The values that the API server accepts.
fn values(schema: &Value) -> String {
    let listed = |words: &Vec<Value>| {
        let words = words.iter().filter_map(Value::as_str);
        words.map(code).collect::<Vec<_>>().join(", ")
    };
    if let Some(words) = schema["enum"].as_array() {
        return listed(words);
    }
    if let Some(rules) = schema["x-kubernetes-validations"].as_array() {
        let rules = rules.iter().map(|rule| text(rule, "message"));
        return rules.collect::<Vec<_>>().join(", ");
    }
    let number = |key: &str| schema[key].as_f64().map(|it| it.to_string());
    match (number("minimum"), number("maximum")) {
        (Some(least), Some(most)) => format!("{least} to {most}"),
        _ if schema["type"] == "boolean" => listed(&vec!["true".into(), "false".into()]),
        _ => String::new(),
    }
}

/// A default as people write it: `4h` for `14400s`.
fn as_written(default: &Value) -> String {
    let seconds = default.as_str().map(|text| text.replace("0ns", "0s"));
    let seconds = seconds.and_then(|text| text.strip_suffix('s')?.parse().ok());
    match seconds {
        Some(0) => "0s".to_owned(),
        Some(seconds) if seconds % 3600 == 0_u64 => format!("{}h", seconds / 3600),
        Some(seconds) if seconds % 60 == 0 => format!("{}m", seconds / 60),
        Some(seconds) => format!("{seconds}s"),
        None => default.to_string(),
    }
}
