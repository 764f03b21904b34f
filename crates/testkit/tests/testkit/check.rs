use anyhow::{Context as _, Result};
use gpustow_api::names;
use gpustow_testkit::builders::{delete, set_containers, set_phase, set_running};
use gpustow_testkit::{BY_HAND, Case, shared};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::json;

/// A pod on the node whose assignment names this much of the card.
async fn holder(case: &Case, name: &str, uuid: &str, mib: u64) -> Result<Pod> {
    let assignment = json!({
        "version": 1, "gpus": [{ "uuid": uuid, "mib": mib }], "containers": { "main": [uuid] },
    });
    let node = case.node_name("n");
    let pod = case
        .pod(name)
        .gpu_mem(mib)
        .annotation(names::ASSIGNMENT, &assignment.to_string())
        .annotation(&format!("{}main", names::DEVICES_OF), uuid)
        .with(|spec| spec.node_name = Some(node));
    pod.create(&case.client).await
}

async fn complaint(case: &Case) -> Result<String> {
    Ok(format!(
        "{:#}",
        case.check()
            .await
            .err()
            .context("nothing was found wrong")?
    ))
}

#[tokio::test]
async fn the_checker_sees_an_overfull_card() -> Result<()> {
    let case = Case::new(shared().await?, "full").await?;
    case.node("n", &[10240, 10240])
        .headroom(1024)
        .create(&case.client)
        .await?;
    let card = case.uuid("n", 1);
    holder(&case, "a", &card, 5000).await?;
    holder(&case, "b", &card, 4216).await?;
    case.check().await?;
    let c = holder(&case, "c", &card, 1).await?;
    assert!(
        complaint(&case)
            .await?
            .contains(&format!("{card} holds 9217 MiB of 9216"))
    );
    set_phase(&case.client, &c, "Succeeded").await?;
    case.check().await?;

    // Deleted and still running, as a kubelet's grace leaves it, it holds its memory.
    set_running(&case.client, &c).await?;
    delete(&case.client, &c, 30).await?;
    assert!(complaint(&case).await?.contains("holds 9217 MiB"));
    let ended = json!({ "terminated": { "exitCode": 0 } });
    set_containers(&case.client, &c, "Running", ended).await?;
    case.check().await?;
    case.end().await
}

#[tokio::test]
async fn the_checker_sees_wrong_annotations() -> Result<()> {
    let case = Case::new(shared().await?, "annot").await?;
    case.node("n", &[10240]).create(&case.client).await?;
    let node = case.node_name("n");
    let place = |spec: &mut k8s_openapi::api::core::v1::PodSpec| spec.node_name = Some(node);
    let by_hand = case
        .pod("hand")
        .gpu_mem(1)
        .label(BY_HAND, "true")
        .with(place.clone());
    by_hand.create(&case.client).await?;
    case.pod("plain")
        .with(place.clone())
        .create(&case.client)
        .await?;
    case.check().await?;

    case.pod("bare")
        .gpu_mem(1)
        .with(place)
        .create(&case.client)
        .await?;
    holder(&case, "stranger", "GPU-elsewhere", 1).await?;
    let liar = holder(&case, "liar", &case.uuid("n", 0), 1).await?;
    let key = format!("{}main", names::DEVICES_OF);
    let lie = Patch::Merge(json!({ "metadata": { "annotations": { key: "GPU-other" } } }));
    let name = liar.metadata.name.context("no name")?;
    case.pods()
        .patch(&name, &PatchParams::default(), &lie)
        .await?;
    let complaint = complaint(&case).await?;
    for part in [
        "/bare: bound without",
        "no card GPU-elsewhere",
        "/liar: main is assigned",
    ] {
        assert!(complaint.contains(part), "{part:?} not in {complaint}");
    }
    case.pods()
        .delete_collection(&Default::default(), &Default::default())
        .await?;
    case.end().await
}
