//! Where pods go: to the last MiB, never more, and with a reason when nothing fits.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::names;
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, wait_bound, wait_pods};

use crate::support::{SOON, bound, charges, event, node_of, placed, refused, rig};

#[tokio::test]
async fn a_burst_of_300_fills_20_nodes_and_one_more_waits_for_room() -> Result<()> {
    const POD: u64 = 1637;
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "burst").await?;
    let nodes: Vec<_> = (0..20)
        .map(|n| case.node(&format!("n{n}"), &[5 * POD, 10 * POD]))
        .collect();
    stream::iter(&nodes)
        .map(|node| node.create(&case.client))
        .buffer_unordered(8)
        .try_collect::<Vec<_>>()
        .await?;
    let pods: Vec<_> = (0..300)
        .map(|p| case.pod(&format!("p{p}")).gpu_mem(POD))
        .collect();
    stream::iter(pods)
        .map(|pod| pod.create(&case.client))
        .buffer_unordered(16)
        .try_collect::<Vec<_>>()
        .await?;

    let all_bound = |pods: &[_]| pods.len() == 300 && pods.iter().all(|p| !node_of(p).is_empty());
    let deadline = Duration::from_secs(120);
    let pods = wait_pods(
        &case.client,
        &case.namespace,
        "all bound",
        deadline,
        all_bound,
    )
    .await?;

    // No card is over its bound, as the checker sees, and the sum is all there is: each is full.
    case.check().await?;
    let mut sum = 0;
    for pod in &pods {
        sum += charges(pod)?.iter().map(|(_, mib)| mib).sum::<u64>();
    }
    assert_eq!(sum, 20 * 15 * POD);

    let reason = format!("20 Insufficient {}", names::GPU_MEM);
    let more = refused(&case.client, case.pod("more").gpu_mem(POD), &reason).await?;
    let told = event(&case.client, &more, "FailedScheduling").await?;
    assert!(told.contains(&reason), "{told}");
    delete(&case.client, &pods[0], 0).await?;
    let deleted = Instant::now();
    wait_bound(&case.client, &more, SOON).await?;
    println!(
        "one more on 20 full nodes: bound {:?} after a deletion",
        deleted.elapsed()
    );
    rig.end(case).await
}

#[tokio::test]
async fn a_request_larger_than_any_card_waits_for_a_larger_card() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "too-large").await?;
    case.node("n", &[8000, 8000]).create(&case.client).await?;

    let reason = "no GPU as large as the pod asks for";
    let pod = refused(&case.client, case.pod("p").gpu_mem(12000), reason).await?;

    let told = event(&case.client, &pod, "GpuMemoryUnavailable").await?;
    assert!(
        told.contains(reason) && told.contains("12000 MiB"),
        "{told}"
    );
    case.node("large", &[16000]).create(&case.client).await?;
    let pod = wait_bound(&case.client, &pod, SOON).await?;
    assert_eq!(charges(&pod)?, [(case.uuid("large", 0), 12000)]);
    rig.end(case).await
}

/// kube-scheduler finds too little in sum, and asks no extender.
#[tokio::test]
async fn pod_that_no_node_can_hold_is_told_so_in_a_full_cluster() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "full").await?;
    case.node("n", &[8000, 8000]).create(&case.client).await?;
    bound(&case.client, case.pod("a").gpu_mem(8000)).await?;
    let reason = format!("Insufficient {}", names::GPU_MEM);
    let pod = refused(&case.client, case.pod("p").gpu_mem(12000), &reason).await?;
    let told = event(&case.client, &pod, "GpuMemoryUnavailable").await?;
    let says = "No node can hold this pod as it is, which asks for 12000 MiB";
    assert!(told.contains(says), "{told}");
    rig.end(case).await
}

#[tokio::test]
async fn free_memory_in_pieces_is_not_enough() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "pieces").await?;
    case.node("n", &[10000, 10000]).create(&case.client).await?;
    let first = bound(&case.client, case.pod("a").gpu_mem(6000)).await?;
    let second = bound(&case.client, case.pod("b").gpu_mem(6000)).await?;
    assert_ne!(charges(&first)?[0].0, charges(&second)?[0].0);

    // 8000 MiB are free on the node, 4000 on each card.
    let reason = "not enough free memory on any one GPU";
    let third = refused(&case.client, case.pod("c").gpu_mem(6000), reason).await?;

    let told = event(&case.client, &third, "GpuMemoryUnavailable").await?;
    assert!(
        told.contains(reason) && told.contains("Most free on one GPU: 4000 MiB"),
        "{told}"
    );
    delete(&case.client, &second, 0).await?;
    let third = wait_bound(&case.client, &third, SOON).await?;
    assert_eq!(charges(&third)?, charges(&second)?);
    rig.end(case).await
}

