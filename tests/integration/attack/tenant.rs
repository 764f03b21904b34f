//! Attempts of a user who may edit one namespace, when creating pods.

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, eventually};
use serde_json::{Value, json};

use super::{Refused, Row, Taken, account, besieged, cdi, chaff, pods, row, run};
use crate::agent_token::send;
use crate::policies::{asks, own_env, path_of, with};
use crate::support::SOON;

pub(crate) const ENV: &str = "NVIDIA_VISIBLE_DEVICES is gpustow's to set: remove it";

const MPS: &str =
    "the variables CUDA_MPS_* of a pod with gpustow.dev/compute-percent are gpustow's to set";

pub(crate) fn of(container: Value) -> Value {
    json!({ "containers": [container] })
}

pub(crate) fn asking_with(container: Value) -> Value {
    json!({ "containers": [asks("main", "1"), container] })
}

pub(crate) fn limited(name: &str, resource: &str, amount: &str) -> Value {
    json!({ "name": name, "resources": { "limits": { resource: amount } } })
}

pub(crate) fn privileged(container: Value) -> Value {
    with(container, "securityContext", json!({ "privileged": true }))
}

pub(crate) fn reads(path: &str) -> Value {
    json!([{ "name": names::VISIBLE_DEVICES, "valueFrom": { "fieldRef": { "fieldPath": path } } }])
}

pub(crate) fn added(container: Value) -> Value {
    let container = with(container, "image", json!("i"));
    json!({ "spec": { "ephemeralContainers": [container] } })
}

/// A case whose namespace `edit` may edit, and its client.
pub(crate) async fn tenant(
    cluster: &ControlPlane,
    name: &str,
    guard: bool,
) -> Result<(Case, kube::Client)> {
    let case = Case::new(cluster, name).await?;
    let namespace = format!("--namespace={}", case.namespace);
    cluster
        .kubectl(&["create", "serviceaccount", "edit", &namespace])
        .await?;
    let to = format!("--serviceaccount={}:edit", case.namespace);
    for (binding, role) in [("edit", "--clusterrole=edit"), ("debug", "--role=debug")] {
        if binding == "debug" {
            let debug = [
                "create",
                "role",
                "debug",
                "--verb=patch",
                "--resource=pods/ephemeralcontainers",
                &namespace,
            ];
            cluster.kubectl(&debug).await?;
        }
        cluster
            .kubectl(&["create", "rolebinding", binding, role, &to, &namespace])
            .await?;
    }
    if !guard {
        let label = format!("{}=off", names::GUARD_LABEL);
        cluster
            .kubectl(&["label", "namespace", &case.namespace, &label])
            .await?;
    }
    let client = account(cluster, &case.namespace, "edit").await?;
    let plain = serde_json::to_value(crate::policies::pod(json!({}), of(json!({ "name": "a" })))?)?;
    eventually(SOON, "the tenant may make pods", async || {
        let answer = send(&client, "POST", &pods(&case, ""), &plain).await?;
        anyhow::ensure!(answer.is_none(), "{answer:?}");
        Ok(())
    })
    .await?;
    Ok((case, client))
}

pub(crate) fn create(
    case: &Case,
    trick: &str,
    annotations: Value,
    spec: Value,
    verdict: super::Verdict,
) -> Result<Row> {
    let pod = serde_json::to_value(crate::policies::pod(annotations, spec)?)?;
    Ok(row(trick, "POST", pods(case, ""), pod, verdict))
}

pub(crate) fn variables(count: usize) -> Value {
    let one = |index| json!({ "name": format!("V{index}"), "value": "" });
    (0..count).map(one).collect::<Vec<_>>().into()
}

pub(crate) fn containers(count: usize, make: impl Fn(String) -> Value) -> Value {
    json!({ "containers": (0..count).map(|index| make(format!("c{index}"))).collect::<Vec<_>>() })
}

