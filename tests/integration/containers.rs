//! Pods with several containers: the cards that each container sees, and the charge of a card by Kubernetes' own rule
//! for init containers.

use std::collections::BTreeMap;

use anyhow::Result;
use gpustow_api::names;
use gpustow_testkit::Case;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::support::{bound, charges, placed, refused, rig};

/// Container → the cards that its environment will name.
fn devices(pod: &Pod) -> BTreeMap<&str, &str> {
    let annotations = pod.annotations().iter();
    annotations
        .filter_map(|(key, uuids)| Some((key.strip_prefix(names::DEVICES_OF)?, uuids.as_str())))
        .collect()
}

#[tokio::test]
async fn init_containers_and_sidecars_are_charged_by_the_max_rule() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "init").await?;
    case.node("n", &[6000, 9000, 11000])
        .create(&case.client)
        .await?;

    // 1000 + max(5000, 2000 + 3000).
    let pod = case
        .pod("after")
        .sidecar("proxy", 1000)
        .init("warm", 5000)
        .gpu_mem(2000);
    let pod = bound(
        &case.client,
        pod.container("second", 3000).container("idle", None),
    )
    .await?;
    assert_eq!(charges(&pod)?, [(case.uuid("n", 0), 6000)]);
    let card = case.uuid("n", 0);
    let card = card.as_str();
    let all = [
        ("main", card),
        ("proxy", card),
        ("second", card),
        ("warm", card),
    ];
    assert_eq!(devices(&pod), BTreeMap::from(all));
    // The card has 6000 MiB.
    for (container, mib, share) in [
        ("proxy", "1000", "0.1666"),
        ("warm", "5000", "0.8333"),
        ("main", "2000", "0.3333"),
        ("second", "3000", "0.5000"),
    ] {
        let says = |key: &str| pod.annotations().get(&format!("{key}{container}")).cloned();
        assert_eq!(says(names::MIB_OF).as_deref(), Some(mib), "{container}");
        assert_eq!(says(names::SHARE_OF).as_deref(), Some(share), "{container}");
    }

    // max(9000, 1000 + 3000): the init container has ended when the sidecar starts.
    let pod = case
        .pod("before")
        .init("warm", 9000)
        .sidecar("proxy", 1000)
        .gpu_mem(3000);
    assert_eq!(
        placed(&case.client, pod).await?,
        [(case.uuid("n", 1), 9000)]
    );
    // Only its init container asks.
    let pod = case.pod("only").init("warm", 11000);
    assert_eq!(
        placed(&case.client, pod).await?,
        [(case.uuid("n", 2), 11000)]
    );
    rig.end(case).await
}

#[tokio::test]
async fn containers_share_a_card_where_they_fit_and_part_where_they_do_not() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "share").await?;
    case.node("n", &[10000, 10000, 10000])
        .create(&case.client)
        .await?;
    let on = |card, mib| (case.uuid("n", card), mib);

    let pod = case.pod("together").gpu_mem(4000).container("second", 6000);
    assert_eq!(placed(&case.client, pod).await?, [on(0, 10000)]);

    let pod = case.pod("apart").gpu_mem(7000).container("second", 6000);
    let pod = bound(&case.client, pod).await?;
    assert_eq!(charges(&pod)?, [on(1, 7000), on(2, 6000)]);
    let (first, second) = (case.uuid("n", 1), case.uuid("n", 2));
    assert_eq!(
        devices(&pod),
        BTreeMap::from([("main", first.as_str()), ("second", &second)])
    );

    // 7000 MiB are free, 3000 and 4000.
    let pod = case.pod("neither").gpu_mem(3500).container("second", 3500);
    refused(&case.client, pod, "not enough free memory on any one GPU").await?;
    rig.end(case).await
}

#[tokio::test]
async fn each_container_may_want_its_own_number_of_gpus() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "own-count").await?;
    case.node("n", &[20000, 10000]).create(&case.client).await?;

    let wide = format!("{}wide", names::GPU_COUNT_OF);
    let pod = case
        .pod("p")
        .gpu_mem(8000)
        .container("wide", 12000)
        .annotation(&wide, "2");
    let pod = bound(&case.client, pod).await?;

    let (large, small) = (case.uuid("n", 0), case.uuid("n", 1));
    assert_eq!(
        charges(&pod)?,
        [(large.clone(), 14000), (small.clone(), 6000)]
    );
    let both = format!("{large},{small}");
    assert_eq!(
        devices(&pod),
        BTreeMap::from([("main", large.as_str()), ("wide", &both)])
    );
    rig.end(case).await
}
