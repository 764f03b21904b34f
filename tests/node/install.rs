//! The documentation's commands, typed on a cluster with a real node. gpustow runs there as pods, from the images of
//! `make images`, with their own accounts and security contexts.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_api::names;
use gpustow_testkit::{check_cluster, eventually, pod};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};

use crate::kubelet::IMAGE;
use crate::site::{CARDS, Site, TAGS, block, inline, on_site, uuid};

const SYSTEM: &str = "gpustow-system";
/// Bound on waits for pods that are started one after another on a busy machine.
const LATER: Duration = Duration::from_secs(300);

#[tokio::test]
async fn what_helm_installs_runs_as_pods() -> Result<()> {
    on_site(async |site| {
        site.types(&block("docs/install.md", "With Helm 3 or 4,")?)
            .await?;
        site.types(&inline("docs/install.md", "helm test")?).await?;
        let page = block("docs/page.md", "## In the cluster")?;
        let certificate = page.split("kubectl apply").next().context("no commands")?;
        site.types(certificate).await?;
        site.types(&inline("docs/page.md", "helm upgrade")?).await?;
        runs(site, TAGS[0]).await?;
        let before = serves(site).await?;

        site.imports(TAGS[1]).await?;
        site.edits(&["manifests/chart/Chart.yaml"], TAGS[0], TAGS[1])?;
        site.types(&inline("docs/upgrade.md", "helm upgrade")?)
            .await?;
        runs(site, TAGS[1]).await?;
        assert_eq!(held(site).await?, before);

        site.types(&inline("docs/uninstall.md", "helm uninstall")?)
            .await?;
        site.types(&block("docs/uninstall.md", "For the second scheduler")?)
            .await?;
        gone(site).await?;
        assert_eq!(held(site).await?, before);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn what_kustomize_installs_runs_as_pods() -> Result<()> {
    on_site(async |site| {
        site.types(&block("docs/install.md", "With kustomize,")?)
            .await?;
        site.types(&block("docs/page.md", "## In the cluster")?)
            .await?;
        runs(site, TAGS[0]).await?;
        guards(site).await?;
        let before = serves(site).await?;

        site.imports(TAGS[1]).await?;
        let files =
            ["base", "agent", "page"].map(|it| format!("manifests/{it}/kustomization.yaml"));
        site.edits(&files.each_ref().map(String::as_str), TAGS[0], TAGS[1])?;
        site.types(&block("docs/upgrade.md", "## gpustow")?).await?;
        site.types("kubectl apply --server-side -k manifests/page")
            .await?;
        runs(site, TAGS[1]).await?;
        assert_eq!(held(site).await?, before);

        site.types(&block("docs/uninstall.md", "For the second scheduler")?)
            .await?;
        gone(site).await?;
        assert_eq!(held(site).await?, before);
        Ok(())
    })
    .await
}

async fn pods(site: &Site, namespace: &str) -> Result<Vec<Pod>> {
    let pods = Api::<Pod>::namespaced(site.client.clone(), namespace);
    Ok(pods.list(&ListParams::default()).await?.items)
}

/// Waits until gpustow's own pods are ready from images of this tag, and no other pods of gpustow exist. Then checks
/// the privileges of their processes.
async fn runs(site: &Site, tag: &str) -> Result<()> {
    let all = [
        ("gpustow-agent", 1),
        ("gpustow-page", 1),
        ("gpustow-scheduler", 2),
    ];
    let ready = eventually(LATER, "gpustow's pods are ready", async || {
        let pods = pods(site, SYSTEM).await?;
        let mut seen = BTreeMap::new();
        for pod in &pods {
            let name = pod.labels().get("app.kubernetes.io/name");
            *seen.entry(name.map_or("", String::as_str)).or_insert(0) += 1;
            let state = format!("{} {:?}", pod.name_any(), pod.status);
            ensure!(is_ready(pod), "{state}");
            let ours = images(pod).filter(|image| image.contains("gpustow"));
            ensure!(
                ours.into_iter().all(|image| image.ends_with(tag)),
                "{state}"
            );
        }
        ensure!(seen == all.into(), "{seen:?}");
        Ok(pods)
    });
    for pod in ready.await? {
        let name = pod.labels().get("app.kubernetes.io/name").cloned();
        let account = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.clone());
        assert_eq!(account, name);
        // The kubelet's socket is root's.
        let user = match name.as_deref() {
            Some("gpustow-agent") => "0",
            _ => "65532",
        };
        for id in containers(&pod) {
            let pid = site.kubelet.pid(&id).await?;
            let which = || format!("{} {id}", pod.name_any());
            confined(pid, user).with_context(which)?;
            is_of_build(pid, tag).with_context(which)?;
        }
    }
    Ok(())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    pod.metadata.deletion_timestamp.is_none() && ready.any(|condition| condition.status == "True")
}

fn images(pod: &Pod) -> impl Iterator<Item = &String> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    })
    .filter_map(|container| container.image.as_ref())
}