/// Held by the base, in every namespace.
#[tokio::test]
async fn a_tenant_gets_no_more_of_gpustow_than_it_asks_for() -> Result<()> {
    let cluster = besieged().await?;
    let (case, edit) = tenant(cluster, "tenant", false).await?;
    let none = || json!({});
    let one = || of(asks("a", "1"));
    let cdi_all = |key: String| json!({ key: "nvidia.com/gpu=all" });
    let exclusive = |value: &str| json!({ names::EXCLUSIVE: value });
    let share = || json!({ names::COMPUTE_PERCENT: "30" });
    let mps = |name: &str, value: &str| json!([{ "name": name, "value": value }]);
    let mut limits = json!({ names::GPU_MEM: "1" });
    for index in 0..3000 {
        limits[format!("example.com/r{index}")] = json!("0");
    }
    let counts = (0..65).map(|index| (format!("{}c{index}", names::GPU_COUNT_OF), json!("1")));
    let counts = Value::Object(counts.collect());
    let mut rows = vec![
        create(&case, "the plain wish", none(), one(), Taken)?,
        create(
            &case,
            "a pod of its own",
            chaff(20_000),
            of(json!({ "name": "a" })),
            Taken,
        )?,
        create(
            &case,
            "chaff",
            chaff(257),
            one(),
            Refused("257 are more than the 256"),
        )?,
        create(
            &case,
            "much chaff",
            chaff(24_000),
            one(),
            Refused("24000 are more than the 256"),
        )?,
        create(&case, "some annotations", chaff(256), one(), Taken)?,
        create(
            &case,
            "many variables",
            none(),
            of(with(asks("a", "1"), "env", variables(20_000))),
            Refused("more than 2048 environment variables"),
        )?,
        create(
            &case,
            "many idle variables",
            none(),
            asking_with(with(json!({ "name": "b" }), "env", variables(20_000))),
            Refused("more than 2048 environment variables"),
        )?,
        create(
            &case,
            "many limits",
            none(),
            of(json!({ "name": "a", "resources": { "limits": limits } })),
            Refused("more than 2048 environment variables and limits"),
        )?,
        create(
            &case,
            "many containers",
            none(),
            containers(1000, |name| asks(&name, "1")),
            Refused("more than 256 of all kinds"),
        )?,
        create(
            &case,
            "many counts",
            counts,
            containers(65, |name| asks(&name, "1")),
            Taken,
        )?,
        create(
            &case,
            "a long count",
            json!({ names::GPU_COUNT: "9".repeat(60_000) }),
            one(),
            Refused("is not a number of GPUs: write 1 to 64"),
        )?,
        create(
            &case,
            "a long word",
            exclusive(&"y".repeat(60_000)),
            one(),
            Refused("is neither \"true\" nor \"false\""),
        )?,
        create(
            &case,
            "a long policy",
            json!({ names::POLICY: "y".repeat(60_000) }),
            one(),
            Refused("use one of tight"),
        )?,
        create(
            &case,
            "a long scheduler",
            none(),
            json!({ "schedulerName": "s".repeat(60_000), "containers": [asks("a", "1")] }),
            Refused("does not use gpustow: write gpustow-scheduler"),
        )?,
        create(
            &case,
            "a node of its choice",
            none(),
            json!({ "nodeName": "n", "containers": [asks("a", "1")] }),
            Refused("spec.nodeName: a pod that asks for gpustow.dev/gpu-mem gets its node"),
        )?,
        create(
            &case,
            "a privileged neighbour",
            none(),
            asking_with(privileged(json!({ "name": "b" }))),
            Refused("spec.containers[1].securityContext.privileged"),
        )?,
        create(
            &case,
            "a privileged neighbour that asks NVIDIA",
            none(),
            asking_with(privileged(limited("b", names::NVIDIA_GPU, "1"))),
            Refused("spec.containers[1].securityContext.privileged"),
        )?,
        create(
            &case,
            "a neighbour that asks NVIDIA, and for all",
            none(),
            asking_with(with(
                limited("b", names::NVIDIA_GPU, "1"),
                "env",
                own_env("all"),
            )),
            Refused(ENV),
        )?,
        create(
            &case,
            "a neighbour that asks NVIDIA",
            none(),
            asking_with(limited("b", names::NVIDIA_GPU, "1")),
            Taken,
        )?,
        create(
            &case,
            "a neighbour with a claim, for all",
            none(),
            json!({
                "resourceClaims": [{ "name": "r", "resourceClaimName": "r" }],
                "containers": [asks("main", "1"), with(json!({
                    "name": "b", "resources": { "claims": [{ "name": "r" }] } }), "env", own_env("all"))],
            }),
            Refused(ENV),
        )?,
        create(
            &case,
            "other pipes of MPS",
            share(),
            of(with(
                asks("a", "1"),
                "env",
                mps(names::MPS_PIPES, "/tmp/nvidia-mps"),
            )),
            Refused(MPS),
        )?,
        create(
            &case,
            "more compute",
            share(),
            of(with(asks("a", "1"), "env", mps(names::MPS_THREADS, "100"))),
            Refused(MPS),
        )?,
        create(
            &case,
            "more memory under MPS",
            share(),
            of(with(asks("a", "1"), "env", mps(names::MPS_MEMORY, "0=80G"))),
            Refused(MPS),
        )?,
        create(
            &case,
            "a neighbour with variables of MPS",
            share(),
            asking_with(with(
                json!({ "name": "b" }),
                "env",
                mps(names::MPS_THREADS, "30"),
            )),
            Refused(MPS),
        )?,
        create(
            &case,
            "memory of its own in place of MPS's",
            share(),
            json!({
                "volumes": [{ "name": "own", "emptyDir": {} }],
                "containers": [with(asks("a", "1"), "volumeMounts",
                    json!([{ "name": "own", "mountPath": "/dev/shm" }]))],
            }),
            Refused("spec.containers[0].volumeMounts: /dev/shm and"),
        )?,
        create(
            &case,
            "a volume of its own in place of MPS's",
            share(),
            json!({
                "volumes": [{ "name": names::MPS_SHM_VOLUME, "emptyDir": {} }],
                "containers": [asks("a", "1")],
            }),
            Refused("the pod's volume gpustow-mps-shm must be the hostPath /run/gpustow/mps/shm"),
        )?,
        create(
            &case,
            "another's devices",
            none(),
            asking_with(with(json!({ "name": "b" }), "env", reads(&path_of("main")))),
            Refused(ENV),
        )?,
        create(
            &case,
            "an annotation's devices",
            json!({ "devices.gpustow.dev/zzz": "all" }),
            of(with(asks("a", "1"), "env", reads(&path_of("zzz")))),
            Refused("only gpustow's extender may write it"),
        )?,
        create(
            &case,
            "NRI",
            cdi_all(cdi("a")),
            one(),
            Refused("only gpustow's extender may write it"),
        )?,
        create(
            &case,
            "NRI for all containers",
            cdi_all(format!("{}/pod", names::CDI_DOMAIN)),
            one(),
            Refused("only gpustow's extender may write it"),
        )?,
        create(
            &case,
            "NRI's short form",
            cdi_all(names::CDI_DOMAIN.to_owned()),
            one(),
            Refused("only gpustow's extender may write it"),
        )?,
        create(
            &case,
            "NRI for an idle container",
            cdi_all(cdi("b")),
            asking_with(json!({ "name": "b" })),
            Refused("only gpustow's extender may write it"),
        )?,
    ];
    for zero in ["0", "0m", "0Ki", "0e3"] {
        for resource in [
            "nvidia.com/gpu",
            "nvidia.com/none",
            "nvidia.com/mig-1g.10gb",
        ] {
            let b = with(limited("b", resource, zero), "env", own_env("all"));
            let trick = format!("{resource}: {zero} in a neighbour");
            rows.push(create(&case, &trick, none(), asking_with(b), Refused(ENV))?);
        }
    }
    for (amount, text) in [
        (
            "8Gi",
            "no GPU has 8589934592 MiB: the unit is MiB already, write 8192",
        ),
        (
            "8192Mi",
            "no GPU has 8589934592 MiB: the unit is MiB already, write 8192",
        ),
        (
            "1Mi",
            "no GPU has 1048576 MiB: the unit is MiB already, write 1",
        ),
        ("9Ti", "no GPU has 9895604649984 MiB"),
        ("1048577", "no GPU has 1048577 MiB: write at most 1048575"),
        ("1000000000000000", "no GPU has 1000000000000000 MiB"),
        ("9223372036854775807", "no GPU has 9223372036854775807 MiB"),
        ("10Ei", "no GPU has 9223372036854775807 MiB"),
        ("1e30", "is not a whole number of MiB"),
    ] {
        rows.push(create(
            &case,
            amount,
            none(),
            of(asks("a", amount)),
            Refused(text),
        )?);
    }
    for amount in ["8k", "81920", "1048575"] {
        rows.push(create(&case, amount, none(), of(asks("a", amount)), Taken)?);
    }
    run("edit", &edit, rows).await?;
    case.end().await
}
