use serde_json::json;

use super::*;
use crate::call::Call;

fn pod() -> Key {
    (Kind::Pod, "demo".to_owned(), "p".to_owned())
}

fn server() -> (Server, Copy) {
    let mut server = Server::default();
    let pod = json!({ "metadata": { "name": "p" }, "spec": {} });
    let pod = server.create(Kind::Pod, "demo", pod).unwrap();
    (server, pod)
}

fn binding(pod: &Value, node: &str) -> Value {
    json!({
        "metadata": {
            "uid": pod["metadata"]["uid"],
            "resourceVersion": pod["metadata"]["resourceVersion"],
            "annotations": { "a": "1" },
        },
        "target": { "name": node },
    })
}

fn code<T: std::fmt::Debug>(result: Result<T, Refusal>) -> u16 {
    result.unwrap_err().0
}

#[test]
fn a_binding_sets_node_and_annotations_in_one_write_and_only_once() {
    let (mut server, old) = server();
    let before = server.version();
    let bound = server.bind(pod(), &binding(&old, "n")).unwrap();
    assert_eq!(bound["spec"]["nodeName"], "n");
    assert_eq!(bound["metadata"]["annotations"]["a"], "1");
    assert_eq!(server.since(before).unwrap().len(), 1);
    assert_eq!(code(server.bind(pod(), &binding(&bound, "n"))), 409);
}

#[test]
fn a_binding_for_another_pod_of_the_name_or_an_older_copy_fails() {
    let (mut server, old) = server();
    let mut other = binding(&old, "n");
    other["metadata"]["uid"] = "other".into();
    assert_eq!(code(server.bind(pod(), &other)), 409);
    let patch = json!({ "metadata": { "annotations": { "b": "2" } } });
    server.patch(pod(), &patch, false, true).unwrap();
    assert_eq!(code(server.bind(pod(), &binding(&old, "n"))), 409);
    assert!(server.get(&pod()).unwrap()["spec"]["nodeName"].is_null());
    server.end(pod());
    assert_eq!(code(server.bind(pod(), &binding(&old, "n"))), 404);
}

#[test]
fn a_binding_without_a_node_is_refused() {
    let (mut server, old) = server();
    assert_eq!(code(server.bind(pod(), &binding(&old, ""))), 422);
}

#[test]
fn a_patch_of_the_status_leaves_the_spec() {
    let (mut server, old) = server();
    let patch = json!({
        "metadata": { "uid": old["metadata"]["uid"] },
        "spec": { "nodeName": "n" },
        "status": { "phase": "Running" },
    });
    let new = server.patch(pod(), &patch, false, true).unwrap();
    assert_eq!(new["status"]["phase"], "Running");
    assert!(new["spec"]["nodeName"].is_null());
    let patch = json!({ "metadata": { "uid": "other" }, "status": { "phase": "Failed" } });
    assert_eq!(code(server.patch(pod(), &patch, false, true)), 409);
}

#[test]
fn a_strategic_patch_merges_conditions_by_type_and_writes_only_what_is_new() {
    let (mut server, _) = server();
    let mut patch = |kind: &str, status: &str| {
        let patch = json!({ "status": { "conditions": [{ "type": kind, "status": status }] } });
        let new = server.patch(pod(), &patch, true, true).unwrap();
        (new["status"]["conditions"].clone(), server.version())
    };
    patch("A", "False");
    patch("B", "True");
    let (conditions, version) = patch("A", "True");
    let expected = json!([{ "type": "A", "status": "True" }, { "type": "B", "status": "True" }]);
    assert_eq!(conditions, expected);
    assert_eq!(patch("A", "True").1, version);
}

#[test]
fn a_lease_is_replaced_only_at_the_version_that_was_read() {
    let mut server = Server::default();
    let lease = json!({ "metadata": { "name": "l" }, "spec": { "n": 1 } });
    let old = server.create(Kind::Lease, "s", lease.clone()).unwrap();
    assert_eq!(code(server.create(Kind::Lease, "s", lease)), 409);
    let key = (Kind::Lease, "s".to_owned(), "l".to_owned());
    let mut set = |n: i32| {
        let mut lease = Value::clone(&old);
        lease["spec"]["n"] = n.into();
        server.replace(key.clone(), lease)
    };
    set(2).unwrap();
    assert_eq!(code(set(3)), 409);
    assert_eq!(server.get(&key).unwrap()["spec"]["n"], 2);
}

#[test]
fn a_history_that_is_forgotten_is_not_left_out_in_silence() {
    let (mut server, _) = server();
    server.compact();
    let patch = json!({ "status": { "phase": "Running" } });
    server.patch(pod(), &patch, false, true).unwrap();
    assert_eq!(code(server.since(0)), 410);
    assert_eq!(server.since(server.version() - 1).unwrap().len(), 1);
}

#[test]
fn a_restored_server_is_what_it_was() {
    let (mut server, old) = server();
    let version = server.version();
    server.bind(pod(), &binding(&old, "n")).unwrap();
    server.restore(version, false);
    assert_eq!(server.get(&pod()).unwrap(), old);
    assert_eq!((server.version(), server.life()), (version, 1));
    server.restore(version, true);
    assert_eq!(code(server.since(version)), 410);
}

/// The type of the watch event about the last write, for this selector.
fn told(server: &Server, selector: &str) -> Option<&'static str> {
    let uri = format!("/api/v1/pods?watch=1&fieldSelector={selector}");
    let request = axum::http::Request::get(uri).body(()).unwrap();
    let call = Call::of(&request.into_parts().0, Value::Null);
    let change = server.history().last()?;
    call.event(change).map(|(kind, _)| kind)
}

#[test]
fn a_watch_with_a_selector_sees_objects_come_and_go() {
    let (mut server, old) = server();
    let (alive, unbound) = (
        "status.phase!%3DSucceeded%2Cstatus.phase!%3DFailed",
        "spec.nodeName%3D",
    );
    assert_eq!(told(&server, alive), Some("ADDED"));
    assert_eq!(told(&server, unbound), Some("ADDED"));
    server.bind(pod(), &binding(&old, "n")).unwrap();
    assert_eq!(told(&server, alive), Some("MODIFIED"));
    assert_eq!(told(&server, unbound), Some("DELETED"));
    assert_eq!(told(&server, "spec.nodeName%3Dn"), Some("ADDED"));
    let patch = json!({ "status": { "phase": "Succeeded" } });
    server.patch(pod(), &patch, false, true).unwrap();
    assert_eq!(told(&server, alive), Some("DELETED"));
    server.end(pod());
    assert_eq!(told(&server, alive), None);
}
