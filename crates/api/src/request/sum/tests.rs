use serde_json::{Value, json};

use super::*;

const MI: u64 = 1 << 20;

/// A container with this request of CPU and memory; `-` is no request.
fn container(name: &str, cpu: &str, memory: &str) -> Value {
    json!({"name": name, "resources": {"requests": list(cpu, memory)}})
}

fn sidecar(name: &str, cpu: &str, memory: &str) -> Value {
    let mut container = container(name, cpu, memory);
    container["restartPolicy"] = json!("Always");
    container
}

fn list(cpu: &str, memory: &str) -> Value {
    let stated = [("cpu", cpu), ("memory", memory)];
    let stated = stated.iter().filter(|(_, amount)| *amount != "-");
    stated
        .map(|(key, amount)| ((*key).to_owned(), json!(amount)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// A kubelet's report of a container: the requests in its cgroup, and the requests that the kubelet has allocated.
fn reports(name: &str, actuated: Value, allocated: Value) -> Value {
    json!({"name": name, "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "resources": {"requests": actuated}, "allocatedResources": allocated})
}

fn pending(reason: &str) -> Value {
    json!([
        {"type": "Ready", "status": "True"},
        {"type": "PodResizePending", "status": "True", "reason": reason},
    ])
}

/// CPU in thousandths and memory in bytes.
fn sums(spec: &Value, status: &Value) -> (u64, u64) {
    let pod: Pod = serde_json::from_value(json!({"spec": spec, "status": status})).unwrap();
    let spec = pod.spec.clone().unwrap();
    let charged = |resource, per| charged(&pod, &spec, resource, per);
    (charged("cpu", 1000), charged("memory", 1))
}

/// The cases of `TestPodResourceRequests`, `TestPodLevelResourceRequests`, `TestPodRequestsAndLimits` and
/// `TestAggregateContainerRequestsAndLimits` in k8s.io/component-helpers v0.36.3, resource/helpers_test.go, about
/// requests, with feature gates as they are by default.
#[test]
fn sums_of_pods_that_wait_are_kube_schedulers() {
    let one = || vec![container("a", "1", "-")];
    let two = || vec![container("a", "2", "-"), container("b", "3", "-")];
    let small = || vec![container("a", "2m", "3Mi")];
    let cases = [
        (
            "a larger init container",
            vec![container("i", "4", "-")],
            one(),
            json!({}),
            (4000, 0),
        ),
        (
            "larger containers",
            vec![container("i", "2", "-")],
            two(),
            json!({}),
            (5000, 0),
        ),
        (
            "overhead is added",
            vec![container("i", "2", "-")],
            two(),
            json!({"overhead": list("1", "1Gi")}),
            (6000, 1 << 30),
        ),
        (
            "overhead is added to a massive init container",
            vec![container("i", "4", "12Gi")],
            two(),
            json!({"overhead": list("1", "1")}),
            (6000, (12 << 30) + 1),
        ),
        (
            "a sidecar",
            vec![sidecar("s", "1", "-")],
            one(),
            json!({}),
            (2000, 0),
        ),
        (
            "sidecars after an init container",
            vec![
                container("i", "5", "-"),
                sidecar("s", "1", "-"),
                sidecar("t", "2", "-"),
                sidecar("u", "3", "-"),
            ],
            one(),
            json!({}),
            (7000, 0),
        ),
        (
            "an init container beside the sidecars before it",
            vec![
                container("i", "5", "-"),
                sidecar("s", "1", "-"),
                sidecar("t", "2", "-"),
                container("j", "5", "-"),
                sidecar("u", "3", "-"),
            ],
            one(),
            json!({}),
            (8000, 0),
        ),
        (
            "a sidecar, an init container and a regular one",
            vec![sidecar("s", "10", "-"), container("i", "200", "-")],
            vec![container("a", "100", "-")],
            json!({}),
            (210_000, 0),
        ),
        (
            "a smaller init container beside a sidecar",
            vec![sidecar("s", "8", "-"), container("i", "6", "-")],
            vec![container("a", "9", "-")],
            json!({}),
            (17_000, 0),
        ),
        ("nothing", vec![], vec![], json!({}), (0, 0)),
        (
            "the pod's memory and a container's CPU",
            vec![],
            vec![container("a", "2m", "-")],
            json!({"resources": {"requests": list("-", "2Mi")}}),
            (2, 2 * MI),
        ),
        ("containers alone", vec![], small(), json!({}), (2, 3 * MI)),
        (
            "the pod before its containers",
            vec![],
            small(),
            json!({"resources": {"requests": list("8m", "6Mi")}}),
            (8, 6 * MI),
        ),
        (
            "an init container",
            vec![container("i", "4m", "5Mi")],
            small(),
            json!({}),
            (4, 5 * MI),
        ),
        (
            "a sidecar's memory",
            vec![sidecar("s", "4m", "5Mi")],
            small(),
            json!({}),
            (6, 8 * MI),
        ),
        (
            "an init container after a sidecar",
            vec![sidecar("s", "4m", "5Mi"), container("i", "8m", "6Mi")],
            small(),
            json!({}),
            (12, 11 * MI),
        ),
        (
            "the pod before all of them, with its overhead",
            vec![sidecar("s", "4m", "5Mi"), container("i", "8m", "6Mi")],
            small(),
            json!({"resources": {"requests": list("18m", "15Mi")}, "overhead": list("1m", "1")}),
            (19, 15 * MI + 1),
        ),
        (
            "parts of a byte and of a thousandth are added before they are rounded",
            vec![],
            vec![
                container("a", "500u", "1500m"),
                container("b", "500u", "1500m"),
            ],
            json!({}),
            (1, 3),
        ),
    ];
    for (what, init, containers, more, expected) in cases {
        let mut spec = json!({"initContainers": init, "containers": containers});
        let more = more.as_object().unwrap().clone();
        spec.as_object_mut().unwrap().extend(more);
        assert_eq!(sums(&spec, &json!({})), expected, "{what}");
    }
}

#[test]
fn a_pod_as_a_whole_states_only_what_kubernetes_lets_it() {
    let whole = json!({"storage": "2Mi", "hugepages-2Mi": "10Mi", "gpustow.dev/gpu-mem": "9"});
    let part = json!({"storage": "3Mi", "hugepages-2Mi": "6Mi", "gpustow.dev/gpu-mem": "7"});
    let spec: PodSpec = serde_json::from_value(json!({
        "resources": {"requests": whole},
        "containers": [{"name": "a", "resources": {"requests": part}}],
    }))
    .unwrap();
    assert_eq!(effective(&spec, "storage", 1), 3 * MI);
    assert_eq!(effective(&spec, "hugepages-2Mi", 1), 10 * MI);
    assert_eq!(effective(&spec, "gpustow.dev/gpu-mem", 1), 7);
}

/// The rest of the same table: the effect of a resize on a bound pod. The status of a pod that waits does not count.
#[test]
fn resizes_count_as_in_kube_scheduler() {
    let cpu = |amount| list(amount, "-");
    let one = |spec| json!([container("a", spec, "-")]);
    let cases = [
        (
            "infeasible",
            one("4"),
            reports("a", cpu("2"), Value::Null),
            pending("Infeasible"),
            (2000, 0),
        ),
        (
            "infeasible after one that is under way",
            one("6"),
            reports("a", cpu("2"), cpu("4")),
            pending("Infeasible"),
            (4000, 0),
        ),
        (
            "deferred",
            one("4"),
            reports("a", cpu("2"), cpu("2")),
            pending("Deferred"),
            (4000, 0),
        ),
        (
            "no condition",
            one("4"),
            reports("a", cpu("2"), Value::Null),
            json!([]),
            (4000, 0),
        ),
        (
            "smaller, and not yet carried out",
            one("1"),
            reports("a", cpu("3"), cpu("2")),
            json!([]),
            (3000, 0),
        ),
        (
            "the most of the three, each resource on its own",
            json!([container("a", "30m", "20M")]),
            reports("a", list("10m", "30M"), list("20m", "10M")),
            json!([]),
            (30, 30_000_000),
        ),
        (
            "no request but one that was carried out",
            json!([{"name": "a"}]),
            reports("a", cpu("2"), Value::Null),
            json!([]),
            (2000, 0),
        ),
        (
            "a status of another container",
            one("4"),
            reports("b", cpu("9"), cpu("9")),
            json!([]),
            (4000, 0),
        ),
    ];
    for (what, containers, status, conditions, expected) in cases {
        let conditions = || conditions.clone();
        let mut spec = json!({"nodeName": "n", "containers": containers.clone()});
        let regular = json!({"containerStatuses": [status.clone()], "conditions": conditions()});
        assert_eq!(sums(&spec, &regular), expected, "{what}");

        // A sidecar is resized like a regular container, an init container that ends is not.
        let mut restarts = containers.clone();
        restarts[0]["restartPolicy"] = json!("Always");
        let init = json!({"initContainerStatuses": [status], "conditions": conditions()});
        let as_sidecar = json!({"nodeName": "n", "containers": [], "initContainers": restarts});
        assert_eq!(sums(&as_sidecar, &init), expected, "{what}, of a sidecar");
        let as_init =
            json!({"nodeName": "n", "containers": [], "initContainers": containers.clone()});
        let stated = sums(&json!({"containers": containers}), &json!({}));
        assert_eq!(
            sums(&as_init, &init),
            stated,
            "{what}, of an init container"
        );

        spec["nodeName"] = json!("");
        assert_eq!(sums(&spec, &regular), stated, "{what}, of a pod that waits");
    }
}

/// The kubelet's allocation to the pod as a whole is unreadable: the allocation to its containers is a lower bound of
/// it.
#[test]
fn an_infeasible_resize_of_a_whole_pod_counts_what_its_containers_have() {
    let mut spec = json!({
        "nodeName": "n",
        "resources": {"requests": list("60", "60Gi")},
        "containers": [container("a", "1", "1Gi")],
    });
    let status = reports("a", list("1", "1Gi"), list("1", "1Gi"));
    let infeasible = json!({"containerStatuses": [status], "conditions": pending("Infeasible")});
    assert_eq!(sums(&spec, &infeasible), (1000, 1 << 30));
    spec["nodeName"] = Value::Null;
    assert_eq!(sums(&spec, &infeasible), (60_000, 60 << 30));
}
