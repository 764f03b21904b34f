//! Every key that gpustow writes, tried by every account through every door. The keys of pods come from the lists in
//! `names`, so that a new key is tried automatically.

use anyhow::Result;
use gpustow_api::{config, names};
use gpustow_testkit::Case;
use kube::Client;
use serde_json::{Value, json};

use super::tenant::{added, of, tenant};
use super::{Refused, Row, Taken, Verdict, account, besieged, cdi, make, note, pods, row, run};
use crate::agent_token::{agent_client, patch, post, unbound_client};
use crate::policies::{asks, pod};

/// The keys that gpustow alone writes into a pod whose one container is called main.
pub(crate) fn keys() -> Vec<String> {
    let users = [
        names::ADOPTED,
        names::ASLEEP,
        names::GPU_COUNT,
        names::GPU_COUNT_OF,
        names::GPU_MEM_PERCENTAGE,
        names::GPU_MEM_PERCENTAGE_OF,
        names::EXCLUSIVE,
        names::MEM_LIMIT,
        names::MEM_LIMIT_OF,
        names::ENFORCE,
        names::RECLAIM_ACTION,
        names::EVICTABLE,
        names::GPU_MODELS,
        names::NOT_GPU_MODELS,
        names::GPU_UUIDS,
        names::NOT_GPU_UUIDS,
        names::GPU_AFFINITY,
        names::GPU_ANTI_AFFINITY,
        names::COMPUTE_PERCENT,
        names::ISOLATION,
        names::START,
        names::POLICY,
        names::MADE_FOR,
    ];
    let ours = |key: &&str| !users.contains(key);
    let of_pod = names::POD_KEYS.into_iter().filter(ours).map(str::to_owned);
    let of_main = names::POD_KEYS_OF.into_iter().filter(ours);
    let of_main = of_main.map(|key| format!("{key}main"));
    let nvidia = [
        cdi("main"),
        names::CDI_DOMAIN.to_owned(),
        format!("{}/pod", names::CDI_DOMAIN),
    ];
    of_pod.chain(of_main).chain(nvidia).collect()
}

/// By which way a key is written.
#[derive(Clone, Copy, Debug)]
enum Door {
    Create,
    Update,
    Status,
    Binding,
    LegacyBinding,
}
use Door::{Binding, Create, LegacyBinding, Status, Update};

/// Everything that may be tried with the keys: on a pod that waits and bears none, and on one that is
/// bound and bears all.
fn rows(case: &Case, verdict: impl Fn(Door, &str) -> Verdict) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut add = |trick: String, verb, door, path: String, body: Value, verdict| {
        rows.push(row(
            format!("{trick} at {door:?}"),
            verb,
            path,
            body,
            verdict,
        ));
    };
    for key in keys() {
        let asking = pod(json!({ key.as_str(): "x" }), of(asks("main", "1")))?;
        let create = serde_json::to_value(asking)?;
        add(
            key.clone(),
            "POST",
            Create,
            pods(case, ""),
            create,
            verdict(Create, &key),
        );
        for (door, rest) in [(Update, ""), (Status, "/status")] {
            for (trick, name, value) in [
                ("add", "waits", json!("y")),
                ("change", "bound", json!("y")),
                ("take away", "bound", Value::Null),
            ] {
                let path = pods(case, &format!("/{name}{rest}"));
                let trick = format!("{trick} {key}");
                add(
                    trick,
                    "PATCH",
                    door,
                    path,
                    note(&key, value),
                    verdict(door, &key),
                );
            }
        }
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": { "name": "waits", "annotations": { key.as_str(): "x" } },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "n" },
        });
        let legacy = format!("/api/v1/namespaces/{}/bindings", case.namespace);
        for (door, path) in [
            (Binding, pods(case, "/waits/binding")),
            (LegacyBinding, legacy),
        ] {
            add(
                key.clone(),
                "POST",
                door,
                path,
                binding.clone(),
                verdict(door, &key),
            );
        }
    }
    for (door, rest) in [(Update, ""), (Status, "/status")] {
        let path = pods(case, &format!("/bound{rest}"));
        let none = json!({ "metadata": { "annotations": null } });
        let trick = "take all away".to_owned();
        add(
            trick,
            "PATCH",
            door,
            path,
            none,
            verdict(door, names::ASSIGNMENT),
        );
    }
    Ok(rows)
}

