//! ResourceClaims of a DRA driver and pods that request GPU memory, on the same GPUs. The driver consists of slices
//! alone: kube-scheduler's own allocator hands out their devices.

mod storm;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use axum::http::StatusCode;
use gpustow_api::claim::{Consumed, GROUP, RULE_VERSIONS, Rule, consumed};
use gpustow_api::{GpustowConfig, names};
use gpustow_simworld::merge;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{
    Action, Case, ControlPlane, DRIVER, Options, Scheduler, SchedulerConfig, claim_kind, client,
    configure, device_class, eventually, wait_bound, wait_refused,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{
    Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions,
};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::fault_rig::{Replica, now, turn};
use crate::install::install;
use crate::support::{ACCOUNT, SOON, SYSTEM, repository};

const ON: &str = "claims: {fence: true}";
const GPU: u64 = 10_000;
/// A fence is built or torn down within this: it settles for five seconds.
const FENCED: Duration = Duration::from_secs(60);
/// The cluster's own scheduler.
const STOCK: &str = "
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 2
";

/// In which version DeviceTaintRules are served.
pub(crate) async fn served(client: &Client) -> Result<&'static str> {
    for version in RULE_VERSIONS {
        let group = format!("{GROUP}/{version}");
        let list = client.list_api_group_resources(&group).await;
        if list.is_ok_and(|it| it.resources.iter().any(|it| it.name == "devicetaintrules")) {
            return Ok(version);
        }
    }
    bail!("no DeviceTaintRules are served: KUBERNETES=1.36 or later")
}

/// A cluster with a DRA driver's class, the cluster's own scheduler, and permission to build fences.
struct Site {
    cluster: ControlPlane,
    _stock: Scheduler,
    /// In which DeviceTaintRules are served.
    version: &'static str,
}

impl Site {
    async fn start() -> Result<Self> {
        let cluster = ControlPlane::start(Options {
            controllers: true,
            ..Options::default()
        })
        .await?;
        install(&cluster, "manifests/base").await?;
        // Extender, scheduler and agents are processes here.
        let all = ["delete", "deployments,daemonsets", "--all", "-n", SYSTEM];
        cluster.kubectl(&all).await?;
        let claims = repository("manifests/claims").display().to_string();
        cluster.kubectl(&["apply", "-k", &claims]).await?;
        device_class(&cluster.admin()?).await?;
        let config = SchedulerConfig::parse(STOCK)?;
        let stock = Scheduler::start(&cluster, config, cluster.admin_kubeconfig()).await?;
        let version = served(&cluster.admin()?).await?;
        Ok(Self {
            cluster,
            _stock: stock,
            version,
        })
    }

    fn rules(&self) -> Result<Api<DynamicObject>> {
        Ok(Api::all_with(
            self.cluster.admin()?,
            &claim_kind(self.version, "DeviceTaintRule"),
        ))
    }

    /// The rules of the extender that are not being deleted.
    async fn fence(&self) -> Result<Vec<Rule>> {
        let labelled = ListParams::default().labels(names::CLAIMS_FENCE);
        let all = self.rules()?.list(&labelled).await?.items;
        let all = all
            .iter()
            .map(|it| Ok(Rule::of(&serde_json::to_value(it)?)));
        let all: Vec<Rule> = all.collect::<Result<_>>()?;
        Ok(all.into_iter().filter(|it| !it.terminating).collect())
    }

    /// Waits until so many GPUs are fenced, and kube-scheduler knows that; the rules.
    async fn fenced(&self, count: usize) -> Result<Vec<Rule>> {
        eventually(FENCED, "the fence is as it must be", async || {
            let rules = self.fence().await?;
            let stamped = rules.iter().filter(|it| it.epoch.is_some()).count();
            ensure!((rules.len(), stamped) == (count, count), "{rules:?}");
            Ok(rules)
        })
        .await
    }
}

/// A node whose GPUs the driver publishes too.
async fn node(case: &Case, name: &str, gpus: usize) -> Result<()> {
    let gpus = vec![GPU; gpus];
    case.node(name, &gpus).create(&case.client).await?;
    case.publish(name, &gpus).await
}

