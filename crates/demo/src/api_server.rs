//! The simulated API server's HTTP: as much of Kubernetes' API as extender and agents call.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Json, Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch, post};
use futures::{Stream, stream};
use serde::Deserialize;
use serde_json::{Value, json};

use super::store::{Change, Key, Preconditions, Refused, Store, merge};

/// The routes over `store`.
pub(crate) fn router(store: Arc<Store>) -> Router {
    Router::new()
        .route("/api/v1/{resource}", get(list_core))
        .route("/apis/{group}/{version}/{resource}", get(list))
        .route("/api/v1/namespaces/{namespace}/pods/{name}", get(get_pod))
        .route(
            "/api/v1/namespaces/{namespace}/pods/{name}/binding",
            post(bind),
        )
        .route(
            "/api/v1/namespaces/{namespace}/pods/{name}/status",
            patch(patch_status),
        )
        .route("/api/v1/nodes/{name}/status", patch(patch_node_status))
        .route(
            "/apis/{group}/{version}/gpunodes/{name}",
            get(get_gpunode).patch(apply_gpunode),
        )
        .route(
            "/apis/{group}/{version}/gpunodes/{name}/status",
            patch(apply_gpunode_status),
        )
        .route(
            "/apis/{group}/{version}/gpustowconfigs/{name}/status",
            patch(patch_config_status),
        )
        .route(
            "/apis/{group}/{version}/namespaces/{namespace}/leases",
            post(create_lease),
        )
        .route(
            "/apis/{group}/{version}/namespaces/{namespace}/leases/{name}",
            get(get_lease).put(replace_lease),
        )
        .route(
            "/apis/{group}/{version}/namespaces/{namespace}/events",
            post(accept_event),
        )
        .route(
            "/apis/{group}/{version}/namespaces/{namespace}/events/{name}",
            patch(accept_event),
        )
        .fallback(async || Refused {
            code: StatusCode::NOT_FOUND,
            message: "the demo's API server does not know this path".to_owned(),
        })
        .with_state(store)
}

impl Refused {
    fn status(&self) -> Value {
        let reason = match self.code {
            StatusCode::NOT_FOUND => "NotFound",
            StatusCode::CONFLICT => "Conflict",
            StatusCode::GONE => "Expired",
            _ => "Invalid",
        };
        json!({
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": reason, "code": self.code.as_u16(),
        })
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.code, Json(self.status())).into_response()
    }
}

/// What of a list's or watch's query is looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Options {
    watch: bool,
    resource_version: String,
    field_selector: String,
}

async fn list_core(
    store: State<Arc<Store>>,
    Path(resource): Path<String>,
    options: Query<Options>,
) -> Response {
    answer_list(store.0, resource, options.0)
}

async fn list(
    store: State<Arc<Store>>,
    Path((_, _, resource)): Path<(String, String, String)>,
    options: Query<Options>,
) -> Response {
    answer_list(store.0, resource, options.0)
}

fn answer_list(store: Arc<Store>, resource: String, options: Options) -> Response {
    if options.watch {
        let from = options.resource_version.parse().unwrap_or_default();
        let events = watch(store, resource, options.field_selector, from);
        return (
            [(header::CONTENT_TYPE, "application/json")],
            Body::from_stream(events),
        )
            .into_response();
    }
    let (version, objects) = store.list(&resource);
    let selected = objects
        .iter()
        .filter(|object| selects(&options.field_selector, object));
    let items: Vec<&Value> = selected.map(|object| &**object).collect();
    Json(json!({
        "apiVersion": "v1", "kind": "List",
        "metadata": {"resourceVersion": version.to_string()},
        "items": items,
    }))
    .into_response()
}

/// Watch events as lines of JSON, for as long as the client reads.
fn watch(
    store: Arc<Store>,
    resource: String,
    selector: String,
    from: u64,
) -> impl Stream<Item = Result<String, Infallible>> {
    let changed = store.subscribe();
    stream::unfold(Some((from, changed)), move |place| {
        let (store, resource, selector) = (store.clone(), resource.clone(), selector.clone());
        async move {
            let (mut seen, mut changed) = place?;
            loop {
                changed.borrow_and_update();
                let changes = match store.since(seen) {
                    Ok(changes) => changes,
                    Err(refused) => return Some((Ok(line("ERROR", &refused.status())), None)),
                };
                seen = changes.last().map_or(seen, |change| change.version);
                let of_it = changes.iter().filter(|change| change.resource == resource);
                let lines: String = of_it
                    .filter_map(|change| event(change, &selector))
                    .collect();
                if !lines.is_empty() {
                    return Some((Ok(lines), Some((seen, changed))));
                }
                changed.changed().await.ok()?;
            }
        }
    })
}