/// Of RBAC.
const FORBIDDEN: Verdict = Refused("cannot ");

#[tokio::test]
async fn each_key_is_its_writers_alone_by_whatever_door() -> Result<()> {
    let cluster = besieged().await?;
    let (case, edit) = tenant(cluster, "keys", false).await?;
    let namespace = format!("--namespace={}", case.namespace);
    for role in ["admin", "view"] {
        cluster
            .kubectl(&["create", "serviceaccount", role, &namespace])
            .await?;
        let to = format!("--serviceaccount={}:{role}", case.namespace);
        let (name, role) = (format!("{role}s"), format!("--clusterrole={role}"));
        let bind = ["create", "rolebinding", &name, &role, &to, &namespace];
        cluster.kubectl(&bind).await?;
    }
    for name in ["n", "another"] {
        case.node(name, &[8000]).create(&case.client).await?;
    }
    let node = case.node_name("n");
    let scheduler = account(cluster, names::NAMESPACE, names::SCHEDULER).await?;
    let agent = agent_client(cluster, &node).await?;
    bound_with_all(&case, &node, &scheduler, &agent).await?;

    let ours = || Refused("only gpustow's");
    let tenants = |door, _: &str| match door {
        Create | Update => ours(),
        _ => FORBIDDEN,
    };
    run("edit", &edit, rows(&case, tenants)?).await?;
    let admin = account(cluster, &case.namespace, "admin").await?;
    run("admin of the namespace", &admin, rows(&case, tenants)?).await?;
    let view = account(cluster, &case.namespace, "view").await?;
    run("view", &view, rows(&case, |_, _| FORBIDDEN)?).await?;
    // An account that RBAC lets do anything.
    run(
        "admin of the cluster",
        &case.client,
        rows(&case, |_, _| ours())?,
    )
    .await?;
    let of_scheduler = |door, key: &str| match door {
        Create => ours(),
        Update => FORBIDDEN,
        Binding | LegacyBinding if key == names::CONFIRMED => ours(),
        Binding | LegacyBinding => Taken,
        Status if [names::EPOCH, names::FENCE, names::RESERVATION].contains(&key) => Taken,
        // By gpustow-annotations or gpustow-extender.
        Status => Refused(" write"),
    };
    run("scheduler", &scheduler, rows(&case, of_scheduler)?).await?;
    let of_agent = |verdict: &dyn Fn(&str) -> Verdict, door, key: &str| match door {
        Status => verdict(key),
        _ => FORBIDDEN,
    };
    // It may write of its own pod alone, and this pod alone is its node's.
    let mut own = rows(&case, |door, key| {
        of_agent(
            &|key| {
                if key == names::CONFIRMED {
                    Taken
                } else {
                    Refused(" write")
                }
            },
            door,
            key,
        )
    })?;
    let waits = pods(&case, "/waits/status");
    for row in own.iter_mut().filter(|row| row.path == waits) {
        row.verdict = Refused(" write");
    }
    run("agent of the node", &agent, own).await?;
    let strangers = |door, key: &str| of_agent(&|_| Refused(" write"), door, key);
    let other = agent_client(cluster, &case.node_name("another")).await?;
    run("agent of another node", &other, rows(&case, strangers)?).await?;
    let unbound = unbound_client(cluster).await?;
    let strangers = |door, key: &str| of_agent(&|_| Refused(""), door, key);
    run("agent of no node", &unbound, rows(&case, strangers)?).await?;

    // This door ignores metadata: annotations that are sent there do not have an effect.
    let path = pods(&case, "/bound/ephemeralcontainers");
    let before = case.pods().get("bound").await?;
    let all = keys().into_iter().map(|key| (key, json!("y")));
    let mut change = added(json!({ "name": "d" }));
    change["metadata"] = json!({ "annotations": all.collect::<serde_json::Map<_, _>>() });
    patch(&edit, &path, &change).await?;
    let after = case.pods().get("bound").await?;
    assert_eq!(before.metadata.annotations, after.metadata.annotations);

    // The values of its annotations are not a valid assignment.
    let at_once = kube::api::DeleteParams::default().grace_period(0);
    case.pods().delete("bound", &at_once).await?;
    case.end().await
}