/// A claim of so much of a GPU, or of a whole one, and a pod of the cluster's own scheduler that uses it.
async fn claim(case: &Case, name: &str, mib: Option<u64>) -> Result<Pod> {
    case.claim(name, 1, mib).await?;
    let pod = case.pod(name).scheduler("default-scheduler");
    pod.claim(name).create(&case.client).await
}

/// The pod and its claim go.
async fn unclaim(case: &Case, name: &str) -> Result<()> {
    let pod = case.pods().get(name).await?;
    delete(&case.client, &pod, 0).await?;
    case.claims().delete(name, &DeleteParams::default()).await?;
    Ok(())
}

/// The memory that claims hold on each GPU of these nodes, by UUID.
async fn claimed(case: &Case) -> Result<BTreeMap<String, u64>> {
    let mut held = BTreeMap::new();
    for claim in case.claims().list(&ListParams::default()).await?.items {
        for (device, consumed) in consumed(&claim.data) {
            let gpu = device
                .name
                .strip_prefix("gpu-")
                .context("a strange device")?;
            let uuid = format!("GPU-{}-{gpu}", device.pool);
            *held.entry(uuid).or_default() += match consumed {
                Consumed::Nothing => 0,
                Consumed::Mib(mib) => mib.0,
                Consumed::Whole => GPU,
            };
        }
    }
    Ok(held)
}

async fn is_allocated(case: &Case, pod: &Pod) -> Result<()> {
    wait_bound(&case.client, pod, FENCED).await.map(drop)
}

#[tokio::test]
async fn a_whole_gpu_is_released_to_a_claim_that_waits_and_returns_to_the_pods() -> Result<()> {
    let site = Site::start().await?;
    let case = Case::new(&site.cluster, "released").await?;
    node(&case, "n", 2).await?;
    let replica = Replica::start(&site.cluster, "fences", &[ON]).await?;
    let _scheduler = replica.scheduler(&site.cluster).await?;
    let pods = case.pod("one").gpu_mem(1000).create(&case.client).await?;
    wait_bound(&case.client, &pods, FENCED).await?;
    let rules = site.fenced(2).await?;
    for rule in &rules {
        let device = rule.device.as_ref().context("it names no device")?;
        assert_eq!(
            (&*device.driver, &device.pool),
            (DRIVER, &case.node_name("n"))
        );
    }

    // The other GPU is released, and is the claims' as long as one holds something of it.
    let first = claim(&case, "first", Some(3000)).await?;
    is_allocated(&case, &first).await?;
    let second = claim(&case, "second", Some(4000)).await?;
    is_allocated(&case, &second).await?;
    let held = claimed(&case).await?;
    assert_eq!(held.values().collect::<Vec<_>>(), [&7000], "{held:?}");
    ensure!(!held.contains_key(&gpu_of(&case, &pods).await?), "{held:?}");
    site.fenced(1).await?;
    let large = case.pod("large").gpu_mem(9500).create(&case.client).await?;
    let said = wait_refused(&case.client, &large, "left to ResourceClaims", SOON).await?;
    ensure!(
        said.contains("1 the GPUs that it fits on are left to ResourceClaims"),
        "{said}"
    );
    // One of a whole GPU waits, and takes none from the pods.
    let whole = claim(&case, "whole", None).await?;
    wait_refused(&case.client, &whole, "cannot allocate all claims", SOON).await?;
    unclaim(&case, "whole").await?;

    for name in ["first", "second"] {
        unclaim(&case, name).await?;
    }
    wait_bound(&case.client, &large, FENCED).await?;
    site.fenced(2).await?;
    replica.settled(&case).await?;

    // Turned off, nothing is left of it.
    configure(&case.client, &[]).await?;
    eventually(SOON, "no rule is left", async || {
        let left = site.rules()?.list(&ListParams::default()).await?.items;
        ensure!(left.is_empty(), "{} rules", left.len());
        Ok(())
    })
    .await?;
    let after = claim(&case, "after", Some(3000)).await?;
    is_allocated(&case, &after).await?;
    unclaim(&case, "after").await?;
    case.end().await
}

/// The GPU that a pod has.
async fn gpu_of(case: &Case, pod: &Pod) -> Result<String> {
    let pod = now(case, pod).await?;
    let note = pod
        .annotations()
        .get(names::ASSIGNMENT)
        .context("no assignment")?;
    let note: Value = serde_json::from_str(note)?;
    Ok(note["gpus"][0]["uuid"]
        .as_str()
        .context("no GPU")?
        .to_owned())
}

