//! `kubectl gpustow` on a real cluster, with the right to read and no other.

use anyhow::{Context as _, Result};
use clap::Parser as _;
use gpustow_api::{Assignment, names};
use gpustow_testkit::{Case, eventually, wait_bound, wait_refused};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kubectl_gpustow::{Answer, Args, Screen, run};
use serde_json::{Value, json};

use crate::support::{SOON, rig};

/// A reader of a case, by its kubeconfig and its ClusterRoleBinding.
pub(crate) struct Reader {
    kubeconfig: String,
    binding: String,
}

impl Reader {
    pub(crate) async fn new(case: &Case) -> Result<Self> {
        let (client, namespace) = (case.client.clone(), &case.namespace);
        let mut account = ServiceAccount::default();
        account.metadata.name = Some("reader".to_owned());
        Api::namespaced(client.clone(), namespace)
            .create(&PostParams::default(), &account)
            .await?;
        let binding: ClusterRoleBinding = serde_json::from_value(json!({
            "metadata": { "name": format!("{namespace}-reader") },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpustow-viewer" },
            "subjects": [{ "kind": "ServiceAccount", "name": "reader", "namespace": namespace }],
        }))?;
        let binding = Api::all(client)
            .create(&PostParams::default(), &binding)
            .await?;
        let kubeconfig = rig().await?.cluster.kubeconfig(namespace, "reader", None);
        Ok(Self {
            kubeconfig: kubeconfig.await?.display().to_string(),
            binding: binding.metadata.name.context("a binding without a name")?,
        })
    }

    pub(crate) async fn ask(&self, words: &[&str]) -> Result<(Answer, String)> {
        let program = ["kubectl-gpustow", "--kubeconfig", &self.kubeconfig];
        let args = Args::try_parse_from(program.iter().chain(words))?;
        let mut out = Vec::new();
        let answer = run(args, &mut out, Screen::default()).await?;
        Ok((answer, String::from_utf8(out)?))
    }

    async fn json(&self, words: &[&str]) -> Result<Value> {
        let (_, said) = self.ask(&[words, &["-o", "json"]].concat()).await?;
        Ok(serde_json::from_str(&said)?)
    }
}

#[tokio::test]
async fn a_reader_is_told_what_the_extender_then_does() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "cli").await?;
    case.node("n", &[24576, 16384]).create(&case.client).await?;
    let reader = Reader::new(&case).await?;
    let ours = format!("--namespace={}", case.namespace);

    // Before it exists: fit names the GPU that the extender then takes.
    let pod = case.pod("p").gpu_mem(8192);
    let file = std::env::temp_dir().join(format!("{}.json", case.namespace));
    std::fs::write(&file, typed(&pod.clone().build())?)?;
    let path = file.display().to_string();
    let (answer, fit) = reader.ask(&["fit", "-f", &path, "-o", "json"]).await?;
    std::fs::remove_file(&file)?;
    assert_eq!(answer, Answer::Yes, "{fit}");
    let fit: Value = serde_json::from_str(&fit)?;
    assert_eq!(fit["place"]["node"], case.node_name("n"));
    assert_eq!(fit["place"]["gpus"][0]["gpu"], "1", "{fit}");
    let bound = wait_bound(&case.client, &pod.create(&case.client).await?, SOON).await?;
    let annotations = bound.metadata.annotations.unwrap_or_default();
    let assignment = Assignment::decode(&annotations[names::ASSIGNMENT])?;
    assert_eq!(*assignment.charges[0].0, *case.uuid("n", 1));

    let (_, pods) = reader.ask(&["pods", &ours, "-o", "json"]).await?;
    let pods: Value = serde_json::from_str(&pods)?;
    assert_eq!(pods["items"][0]["requestedBytes"], 8192_u64 << 20);
    assert_eq!(pods["items"][0]["gpus"][0], "1");
    let (answer, why) = reader.ask(&["why", "p", &ours]).await?;
    assert!(
        answer == Answer::Yes && why.contains("the only node"),
        "{why}"
    );

    // The extender and its scheduler are looked at, and nothing is wrong with them.
    let (_, check) = reader.ask(&["check"]).await?;
    for wrong in [
        "Leases",
        "Lease was renewed",
        "ever decided",
        "kube-scheduler is of",
    ] {
        assert!(!check.contains(wrong), "{check}");
    }

    // All that it reads, the reader may read.
    let (_, adopt) = reader.ask(&["adopt", "--dry-run", &ours]).await?;
    assert!(
        adopt.contains("No pod requests GPUs of gpushare"),
        "{adopt}"
    );

    // 9000 MiB are left in sum and on no card.
    let large = case
        .pod("large")
        .gpu_mem(20000)
        .create(&case.client)
        .await?;
    wait_bound(&case.client, &large, SOON).await?;
    let waits = case.pod("waits").gpu_mem(9000).create(&case.client).await?;
    wait_refused(&case.client, &waits, "free memory", SOON).await?;
    let (answer, why) = reader.ask(&["why", "waits", &ours, "-o", "json"]).await?;
    let why: Value = serde_json::from_str(&why)?;
    assert_eq!((answer, &why["verdict"]), (Answer::No, &json!("Waiting")));
    assert_eq!(why["nearest"][0]["lacksBytes"], (9000 - 8192_u64) << 20);
    assert_eq!(
        why["nearest"][0]["freedBy"],
        json!([{ "pod": format!("{}/p", case.namespace), "bytes": 8_u64 << 30 }])
    );

    Api::<ClusterRoleBinding>::all(case.client.clone())
        .delete(&reader.binding, &DeleteParams::default())
        .await?;
    case.end().await
}

