//! Plays the rows of `gang_tables.rs`: each in its own namespace and on its own nodes, all of a table at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use futures::future::join_all;
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, ControlPlane, PodBuilder, eventually, refusal, wait_bound, wait_gone};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};

use crate::gang_binding::cluster;
use crate::install::try_create;
use crate::support::{Rig, SOON, Setup, node_of};

/// Bound on the wait of one step: all cases of a table run at once.
const STEP: Duration = Duration::from_secs(150);

/// Priority classes, by name.
const CLASSES: [(&str, i32, &str); 6] = [
    ("lowest", 5, "PreemptLowerPriority"),
    ("low", 10, "PreemptLowerPriority"),
    ("middle", 50, "PreemptLowerPriority"),
    ("high", 100, "PreemptLowerPriority"),
    ("top", 200, "PreemptLowerPriority"),
    ("never", 100, "Never"),
];

pub(crate) type Names = &'static [&'static str];

/// Constraints that kube-scheduler checks in addition to memory.
#[derive(Clone, Copy)]
pub(crate) enum Rule {
    /// On no node with a pod that has the label `app`.
    Apart,
    /// The same port of the node.
    Port,
    /// At most two of the pods with the label `app` on one node.
    Spread,
}

/// Pods that differ in their names alone.
#[derive(Clone, Copy)]
pub(crate) struct Pods {
    class: &'static str,
    /// Thousands of MiB.
    memory: u64,
    group: Option<&'static str>,
    node: Option<usize>,
    app: bool,
    rule: Option<Rule>,
}

pub(crate) fn pods(class: &'static str, memory: u64) -> Pods {
    Pods {
        class,
        memory,
        group: None,
        node: None,
        app: false,
        rule: None,
    }
}

impl Pods {
    pub(crate) fn of(mut self, group: &'static str) -> Self {
        self.group = Some(group);
        self
    }

    pub(crate) fn on(mut self, node: usize) -> Self {
        self.node = Some(node);
        self
    }

    pub(crate) fn app(mut self) -> Self {
        self.app = true;
        self
    }

    pub(crate) fn with(mut self, rule: Rule) -> Self {
        self.rule = Some(rule);
        self
    }

    fn build(self, case: &Case, name: &str) -> Result<PodBuilder> {
        let mut pod = case.pod(name).priority_class(self.class);
        if self.memory > 0 {
            pod = pod.gpu_mem(self.memory * 1000);
        }
        if let Some(node) = self.node {
            let node = case.node_name(&format!("n{node}"));
            pod = pod.node_selector(names::HOSTNAME, &node);
        }
        if self.app {
            pod = pod.label("app", "table");
        }
        let apart = serde_json::from_value(json!({"podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{
                "labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]},
                "topologyKey": names::HOSTNAME,
            }],
        }}))?;
        let spread = serde_json::from_value(json!([{
            "maxSkew": 2, "minDomains": 10, "topologyKey": names::HOSTNAME,
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "table"}},
        }]))?;
        let ports = serde_json::from_value(json!([{"containerPort": 8080, "hostPort": 8080}]))?;
        Ok(pod.with(|spec| match self.rule {
            Some(Rule::Apart) => spec.affinity = Some(apart),
            Some(Rule::Spread) => spec.topology_spread_constraints = Some(spread),
            Some(Rule::Port) => spec.containers[0].ports = Some(ports),
            None => {}
        }))
    }
}