#[tokio::test]
async fn rules_outlive_their_deletion_by_hand_and_their_leader() -> Result<()> {
    let site = Site::start().await?;
    let case = Case::new(&site.cluster, "outlive").await?;
    node(&case, "n", 2).await?;
    let replica = Replica::start(&site.cluster, "first", &[ON]).await?;
    let scheduler = replica.scheduler(&site.cluster).await?;
    for name in ["one", "two"] {
        let pod = case.pod(name).gpu_mem(6000).create(&case.client).await?;
        wait_bound(&case.client, &pod, FENCED).await?;
    }
    let before = site.fenced(2).await?;
    let waits = claim(&case, "waits", Some(1000)).await?;
    wait_refused(&case.client, &waits, "cannot allocate all claims", SOON).await?;

    // kube-scheduler sees a rule for each GPU at any time.
    let all = DeleteParams::default();
    site.rules()?
        .delete_collection(&all, &ListParams::default())
        .await?;
    let after = eventually(FENCED, "others have taken their place", async || {
        let rules = site.fenced(2).await?;
        let old = rules
            .iter()
            .filter(|rule| before.iter().any(|it| it.uid == rule.uid));
        ensure!(old.count() == 0, "some are still there");
        let left = site
            .rules()?
            .list(&ListParams::default())
            .await?
            .items
            .len();
        ensure!(left == 2, "{left} rules are left");
        Ok(rules)
    })
    .await?;
    ensure!(
        now(&case, &waits)
            .await?
            .spec
            .is_some_and(|it| it.node_name.is_none()),
        "the claim has a GPU of a pod"
    );

    // A rule that someone changed is none, and is replaced.
    let change = json!({ "spec": { "deviceSelector": { "device": "gpu-7" } } });
    let (params, change) = (PatchParams::default(), Patch::Merge(&change));
    site.rules()?
        .patch(&after[0].name, &params, &change)
        .await?;
    eventually(FENCED, "it is replaced", async || {
        let rules = site.fenced(2).await?;
        ensure!(
            rules.iter().all(|rule| rule.uid != after[0].uid),
            "it is still there"
        );
        Ok(())
    })
    .await?;

    // The next leader keeps them, with its own epoch.
    let before = site.fenced(2).await?;
    drop((scheduler, replica));
    let replica = Replica::start(&site.cluster, "second", &[ON]).await?;
    let _scheduler = replica.scheduler(&site.cluster).await?;
    let small = case.pod("small").gpu_mem(500).create(&case.client).await?;
    wait_bound(&case.client, &small, FENCED).await?;
    let after = site.fenced(2).await?;
    for rule in &after {
        let old = before
            .iter()
            .find(|it| it.uid == rule.uid)
            .context("another rule")?;
        ensure!(rule.epoch > old.epoch, "{rule:?}");
    }
    unclaim(&case, "waits").await?;
    replica.settled(&case).await?;

    // A node that goes takes its rules along.
    for name in ["one", "two", "small"] {
        delete(&case.client, &case.pods().get(name).await?, 0).await?;
    }
    case.end().await?;
    site.fenced(0).await.map(drop)
}

