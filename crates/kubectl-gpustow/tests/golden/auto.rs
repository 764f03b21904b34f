//! The output of `fit` and `why` for pods that leave their amount to the history of their workload.

use anyhow::{Result, ensure};
use kubectl_gpustow::Answer;
use serde_json::{Value, json};

use crate::advise::workload;
use crate::objects::{Files, NOW, node, report, waiting};

const DAY: u64 = 1440;

fn namespace(name: &str, quantile: Option<&str>, default: Option<&str>) -> Value {
    json!({ "kind": "Namespace", "metadata": { "name": name,
        "labels": quantile.map(|it| json!({ "gpustow.dev/auto": it })),
        "annotations": default.map(|it| json!({ "gpustow.dev/auto-default": it })) } })
}

fn objects() -> Vec<Value> {
    vec![
        node("n", &json!({}), "24k"),
        report("n", NOW, &json!({})),
        namespace("ops", Some("p99"), Some("12000")),
        namespace("new", Some("p95"), None),
        namespace("wrong", Some("p95"), Some("12Gi")),
        namespace("closed", None, Some("12000")),
        workload("StatefulSet", "web", DAY, |it| {
            if it % 20 == 0 { 7000 } else { 4000 }
        }),
        workload("StatefulSet", "young", 60, |_| 4000),
    ]
}

/// The output of `fit` for a StatefulSet of this name in this namespace, in one line.
async fn fit(name: &str, namespace: &str, image: &str, notes: Value) -> Result<(Answer, String)> {
    let files = Files::new("auto", &objects())?;
    let mut template = json!({ "gpustow.dev/gpu-mem": "auto" });
    for (key, value) in notes.as_object().into_iter().flatten() {
        template[key] = value.clone();
    }
    let object = json!({ "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": { "name": name, "namespace": namespace },
        "spec": { "template": { "metadata": { "annotations": template },
            "spec": { "containers": [{ "name": "main", "image": image }] } } } });
    let file = files.file("pod.json", &object)?;
    let (answer, said) = files.ask(&format!("fit -f {file}")).await?;
    Ok((
        answer,
        said.split_whitespace().collect::<Vec<_>>().join(" "),
    ))
}

#[tokio::test]
async fn fit_gives_a_pod_the_amount_that_admission_would() -> Result<()> {
    let (answer, said) = fit("web", "ops", "app:1", json!({})).await?;
    ensure!(
        answer == Answer::Yes
            && said.contains("asks for main: 6.9Gi; by gpustow.dev/gpu-mem: auto: what its workload exceeds in one minute of a hundred")
            && said.contains("It fits now on 1 of 1 GPU nodes"),
        "{said}"
    );
    // A new image has the earlier one's amount, a young workload the namespace's default.
    let default = "main: 11.7Gi; by gpustow.dev/gpu-mem: auto: the default of its namespace";
    let earlier =
        "main: 6.9Gi; by gpustow.dev/gpu-mem: auto: what its workload needed with an earlier image";
    for (name, image, expected) in [
        ("web", "app:2", earlier),
        ("young", "app:1", default),
        ("other", "app:1", default),
    ] {
        let (answer, said) = fit(name, "ops", image, json!({})).await?;
        ensure!(answer == Answer::Yes && said.contains(expected), "{said}");
    }
    let (answer, said) = fit(
        "web",
        "ops",
        "app:1",
        json!({ "gpustow.dev/gpu-count": "2" }),
    )
    .await?;
    ensure!(
        answer == Answer::No && said.contains("main: 6.9Gi on each of 2 GPUs"),
        "{said}"
    );
    Ok(())
}

#[tokio::test]
async fn fit_says_why_admission_would_refuse_a_pod_without_an_amount() -> Result<()> {
    for (namespace, text) in [
        (
            "new",
            "has no advice to follow (kubectl gpustow advise says why), and the namespace has no default",
        ),
        (
            "wrong",
            "annotation gpustow.dev/auto-default is no number of MiB",
        ),
        (
            "closed",
            "the namespace does not allow it: label it gpustow.dev/auto: advised",
        ),
    ] {
        let (answer, said) = fit("web", namespace, "app:2", json!({})).await?;
        ensure!(
            answer == Answer::No && said.contains(text) && !said.contains("Fits"),
            "{said}"
        );
    }
    let unknown = fit("web", "nowhere", "app:1", json!({})).await;
    ensure!(unknown.is_err_and(|error| error.to_string().contains("no namespace nowhere")));
    Ok(())
}

#[tokio::test]
async fn why_says_where_the_amount_is_from() -> Result<()> {
    let mut objects = objects();
    let mut pod = waiting("web-0", "");
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/gpu-mem": "auto-p95" });
    objects.push(pod.clone());
    // Without the webhook the API server still creates such a pod.
    pod["metadata"]["name"] = json!("bare");
    pod["metadata"]["uid"] = json!("bare");
    pod["metadata"]["annotations"] = json!({ "gpustow.dev/gpu-mem": "auto" });
    pod["spec"]["containers"][0]["resources"] = json!({});
    objects.push(pod);
    let files = Files::new("auto-why", &objects)?;
    let (_, said) = files.ask("why ops/web-0").await?;
    ensure!(
        said.contains("main: 2Gi; by gpustow.dev/gpu-mem: auto: what its workload exceeds in one minute of twenty"),
        "{said}"
    );
    let said = files
        .ask("why ops/bare")
        .await
        .err()
        .map(|it| it.to_string());
    ensure!(
        said.as_ref()
            .is_some_and(|it| it.contains("admission gave the pod no amount")),
        "{said:?}"
    );
    Ok(())
}