/// A Deployment of one such pod.
pub(crate) fn deployment(name: &str, pod: &Pod) -> Value {
    let labels = json!({ "app": name });
    json!({
        "metadata": { "name": name },
        "spec": {
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": pod.spec },
        },
    })
}

/// A manifest bears its kind.
fn typed(pod: &Pod) -> Result<String> {
    let mut pod = serde_json::to_value(pod)?;
    pod["kind"] = json!("Pod");
    Ok(pod.to_string())
}

/// A user with the role `edit` in her namespace and nothing else.
async fn editor(case: &Case) -> Result<Reader> {
    let reader = Reader::new(case).await?;
    Api::<ClusterRoleBinding>::all(case.client.clone())
        .delete(&reader.binding, &DeleteParams::default())
        .await?;
    let binding: RoleBinding = serde_json::from_value(json!({
        "metadata": { "name": "reader" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit" },
        "subjects": [{ "kind": "ServiceAccount", "name": "reader", "namespace": case.namespace }],
    }))?;
    Api::namespaced(case.client.clone(), &case.namespace)
        .create(&PostParams::default(), &binding)
        .await?;
    Ok(reader)
}

#[tokio::test]
async fn a_tenant_gets_answers_about_her_own_pods_and_none_about_others() -> Result<()> {
    let rig = rig().await?;
    let (case, others) = (
        Case::new(rig.cluster, "cli-edit").await?,
        Case::new(rig.cluster, "cli-others").await?,
    );
    case.node("n", &[8192]).create(&case.client).await?;
    others.node("n", &[8192]).create(&case.client).await?;
    let secret = others.pod("secret").gpu_mem(1024);
    wait_bound(&case.client, &secret.create(&case.client).await?, SOON).await?;
    let tenant = editor(&case).await?;
    let ours = format!("--namespace={}", case.namespace);
    let small = case.pod("small").gpu_mem(4096).create(&case.client).await?;
    wait_bound(&case.client, &small, SOON).await?;
    let web = deployment("web", &case.pod("web").gpu_mem(9000).build());
    Api::<Deployment>::namespaced(case.client.clone(), &case.namespace)
        .create(&PostParams::default(), &serde_json::from_value(web)?)
        .await?;
    let large = eventually(SOON, "the Deployment has a pod", async || {
        let web = ListParams::default().labels("app=web");
        let mut pods = case.pods().list(&web).await?.items;
        pods.pop().context("none")
    });
    let large = large.await?;
    wait_refused(&case.client, &large, "Insufficient", SOON).await?;
    let name = large.name_any();

    // By name, by workload, and for programs.
    for pod in [&*name, "deploy/web", &format!("{}/{name}", case.namespace)] {
        eventually(SOON, "why names the Event", async || {
            let (answer, why) = tenant.ask(&["why", pod, &ours]).await?;
            anyhow::ensure!(answer == Answer::No, "{why}");
            for part in [
                "Insufficient",
                "Event GpuMemoryUnavailable",
                "Left out: pods of others",
            ] {
                anyhow::ensure!(why.contains(part), "{why}");
            }
            Ok(())
        })
        .await?;
    }
    let why = tenant.json(&["why", "deploy/web", &ours]).await?;
    assert_eq!(why["verdict"], "Waiting");
    assert_eq!(why["events"][0]["event"], "GpuMemoryUnavailable", "{why}");
    let why = tenant.json(&["why", "small", &ours]).await?;
    assert_eq!(why["verdict"], "Running");
    let place = format!(
        "It is on {}, on GPU {}.",
        case.node_name("n"),
        case.uuid("n", 0)
    );
    assert_eq!(why["summary"], place);

    let pods = tenant.json(&["pods", &ours]).await?;
    let names: Vec<_> = pods["items"].as_array().into_iter().flatten().collect();
    let names: Vec<_> = names.iter().map(|it| it["pod"].as_str()).collect();
    assert_eq!(names, [Some("small"), Some(&*name)], "{pods}");
    assert_eq!(pods["items"][0]["podChargedBytes"], 4096_u64 << 20);
    assert!(
        pods["leftOut"].to_string().contains("gpustow-viewer"),
        "{pods}"
    );

    let (_, top) = tenant.ask(&["top", "-1", &ours]).await?;
    assert!(top.contains("small") && top.contains("Left out: "), "{top}");

    // A pod that the API server refuses cannot fit. For all other pods the answer is unknown.
    let file = std::env::temp_dir().join(format!("{}.json", case.namespace));
    let path = file.display().to_string();
    for (pod, verdict, answer) in [
        (case.pod("p").gpu_mem(4096), "Unknown", Answer::Unknown),
        (
            case.pod("p").gpu_mem(4096).label("a/b/c", ""),
            "Invalid",
            Answer::No,
        ),
    ] {
        std::fs::write(&file, typed(&pod.build())?)?;
        let (said, fit) = tenant.ask(&["fit", "-f", &path, "-o", "json"]).await?;
        let fit: Value = serde_json::from_str(&fit)?;
        assert_eq!((said, &fit["verdict"]), (answer, &json!(verdict)), "{fit}");
    }
    std::fs::remove_file(&file)?;

    // She may not see these.
    let theirs = format!("--namespace={}", others.namespace);
    for words in [
        &["pods", "-A"][..],
        &["pods", &theirs],
        &["why", "secret", &theirs],
        &["why", &format!("{}/secret", others.namespace)],
        &["gpus"],
    ] {
        let error = format!("{:#}", tenant.ask(words).await.err().context("an answer")?);
        assert!(error.contains("gpustow-viewer"), "{words:?}: {error}");
    }
    others.end().await?;
    case.end().await
}

#[tokio::test]
async fn bundle_is_a_cluster_in_files_without_environment_and_arguments() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "bundle").await?;
    case.node("n", &[24576]).create(&case.client).await?;
    let reader = Reader::new(&case).await?;
    let mut pod = case.pod("p").gpu_mem(8192).build();
    if let Some(spec) = &mut pod.spec {
        let secret = json!([{ "name": "TOKEN", "value": "hunter2" }]);
        spec.containers[0].env = serde_json::from_value(secret)?;
        spec.containers[0].args = Some(vec!["--password=hunter2".to_owned()]);
    }
    let pod = case.pods().create(&PostParams::default(), &pod).await?;
    wait_bound(&case.client, &pod, SOON).await?;

    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (_, said) = reader.ask(&["check", "--bundle", &path("b.tar")]).await?;
    assert!(said.contains("read it before you pass it on"), "{said}");
    let again = reader.ask(&["check", "--bundle", &path("b.tar")]).await;
    let again = format!("{:#}", again.err().context("it was written over")?);
    assert!(again.contains("cannot create"), "{again}");

    let tar = std::process::Command::new("tar")
        .args(["-xf", &path("b.tar"), "-C", &path("")])
        .status()?;
    assert!(tar.success());
    let objects = std::fs::read_to_string(path("gpustow/objects.json"))?;
    assert!(!objects.contains("hunter2"), "{objects}");
    let left_out = std::fs::read_to_string(path("gpustow/left-out.txt"))?;
    assert!(left_out.contains("ConfigMap: "), "{left_out}");
    let from = format!("--from={}", path("gpustow"));
    let ours = format!("--namespace={}", case.namespace);
    let (_, pods) = reader.ask(&["pods", &from, &ours, "-o", "name"]).await?;
    assert_eq!(pods, "pod/p\n");
    Api::<ClusterRoleBinding>::all(case.client.clone())
        .delete(&reader.binding, &DeleteParams::default())
        .await?;
    case.end().await
}

#[tokio::test]
async fn without_rights_it_says_which_are_missing() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "cli-denied").await?;
    let mut account = ServiceAccount::default();
    account.metadata.name = Some("outsider".to_owned());
    Api::namespaced(case.client.clone(), &case.namespace)
        .create(&PostParams::default(), &account)
        .await?;
    let kubeconfig = rig
        .cluster
        .kubeconfig(&case.namespace, "outsider", None)
        .await?;
    let path = kubeconfig.display().to_string();
    let args = Args::try_parse_from(["kubectl-gpustow", "--kubeconfig", &path, "nodes"])?;
    let error = run(args, &mut Vec::new(), Screen::default()).await.err();
    let error = format!("{:#}", error.context("the account may not list nodes")?);
    assert!(error.contains("ClusterRole gpustow-viewer"), "{error}");
    case.end().await
}