#[derive(Clone)]
enum Step {
    /// Creates a PodGroup; none are too few for one with the policy `basic`.
    Group(&'static str, usize, Value),
    /// Creates pods and waits until they are bound.
    Run(Names, Pods),
    /// Creates pods, of which the rest of the case decides.
    Come(Names, Pods),
    Delete(&'static str),
    MinCount(&'static str, usize),
    /// Waits until exactly these pods are preempted, and this many of the pods that came are bound.
    Until(Names, usize),
    /// As above, and kube-scheduler has refused a waiting pod.
    Refused(Names, usize),
}

/// A case of a table.
pub(crate) struct Row {
    name: &'static str,
    /// Thousands of MiB of each GPU.
    nodes: &'static [&'static [u64]],
    /// A disruption budget protects all pods with the label `app`.
    budget: bool,
    steps: Vec<Step>,
}

pub(crate) fn row(name: &'static str, nodes: &'static [&'static [u64]]) -> Row {
    Row {
        name,
        nodes,
        budget: false,
        steps: Vec::new(),
    }
}

impl Row {
    fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    pub(crate) fn budget(mut self) -> Self {
        self.budget = true;
        self
    }

    pub(crate) fn gang(self, name: &'static str, class: &str, min: usize) -> Self {
        let policy = json!({"gang": {"minCount": min}});
        let spec = json!({"priorityClassName": class, "schedulingPolicy": policy});
        self.step(Step::Group(name, min, spec))
    }

    pub(crate) fn basic(self, name: &'static str, class: &str) -> Self {
        let spec = json!({"priorityClassName": class, "schedulingPolicy": {"basic": {}}});
        self.step(Step::Group(name, 0, spec))
    }

    /// The group created last is disrupted as a whole.
    pub(crate) fn whole(mut self) -> Self {
        if let Some(Step::Group(_, _, spec)) = self.steps.last_mut() {
            spec["disruptionMode"] = json!({"all": {}});
        }
        self
    }

    pub(crate) fn run(self, names: Names, pods: Pods) -> Self {
        self.step(Step::Run(names, pods))
    }

    pub(crate) fn come(self, names: Names, pods: Pods) -> Self {
        self.step(Step::Come(names, pods))
    }

    pub(crate) fn until(self, gone: Names, bound: usize) -> Self {
        self.step(Step::Until(gone, bound))
    }

    pub(crate) fn refused(self, gone: Names, bound: usize) -> Self {
        self.step(Step::Refused(gone, bound))
    }

    pub(crate) fn delete(self, name: &'static str) -> Self {
        self.step(Step::Delete(name))
    }

    pub(crate) fn min_count(self, group: &'static str, min: usize) -> Self {
        self.step(Step::MinCount(group, min))
    }
}

/// A row under way.
struct World {
    row: Row,
    case: Case,
    /// Pods that no step has deleted, and whether they came; else they ran.
    pods: BTreeMap<&'static str, (Option<&'static str>, bool)>,
    min: BTreeMap<&'static str, usize>,
}

impl World {
    async fn start(cluster: &ControlPlane, row: Row) -> Result<World> {
        let case = Case::new(cluster, "table").await?;
        for (at, gpus) in row.nodes.iter().enumerate() {
            let gpus: Vec<u64> = gpus.iter().map(|gpu| gpu * 1000).collect();
            let name = format!("n{at}");
            let node = case.node(&name, &gpus);
            let node = node.label(names::HOSTNAME, &case.node_name(&name));
            node.create(&case.client).await?;
        }
        if row.budget {
            case.budget("table", ("maxUnavailable", 0)).await?;
        }
        Ok(World {
            row,
            case,
            pods: BTreeMap::new(),
            min: BTreeMap::new(),
        })
    }

    async fn create(&mut self, all: Names, pods: Pods, came: bool) -> Result<Vec<Pod>> {
        let mut made = Vec::new();
        for &name in all {
            let pod = pods.build(&self.case, name)?;
            made.push(match pods.group {
                Some(group) => self.case.member(group, pod).await?,
                None => pod.create(&self.case.client).await?,
            });
            self.pods.insert(name, (pods.group, came));
        }
        Ok(made)
    }

    async fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Group(name, min, spec) => {
                self.case.pod_group(name, spec).await?;
                self.min.insert(name, min);
            }
            Step::Run(names, pods) => {
                for pod in self.create(names, pods, false).await? {
                    wait_bound(&self.case.client, &pod, STEP).await?;
                }
            }
            Step::Come(names, pods) => drop(self.create(names, pods, true).await?),
            Step::Delete(name) => {
                let pod = self.case.pods().get(name).await?;
                self.pods.remove(name);
                delete(&self.case.client, &pod, 0).await?;
                wait_gone(&self.case.client, &pod, SOON).await?;
            }
            Step::MinCount(name, min) => {
                let change = json!({"spec": {"schedulingPolicy": {"gang": {"minCount": min}}}});
                self.case.patch_pod_group(name, change).await?;
                self.min.insert(name, min);
            }
            Step::Until(..) | Step::Refused(..) => {
                eventually(STEP, "the end", async || self.check(&step).await).await?;
            }
        }
        Ok(())
    }