/// Pods `waits` and `bound`; the second bears every key, each from its writer.
async fn bound_with_all(case: &Case, node: &str, scheduler: &Client, agent: &Client) -> Result<()> {
    for name in ["waits", "bound"] {
        make(case, name, json!({}), of(asks("main", "1")), None).await?;
    }
    let all = keys().into_iter().filter(|key| key != names::CONFIRMED);
    let all: serde_json::Map<_, _> = all.map(|key| (key, json!("x"))).collect();
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": { "name": "bound", "annotations": all },
        "target": { "apiVersion": "v1", "kind": "Node", "name": node },
    });
    post(scheduler, &pods(case, "/bound/binding"), &binding).await?;
    let confirmed = note(names::CONFIRMED, "x");
    patch(agent, &pods(case, "/bound/status"), &confirmed).await
}

/// Objects and fields outside a pod's annotations that gpustow writes or reads.
#[tokio::test]
async fn what_gpustow_goes_by_elsewhere_is_no_tenants_to_write() -> Result<()> {
    let cluster = besieged().await?;
    let (case, edit) = tenant(cluster, "elsewhere", false).await?;
    case.node("n", &[8000]).create(&case.client).await?;
    make(&case, "waits", json!({}), of(asks("main", "1")), None).await?;
    let node = format!("/api/v1/nodes/{}", case.node_name("n"));
    let label = |key: &str, value: Value| json!({ "metadata": { "labels": { key: value } } });
    let mut rows = Vec::new();
    let mut no = |verb, path: String, body: Value| {
        rows.push(row(format!("{body}"), verb, path, body, FORBIDDEN));
    };
    for key in [
        names::GPU_MODEL_LABEL,
        names::GPU_MEMORY_LABEL,
        names::GPU_COUNT_LABEL,
    ] {
        no("PATCH", node.clone(), label(key, json!("9")));
    }
    let capacity = json!({ "status": { "capacity": { names::GPU_MEM: "9" } } });
    no("PATCH", format!("{node}/status"), capacity);
    let condition = json!({ "type": names::AVAILABLE_CONDITION, "status": "True" });
    let condition = json!({ "status": { "conditions": [condition] } });
    no("PATCH", pods(&case, "/waits/status"), condition);
    let gpunodes = format!("/apis/{}/{}/gpunodes", names::GROUP, names::VERSION);
    no(
        "PATCH",
        format!("{gpunodes}/{}", case.node_name("n")),
        json!({ "status": {} }),
    );
    no(
        "DELETE",
        format!("{gpunodes}/{}", case.node_name("n")),
        Value::Null,
    );
    let lease = format!(
        "/apis/coordination.k8s.io/v1/namespaces/{}/leases/{}",
        names::NAMESPACE,
        names::EXTENDER
    );
    no("PATCH", lease.clone(), note(names::LEFT_CLEANLY, "true"));
    no("DELETE", lease, Value::Null);
    let configs = format!("/apis/{}/{}/gpustowconfigs", names::GROUP, names::VERSION);
    no(
        "POST",
        configs.clone(),
        json!({ "metadata": { "name": config::NAME } }),
    );
    for path in ["", "/status"] {
        let own = format!("{configs}/{}{path}", config::NAME);
        no("PATCH", own, json!({ "spec": {}, "status": {} }));
    }
    no("DELETE", format!("{configs}/{}", config::NAME), Value::Null);
    let own = format!("/api/v1/namespaces/{}", case.namespace);
    no("PATCH", own, label(names::GUARD_LABEL, json!("off")));
    let policies = "/apis/admissionregistration.k8s.io/v1";
    for kind in ["validatingadmissionpolicies", "mutatingadmissionpolicies"] {
        for kind in [kind.to_owned(), kind.replace("policies", "policybindings")] {
            let policy = format!("{policies}/{kind}/gpustow-annotations");
            no("PATCH", policy.clone(), note(names::MADE_FOR, "9999.0.0"));
            no("DELETE", policy, Value::Null);
        }
    }
    // A user that takes it off its pod is warned of less.
    let waits = pods(&case, "/waits");
    for value in [Value::Null, json!("false")] {
        let body = label(names::MANAGED_LABEL, value);
        rows.push(row("the label", "PATCH", waits.clone(), body, Taken));
    }
    run("edit", &edit, rows).await?;
    case.end().await
}
