//! The Helm chart: it makes the objects of the kustomizations, and is installed, upgraded and removed on a real API
//! server.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{GpuNode, GpustowConfig, config, names};
use gpustow_testkit::{
    Case, ControlPlane, Extender, ExtenderOptions, Options, PodBuilder, Scheduler, SchedulerConfig,
    Webhook, eventually, wait_bound, wait_refused,
};
use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::install::{forget, in_force};
use crate::support::{ACCOUNT, SOON, SYSTEM, bound, charges, gpustow, node_of, repository};

async fn output(command: &mut Command) -> Result<String> {
    let output = command.kill_on_drop(true).output().await?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {complaint}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs Helm in gpustow's namespace.
pub(crate) async fn helm(args: &[&str], kubeconfig: Option<&Path>) -> Result<String> {
    static BUILT: OnceCell<String> = OnceCell::const_new();
    let built = BUILT.get_or_try_init(async || {
        output(&mut Command::new(repository("tests/helm/build.sh"))).await
    });
    let home = tempfile::tempdir()?;
    let mut command = Command::new(built.await?.trim_end());
    command.args(args).arg("--namespace").arg(SYSTEM);
    command.env("HOME", home.path()).env_remove("KUBECONFIG");
    if let Some(kubeconfig) = kubeconfig {
        command.env("KUBECONFIG", kubeconfig);
    }
    output(&mut command).await
}

/// Path of the chart.
pub(crate) fn chart() -> String {
    repository("manifests/chart").display().to_string()
}

/// The chart's objects for a cluster of this version.
pub(crate) async fn template(version: &str, args: &[&str]) -> Result<String> {
    let version = format!("--kube-version={version}");
    let chart = chart();
    let all = [
        &["template", "gpustow", &chart, &version, "--skip-tests"],
        args,
    ]
    .concat();
    helm(&all, None).await
}

/// Objects by kind and name. Blanks within texts count as one: kustomize breaks folded lines elsewhere.
pub(crate) fn objects(yaml: &str) -> Result<BTreeMap<String, Value>> {
    fn fold(value: &mut Value) {
        match value {
            Value::String(text) => {
                *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            }
            Value::Array(list) => list.iter_mut().for_each(fold),
            Value::Object(fields) => fields.values_mut().for_each(fold),
            _ => {}
        }
    }
    let mut all = BTreeMap::new();
    for document in serde_yaml::Deserializer::from_str(yaml) {
        let mut object = Value::deserialize(document)?;
        let Some(kind) = object["kind"].as_str() else {
            continue;
        };
        let metadata = &object["metadata"];
        // Helm has hooks; kustomize does not.
        if !metadata["annotations"]["helm.sh/hook"].is_null() {
            continue;
        }
        let key = format!("{kind} {} {}", metadata["namespace"], metadata["name"]);
        // Helm's own.
        if let Some(metadata) = object["metadata"].as_object_mut() {
            let notes = metadata.get_mut("annotations");
            if let Some(notes) = notes.and_then(Value::as_object_mut)
                && notes.remove("helm.sh/resource-policy").is_some()
                && notes.is_empty()
            {
                metadata.remove("annotations");
            }
        }
        fold(&mut object);
        ensure!(all.insert(key.clone(), object).is_none(), "{key} twice");
    }
    Ok(all)
}

#[tokio::test]
async fn the_chart_makes_the_objects_of_the_kustomizations() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    const QUEUE: &str = "--set=config.queue.mode=Auto";
    let tag = |tag: &str| format!("--set=scheduler.image.tag={tag}");
    let same = tag("v1.36.3");
    for (version, args, kustomization) in [
        ("1.36.3", &[][..], "base"),
        (
            "1.36.3",
            &["--set=agent.killProcesses=true"],
            "overlays/kill-processes",
        ),
        (
            "1.36.3",
            &["--set=agent.setLimits=true"],
            "overlays/set-limits",
        ),
        (
            "1.36.3",
            &["--set=agent.makeInstances=true"],
            "overlays/make-instances",
        ),
        ("1.36.3", &["--set=agent.mps=true"], "overlays/mps"),
        (
            "1.36.3",
            &["--set=agent.mps=true,agent.mpsDaemon=true"],
            "overlays/mps-daemon",
        ),
        (
            "1.36.3",
            &["--set=metrics.secure=true,monitoring.enabled=true"],
            "overlays/monitored",
        ),
        ("1.36.3", &[QUEUE], "overlays/queue"),
        ("1.34.1", &[QUEUE, &same], "overlays/queue"),
    ] {
        let own = "--set=webhook.certificate=selfSigned";
        let args = [&["--include-crds", own], args].concat();
        let mut ours = objects(&template(version, &args).await?)?;
        let config = ours.remove(r#"GpustowConfig null "gpustow""#);
        let mode = config.context("no GpustowConfig")?["spec"]["queue"]["mode"].take();
        ensure!((mode == "Auto") == args.contains(&QUEUE), "{mode}");
        let path = repository("manifests").join(kustomization);
        let theirs = cluster
            .kubectl(&["kustomize", &path.display().to_string()])
            .await?;
        let theirs = objects(&theirs)?;
        let names = |all: &BTreeMap<String, Value>| all.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&ours), names(&theirs), "{kustomization}");
        for (name, theirs) in &theirs {
            assert_eq!(&ours[name], theirs, "{kustomization}: {name}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_schedulers_image_is_the_clusters_version_as_far_as_it_was_tested() -> Result<()> {
    let mut tested = Vec::new();
    for minor in 34..=37 {
        let pins = repository(&format!("tests/control-plane/1.{minor}/go.mod"));
        let pins = std::fs::read_to_string(pins)?;
        let version = pins.split("k8s.io/kubernetes ").nth(1);
        let version = version.and_then(|rest| rest.split_whitespace().next());
        tested.push((
            format!("v1.{minor}.99-gke.100"),
            version.context("no pin")?.to_owned(),
        ));
    }
    tested.push(("v1.34.2-eks-a1b2".to_owned(), "v1.34.2".to_owned()));
    tested.push(("v1.36.1".to_owned(), "v1.36.1".to_owned()));
    tested.push(("v1.38.2-rc.1".to_owned(), "v1.38.2".to_owned()));
    for (cluster, expected) in tested {
        let made = template(&cluster, &[]).await?;
        let image = format!("registry.k8s.io/kube-scheduler:{expected}\n");
        ensure!(made.contains(&image), "{cluster}: not {expected}");
    }
    Ok(())
}

#[tokio::test]
async fn a_value_that_the_chart_does_not_have_is_refused() -> Result<()> {
    let values = std::fs::read_to_string(repository("manifests/chart/values.yaml"))?;
    let values: Value = serde_yaml::from_str(&values)?;
    let (mut levels, mut open) = (Vec::new(), vec![(String::new(), &values)]);
    while let Some((path, value)) = open.pop() {
        let fields = value.as_object().into_iter().flatten();
        let below = fields.filter(|(_, value)| value.as_object().is_some_and(|it| !it.is_empty()));
        open.extend(below.map(|(key, value)| (format!("{path}{key}."), value)));
        levels.push(path);
    }
    ensure!(levels.len() > 10, "{levels:?}");
    for path in levels {
        let set = format!("--set={path}misspelt=1");
        let refused = template("1.36.3", &[&set]).await.map(drop);
        let text = refused.err().with_context(|| format!("{set} passes"))?;
        ensure!(text.to_string().contains("misspelt"), "{text}");
    }
    Ok(())
}

/// The command of docs/upgrade.md, with a kind that differs from the installed kind.
async fn applies_a_changed_kind(cluster: &ControlPlane) -> Result<()> {
    let page = std::fs::read_to_string(repository("docs/upgrade.md"))?;
    let mut commands = page.lines().map(str::trim);
    let command = commands.find(|it| it.starts_with("kubectl ") && it.ends_with("config-crd.yaml"));
    let mut words: Vec<&str> = command.context("no command")?.split(' ').skip(1).collect();
    let kind = words.pop().context("no file")?;
    let changed = std::fs::read_to_string(repository(kind))?.replace("How long", "The time");
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), changed)?;
    words.push(file.path().to_str().context("path")?);
    cluster.kubectl(&words).await.map(drop)
}