/// The runtime's names of the containers that run.
fn containers(pod: &Pod) -> Vec<String> {
    let status = pod.status.iter();
    let all = status.flat_map(|status| {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    });
    let ids = all.filter_map(|container| container.container_id.as_deref());
    ids.map(|id| id.trim_start_matches("containerd://").to_owned())
        .collect()
}

/// Checks that gpustow's programs contain the revision of this build, as `images.sh` names it.
fn is_of_build(pid: u32, tag: &str) -> Result<()> {
    let program = std::fs::read_link(format!("/proc/{pid}/exe"))?;
    if !["/gpustow", "/gpustow-agent"]
        .map(Path::new)
        .contains(&&*program)
    {
        return Ok(());
    }
    let bytes = std::fs::read(format!("/proc/{pid}/exe"))?;
    let revision = format!("build-of-{tag}");
    let tells = bytes
        .windows(revision.len())
        .any(|it| it == revision.as_bytes());
    ensure!(tells, "{} is not of {revision}", program.display());
    Ok(())
}

/// This user, no capability, none to be had, system calls filtered, and a root that cannot be written.
fn confined(pid: u32, user: &str) -> Result<()> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    for (field, wanted) in [
        ("Uid", user),
        ("CapEff", "0000000000000000"),
        ("CapBnd", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{field}:")));
        let value = line.and_then(|line| line.split_whitespace().next());
        ensure!(value == Some(wanted), "{field} is {value:?}");
    }
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let root = mounts
        .lines()
        .find(|line| line.split(' ').nth(4) == Some("/"));
    let options = root
        .and_then(|line| line.split(' ').nth(5))
        .unwrap_or_default();
    ensure!(
        options.split(',').any(|option| option == "ro"),
        "root is {options}"
    );
    Ok(())
}

/// Every example runs, and pods are bound while the leading replica ends. Returns the state of the running pods.
async fn serves(site: &Site) -> Result<Vec<String>> {
    site.types("kubectl apply -f manifests/examples").await?;
    // Each wants a core; this machine may have two.
    site.types("kubectl scale deployment triton --replicas=1")
        .await?;
    let leader = leader(site).await?;
    for number in 0..16 {
        if number == 8 {
            let delete = format!("kubectl delete pod -n {SYSTEM} {leader} --wait=false");
            site.types(&delete).await?;
        }
        let name = format!("crowd-{number}");
        let pod = pod("default", &name).gpu_mem(1000).with(|spec| {
            for container in &mut spec.containers {
                container.image = Some(IMAGE.to_owned());
            }
        });
        pod.create(&site.client).await?;
    }
    // The pods of the Deployments and Jobs, and the crowd.
    let all = 6 + 16;
    let running = eventually(LATER, "examples and others run", async || {
        let pods = pods(site, "default").await?;
        for pod in &pods {
            ensure!(is_ready(pod), "{}: {:?}", pod.name_any(), pod.status);
        }
        ensure!(pods.len() == all, "{} pods", pods.len());
        Ok(pods)
    });
    for pod in running.await? {
        let container = pod.spec.iter().find_map(|spec| spec.containers.first());
        let key = format!(
            "{}{}",
            names::DEVICES_OF,
            container.context("no container")?.name
        );
        let devices = pod.annotations().get(&key).context("no devices")?;
        // In CDI mode the toolkit takes the variable when it has seen it.
        let log = site
            .types(&format!("kubectl logs {}", pod.name_any()))
            .await?;
        ensure!(log.trim_end() == "NVIDIA_VISIBLE_DEVICES=void", "{log}");
        let given: Vec<_> = devices.split(',').map(str::to_owned).collect();
        assert_eq!(cards(site, &pod).await?, given, "{}", pod.name_any());
    }
    check_cluster(&site.client, None).await?;
    eventually(LATER, "another replica leads", async || {
        let now = self::leader(site).await?;
        ensure!(now != leader, "{now} leads");
        Ok(())
    })
    .await?;
    held(site).await
}

