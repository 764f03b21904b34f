//! The output of `check` for faults of a whole node, for pods that borrow, and for features without their permission.

use anyhow::{Result, ensure};
use gpustow_api::faults::NodeFault;
use kubectl_gpustow::Answer;
use serde_json::json;
use strum::VariantArray as _;

use crate::objects::{Files, NOW, config, healthy, report, waiting};

#[tokio::test]
async fn check_finds_a_feature_that_lacks_its_permission() -> Result<()> {
    let condition = |feature: &str, reason: &str| {
        json!({ "type": feature, "status": "False", "reason": reason, "message": "the extender may not do it",
            "lastTransitionTime": "2026-11-21T09:40:00Z" })
    };
    let missing = |feature: &str| condition(feature, "PermissionMissing");
    let queue = json!({ "queue": { "mode": "Auto" } });
    let defragment = json!({ "defragment": { "evictionsPerHour": 3 } });
    for (spec, conditions, found) in [
        (
            queue,
            json!([
                missing("Working"),
                missing("Queue"),
                condition("Reclaim", "Off")
            ]),
            Some((
                "Queue does not work: the extender may not do it",
                "manifests/queue/rbac.yaml",
            )),
        ),
        (
            defragment,
            json!([missing("Defragment")]),
            Some((
                "Defragment does not work: the extender may not do it",
                "manifests/disruptions/rbac.yaml",
            )),
        ),
        (
            json!({}),
            json!([condition("Working", "Unreadable")]),
            Some(("the extender may not do it", "correct the object")),
        ),
        // The text in the status is older than the object, which is off now.
        (json!({}), json!([missing("Queue")]), None),
        (json!({}), json!([condition("Queue", "Off")]), None),
    ] {
        let mut objects = healthy().to_vec();
        let mut config = config(spec);
        config["status"]["conditions"] = conditions;
        objects.push(config);
        let files = Files::new("features", &objects)?;
        match found {
            Some((problem, fix)) => {
                let row = files.finds("error", problem, fix).await?;
                ensure!(row["object"] == "gpustowconfig/gpustow", "{row:#?}");
            }
            None => {
                let (answer, rows) = files.check().await?;
                ensure!(answer == Answer::Yes && rows.is_empty(), "{rows:#?}");
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_node_whose_driver_is_not_loaded_is_one_finding_with_its_own_fix() -> Result<()> {
    let known = NodeFault::VARIANTS.iter().map(|fault| {
        let reason: &str = fault.into();
        (reason, fault.in_short(), fault.fix())
    });
    let unknown = ("OfALaterAgent", "GPUs unreadable", "gpustow-agent");
    for (fault, state, fix) in known.chain([unknown]) {
        let [n, _] = healthy();
        let mut node = report("n", NOW, &json!({}));
        let gpus: Vec<_> = (0..4)
            .map(|index| {
                json!({ "uuid": format!("GPU-{index}"), "index": index, "model": "NVIDIA L4", "totalMiB": 6000,
                    "healthy": false, "reason": "the words of the agent" })
            })
            .collect();
        node["status"]["gpus"] = json!(gpus);
        node["status"]["conditions"] = json!([{ "type": "Ready", "status": "False", "reason": fault,
            "message": "the words of the agent" }]);
        let files = Files::new("driver", &[n, node])?;
        // Pages are named by their URLs.
        let (fix, page) = fix.split_once("docs/").unwrap_or((fix, ""));
        let row = files
            .finds("warning", "the words of the agent", fix)
            .await?;
        ensure!(row["fix"].to_string().contains(page), "{row:#?}");
        let (_, rows) = files.check().await?;
        ensure!(rows.len() == 1 && row["object"] == "node/n", "{rows:#?}");
        ensure!(!row["fix"].to_string().contains("replace"), "{row:#?}");
        let (_, nodes) = files.ask("nodes").await?;
        ensure!(nodes.contains(state), "{nodes}");
        let (_, gpus) = files.ask("gpus").await?;
        ensure!(gpus.matches(state).count() == 4, "{gpus}");
    }
    Ok(())
}

#[tokio::test]
async fn a_pod_that_borrows_as_its_limit_allows_is_no_finding() -> Result<()> {
    let holder = |notes: &[(&str, &str)]| {
        let mut pod = waiting("borrows", "");
        pod["metadata"]["annotations"] = json!({ "gpustow.dev/assignment":
            r#"{"version":1,"gpus":[{"uuid":"GPU-n","mib":2048}],"containers":{"main":["GPU-n"]}}"# });
        for (key, value) in notes {
            pod["metadata"]["annotations"][*key] = json!(value);
        }
        pod["spec"]["nodeName"] = json!("n");
        pod["status"] = json!({ "phase": "Running" });
        pod
    };
    const LIMIT: &str = "gpustow.dev/gpu-mem-limit";
    for (notes, found) in [
        (
            &[][..],
            Some((
                "uses 19.5Gi of 2Gi asked for",
                "raise its gpustow.dev/gpu-mem",
            )),
        ),
        (&[(LIMIT, "max")], None),
        (&[(LIMIT, "20000")], None),
        (
            &[(LIMIT, "8192")],
            Some((
                "uses 19.5Gi, more than its limit of 8Gi",
                "raise its gpustow.dev/gpu-mem-limit",
            )),
        ),
        (&[(LIMIT, "8192"), ("gpustow.dev/enforce", "none")], None),
    ] {
        let [n, _] = healthy();
        let gpu = json!({ "pods": [{ "uid": "borrows", "usedMiB": 20_000 }] });
        let files = Files::new("borrows", &[n, report("n", NOW, &gpu), holder(notes)])?;
        match found {
            Some((problem, fix)) => drop(files.finds("info", problem, fix).await?),
            None => {
                let (answer, rows) = files.check().await?;
                ensure!(
                    answer == Answer::Yes && rows.is_empty(),
                    "{notes:?}: {rows:#?}"
                );
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_pod_with_the_same_problem_on_two_gpus_is_named_once() -> Result<()> {
    let [n, _] = healthy();
    let gpu = json!({ "pods": [{ "uid": "two", "usedMiB": 20_000 }] });
    let mut node = report("n", NOW, &gpu);
    let mut second = node["status"]["gpus"][0].clone();
    second["uuid"] = json!("GPU-o");
    second["index"] = json!(1);
    let first = node["status"]["gpus"][0].clone();
    node["status"]["gpus"] = json!([first, second]);
    let mut pod = waiting("two", "");
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/assignment": r#"{"version":1,"gpus":
        [{"uuid":"GPU-n","mib":2048},{"uuid":"GPU-o","mib":2048}],"containers":{"main":["GPU-n","GPU-o"]}}"# });
    pod["spec"]["nodeName"] = json!("n");
    pod["status"] = json!({ "phase": "Running" });
    let files = Files::new("twice", &[n, node, pod])?;
    let (_, rows) = files.check().await?;
    let row = rows
        .iter()
        .find(|row| row["problem"] == "uses 19.5Gi of 2Gi asked for");
    ensure!(
        row.is_some_and(|row| row["object"] == "pod/ops/two"),
        "{rows:#?}"
    );
    Ok(())
}

#[tokio::test]
async fn gpu_that_is_no_longer_there_is_one_finding_whose_fix_is_to_delete_its_pods() -> Result<()>
{
    let [n, _] = healthy();
    let gone = json!({ "healthy": false, "missing": true, "reason": "not there any more" });
    let mut node = report("n", NOW, &gone);
    let first = node["status"]["gpus"][0].clone();
    let mut other = first.clone();
    (other["uuid"], other["index"]) = (json!("GPU-new"), json!(1));
    (other["healthy"], other["missing"]) = (json!(true), json!(false));
    other["reason"] = json!(null);
    node["status"]["gpus"] = json!([first, other]);
    let mut pod = waiting("holds", "");
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/assignment":
        r#"{"version":1,"gpus":[{"uuid":"GPU-n","mib":2048}],"containers":{"main":["GPU-n"]}}"# });
    pod["spec"]["nodeName"] = json!("n");
    let files = Files::new("gone", &[n, node, pod])?;
    files
        .finds(
            "warning",
            "is no longer there",
            "delete the pods that hold it",
        )
        .await?;
    let (_, rows) = files.check().await?;
    let fixes: Vec<_> = rows.iter().map(|row| row["fix"].to_string()).collect();
    ensure!(
        !fixes
            .iter()
            .any(|fix| fix.contains("replace the GPU") || fix.contains("look at the log")),
        "{rows:#?}"
    );
    let (_, why) = files.ask("why ops/holds").await?;
    ensure!(
        why.contains("its GPU GPU-n is no longer there. Delete the pod"),
        "{why}"
    );
    Ok(())
}