/// The state that must not change, whatever is done to gpustow.
async fn kept(client: &Client, case: &Case, objects: usize) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for pod in case.pods().list(&Default::default()).await? {
        let pod: Pod = pod;
        all.push(format!("{:?} {:?}", pod.uid(), pod.metadata.annotations));
    }
    // The API server refuses lists for a moment while a kind changes.
    let nodes = Api::<GpuNode>::all(client.clone());
    let listed = async || Ok(nodes.list(&Default::default()).await?);
    for node in eventually(SOON, "GpuNodes are listed", listed).await? {
        all.push(format!("{:?} {:?}", node.uid(), node.status));
    }
    ensure!(all.len() == objects, "{all:?}");
    Ok(all)
}

#[tokio::test]
async fn helm_installs_upgrades_rolls_back_and_uninstalls_and_pods_stay_as_they_are() -> Result<()>
{
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    let client = cluster.admin()?;
    let chart = chart();
    let run = async |args: &[&str]| helm(args, Some(cluster.admin_kubeconfig())).await;
    let install = ["install", "gpustow", &chart, "--create-namespace"];
    run(&install).await?;
    Webhook::keep(&cluster, gpustow()).await?;
    in_force(&cluster).await?;
    let case = Case::new(&cluster, "helm").await?;
    case.node("n", &[24576]).create(&client).await?;
    case.pod("p").gpu_mem(8192).create(&client).await?;
    let before = kept(&client, &case, 2).await?;
    // Helm must not find objects that the test has changed.
    forget(&cluster).await?;

    let set = "--set=config.scheduling.policy=binpack";
    run(&["upgrade", "gpustow", &chart, set]).await?;
    let policy = async || {
        let config = Api::<GpustowConfig>::all(client.clone());
        let config = config.get(config::NAME).await?;
        anyhow::Ok(config.spec.scheduling.policy.name())
    };
    ensure!(policy().await? == "binpack");
    run(&["rollback", "gpustow", "1"]).await?;
    ensure!(policy().await? == "tight");
    applies_a_changed_kind(&cluster).await?;
    assert_eq!(kept(&client, &case, 2).await?, before);

    let kinds = "customresourcedefinitions,clusterroles,clusterrolebindings,\
                 mutatingwebhookconfigurations,validatingadmissionpolicies,\
                 validatingadmissionpolicybindings";
    let gone = async || {
        let left = cluster.kubectl(&["get", kinds, "--output=name"]).await?;
        let left: Vec<_> = left.lines().filter(|it| it.contains("gpustow")).collect();
        let kinds = ["gpunodes", "gpustowconfigs", "gpuworkloads"];
        let crds = kinds
            .map(|it| format!("customresourcedefinition.apiextensions.k8s.io/{it}.gpustow.dev"));
        ensure!(left == crds, "{left:?}");
        assert_eq!(kept(&client, &case, 2).await?, before);
        anyhow::Ok(())
    };
    run(&["uninstall", "gpustow"]).await?;
    gone().await?;

    // From kustomize to Helm.
    let base = repository("manifests/base").display().to_string();
    cluster
        .kubectl(&["apply", "--server-side", "-k", &base])
        .await?;
    // Helm 4 applies on the server, where the fields are kubectl's still.
    let force: &[&str] = match std::env::var("HELM").as_deref() {
        Ok("3") => &[],
        _ => &["--force-conflicts"],
    };
    // The extenders make the certificate, as with kustomize.
    let own = ["--take-ownership", "--set=webhook.certificate=selfSigned"];
    run(&[&install[..], &own, force].concat()).await?;
    assert_eq!(kept(&client, &case, 2).await?, before);
    run(&["uninstall", "gpustow"]).await?;
    gone().await
}

