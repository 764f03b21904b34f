//! `check` and `why` in the moments that they are there for, on clusters made for each.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::objects::{Files, NOW, config, healthy, node, part, report, waiting};

fn lease(name: &str, spec: &Value) -> Value {
    json!({ "kind": "Lease", "metadata": { "namespace": "gpustow-system", "name": name }, "spec": spec })
}

const ROOM: &str = "0/1 nodes are available: 1 not enough free memory on any one GPU.";
const REFUSED: &str =
    "Post \"http://127.0.0.1:32766/filter\": dial tcp 127.0.0.1:32766: connect: connection refused";

#[tokio::test]
async fn a_cluster_without_a_report_is_not_fine() -> Result<()> {
    let bare = node("n", &json!({}), "0");
    let files = Files::new("no-label", &[bare])?;
    files
        .finds(
            "error",
            "no GpuNode exists",
            "install NVIDIA's GPU feature discovery",
        )
        .await?;

    let labelled: Vec<_> = (0..9)
        .map(|it| {
            node(
                &format!("n{it}"),
                &json!({ "nvidia.com/gpu.present": "true" }),
                "0",
            )
        })
        .collect();
    let files = Files::new("no-agent", &labelled)?;
    files
        .finds("error", "no GpuNode exists", "kubectl describe daemonset")
        .await?;
    let row = files
        .finds(
            "warning",
            "no agent has reported them",
            "no pod of gpustow-agent",
        )
        .await?;
    ensure!(
        row["objects"].as_array().is_some_and(|all| all.len() == 9),
        "{row}"
    );
    ensure!(row["object"] == "node/n0 and 8 more", "{row}");

    let mut objects = healthy().to_vec();
    objects.push(node(
        "m",
        &json!({ "nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.client": "false" }),
        "0",
    ));
    let (answer, rows) = Files::new("sent-away", &objects)?.check().await?;
    ensure!(answer == Answer::Yes && rows.is_empty(), "{rows:#?}");
    Ok(())
}

#[tokio::test]
async fn a_quantity_is_read_as_kubernetes_writes_it() -> Result<()> {
    // 24k is 24000.
    let (answer, rows) = Files::new("quantity", &healthy())?.check().await?;
    ensure!(answer == Answer::Yes && rows.is_empty(), "{rows:#?}");
    Ok(())
}

