//! kube-scheduler refuses a node for a reason that the extender cannot see: no pod there ends or gives memory back for the
//! pod that waits.

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use gpustow_api::gpunode::PodUse;
use gpustow_api::names;
use gpustow_testkit::{
    Case, PodBuilder, Scheduler, eventually, wait_bound, wait_gone, wait_refused,
};
use k8s_openapi::api::core::v1::{ContainerPort, Pod};
use kube::ResourceExt as _;
use serde_json::json;

use crate::fault_rig::{Replica, Turn, now, turn};
use crate::fragmented::{bound, condition, nothing_is_left, staying};
use crate::reclaim::borrower;
use crate::support::{SOON, event, rounds};

const CARD: u64 = 10_000;
const PORT: i32 = 8080;
/// A round takes half a minute: 200 of them would take two hours of `make soak`.
const MOST_ROUNDS: usize = 20;

/// Why kube-scheduler takes one pod of a kind on a node and no second.
#[derive(Clone, Copy)]
enum Once {
    /// Replicas of one Deployment with anti-affinity.
    Siblings,
    /// They want the same port of their node.
    Port,
    /// They spread over this node and another, which is too small for them.
    Spread,
}

impl Once {
    const ALL: [Self; 3] = [Self::Siblings, Self::Port, Self::Spread];

    /// The same pod, as one of the kind.
    fn of(self, pod: PodBuilder) -> Result<PodBuilder> {
        let affinity = serde_json::from_value(json!({ "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{
                "labelSelector": { "matchLabels": { "app": "prod" } },
                "topologyKey": "testkit/case",
            }],
        } }))?;
        let spread = serde_json::from_value(json!({
            "maxSkew": 1,
            "topologyKey": names::HOSTNAME,
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": { "matchLabels": { "app": "prod" } },
        }))?;
        Ok(match self {
            Self::Siblings => pod
                .label("app", "prod")
                .with(|spec| spec.affinity = Some(affinity)),
            Self::Port => pod.with(|spec| {
                spec.host_network = Some(true);
                spec.containers[0].ports = Some(vec![ContainerPort {
                    container_port: PORT,
                    host_port: Some(PORT),
                    ..ContainerPort::default()
                }]);
            }),
            Self::Spread => pod.label("app", "prod").with(|spec| {
                spec.topology_spread_constraints = Some(vec![spread]);
            }),
        })
    }

    /// kube-scheduler's reason against the second pod.
    fn refusal(self) -> &'static str {
        match self {
            Self::Siblings => "anti-affinity",
            Self::Port => "free ports",
            Self::Spread => "topology spread constraints",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Siblings => "siblings",
            Self::Port => "port",
            Self::Spread => "spread",
        }
    }
}

fn high(case: &Case, name: &str) -> PodBuilder {
    case.pod(name).priority_class("system-cluster-critical")
}

/// A replica with these arguments, its kube-scheduler, and a case with a node of so many GPUs.
async fn rig(
    turn: &Turn,
    name: &str,
    args: &[&str],
    gpus: usize,
) -> Result<(Replica, Scheduler, Case)> {
    let replica = Replica::start(turn.cluster, name, args).await?;
    let scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, name).await?;
    for (name, gpus) in [("n", vec![CARD; gpus]), ("small", vec![CARD / 100])] {
        let node = case.node(name, &gpus).label(names::HOSTNAME, name);
        node.create(&case.client).await?;
    }
    Ok((replica, scheduler, case))
}

#[tokio::test]
async fn preempt_ends_no_pod_on_a_node_that_kube_scheduler_refuses() -> Result<()> {
    for once in Once::ALL {
        let turn = turn().await?;
        let name = format!("once-{}", once.name());
        let args = ["preempt: {after: 0s}"];
        let (replica, _scheduler, case) = rig(&turn, &name, &args, 3).await?;
        for index in 0..3 {
            bound(&case, case.pod(&format!("low-{index}")).gpu_mem(6000)).await?;
        }
        // The first of the kind is helped.
        bound(&case, once.of(high(&case, "first").gpu_mem(8000))?).await?;
        let before = staying(&case).await?;
        assert_eq!(before.len(), 3, "{before:?}");
        let second = once.of(high(&case, "second").gpu_mem(8000))?;
        let second = second.create(&case.client).await?;
        wait_refused(&case.client, &second, once.refusal(), SOON).await?;

        // One that came later is helped: the extender has looked by then.
        let later = case.pod("later").priority_class("system-node-critical");
        bound(&case, later.gpu_mem(8000)).await?;
        let after = staying(&case).await?;
        let gone = before.iter().filter(|name| !after.contains(name));
        let gone: Vec<_> = gone.collect();
        ensure!(gone.len() == 1 && gone[0].starts_with("low-"), "{gone:?}");
        let second = case.pods().get("second").await?;
        assert!(condition(&second, names::RESERVED_CONDITION).is_none());
        nothing_is_left(&replica, &case).await?;
        case.end().await?;
    }
    Ok(())
}