/// The cards whose device nodes exist in a pod's containers.
async fn cards(site: &Site, pod: &Pod) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for id in containers(pod) {
        let pid = site.kubelet.pid(&id).await?;
        for card in 0..CARDS {
            if Path::new(&format!("/proc/{pid}/root/dev/nvidia{card}")).exists() {
                all.push(uuid(card));
            }
        }
    }
    Ok(all)
}

/// A container without a GPU request sees every card, as its image asks, until the guard is in force.
async fn guards(site: &Site) -> Result<()> {
    for (name, seen) in [
        ("before", (0..CARDS).map(uuid).collect()),
        ("guarded", Vec::new()),
    ] {
        let image = "docker.io/vllm/vllm-openai:v0.11.0";
        let run = format!("kubectl run {name} --image={image} --image-pull-policy=Never");
        site.types(&run).await?;
        let ready = format!("kubectl wait pod/{name} --for=condition=Ready --timeout=90s");
        site.types(&ready).await?;
        let pods = Api::<Pod>::namespaced(site.client.clone(), "default");
        assert_eq!(cards(site, &pods.get(name).await?).await?, seen, "{name}");
        site.types(&block("docs/install.md", "## Other pods on GPU nodes")?)
            .await?;
        // The API server takes a moment to hear of a policy.
        eventually(LATER, "the guard is in force", async || {
            let dry = format!("kubectl run dry --image={image} --dry-run=server --output=json");
            let pod = site.types(&dry).await?;
            ensure!(pod.contains("void"), "{pod}");
            Ok(())
        })
        .await?;
    }
    site.types("kubectl delete pod before guarded --now")
        .await?;
    Ok(())
}

/// The pod of the scheduler that leads.
async fn leader(site: &Site) -> Result<String> {
    let lease = "kubectl get lease gpustow-scheduler -n gpustow-system --output=jsonpath={.spec.holderIdentity}";
    let holder = site.types(lease).await?;
    let pod = holder.split('_').next().filter(|pod| !pod.is_empty());
    Ok(pod.context("no replica leads")?.to_owned())
}

/// Each pod, its containers and its assignment.
async fn held(site: &Site) -> Result<Vec<String>> {
    let pods = pods(site, "default").await?.into_iter();
    let all = pods.map(|pod| {
        let notes = pod.annotations().iter();
        let ours: Vec<_> = notes
            .filter(|(key, _)| key.contains(names::ASSIGNMENT))
            .collect();
        format!("{:?} {:?} {ours:?}", pod.uid(), containers(&pod))
    });
    Ok(all.collect())
}

/// Waits until nothing of gpustow's is left in the cluster.
async fn gone(site: &Site) -> Result<()> {
    eventually(LATER, "nothing of gpustow is left", async || {
        let kinds = site
            .types("kubectl api-resources --verbs=list --output=name")
            .await?;
        let kinds = kinds.lines().filter(|kind| !kind.starts_with("events"));
        let kinds = kinds.collect::<Vec<_>>().join(",");
        let all = site
            .types(&format!(
                "kubectl get {kinds} --all-namespaces --output=name"
            ))
            .await?;
        let left: Vec<_> = all
            .lines()
            .filter(|line| line.contains("gpustow"))
            .collect();
        if !left.is_empty() {
            bail!("{left:?}");
        }
        let node = site.types("kubectl get nodes --output=json").await?;
        ensure!(!node.contains("gpustow.dev/"), "{node}");
        Ok(())
    })
    .await
}