/// A change as those see it who select some objects only.
fn event(change: &Change, selector: &str) -> Option<String> {
    let selected =
        |object: &Option<Arc<Value>>| object.clone().filter(|object| selects(selector, object));
    match (selected(&change.old), selected(&change.new)) {
        (None, None) => None,
        (None, Some(new)) => Some(line("ADDED", &new)),
        (Some(_), Some(new)) => Some(line("MODIFIED", &new)),
        (Some(old), None) => {
            let mut last = Value::clone(change.new.as_ref().unwrap_or(&old));
            last["metadata"]["resourceVersion"] = change.version.to_string().into();
            Some(line("DELETED", &last))
        }
    }
}

fn line(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

/// `a.b=c` and `a.b!=c`, joined by commas, as in field selectors.
fn selects(selector: &str, object: &Value) -> bool {
    let mut terms = selector.split(',').filter(|term| !term.is_empty());
    terms.all(|term| {
        let (path, value, wanted) = match term.split_once("!=") {
            Some((path, value)) => (path, value, false),
            None => {
                let (path, value) = term.split_once('=').unwrap_or((term, ""));
                (path, value, true)
            }
        };
        let found = object.pointer(&format!("/{}", path.replace('.', "/")));
        (found.and_then(Value::as_str).unwrap_or_default() == value) == wanted
    })
}

fn pod_key((namespace, name): (String, String)) -> Key {
    ("pods".to_owned(), namespace, name)
}

async fn get_pod(
    State(store): State<Arc<Store>>,
    Path(pod): Path<(String, String)>,
) -> Result<Json<Value>, Refused> {
    let pod = store.get(&pod_key(pod))?;
    Ok(Json(Value::clone(&pod)))
}

async fn bind(
    State(store): State<Arc<Store>>,
    Path(pod): Path<(String, String)>,
    Json(binding): Json<Value>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    store.bind(pod_key(pod), &binding)?;
    let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201});
    Ok((StatusCode::CREATED, Json(status)))
}

async fn patch_status(
    State(store): State<Arc<Store>>,
    Path(pod): Path<(String, String)>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json<Value>, Refused> {
    let patch = json_of(&body)?;
    let strategic = headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind == "application/strategic-merge-patch+json");
    let pod = store.patch_status(pod_key(pod), &patch, strategic)?;
    Ok(Json(Value::clone(&pod)))
}

/// A patch, whatever its content type is called.
fn json_of(body: &Bytes) -> Result<Value, Refused> {
    serde_json::from_slice(body).map_err(|error| Refused {
        code: StatusCode::BAD_REQUEST,
        message: error.to_string(),
    })
}

/// The node's kubelet is here too: what a node has, its pods may have.
async fn patch_node_status(
    State(store): State<Arc<Store>>,
    Path(name): Path<String>,
    body: Bytes,
) -> Result<Json<Value>, Refused> {
    let patch = json_of(&body)?;
    let capacity = patch.pointer("/status/capacity").unwrap_or(&Value::Null);
    let allowed = json!({
        "metadata": {"labels": patch.pointer("/metadata/labels").unwrap_or(&json!({}))},
        "status": if capacity.is_null() {
            json!({})
        } else {
            json!({"capacity": capacity, "allocatable": capacity})
        },
    });
    let key = ("nodes".to_owned(), String::new(), name);
    let node = store.update(key, &Preconditions::of(&patch), |node| {
        merge(node, &allowed, false);
        Ok(())
    })?;
    Ok(Json(Value::clone(&node)))
}

async fn patch_config_status(
    State(store): State<Arc<Store>>,
    Path((_, _, name)): GpuNodePath,
    body: Bytes,
) -> Result<Json<Value>, Refused> {
    let patch = json_of(&body)?;
    let status = json!({"status": patch["status"]});
    let key = ("gpustowconfigs".to_owned(), String::new(), name);
    let config = store.update(key, &Preconditions::default(), |config| {
        merge(config, &status, false);
        Ok(())
    })?;
    Ok(Json(Value::clone(&config)))
}

/// Group, version, name.
type GpuNodePath = Path<(String, String, String)>;

