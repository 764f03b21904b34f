//! The pods that an extender may delete when it preempts for fragmented memory.

use anyhow::{Context as _, Result};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{Refused, Taken, account, make, pods, row, run};
use crate::agent_token::patch;
use crate::install::install;
use crate::policies::asks;
use crate::support::{ACCOUNT, SYSTEM};

const NONE_BUT: &str = "the extender deletes only pods that are bound";

#[tokio::test]
async fn a_fallen_extender_deletes_no_pod_but_a_marked_one_and_that_by_its_copy() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    install(&cluster, "manifests/base").await?;
    let namespace = format!("--namespace={SYSTEM}");
    let kind = ["create", "serviceaccount", names::EXTENDER, &namespace];
    cluster.kubectl(&kind).await?;
    let case = Case::new(&cluster, "deletes").await?;
    let asking = || json!({ "containers": [asks("main", "1")] });
    let plain = || json!({ "containers": [{ "name": "a" }] });
    make(&case, "marked", json!({}), asking(), Some("n")).await?;
    make(&case, "bound", json!({}), asking(), Some("n")).await?;
    make(&case, "plain", json!({}), plain(), Some("n")).await?;
    make(&case, "waits", json!({}), asking(), None).await?;
    let target = json!({ "status": { "conditions": [
        { "type": names::DISRUPTION_TARGET, "status": "True", "reason": names::PREEMPTED },
    ] } });
    for pod in ["marked", "plain", "waits"] {
        patch(
            &case.client,
            &pods(&case, &format!("/{pod}/status")),
            &target,
        )
        .await?;
    }
    let options = async |pod: &str, by: &[&str]| -> Result<Value> {
        let pod = case.pods().get(pod).await?;
        let all = [
            ("uid", pod.uid()),
            ("resourceVersion", pod.resource_version()),
        ];
        let named = all.into_iter().filter(|(key, _)| by.contains(key));
        let preconditions: serde_json::Map<String, Value> = named
            .map(|(key, value)| Some((key.to_owned(), json!(value?))))
            .collect::<Option<_>>()
            .context("no uid")?;
        Ok(
            json!({ "apiVersion": "v1", "kind": "DeleteOptions", "dryRun": ["All"], "preconditions": preconditions }),
        )
    };
    let both = ["uid", "resourceVersion"];
    let copy = "without its uid and resourceVersion";
    let tries = [
        ("marked", &both[..], Taken, Taken),
        ("marked", &["uid"], Refused(copy), Taken),
        ("marked", &["resourceVersion"], Refused(copy), Taken),
        ("marked", &[], Refused(copy), Taken),
        ("bound", &both, Refused(NONE_BUT), Taken),
        ("plain", &both, Refused(NONE_BUT), Taken),
        ("waits", &both, Refused(NONE_BUT), Taken),
    ];
    let (mut extender, mut scheduler) = (Vec::new(), Vec::new());
    for (pod, by, alone, beside) in tries {
        let options = options(pod, by).await?;
        let path = pods(&case, &format!("/{pod}"));
        let trick = format!("{pod} by {by:?}");
        extender.push(row(
            trick.clone(),
            "DELETE",
            path.clone(),
            options.clone(),
            alone,
        ));
        // kube-scheduler's own preemption, of the same account, deletes the pods that it likes.
        scheduler.push(row(trick, "DELETE", path, options, beside));
    }
    let all = row(
        "all",
        "DELETE",
        pods(&case, ""),
        json!({}),
        Refused("forbidden"),
    );
    extender.push(all);
    let client = account(&cluster, SYSTEM, names::EXTENDER).await?;
    run("the extender", &client, extender).await?;
    let client = account(&cluster, SYSTEM, ACCOUNT).await?;
    run("the scheduler", &client, scheduler).await?;
    case.end().await
}