/// The first commit that had a chart.
const EARLIER: &str = "cbf682f52cb6f1bd4c641ea7c2dd58792a034f88";

/// The chart of that commit, below `folder`.
async fn earlier(folder: &Path) -> Result<String> {
    let archive = folder.join("earlier.tar");
    let mut git = Command::new("git");
    git.current_dir(repository(""));
    git.args(["archive", EARLIER, "manifests", "scheduler-config", "-o"]);
    let lacks = "this clone lacks the earlier chart's commit: git fetch --unshallow";
    output(git.arg(&archive)).await.context(lacks)?;
    let mut tar = Command::new("tar");
    output(tar.arg("-xf").arg(&archive).arg("-C").arg(folder)).await?;
    Ok(folder.join("manifests/chart").display().to_string())
}

/// With the lines that pods need if no webhook changes them.
fn whole(pod: PodBuilder) -> PodBuilder {
    pod.scheduler(names::SCHEDULER).with(|spec| {
        for container in &mut spec.containers {
            let path = format!(
                "metadata.annotations['{}{}']",
                names::DEVICES_OF,
                container.name
            );
            container.env = Some(vec![EnvVar {
                name: names::VISIBLE_DEVICES.to_owned(),
                value_from: Some(EnvVarSource {
                    field_ref: Some(ObjectFieldSelector {
                        field_path: path,
                        ..ObjectFieldSelector::default()
                    }),
                    ..EnvVarSource::default()
                }),
                ..EnvVar::default()
            }]);
        }
    })
}