#[tokio::test]
async fn two_and_four_gpus_of_a_pod_are_different_cards() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "gpus").await?;
    case.node("n", &[10000; 4]).create(&case.client).await?;
    let pod = |name: &str, gpus: u64, each: u64| {
        let pod = case.pod(name).gpu_mem(gpus * each);
        pod.annotation(names::GPU_COUNT, &gpus.to_string())
    };
    let cards = |cards: &[usize], mib: u64| -> Vec<_> {
        cards
            .iter()
            .map(|&card| (case.uuid("n", card), mib))
            .collect()
    };

    assert_eq!(
        placed(&case.client, pod("two", 2, 6000)).await?,
        cards(&[0, 1], 6000)
    );
    assert_eq!(
        placed(&case.client, pod("four", 4, 4000)).await?,
        cards(&[0, 1, 2, 3], 4000)
    );
    // Two cards are full now.
    refused(
        &case.client,
        pod("four-more", 4, 1),
        "not enough free memory on any one GPU",
    )
    .await?;
    assert_eq!(
        placed(&case.client, pod("two-more", 2, 6000)).await?,
        cards(&[2, 3], 6000)
    );
    case.node("large", &[20000, 20000])
        .create(&case.client)
        .await?;
    refused(
        &case.client,
        pod("five", 5, 1000),
        "fewer GPUs than the pod asks for",
    )
    .await?;
    rig.end(case).await
}

#[tokio::test]
async fn an_exclusive_pod_gets_a_whole_card_to_itself() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "exclusive").await?;
    case.node("n", &[8000, 16000]).create(&case.client).await?;
    let alone = |name: &str| {
        case.pod(name)
            .gpu_mem(4000)
            .annotation(names::EXCLUSIVE, "true")
    };
    let card = |card, mib| [(case.uuid("n", card), mib)];

    assert_eq!(
        placed(&case.client, case.pod("small").gpu_mem(1000)).await?,
        card(0, 1000)
    );
    assert_eq!(placed(&case.client, alone("whole")).await?, card(1, 16000));
    refused(&case.client, alone("second"), "not enough wholly free GPUs").await?;
    // Its neighbour has room; the card of the exclusive pod has none, whatever it asked for.
    assert_eq!(
        placed(&case.client, case.pod("fits").gpu_mem(7000)).await?,
        card(0, 7000)
    );
    refused(
        &case.client,
        case.pod("no-more").gpu_mem(1),
        "not enough free memory",
    )
    .await?;
    rig.end(case).await
}

#[tokio::test]
async fn mixed_cards_are_filled_tightest_first() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "mixed").await?;
    case.node("a", &[40000, 16000]).create(&case.client).await?;
    case.node("b", &[24000, 80000]).create(&case.client).await?;
    let card = |node, card| vec![(case.uuid(node, card), 14000)];

    let mut found = Vec::new();
    for name in ["p1", "p2", "p3", "p4"] {
        found.push(placed(&case.client, case.pod(name).gpu_mem(14000)).await?);
    }

    // The memory that each pod leaves free on its card: 2000, 10000, 26000, 12000.
    assert_eq!(
        found,
        [card("a", 1), card("b", 0), card("a", 0), card("a", 0)]
    );
    rig.end(case).await
}

#[tokio::test]
async fn a_pod_may_choose_its_policy() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "policy").await?;
    case.node("n", &[50000, 10000, 20000])
        .create(&case.client)
        .await?;
    let pod = |name: &str, policy: &str| {
        case.pod(name)
            .gpu_mem(4000)
            .annotation(names::POLICY, policy)
    };

    let mut cards = Vec::new();
    let names = ["a", "b", "c", "d", "e"];
    let policies = ["binpack", "binpack", "first-fit", "spread", "spread"];
    for (name, policy) in names.into_iter().zip(policies) {
        cards.extend(placed(&case.client, pod(name, policy)).await?);
    }

    let on = |card| (case.uuid("n", card), 4000);
    assert_eq!(cards, [on(1), on(1), on(0), on(0), on(2)]);
    rig.end(case).await
}
