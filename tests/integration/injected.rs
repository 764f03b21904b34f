//! Pods that another policy or webhook changes too.

use anyhow::{Result, ensure};
use axum::Json;
use axum::extract::Path;
use axum::routing::post;
use gpustow_api::names;
use gpustow_serve::{Tls, serve};
use gpustow_testkit::{ControlPlane, Options, certificate, eventually};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::install::{install, installed, try_create};
use crate::policies::{asks, devices, path_of, pod};
use crate::support::SOON;
use crate::webhook::created;

/// Adds a container to pods with a label.
fn injecting(name: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": { "name": name },
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "objectSelector": { "matchLabels": { "injected-by": name } },
                "resourceRules": [{
                    "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"],
                }],
            },
            "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression":
                "object.spec.containers.exists(c, c.name == 'injected') ? [] : [JSONPatch{op: 'add', \
                 path: '/spec/containers/-', value: {'name': 'injected', 'image': 'registry.k8s.io/pause:3.10'}}]"
            } }],
        },
    })
}

/// The API server calls policies in the order of their names or in another one.
#[tokio::test]
async fn a_container_that_another_policy_adds_gets_no_devices() -> Result<()> {
    let cluster = installed().await?;
    let client = cluster.admin()?;
    for name in ["aa-injects", "zz-injects"] {
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": { "name": name },
            "spec": { "policyName": name },
        });
        for object in [injecting(name), binding] {
            cluster.apply(&object.to_string()).await?;
        }
        let mut pod = pod(json!({}), json!({ "containers": [asks("main", "8192")] }))?;
        pod.metadata.labels = Some([("injected-by".to_owned(), name.to_owned())].into());
        let mut made = eventually(SOON, "a container is added", async || {
            let made = try_create(&client, &pod).await?;
            ensure!(devices(&made).len() == 2, "one container alone");
            Ok(made)
        })
        .await?;
        let expected = [
            ("main".to_owned(), vec![path_of("main")]),
            ("injected".to_owned(), vec!["void".to_owned()]),
        ];
        assert_eq!(devices(&made), expected, "{name}");
        made.metadata.uid = None;
        made.metadata.managed_fields = None;
        let copy = try_create(&client, &made).await?;
        assert_eq!(copy.spec, made.spec, "{name}");
    }
    Ok(())
}

/// Changes that a webhook makes, by the path at which it is called.
fn changes(path: &str) -> Value {
    let limits = |key: &str, amount: &str| {
        let add = json!({ "limits": { key: amount }, "requests": { key: amount } });
        json!([{ "op": "add", "path": "/spec/containers/0/resources", "value": add }])
    };
    let set = |at: &str, value: Value| json!([{ "op": "add", "path": at, "value": value }]);
    match path {
        "gives" => limits(names::GPU_MEM, "4096"),
        "unmarks" => set("/metadata/labels", json!({ "later": "unmarks" })),
        "moves" => set("/spec/schedulerName", json!("default-scheduler")),
        "shows" => {
            let all = json!({ "name": names::VISIBLE_DEVICES, "value": "all" });
            set("/spec/containers/1/env/-", all)
        }
        "forgets" => set("/spec/containers/0/env", json!([])),
        "privileges" => {
            let all = json!({ "privileged": true });
            set("/spec/containers/1/securityContext", all)
        }
        _ => set(
            "/metadata/annotations",
            json!({ "example.com/seen": "yes" }),
        ),
    }
}

/// A webhook that changes pods, each by the value of its label `later`, after gpustow's.
async fn later(cluster: &ControlPlane) -> Result<()> {
    let authority = certificate(cluster.dir(), "127.0.0.1")?;
    let tls = Tls::of(cluster.dir())?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let answer = async |Path(path): Path<String>, Json(review): Json<Value>| {
        let patch = ByteString(changes(&path).to_string().into_bytes());
        let response = json!({ "uid": review["request"]["uid"], "allowed": true,
            "patchType": "JSONPatch", "patch": patch });
        Json(
            json!({ "apiVersion": review["apiVersion"], "kind": review["kind"], "response": response }),
        )
    };
    let router = axum::Router::new().route("/{path}", post(answer));
    tokio::spawn(serve(listener, Some(tls), router));
    let webhooks = LATER.map(|path| {
        let pods = json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] });
        json!({ "name": format!("{path}.example.com"), "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "reinvocationPolicy": "IfNeeded", "objectSelector": { "matchLabels": { "later": path } }, "rules": [pods],
            "clientConfig": { "url": format!("https://127.0.0.1:{port}/{path}"),
                "caBundle": ByteString(authority.clone().into_bytes()) } })
    });
    let configuration = json!({ "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration", "metadata": { "name": "zzz-later" }, "webhooks": webhooks });
    cluster.apply(&configuration.to_string()).await.map(drop)
}

const LATER: [&str; 7] = [
    "gives",
    "unmarks",
    "moves",
    "shows",
    "forgets",
    "privileges",
    "notes",
];

#[tokio::test]
async fn pod_that_a_later_webhook_changes_is_refused_by_the_name_of_what_is_wrong() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let client = cluster.admin()?;
    later(&cluster).await?;
    let of = |kind: &str| {
        let container = match kind {
            "gives" => json!({ "name": "main", "image": "cuda" }),
            _ => json!({ "name": "main", "image": "cuda",
                "resources": { "limits": { names::GPU_MEM: "4096" } } }),
        };
        json!({ "metadata": { "name": "p", "labels": { "later": kind } },
            "spec": { "containers": [container, { "name": "idle", "image": "cuda" }] } })
    };
    eventually(SOON, "the later webhook is called", async || {
        let made = created(&client, &of("notes")).await?;
        let made = made.map_err(anyhow::Error::msg)?;
        let seen = &made["metadata"]["annotations"]["example.com/seen"];
        ensure!(*seen == "yes", "{made}");
        Ok(())
    })
    .await?;
    let before = "a name that sorts before zz-gpustow";
    for (kind, texts) in [
        ("gives", ["spec.containers: gpustow.dev/gpu-mem: ", before]),
        (
            "unmarks",
            ["spec.containers: gpustow.dev/gpu-mem: ", before],
        ),
        ("moves", ["spec.schedulerName: ", before]),
        (
            "forgets",
            ["spec.containers: main: NVIDIA_VISIBLE_DEVICES ", before],
        ),
        // The webhook is asked again.
        (
            "shows",
            ["spec.containers[1].env", "is gpustow's to set: remove it"],
        ),
        (
            "privileges",
            ["spec.containers[1].securityContext", "remove it"],
        ),
    ] {
        let made = created(&client, &of(kind)).await?;
        let why = made.err().unwrap_or_default();
        ensure!(texts.iter().all(|it| why.contains(it)), "{kind}: {why:?}");
    }
    // Pods that it leaves alone pass, and pods that do not request anything.
    for kind in ["none", "notes"] {
        created(&client, &of(kind))
            .await?
            .map_err(anyhow::Error::msg)?;
    }
    Ok(())
}