    /// Are the pods as the step wants them, and no gang bound in part?
    async fn check(&self, step: &Step) -> Result<()> {
        let (Step::Until(gone, bound) | Step::Refused(gone, bound)) = step else {
            bail!("the last step expects nothing");
        };
        let list = self.case.pods().list(&ListParams::default()).await?;
        let staying = list
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let staying: BTreeMap<String, &Pod> = staying.map(|pod| (pod.name_any(), pod)).collect();
        let is_bound = |name: &str| {
            staying
                .get(name)
                .is_some_and(|pod| !node_of(pod).is_empty())
        };
        let left = self
            .pods
            .keys()
            .filter(|name| !staying.contains_key(**name));
        let left: BTreeSet<&str> = left.copied().collect();
        let here = self.pods.iter().filter(|(name, it)| it.1 && is_bound(name));
        let here: Vec<_> = here.map(|(name, _)| name).collect();
        let refusals: Vec<_> = staying.values().filter_map(|pod| refusal(pod)).collect();
        ensure!(
            left == gone.iter().copied().collect() && here.len() == *bound,
            "gone {left:?}, bound {here:?}, refused {refusals:?}"
        );
        if matches!(step, Step::Refused(..)) {
            ensure!(!refusals.is_empty(), "none is refused");
        }
        for (group, min) in &self.min {
            let of = self.pods.iter().filter(|(_, it)| it.0 == Some(*group));
            let count = of.filter(|(name, _)| is_bound(name)).count();
            ensure!(count == 0 || count >= *min, "{group}: {count} of {min}");
        }
        Ok(())
    }

    async fn play(cluster: &ControlPlane, row: Row) -> Result<World> {
        let mut world = World::start(cluster, row).await?;
        for step in world.row.steps.clone() {
            world.step(step).await?;
        }
        Ok(world)
    }
}

/// gpustow without limits of disruptions, and the priority classes.
async fn rig(cluster: &ControlPlane) -> Result<Rig<'_>> {
    let config = [
        "preempt: {after: 0s}",
        "disruptions: {perMinute: 1000, perNodePerMinute: 100}",
    ];
    let setup = Setup {
        config: &config,
        ..Setup::default()
    };
    let rig = Rig::start(cluster, setup).await?;
    let client = cluster.admin()?;
    for (name, value, policy) in CLASSES {
        let class: PriorityClass = serde_json::from_value(json!({
            "metadata": {"name": name}, "value": value, "preemptionPolicy": policy,
        }))?;
        let classes = Api::<PriorityClass>::all(client.clone());
        classes.create(&PostParams::default(), &class).await?;
        let pod = gpustow_testkit::pod("default", "probe").priority_class(name);
        let known = async || Ok(try_create(&client, &pod.clone().build()).await?);
        eventually(SOON, "admission knows the class", known).await?;
    }
    Ok(rig)
}

/// Plays all rows at once. In the end the extender preempts for pods that came later: it has looked at all others by then.
pub(crate) async fn hold(rows: Vec<Row>) -> Result<()> {
    let cluster = cluster().await?;
    let rig = rig(&cluster).await?;
    let mut faults = Vec::new();
    let mut worlds = Vec::new();
    let played = rows.into_iter().map(async |row| {
        let name = row.name;
        let began = Instant::now();
        let world = World::play(rig.cluster, row).await;
        println!("{name}: {:?}", began.elapsed());
        (name, world)
    });
    for (name, world) in join_all(played).await {
        match world {
            Ok(world) => worlds.push(world),
            Err(error) => faults.push(format!("{name}: {error:#}")),
        }
    }
    let probe = row("a gang and a single pod that come later", &[&[10], &[10]])
        .run(&["low-0"], pods("low", 10).on(0))
        .run(&["low-1"], pods("low", 10).on(1))
        .gang("gang", "top", 1)
        .come(&["gang-0"], pods("top", 10).of("gang").on(0))
        .basic("basic", "top")
        .come(&["basic-0"], pods("top", 10).of("basic").on(1))
        .until(&["low-0", "low-1"], 2);
    match World::play(rig.cluster, probe).await {
        Ok(world) => worlds.push(world),
        Err(error) => faults.push(format!("the pods that come later: {error:#}")),
    }
    for world in worlds {
        let name = world.row.name;
        let last = world.row.steps.last().cloned();
        let ended = async {
            if let Some(last) = last {
                world.check(&last).await?;
            }
            rig.end(world.case).await
        };
        if let Err(error) = ended.await {
            faults.push(format!("{name}, later: {error:#}"));
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}