fn gpunode_key(Path((_, _, name)): GpuNodePath) -> Key {
    ("gpunodes".to_owned(), String::new(), name)
}

async fn get_gpunode(
    State(store): State<Arc<Store>>,
    path: GpuNodePath,
) -> Result<Json<Value>, Refused> {
    Ok(Json(Value::clone(&*store.get(&gpunode_key(path))?)))
}

/// Server-side apply by the object's only writer: makes it if there is none.
async fn apply_gpunode(
    State(store): State<Arc<Store>>,
    path: GpuNodePath,
    body: Bytes,
) -> Result<Json<Value>, Refused> {
    let mut object = json_of(&body)?;
    merge(&mut object, &json!({"status": null}), false);
    let key = gpunode_key(path);
    let object = match store.get(&key) {
        Err(_) => store.create("gpunodes", object)?,
        Ok(_) => store.update(key, &Preconditions::default(), |node| {
            merge(node, &object, false);
            Ok(())
        })?,
    };
    Ok(Json(Value::clone(&object)))
}

async fn apply_gpunode_status(
    State(store): State<Arc<Store>>,
    path: GpuNodePath,
    body: Bytes,
) -> Result<Json<Value>, Refused> {
    let status = json_of(&body)?.get("status").cloned();
    let key = gpunode_key(path);
    let node = store.update(key, &Preconditions::default(), |node| {
        node["status"] = status.unwrap_or_default();
        Ok(())
    })?;
    Ok(Json(Value::clone(&node)))
}

/// Group, version, namespace, name.
type LeasePath = Path<(String, String, String, String)>;

async fn get_lease(
    State(store): State<Arc<Store>>,
    Path((_, _, namespace, name)): LeasePath,
) -> Result<Json<Value>, Refused> {
    let lease = store.get(&("leases".to_owned(), namespace, name))?;
    Ok(Json(Value::clone(&lease)))
}

async fn create_lease(
    State(store): State<Arc<Store>>,
    Path((_, _, namespace)): Path<(String, String, String)>,
    Json(mut lease): Json<Value>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    merge(
        &mut lease,
        &json!({"metadata": {"namespace": namespace}}),
        false,
    );
    let lease = store.create("leases", lease)?;
    Ok((StatusCode::CREATED, Json(Value::clone(&lease))))
}

async fn replace_lease(
    State(store): State<Arc<Store>>,
    Path((_, _, namespace, name)): LeasePath,
    Json(new): Json<Value>,
) -> Result<Json<Value>, Refused> {
    let key = ("leases".to_owned(), namespace, name);
    let lease = store.update(key, &Preconditions::of(&new), |lease| {
        let kept = json!({
            "metadata": {"annotations": new.pointer("/metadata/annotations")},
            "spec": new.get("spec"),
        });
        merge(lease, &kept, false);
        Ok(())
    })?;
    Ok(Json(Value::clone(&lease)))
}

/// Events are for people who run `kubectl describe`; nobody does here.
async fn accept_event(Json(event): Json<Value>) -> Json<Value> {
    Json(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(phase: &str) -> Option<Arc<Value>> {
        Some(Arc::new(
            json!({"metadata": {"name": "p"}, "status": {"phase": phase}}),
        ))
    }

    #[test]
    fn a_watch_with_a_selector_sees_objects_come_and_go() {
        let selector = "status.phase!=Succeeded,status.phase!=Failed";
        let kind = |old, new| {
            let change = Change {
                version: 7,
                resource: "pods".to_owned(),
                old,
                new,
            };
            let line = event(&change, selector)?;
            let event: Value = serde_json::from_str(&line).unwrap();
            Some(event["type"].as_str().unwrap().to_owned())
        };
        assert_eq!(kind(None, pod("")).as_deref(), Some("ADDED"));
        assert_eq!(kind(pod(""), pod("Running")).as_deref(), Some("MODIFIED"));
        assert_eq!(kind(pod(""), pod("Succeeded")).as_deref(), Some("DELETED"));
        assert_eq!(kind(pod("Failed"), None), None);
    }

    #[test]
    fn an_empty_value_selects_what_is_unset() {
        let unbound = json!({"spec": {}});
        let bound = json!({"spec": {"nodeName": "n"}});
        assert!(selects("spec.nodeName=", &unbound) && !selects("spec.nodeName=", &bound));
        assert!(selects("", &bound));
    }
}
