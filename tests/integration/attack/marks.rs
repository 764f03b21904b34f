//! The changes that an extender may make to nodes in order to mark them while it keeps places there.

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options};
use serde_json::{Value, json};

use super::{Refused, Taken, account, row, run};
use crate::install::install;
use crate::support::{ACCOUNT, SYSTEM};

const STRAY: &str = "not the extender's to write";

#[tokio::test]
async fn a_fallen_extender_marks_nodes_and_changes_nothing_else_of_them() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let case = Case::new(&cluster, "marks").await?;
    let [(ca_name, ca), (who, karpenter)] = names::SPARE_NODE;
    let noted = |labels: &[(&str, &str)], notes: &[(&str, &str)]| {
        let mut node = case.node("n", &[]);
        for (key, value) in labels {
            node = node.label(key, value);
        }
        let notes = notes.iter();
        let notes = notes.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let notes = notes.collect();
        node.with_node(|node| node.metadata.annotations = Some(notes))
    };
    let named = |name: &str, mut node: gpustow_testkit::GpuNodeBuilder| {
        node.node.metadata.name = Some(case.node_name(name));
        node
    };
    for (name, node) in [
        ("plain", noted(&[], &[("example.com/a", "b")])),
        ("theirs", noted(&[], &[(ca, "true"), (karpenter, "true")])),
        (
            "ours",
            noted(
                &[(names::RESERVED_LABEL, who)],
                &[(ca, "true"), (karpenter, "true")],
            ),
        ),
    ] {
        named(name, node).create(&case.client).await?;
    }
    let note = |key: &str, value: Value| json!({ "metadata": { "annotations": { key: value } } });
    let label = |key: &str, value: Value| json!({ "metadata": { "labels": { key: value } } });
    let both = |marks: &[(&str, Value)], name: Value| {
        let marks = marks.iter();
        let marks: serde_json::Map<_, _> = marks
            .map(|(key, value)| ((*key).to_owned(), value.clone()))
            .collect();
        json!({ "metadata": { "annotations": marks, "labels": { names::RESERVED_LABEL: name } } })
    };
    let yes = || json!("true");
    let both_names = format!("{ca_name}_{who}");
    let tries = [
        // A label by itself claims annotations that others wrote.
        (
            "label another's annotations",
            "theirs",
            label(names::RESERVED_LABEL, json!(who)),
            Refused(STRAY),
        ),
        (
            "label what is not there",
            "plain",
            label(names::RESERVED_LABEL, json!(who)),
            Refused(STRAY),
        ),
        (
            "mark, and label more",
            "plain",
            both(&[(ca, yes())], json!(both_names)),
            Refused(STRAY),
        ),
        (
            "mark, and label less",
            "plain",
            both(&[(ca, yes()), (karpenter, yes())], json!(who)),
            Refused(STRAY),
        ),
        (
            "mark, and label something else",
            "plain",
            both(&[(karpenter, yes())], json!("x")),
            Refused(STRAY),
        ),
        (
            "mark",
            "plain",
            both(&[(ca, yes()), (karpenter, yes())], json!(both_names)),
            Taken,
        ),
        (
            "unlabel alone",
            "ours",
            label(names::RESERVED_LABEL, Value::Null),
            Refused(STRAY),
        ),
        (
            "unmark alone",
            "ours",
            note(karpenter, Value::Null),
            Refused(STRAY),
        ),
        (
            "label more than it marked",
            "ours",
            label(names::RESERVED_LABEL, json!(both_names)),
            Refused(STRAY),
        ),
        (
            "unmark more than it marked",
            "ours",
            both(&[(ca, Value::Null), (karpenter, Value::Null)], Value::Null),
            Refused(STRAY),
        ),
        (
            "unmark what it marked",
            "ours",
            both(&[(karpenter, Value::Null)], Value::Null),
            Taken,
        ),
        (
            "unmark what it did not",
            "ours",
            note(ca, Value::Null),
            Refused(STRAY),
        ),
        (
            "unmark another's",
            "theirs",
            note(karpenter, Value::Null),
            Refused(STRAY),
        ),
        (
            "overrule another's",
            "theirs",
            note(karpenter, json!("false")),
            Refused(STRAY),
        ),
        (
            "mark otherwise",
            "plain",
            note(ca, json!("false")),
            Refused(STRAY),
        ),
        (
            "another annotation",
            "plain",
            note("example.com/a", json!("c")),
            Refused(STRAY),
        ),
        (
            "no annotation",
            "plain",
            note("example.com/a", Value::Null),
            Refused(STRAY),
        ),
        (
            "another label",
            "plain",
            label("kubernetes.io/hostname", json!("m")),
            Refused(STRAY),
        ),
        (
            "a taint",
            "plain",
            json!({ "spec": { "taints": [{ "key": "a", "effect": "NoSchedule" }] } }),
            Refused(STRAY),
        ),
        (
            "cordon",
            "plain",
            json!({ "spec": { "unschedulable": true } }),
            Refused(STRAY),
        ),
        (
            "a finalizer",
            "plain",
            json!({ "metadata": { "finalizers": ["example.com/f"] } }),
            Refused(STRAY),
        ),
    ];
    let path = |name: &str, rest: &str| format!("/api/v1/nodes/{}{rest}", case.node_name(name));
    let mut rows: Vec<_> = tries
        .into_iter()
        .map(|(trick, name, body, verdict)| row(trick, "PATCH", path(name, ""), body, verdict))
        .collect();
    let status = json!({ "status": { "capacity": { names::GPU_MEM: "1" } } });
    let forbidden = || Refused("forbidden");
    rows.push(row(
        "capacity",
        "PATCH",
        path("plain", "/status"),
        status,
        forbidden(),
    ));
    rows.push(row(
        "delete",
        "DELETE",
        path("plain", ""),
        json!({}),
        forbidden(),
    ));
    let client = account(&cluster, SYSTEM, ACCOUNT).await?;
    run("the extender", &client, rows).await?;
    case.end().await
}
