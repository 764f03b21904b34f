//! The output of `check` and `why` where kube-scheduler looks at a part of the nodes.

use anyhow::{Result, ensure};
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::objects::{Files, healthy, node, waiting};

/// The configuration of kube-scheduler with these settings of the profile, and with this line next to the profiles.
fn configuration(profile: &str, beside: &str) -> Value {
    let text = format!(
        "kind: KubeSchedulerConfiguration\n{beside}\nprofiles: [{{schedulerName: gpustow-scheduler{profile}}}]\n\
         extenders: [{{filterVerb: filter, preemptVerb: preempt, bindVerb: bind, weight: 1, nodeCacheCapable: true, \
         managedResources: [{{name: gpustow.dev/gpu-mem}}]}}]\n"
    );
    json!({ "kind": "ConfigMap", "metadata": { "namespace": "gpustow-system", "name": "gpustow-scheduler-config" },
        "data": { "gpustow-scheduler.yaml": text } })
}

/// A cluster with this number of further nodes, all without a GPU.
fn cluster(name: &str, nodes: usize, configuration: Value) -> Result<Files> {
    let mut objects = healthy().to_vec();
    let more = (0..nodes).map(|at| node(&format!("cpu-{at:05}"), &json!({}), "0"));
    objects.extend(more);
    objects.push(configuration);
    Files::new(name, &objects)
}

#[tokio::test]
async fn check_warns_where_kube_scheduler_looks_at_every_node_of_many() -> Result<()> {
    let (found, fix) = (
        "kube-scheduler looks at 1600 of 1600 nodes for each pod, which makes it slow",
        "set percentageOfNodesToScore: 0 (adaptive) in the profile",
    );
    let all = ", percentageOfNodesToScore: 100";
    let files = cluster("looks-at-all", 1599, configuration(all, ""))?;
    files.finds("warning", found, fix).await?;
    let global = configuration("", "percentageOfNodesToScore: 100");
    let files = cluster("looks-at-all-globally", 1599, global)?;
    files.finds("warning", found, fix).await?;
    Ok(())
}

#[tokio::test]
async fn check_accepts_a_sample_of_nodes_and_all_of_few() -> Result<()> {
    let [adaptive, fifth] = [0, 20].map(|set| format!(", percentageOfNodesToScore: {set}"));
    for (name, nodes, profile, beside) in [
        ("samples", 1599, &*fifth, ""),
        ("samples-by-default", 1599, "", ""),
        ("samples-adaptive", 1599, &adaptive, ""),
        (
            "samples-beside",
            1599,
            &adaptive,
            "percentageOfNodesToScore: 100",
        ),
        ("all-of-few", 99, ", percentageOfNodesToScore: 100", ""),
    ] {
        let files = cluster(name, nodes, configuration(profile, beside))?;
        let (answer, rows) = files.check().await?;
        ensure!(
            answer == Answer::Yes && rows.is_empty(),
            "{name}: {rows:#?}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn check_tells_where_kube_scheduler_looks_at_few_of_many_nodes() -> Result<()> {
    let few = configuration(", percentageOfNodesToScore: 5", "");
    let files = cluster("looks-at-few", 1599, few)?;
    let (found, fix) = (
        "kube-scheduler looks at 100 of 1600 nodes for each pod, which leaves fewer nodes empty",
        "set percentageOfNodesToScore: 0 (adaptive) in the profile",
    );
    files.finds("info", found, fix).await?;
    Ok(())
}

#[tokio::test]
async fn why_says_that_a_part_of_the_nodes_was_looked_at() -> Result<()> {
    let mut objects = healthy().to_vec();
    let said = "0/5000 nodes are available: 500 not enough free memory on any one GPU.";
    objects.push(waiting("a", said));
    let (_, text) = Files::new("sampled", &objects)?.ask("why ops/a").await?;
    ensure!(
        text.contains("It fits now on 1 of 1 GPU nodes; the best is n.")
            && text.contains(
                "kube-scheduler last looked at 500 of 5000 nodes, and none of them fits."
            ),
        "{text}"
    );
    Ok(())
}