/// An extender and a scheduler of the account that was installed.
async fn running(cluster: &ControlPlane) -> Result<(Extender, Scheduler)> {
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let options = ExtenderOptions::default();
    let extender = Extender::start(cluster, gpustow(), &kubeconfig, options).await?;
    let config = SchedulerConfig::load(&repository("scheduler-config/gpustow-scheduler.yaml"))?;
    let config = config.with_extender(&extender.url)?;
    let scheduler = Scheduler::start(cluster, config, &kubeconfig).await?;
    Ok((extender, scheduler))
}

#[tokio::test]
async fn an_earlier_chart_is_upgraded_while_pods_run_and_wait() -> Result<()> {
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    let client = cluster.admin()?;
    let folder = tempfile::tempdir()?;
    let (before, now) = (earlier(folder.path()).await?, chart());
    let run = async |args: &[&str]| helm(args, Some(cluster.admin_kubeconfig())).await;
    // The policies of the earlier chart require pods to set all fields themselves.
    let install = ["install", "gpustow", &before, "--create-namespace"];
    run(&[&install[..], &["--set=admission=none"]].concat()).await?;
    let (_extender, _scheduler) = running(&cluster).await?;
    let case = Case::new(&cluster, "upgrade").await?;
    case.node("n", &[24576]).create(&client).await?;
    let runs = bound(&client, whole(case.pod("runs").gpu_mem(16384))).await?;
    let waits = whole(case.pod("waits").gpu_mem(16384))
        .create(&client)
        .await?;
    wait_refused(&client, &waits, "gpu-mem", SOON).await?;
    let as_it_was = kept(&client, &case, 3).await?;

    run(&["upgrade", "gpustow", &now, "--reset-values"]).await?;
    assert_eq!(kept(&client, &case, 3).await?, as_it_was);
    run(&["rollback", "gpustow", "1"]).await?;
    assert_eq!(kept(&client, &case, 3).await?, as_it_was);
    run(&["upgrade", "gpustow", &now, "--reset-values"]).await?;
    Webhook::keep(&cluster, gpustow()).await?;
    in_force(&cluster).await?;

    // Who waited gets the room once there is some.
    let name = runs.name_any();
    let pods: Api<Pod> = case.pods();
    pods.delete(&name, &DeleteParams::default().grace_period(0))
        .await?;
    wait_bound(&client, &waits, SOON).await?;
    let as_it_is = kept(&client, &case, 2).await?;
    run(&["uninstall", "gpustow"]).await?;
    assert_eq!(kept(&client, &case, 2).await?, as_it_is);
    case.end().await
}

#[tokio::test]
async fn helm_test_ends_well_once_its_pod_has_a_gpu() -> Result<()> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let client = cluster.admin()?;
    let chart = chart();
    let run = async |args: &[&str]| helm(args, Some(cluster.admin_kubeconfig())).await;
    run(&["install", "gpustow", &chart, "--create-namespace"]).await?;
    Webhook::keep(&cluster, gpustow()).await?;
    in_force(&cluster).await?;
    let (_extender, _scheduler) = running(&cluster).await?;
    let case = Case::new(&cluster, "helm-test").await?;
    case.node("n", &[24576]).create(&client).await?;

    let pods = Api::<Pod>::namespaced(client.clone(), SYSTEM);
    // The kubelet's part.
    let runs = async {
        let bound = eventually(SOON, "the pod is bound", async || {
            let pod = pods.get("gpustow-test").await?;
            ensure!(!node_of(&pod).is_empty(), "{:?}", pod.status);
            Ok(pod)
        })
        .await?;
        let done = json!({"status": {"phase": "Succeeded"}});
        let params = PatchParams::default();
        pods.patch_status("gpustow-test", &params, &Patch::Merge(done))
            .await?;
        anyhow::Ok(bound)
    };
    let test = ["test", "gpustow", "--timeout=60s"];
    let (said, bound) = tokio::try_join!(run(&test), runs)?;
    ensure!(said.contains("Succeeded"), "{said}");
    assert_eq!(charges(&bound)?, [(case.uuid("n", 0), 1)]);
    case.end().await
}