#[tokio::test]
async fn a_fallen_extender_writes_no_rule_that_keeps_claims_off_other_devices() -> Result<()> {
    let site = Site::start().await?;
    let account = client(&site.cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?).await?;
    let rules: Api<DynamicObject> =
        Api::all_with(account, &claim_kind(site.version, "DeviceTaintRule"));
    let device = gpustow_api::claim::Device {
        driver: DRIVER.to_owned(),
        pool: "p".to_owned(),
        name: "gpu-0".to_owned(),
    };
    let good = Rule::object(site.version, &device, "n", "GPU-0").context("no rule")?;
    let create = async |rule: &Value| {
        let rule = serde_json::from_value(rule.clone()).map_err(kube::Error::SerdeError)?;
        rules.create(&PostParams::default(), &rule).await
    };
    let with = |change: Value| {
        let mut rule = good.clone();
        merge(&mut rule, &change);
        rule
    };
    let selector = |change: Value| with(json!({ "spec": { "deviceSelector": change } }));
    let bad = [
        selector(json!(null)),
        with(
            json!({ "spec": { "deviceSelector": { "driver": null, "pool": null, "device": null } } }),
        ),
        selector(json!({ "driver": null })),
        selector(json!({ "pool": null })),
        selector(json!({ "device": null })),
        with(json!({ "spec": { "taint": { "effect": "NoExecute" } } })),
        with(json!({ "spec": { "taint": { "key": "example.com/other" } } })),
        with(json!({ "metadata": { "labels": null } })),
    ];
    let refused = |error: kube::Error, what: &Value| {
        let said = error.to_string();
        ensure!(said.contains("gpustow-claims"), "{what}: {said}");
        Ok(())
    };
    eventually(SOON, "the policy is in force", async || {
        let answer = create(&bad[0]).await;
        refused(answer.err().context("created")?, &bad[0])
    })
    .await?;
    for rule in &bad {
        let answer = create(rule).await;
        refused(
            answer.err().with_context(|| format!("created: {rule}"))?,
            rule,
        )?;
    }
    let made = create(&good).await?;
    let (name, params) = (made.name_any(), PatchParams::default());
    for change in [
        json!({ "spec": { "deviceSelector": { "device": "gpu-1" } } }),
        json!({ "spec": { "deviceSelector": { "device": null } } }),
        json!({ "metadata": { "labels": { names::CLAIMS_FENCE: null } } }),
    ] {
        let answer = rules.patch(&name, &params, &Patch::Merge(&change)).await;
        refused(
            answer.err().with_context(|| format!("changed: {change}"))?,
            &change,
        )?;
    }
    let note = json!({ "metadata": { "annotations": { names::EPOCH: "1" }, "finalizers": null } });
    let noted = rules.patch(&name, &params, &Patch::Merge(&note)).await?;
    // Only its own, and only the copy that it knows.
    let theirs = json!({
        "apiVersion": format!("resource.k8s.io/{}", site.version), "kind": "DeviceTaintRule", "metadata": { "name": "theirs" },
        "spec": { "deviceSelector": { "driver": "d" }, "taint": { "key": "example.com/k", "effect": "NoSchedule" } },
    });
    site.cluster.apply(&theirs.to_string()).await?;
    let copy = |of: &DynamicObject| DeleteParams {
        preconditions: Some(Preconditions {
            uid: of.uid(),
            resource_version: of.resource_version(),
        }),
        ..DeleteParams::default()
    };
    let other = site.rules()?.get("theirs").await?;
    for (name, params) in [("theirs", copy(&other)), (&*name, DeleteParams::default())] {
        let answer = rules.delete(name, &params).await;
        refused(answer.err().context("deleted")?, &json!(name))?;
    }
    rules.delete(&name, &copy(&noted)).await?;
    Ok(())
}

#[tokio::test]
async fn a_cluster_without_device_taint_rules_says_so_and_places_pods() -> Result<()> {
    let turn = turn().await?;
    let claims = repository("manifests/claims").display().to_string();
    turn.cluster.kubectl(&["apply", "-k", &claims]).await?;
    let replica = Replica::start(turn.cluster, "unserved", &[]).await?;
    let rule = replica.proxy.rule(
        |method, uri| method.as_str() == "GET" && uri.path().starts_with("/apis/resource.k8s.io/"),
        Action::Answer(StatusCode::NOT_FOUND, ""),
    );
    configure(&turn.cluster.admin()?, &[ON.to_owned()]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "unserved").await?;
    case.node("n", &[GPU]).create(&case.client).await?;
    let pod = case.pod("one").gpu_mem(1000).create(&case.client).await?;
    wait_bound(&case.client, &pod, SOON).await?;
    let configs: Api<GpustowConfig> = Api::all(case.client.clone());
    eventually(SOON, "the status says so", async || {
        let status = configs.get("gpustow").await?.status.unwrap_or_default();
        let condition = status
            .conditions
            .into_iter()
            .find(|it| it.type_ == "Claims");
        let condition = condition.context("no condition")?;
        ensure!(condition.reason == "NotServed", "{condition:?}");
        ensure!(
            condition.message.contains("serves no DeviceTaintRules"),
            "{condition:?}"
        );
        Ok(())
    })
    .await?;
    drop(rule);
    replica.settled(&case).await?;
    case.end().await
}