#[tokio::test]
async fn replicas_that_come_at_once_end_as_many_pods_as_run() -> Result<()> {
    for round in 0..rounds()?.min(MOST_ROUNDS) {
        for once in Once::ALL {
            let turn = turn().await?;
            let replicas = [2, 4, 8][round % 3];
            let name = format!("at-once-{}-{round}", once.name());
            let (replica, _scheduler, case) = rig(&turn, &name, &[], replicas + 2).await?;
            for index in 0..replicas + 2 {
                let low = case.pod(&format!("low-{index}")).gpu_mem(6000);
                bound(&case, low).await?;
            }
            let before = staying(&case).await?;
            let created = (0..replicas).map(async |index| {
                let pod = once.of(high(&case, &format!("at-once-{index}")))?;
                pod.gpu_mem(8000).create(&case.client).await
            });
            let created: Vec<Pod> = try_join_all(created).await?;
            let refused = async || {
                let mut refused = 0;
                for pod in &created {
                    let pod = now(&case, pod).await?;
                    refused += usize::from(pod.spec.is_some_and(|it| it.node_name.is_none()));
                }
                ensure!(refused == replicas - 1, "{refused} wait");
                Ok(())
            };
            eventually(SOON, "one replica runs", refused).await?;
            // Two that come later are helped: the extender has looked again by then.
            for index in 0..2 {
                let later = case.pod(&format!("later-{index}"));
                let later = later.priority_class("system-node-critical").gpu_mem(8000);
                bound(&case, later).await?;
            }
            eventually(SOON, "no replica runs beside", refused).await?;
            let after = staying(&case).await?;
            let gone = before.iter().filter(|name| !after.contains(name));
            let gone: Vec<_> = gone.collect();
            ensure!(gone.len() == 3, "{}: {gone:?}", once.name());
            nothing_is_left(&replica, &case).await?;
            case.end().await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn reclaim_evicts_no_pod_for_one_that_kube_scheduler_refuses() -> Result<()> {
    for once in Once::ALL {
        let turn = turn().await?;
        let name = format!("lent-{}", once.name());
        let args = ["reclaim: {action: Evict}"];
        let (replica, _scheduler, case) = rig(&turn, &name, &args, 1).await?;
        let greedy = borrower(&case, "greedy", 2000).await?;
        bound(&case, once.of(case.pod("first").gpu_mem(500))?).await?;
        let node = case.node("n", &[CARD]);
        let uid = greedy.uid().unwrap_or_default();
        let lent = node.clone().with_status(|status| {
            status.gpus[0].pods = vec![PodUse {
                uid,
                used_mib: 8500,
                ..PodUse::default()
            }];
        });
        lent.report(&case.client).await?;
        let second = once.of(case.pod("second").gpu_mem(6000))?;
        let second = second.create(&case.client).await?;
        wait_refused(&case.client, &second, once.refusal(), SOON).await?;

        let later = case.pod("later").gpu_mem(6000).create(&case.client).await?;
        let told = event(&case.client, &greedy, "GpuPodDisrupted").await?;
        let name = format!("{}/later", case.namespace);
        ensure!(told.contains(&name), "{told}");
        wait_gone(&case.client, &greedy, SOON).await?;
        node.report(&case.client).await?;
        wait_bound(&case.client, &later, SOON).await?;
        let second = case.pods().get("second").await?;
        assert!(condition(&second, names::RESERVED_CONDITION).is_none());
        nothing_is_left(&replica, &case).await?;
        case.end().await?;
    }
    Ok(())
}
