//! Who comes first: pods that want the same room, and schedulers that want the same pods.

use anyhow::Result;
use gpustow_testkit::{Case, wait_bound, wait_pods};
use k8s_openapi::api::core::v1::Pod;

use crate::fault_rig::{Replica, clear, turn};
use crate::support::{SOON, node_of, rounds};

const CARD: u64 = 8192;

fn bound(pods: &[Pod]) -> usize {
    pods.iter().filter(|pod| !node_of(pod).is_empty()).count()
}

#[tokio::test]
async fn two_pods_race_for_the_last_slot() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "slot", &[]).await?;
    let _scheduler = replica.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "slot").await?;
    // The sums of the nodes leave room for both: only a card does not.
    case.node("n", &[CARD, CARD]).create(&case.client).await?;
    let filler = case
        .pod("filler")
        .gpu_mem(CARD / 2 + 1)
        .create(&case.client)
        .await?;
    wait_bound(&case.client, &filler, SOON).await?;
    for round in 0..rounds()? {
        let create = async |name: &str| {
            let pod = case.pod(&format!("{name}{round}")).gpu_mem(CARD / 2 + 2);
            pod.create(&case.client).await
        };
        let (one, two) = tokio::join!(create("one"), create("two"));
        let (one, two) = (one?, two?);
        let settled = |pods: &[Pod]| bound(pods) == 2 && pods.iter().any(is_refused);
        wait_pods(
            &case.client,
            &case.namespace,
            "one of two is bound",
            SOON,
            settled,
        )
        .await?;
        replica.settled(&case).await?;
        for pod in [one, two] {
            gpustow_testkit::builders::delete(&case.client, &pod, 0).await?;
        }
    }
    case.end().await
}

fn is_refused(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    node_of(pod).is_empty()
        && conditions
            .into_iter()
            .any(|c| c.reason.as_deref() == Some("Unschedulable"))
}

#[tokio::test]
async fn two_schedulers_drive_two_extenders() -> Result<()> {
    const PODS: usize = 24;
    let turn = turn().await?;
    let args = ["--retake-after=0.5"];
    let left = Replica::start(turn.cluster, "left", &args).await?;
    let right = Replica::start(turn.cluster, "right", &args).await?;
    let left_scheduler = left.scheduler(turn.cluster).await?;
    let _right_scheduler = right.scheduler(turn.cluster).await?;
    let case = Case::new(turn.cluster, "two").await?;
    for name in ["a", "b", "c"] {
        case.node(name, &[CARD, CARD]).create(&case.client).await?;
    }
    for round in 0..rounds()?.div_ceil(10) {
        for i in 0..PODS {
            let pod = case.pod(&format!("p{round}-{i}")).gpu_mem(CARD / 4);
            pod.create(&case.client).await?;
        }
        let all = |pods: &[Pod]| bound(pods) == PODS;
        wait_pods(
            &case.client,
            &case.namespace,
            "all are bound",
            4 * SOON,
            all,
        )
        .await?;
        left.settled(&case).await?;
        right.settled(&case).await?;
        clear(&case).await?;
    }
    let takeovers = [left.takeovers().await?, right.takeovers().await?];
    assert!(takeovers.iter().all(|count| *count > 0), "{takeovers:?}");
    // And one alone goes on.
    left_scheduler.process.kill9();
    left.extender.process.kill9();
    let last = case.pod("last").gpu_mem(CARD).create(&case.client).await?;
    wait_bound(&case.client, &last, 2 * SOON).await?;
    case.end().await
}
