use super::*;

fn pod() -> Key {
    ("pods".to_owned(), "demo".to_owned(), "p".to_owned())
}

fn store() -> (Store, Value) {
    let store = Store::new();
    let pod = json!({"metadata": {"namespace": "demo", "name": "p"}, "spec": {}});
    let pod = store.create("pods", pod).unwrap();
    (store, Value::clone(&pod))
}

fn binding(pod: &Value, node: &str) -> Value {
    json!({
        "metadata": {
            "uid": pod["metadata"]["uid"],
            "resourceVersion": pod["metadata"]["resourceVersion"],
            "annotations": {"a": "1"},
        },
        "target": {"name": node},
    })
}

fn code<T: std::fmt::Debug>(result: Result<T, Refused>) -> u16 {
    result.unwrap_err().code.as_u16()
}

#[test]
fn a_binding_sets_node_and_annotations_in_one_write_and_only_once() {
    let (store, old) = store();
    let (before, _) = store.list("pods");
    store.bind(pod(), &binding(&old, "n")).unwrap();
    let bound = store.get(&pod()).unwrap();
    assert_eq!(bound["spec"]["nodeName"], "n");
    assert_eq!(bound["metadata"]["annotations"]["a"], "1");
    assert_eq!(store.since(before).unwrap().len(), 1);
    let again = binding(&bound, "n");
    assert_eq!(code(store.bind(pod(), &again)), 409);
}

#[test]
fn a_binding_for_another_pod_of_the_name_or_an_older_copy_fails() {
    let (store, old) = store();
    let mut other = binding(&old, "n");
    other["metadata"]["uid"] = "other".into();
    assert_eq!(code(store.bind(pod(), &other)), 409);

    let patch = json!({"metadata": {"annotations": {"b": "2"}}});
    store.patch_status(pod(), &patch, false).unwrap();
    assert_eq!(code(store.bind(pod(), &binding(&old, "n"))), 409);
    assert!(store.get(&pod()).unwrap()["spec"]["nodeName"].is_null());

    store.delete(pod()).unwrap();
    assert_eq!(code(store.bind(pod(), &binding(&old, "n"))), 404);
}

#[test]
fn a_binding_without_a_node_is_refused() {
    let (store, old) = store();
    assert_eq!(code(store.bind(pod(), &binding(&old, ""))), 422);
}

#[test]
fn a_status_patch_reaches_status_and_annotations_alone() {
    let (store, old) = store();
    let patch = json!({
        "metadata": {"uid": old["metadata"]["uid"], "labels": {"no": "no"}},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running"},
    });
    let new = store.patch_status(pod(), &patch, false).unwrap();
    assert_eq!(new["status"]["phase"], "Running");
    assert!(new["spec"]["nodeName"].is_null() && new["metadata"]["labels"].is_null());

    let patch = json!({"metadata": {"uid": "other"}, "status": {"phase": "Failed"}});
    assert_eq!(code(store.patch_status(pod(), &patch, false)), 409);
}

#[test]
fn a_strategic_patch_merges_conditions_by_type() {
    let (store, _) = store();
    let condition = |kind: &str, status: &str| json!({"status": {"conditions": [{"type": kind, "status": status}]}});
    store
        .patch_status(pod(), &condition("A", "False"), true)
        .unwrap();
    store
        .patch_status(pod(), &condition("B", "True"), true)
        .unwrap();
    let new = store
        .patch_status(pod(), &condition("A", "True"), true)
        .unwrap();
    let expected = json!([{"type": "A", "status": "True"}, {"type": "B", "status": "True"}]);
    assert_eq!(new["status"]["conditions"], expected);

    let (version, _) = store.list("pods");
    store
        .patch_status(pod(), &condition("A", "True"), true)
        .unwrap();
    assert_eq!(
        store.since(version).unwrap().len(),
        0,
        "nothing new, nothing written"
    );
}

#[test]
fn a_lease_is_replaced_only_at_the_version_that_was_read() {
    let store = Store::new();
    let lease = json!({"metadata": {"namespace": "s", "name": "l"}, "spec": {"n": 1}});
    let old = store.create("leases", lease.clone()).unwrap();
    assert_eq!(code(store.create("leases", lease.clone())), 409);
    let key = key_of("leases", &lease);
    let set = |n: i32| {
        let preconditions = Preconditions::of(&old);
        store.update(key.clone(), &preconditions, |lease| {
            lease["spec"]["n"] = n.into();
            Ok(())
        })
    };
    set(2).unwrap();
    assert_eq!(code(set(3)), 409);
    assert_eq!(store.get(&key).unwrap()["spec"]["n"], 2);
}

#[test]
fn changes_that_are_forgotten_are_not_left_out_in_silence() {
    let (store, _) = store();
    for n in 0..LOG {
        let patch = json!({"status": {"n": n}});
        store.patch_status(pod(), &patch, false).unwrap();
    }
    assert_eq!(code(store.since(0)), 410);
    assert_eq!(store.since(1).unwrap().len(), LOG);
}
