//! What `check` makes of faults of a whole node, of pods that borrow, and of switches without their component.

use anyhow::{Result, ensure};
use gpustow_api::faults::NodeFault;
use kubectl_gpustow::Answer;
use serde_json::json;
use strum::VariantArray as _;

use crate::incidents::{Files, NOW, healthy, part, report, waiting};

#[tokio::test]
async fn a_switch_without_its_component_is_found() -> Result<()> {
    let review = |verb: &str, resource: &str, subresource: Option<&str>, allowed: bool| {
        let mut attributes = json!({ "verb": verb, "resource": resource });
        if let Some(subresource) = subresource {
            attributes["subresource"] = json!(subresource);
        }
        json!({ "kind": "SubjectAccessReview",
            "spec": { "user": "system:serviceaccount:gpustow-system:gpustow-scheduler",
                "resourceAttributes": attributes },
            "status": { "allowed": allowed } })
    };
    for (args, asked, found) in [
        (
            &["--line=auto"][..],
            review("patch", "pods", None, false),
            Some((
                "--line does not work: its account may not patch pods",
                "manifests/line/rbac.yaml",
            )),
        ),
        (
            &["--call-back", "--act=evict"],
            review("create", "pods", Some("eviction"), false),
            Some((
                "--act=evict does not work: its account may not create pods/eviction",
                "manifests/evict/",
            )),
        ),
        (
            &["--move=3"],
            review("create", "pods", Some("eviction"), true),
            None,
        ),
        // Off, so it needs none.
        (
            &["--call-back"],
            review("create", "pods", Some("eviction"), false),
            None,
        ),
    ] {
        let mut objects = healthy().to_vec();
        let mut pod = part("e", "initContainers", "extender", args, true);
        pod["spec"]["serviceAccountName"] = json!("gpustow-scheduler");
        objects.extend([pod, asked]);
        let files = Files::new("rights", &objects)?;
        match found {
            Some((problem, fix)) => drop(files.finds("error", problem, fix).await?),
            None => {
                let (answer, rows) = files.check().await?;
                ensure!(
                    answer == Answer::Yes && rows.is_empty(),
                    "{args:?}: {rows:#?}"
                );
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
        let row = files
            .finds("warning", "the words of the agent", fix)
            .await?;
        let (_, rows) = files.check().await?;
        ensure!(rows.len() == 1 && row["object"] == "node/n", "{rows:#?}");
        ensure!(!row["mend"].to_string().contains("replace"), "{row:#?}");
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