#[tokio::test]
async fn an_unreachable_extender_is_found() -> Result<()> {
    let mut objects = healthy().to_vec();
    objects.extend([waiting("a", REFUSED), waiting("b", REFUSED)]);
    let files = Files::new("unreached", &objects)?;
    files
        .finds(
            "error",
            "2 pods wait because kube-scheduler does not reach it",
            "kubectl get pods",
        )
        .await?;

    let mut objects = healthy().to_vec();
    objects.push(part(
        "gpustow-scheduler-1",
        "initContainers",
        "extender",
        &[],
        false,
    ));
    objects.push(waiting("a", ROOM));
    let files = Files::new("down", &objects)?;
    files
        .finds(
            "error",
            "none of its 1 pods is ready (CrashLoopBackOff)",
            "kubectl logs",
        )
        .await?;
    let (answer, said) = files.ask("why ops/a").await?;
    ensure!(answer == Answer::No && !said.contains("Fits"), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_lease_that_no_extender_renews_is_found() -> Result<()> {
    let mut objects = healthy().to_vec();
    let stale = json!({ "holderIdentity": "x", "leaseDurationSeconds": 15, "renewTime": "2026-11-21T09:55:00.000000Z" });
    objects.extend([waiting("a", ROOM), lease("gpustow-scheduler", &stale)]);
    let files = Files::new("stale-lease", &objects)?;
    files
        .finds("error", "its Lease was renewed 5m ago", "kubectl logs")
        .await?;
    // Leases are there, and not the extender's.
    files
        .finds("error", "none has ever decided", "kubectl describe pod")
        .await?;
    let (answer, said) = files.ask("why ops/a").await?;
    ensure!(
        answer == Answer::No && said.contains("no kube-scheduler leads"),
        "{said}"
    );

    let mut objects = healthy().to_vec();
    let gone = json!({ "holderIdentity": "gpustow-scheduler-0" });
    let fresh = json!({ "leaseDurationSeconds": 15, "renewTime": "2026-11-21T09:59:58.000000Z" });
    objects.push(part(
        "gpustow-scheduler-1",
        "initContainers",
        "extender",
        &[],
        true,
    ));
    objects.extend([
        lease("gpustow-extender", &gone),
        lease("gpustow-scheduler", &fresh),
    ]);
    // No pod waits: kube-scheduler had nothing to ask.
    let (answer, rows) = Files::new("quiet", &objects)?.check().await?;
    ensure!(answer == Answer::Yes && rows.is_empty(), "{rows:#?}");
    objects.push(waiting("a", ROOM));
    let files = Files::new("gone", &objects)?;
    files
        .finds(
            "error",
            "gpustow-scheduler-0, is gone",
            "kubectl describe pod",
        )
        .await?;
    Ok(())
}

#[tokio::test]
async fn an_agent_is_not_reporting_by_the_configured_time() -> Result<()> {
    let [n, _] = healthy();
    let mut objects = vec![
        n,
        report("n", "2026-11-21T09:58:30Z", &json!({})),
        report("m", NOW, &json!({})),
    ];
    objects.push(node("m", &json!({}), "24k"));
    let (answer, _) = Files::new("three-minutes", &objects)?.check().await?;
    ensure!(answer == Answer::Yes);
    objects.push(config(json!({ "scheduling": { "staleAfter": "60s" } })));
    objects.push(part("gpustow-agent-x", "containers", "agent", &[], false));
    let files = Files::new("one-minute", &objects)?;
    files
        .finds(
            "warning",
            "its agent reported 90s ago",
            "CrashLoopBackOff: kubectl logs -n gpustow-system gpustow-agent-x",
        )
        .await?;
    let (_, gpus) = files.ask("gpus n").await?;
    ensure!(gpus.contains("agent silent"), "{gpus}");
    Ok(())
}

#[tokio::test]
async fn a_card_is_found_with_what_helps_it() -> Result<()> {
    for (name, gpu, level, problem, fix) in [
        (
            "failing",
            json!({ "healthy": false, "reason": "NVML's error 15", "failed": NOW }),
            "warning",
            "NVML's error 15 (GPU has fallen off the bus or is otherwise inaccessible)",
            "drain the node",
        ),
        (
            "probation",
            json!({ "healthy": false, "reason": "XID 79", "failed": "2026-11-21T09:57:00Z" }),
            "warning",
            "XID 79 (GPU has fallen off the bus), seen last at 09:57 UTC",
            "wait: it takes pods again from 10:07 UTC on",
        ),
        (
            "mode",
            json!({ "healthy": false, "reason": "compute mode EXCLUSIVE_PROCESS, and pod a/b has it" }),
            "warning",
            "compute mode EXCLUSIVE_PROCESS, and pod a/b has it",
            "remove the cause on the node: https://",
        ),
        (
            "lent",
            json!({ "healthy": false, "reason": "held by pod a/b through nvidia.com/gpu",
                "heldBy": { "pod": "a/b", "through": "nvidia.com/gpu" } }),
            "info",
            "GPU 0 is held by pod a/b through nvidia.com/gpu",
            "once that pod is gone",
        ),
    ] {
        let [n, _] = healthy();
        let files = Files::new(name, &[n, report("n", NOW, &gpu)])?;
        files.finds(level, problem, fix).await?;
    }
    // One that gpustow gave away as well.
    let [n, _] = healthy();
    let gpu = json!({ "healthy": false, "reason": "held by pod a/b through nvidia.com/gpu",
        "heldBy": { "pod": "a/b", "through": "nvidia.com/gpu" } });
    let mut pod = waiting("ours", "");
    pod["spec"]["nodeName"] = json!("n");
    pod["status"] = json!({ "phase": "Pending" });
    let assignment = json!({ "version": 1, "gpus": [{ "uuid": "GPU-n", "mib": 2048 }],
        "containers": { "main": ["GPU-n"] } });
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/assignment": assignment.to_string() });
    let files = Files::new("shared", &[n, report("n", NOW, &gpu), pod])?;
    files
        .finds("error", "and by ops/ours", "docs/platforms.md")
        .await?;
    Ok(())
}

/// As scripts see it.
#[test]
fn exit_codes_are_as_documented() -> Result<()> {
    let mut objects = healthy().to_vec();
    objects.push(waiting("waits", REFUSED));
    let files = Files::new("codes", &objects)?;
    for (words, code) in [
        ("nodes", 0),
        ("gpus n -o json", 0),
        ("why ops/waits", 1),
        ("check", 1),
        ("--version", 0),
        ("--help", 0),
        ("why ops/absent", 2),
        ("gpus nowhere", 2),
        ("fit -f /nowhere.yaml", 2),
        ("nodes --sort-by colour", 2),
        ("nodes -o colour", 2),
        ("colour", 2),
    ] {
        let program = Command::new(env!("CARGO_BIN_EXE_kubectl-gpustow"))
            .arg("--from")
            .arg(&files.0)
            .args(words.split_whitespace())
            .output()?;
        let said = String::from_utf8_lossy(&program.stderr).into_owned();
        ensure!(
            program.status.code() == Some(code),
            "{words}: {} {said}",
            program.status
        );
        ensure!(
            (code == 2) == said.starts_with("error: "),
            "{words}: {said}"
        );
    }
    Ok(())
}

#[test]
fn a_kubeconfig_that_is_not_there_is_named_once() -> Result<()> {
    let program = Command::new(env!("CARGO_BIN_EXE_kubectl-gpustow"))
        .args(["--kubeconfig", "/nowhere/config", "nodes"])
        .output()?;
    let said = String::from_utf8_lossy(&program.stderr).into_owned();
    let begin = "error: cannot reach the cluster: kubeconfig: /nowhere/config: No such file";
    ensure!(
        said.starts_with(begin) && said.matches("No such file").count() == 1,
        "{said}"
    );
    ensure!(program.status.code() == Some(2), "{}", program.status);
    Ok(())
}

#[tokio::test]
async fn why_says_what_a_pod_lacks_that_bears_annotations_and_asks_for_nothing() -> Result<()> {
    let mut pod = waiting("trainer-0", "");
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/gpu-count": "2" });
    pod["metadata"]["ownerReferences"] = json!([{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "trainer", "uid": "u", "controller": true }]);
    pod["spec"]["containers"][0]["resources"] = json!({});
    let mut plain = pod.clone();
    plain["metadata"] = json!({ "namespace": "ops", "name": "plain", "uid": "plain" });
    let [node, report] = healthy();
    let files = Files::new("asks-nothing", &[node, report, pod, plain])?;
    for (asked, said) in [
        (
            "ops/trainer-0",
            "ops/trainer-0: metadata.annotations[gpustow.dev/gpu-count]: no container asks",
        ),
        (
            "sts/trainer",
            "ops/trainer-0: metadata.annotations[gpustow.dev/gpu-count]: no container asks",
        ),
        ("ops/plain", "no pod plain in namespace ops asks"),
    ] {
        let error = files.ask(&format!("why {asked}")).await.err();
        let error = error.context("a pod that asks for nothing has no answer")?;
        ensure!(error.to_string().contains(said), "{asked}: {error}");
    }
    Ok(())
}

#[tokio::test]
async fn why_says_that_room_is_kept_and_who_is_to_give_it_back() -> Result<()> {
    let mut objects = healthy().to_vec();
    objects[1] = report(
        "n",
        NOW,
        &json!({ "pods": [{ "uid": "greedy", "usedMiB": 24000 }] }),
    );
    let mut waits = waiting("waits", ROOM);
    let kept = json!({ "type": "gpustow.dev/MemoryReserved", "status": "True", "reason": "Reclaiming",
        "message": "Reserved 2048 MiB of GPU GPU-n on node n until 2026-11-21T10:00:40Z. Reclaiming memory from ops/greedy." });
    let mut greedy = waiting("greedy", "");
    greedy["metadata"]["annotations"] = json!({ "gpustow.dev/assignment":
        r#"{"version":1,"gpus":[{"uuid":"GPU-n","mib":2048}],"containers":{"main":["GPU-n"]}}"# });
    greedy["spec"]["nodeName"] = json!("n");
    greedy["status"] = json!({ "phase": "Running", "conditions": [
        { "type": "gpustow.dev/Reclaiming", "status": "True", "reason": "Event",
          "message": "Uses 24000 MiB of GPU GPU-n, asked for 2048 MiB" }] });
    waits["status"]["conditions"]
        .as_array_mut()
        .context("its conditions")?
        .push(kept);
    objects.extend([waits, greedy]);
    let files = Files::new("called-back", &objects)?;
    let (answer, said) = files.ask("why ops/waits").await?;
    ensure!(answer == Answer::No, "{said}");
    let words = |said: &str| said.split_whitespace().collect::<Vec<_>>().join(" ");
    let kept = "Reserved 2048 MiB of GPU GPU-n on node n until 2026-11-21T10:00:40Z. Reclaiming memory from ops/greedy.";
    ensure!(words(&said).contains(kept), "{said}");
    let (_, said) = files.ask("why ops/greedy").await?;
    ensure!(
        words(&said).contains("Uses 24000 MiB of GPU GPU-n, asked for 2048 MiB."),
        "{said}"
    );
    Ok(())
}
