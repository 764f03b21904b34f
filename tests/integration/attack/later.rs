//! Attempts of a user who may edit one namespace, on existing pods.

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::eventually;
use serde_json::{Value, json};

use super::tenant::{ENV, added, of, privileged, reads, tenant, variables};
use super::{Refused, Taken, besieged, cdi, chaff, make, note, pods, row, run};
use crate::agent_token::send;
use crate::policies::{asks, own_env, path_of};
use crate::support::{SOON, repository};

#[tokio::test]
async fn a_tenant_does_not_change_its_mind_behind_the_books() -> Result<()> {
    let cluster = besieged().await?;
    let (case, edit) = tenant(cluster, "later", false).await?;
    let gated = |container: Value| json!({ "schedulingGates": [{ "name": "x.y/z" }], "containers": [container, { "name": "idle" }] });
    make(
        &case,
        "gated",
        json!({ names::POLICY: "tight" }),
        gated(asks("main", "80")),
        None,
    )
    .await?;
    make(
        &case,
        "bound",
        json!({ names::GPU_COUNT: "2" }),
        of(asks("main", "80")),
        Some("n"),
    )
    .await?;
    let patch = |name: &str, change: Value, verdict| {
        row(
            format!("{name} {change}"),
            "PATCH",
            pods(&case, &format!("/{name}")),
            change,
            verdict,
        )
    };
    let debug = |name: &str, container: Value, verdict| {
        let path = pods(&case, &format!("/{name}/ephemeralcontainers"));
        row(
            format!("{name} {container}"),
            "PATCH",
            path,
            added(container),
            verdict,
        )
    };
    let fixed = || Refused("the pod is bound to its GPUs already: leave it as it was");
    let written = || Refused("leave it as it was, or create the pod again");
    let grouped = || Refused("metadata.labels: the pod is bound to its GPUs already");
    let label = |key: &str, value: &str| json!({ "metadata": { "labels": { key: value } } });
    let of_extender = || Refused("only gpustow's extender may write it");
    let of_main = format!("{}main", names::GPU_COUNT_OF);
    let of_other = format!("{}other", names::GPU_COUNT_OF);
    let rows = vec![
        patch("gated", note("example.com/own", "x"), Taken),
        patch("gated", note(names::EXCLUSIVE, "true"), Taken),
        patch("gated", note(names::POLICY, Value::Null), Taken),
        // Its containers carry their limits from their creation on.
        patch("gated", note(names::ENFORCE, "driver"), written()),
        patch("gated", note(names::MEM_LIMIT, "max"), written()),
        patch(
            "gated",
            note(names::EXCLUSIVE, "maybe"),
            Refused("is neither \"true\" nor \"false\""),
        ),
        patch(
            "gated",
            note(names::GPU_COUNT, "999999"),
            Refused("is not a number of GPUs"),
        ),
        patch(
            "gated",
            note(names::GPU_COUNT, "3"),
            Refused("do not split evenly over 3 GPUs"),
        ),
        patch(
            "gated",
            note(&of_other, "1"),
            Refused("no container \"other\" asks"),
        ),
        patch(
            "gated",
            note(names::POLICY, "best"),
            Refused("unknown policy"),
        ),
        patch(
            "gated",
            json!({ "metadata": { "annotations": chaff(300) } }),
            Refused("are more than the 256"),
        ),
        patch("gated", note(&cdi("main"), "x"), of_extender()),
        patch("gated", note(&cdi("idle"), "x"), of_extender()),
        patch(
            "gated",
            note("devices.gpustow.dev/main", "all"),
            of_extender(),
        ),
        patch("gated", note(names::FENCE, "x"), of_extender()),
        patch("gated", note(names::EPOCH, "99999"), of_extender()),
        patch("gated", note(names::ASSIGNMENT, "x"), of_extender()),
        patch(
            "gated",
            note(names::CONFIRMED, "x"),
            Refused("only gpustow's agent may write it"),
        ),
        patch("bound", note("example.com/own", "x"), Taken),
        patch("bound", note(names::EXCLUSIVE, "true"), fixed()),
        patch("bound", note(names::EXCLUSIVE, "maybe"), fixed()),
        patch("bound", note(names::GPU_COUNT, Value::Null), fixed()),
        patch("bound", note(names::GPU_COUNT, "4"), fixed()),
        patch("bound", note(&of_main, "4"), fixed()),
        patch("bound", note(names::POLICY, "spread"), fixed()),
        patch(
            "bound",
            note(names::MEM_LIMIT, "4096"),
            Refused("have an administrator give you the right to resize limits.gpustow.dev"),
        ),
        patch("bound", note(names::ASSIGNMENT, "x"), of_extender()),
        patch(
            "bound",
            label("scheduling.x-k8s.io/pod-group", "g"),
            grouped(),
        ),
        patch(
            "bound",
            label("pod-group.scheduling.sigs.k8s.io", "g"),
            grouped(),
        ),
        patch("bound", label("example.com/own", "g"), Taken),
        patch(
            "bound",
            note("devices.gpustow.dev/main", "all"),
            of_extender(),
        ),
        debug("bound", json!({ "name": "d" }), Taken),
        debug(
            "bound",
            json!({ "name": "d", "env": reads(&path_of("main")) }),
            Taken,
        ),
        debug(
            "bound",
            json!({ "name": "d", "env": own_env("all") }),
            Refused(ENV),
        ),
        debug(
            "bound",
            json!({ "name": "d", "env": reads(&path_of("zzz")) }),
            Refused(ENV),
        ),
        debug(
            "bound",
            json!({ "name": "d", "env": reads("metadata.annotations['mine']") }),
            Refused(ENV),
        ),
        debug(
            "bound",
            privileged(json!({ "name": "d" })),
            Refused("spec.ephemeralContainers[0].securityContext.privileged"),
        ),
        debug(
            "bound",
            json!({ "name": "d", "env": variables(3000) }),
            Refused("more than 2048 environment variables"),
        ),
    ];
    run("edit", &edit, rows).await?;
    // If agents set limits, a user that may edit pods may have them follow the annotation, and change nothing else.
    let role = repository("manifests/set-limits/rbac.yaml");
    cluster.apply(&std::fs::read_to_string(role)?).await?;
    let path = pods(&case, "/bound");
    let change = note(names::MEM_LIMIT, "4096");
    eventually(SOON, "the tenant may resize", async || {
        let refused = send(&edit, "PATCH", &path, &change).await?;
        ensure!(refused.is_none(), "{refused:?}");
        Ok(())
    })
    .await?;
    let all = json!({ names::MEM_LIMIT: "8192", names::GPU_COUNT: "4" });
    let rows = vec![
        patch(
            "bound",
            note(names::MEM_LIMIT, "79"),
            Refused("write at least 80, or max"),
        ),
        patch(
            "bound",
            note(&format!("{}main", names::MEM_LIMIT_OF), "max"),
            Taken,
        ),
        patch("bound", note(names::ENFORCE, "driver"), fixed()),
        patch(
            "bound",
            json!({ "metadata": { "annotations": all } }),
            fixed(),
        ),
        patch("gated", note(names::MEM_LIMIT, "8192"), written()),
    ];
    run("edit with the right to resize", &edit, rows).await?;
    // An annotation for a container that is not there yet.
    crate::agent_token::patch(&edit, &path, &note(&cdi("late"), "nvidia.com/gpu=all")).await?;
    run(
        "edit",
        &edit,
        vec![debug(
            "bound",
            json!({ "name": "late" }),
            Refused("name the container otherwise"),
        )],
    )
    .await?;
    case.end().await
}
