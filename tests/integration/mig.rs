//! MIG instances that agents make for pods: the nodes of pods that request one, and their Bindings.

use anyhow::{Context as _, Result};
use gpustow_api::gpunode::Gpu;
use gpustow_api::instances::{Instance, OnDemand, Profile};
use gpustow_api::names;
use gpustow_testkit::{Case, wait_bound};
use kube::ResourceExt as _;
use kube::api::DeleteParams;

use crate::support::{SOON, assignment, bound, refused, rig};

/// As an agent shows a GPU of eight slices of 10,000 MiB, the last of which others have.
pub(crate) fn makes_instances(gpu: &mut Gpu) {
    let profile = |slices: u8, starts: &[u8]| Profile {
        name: format!("{slices}g.{slices}0gb"),
        memory_mib: 10_000 * u32::from(slices),
        slices,
        compute_slices: slices.min(7),
        starts: starts.into(),
    };
    gpu.mig = Some(Box::new(OnDemand {
        profiles: vec![
            profile(1, &[0, 1, 2, 3, 4, 5, 6, 7]),
            profile(2, &[0, 2, 4, 6]),
            profile(4, &[0, 4]),
            profile(8, &[0]),
        ],
        instances: vec![Instance {
            profile: "1g.10gb".to_owned(),
            start: 7,
            slices: 1,
            pod: None,
        }],
    }));
}

#[tokio::test]
async fn pods_with_isolation_get_instances_and_others_stay_off_their_gpus() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "mig").await?;
    let node = case.node("n", &[80_000]);
    let node = node.with_status(|status| status.gpus.iter_mut().for_each(makes_instances));
    node.create(&case.client).await?;
    let isolated = |name: &str, mib: u64| {
        let pod = case.pod(name).gpu_mem(mib);
        pod.annotation(names::ISOLATION, "mig")
    };
    let plain = case.pod("plain").gpu_mem(8000);
    let only = "GPUs that make MIG instances take only pods with isolation mig";
    refused(&case.client, plain, only).await?;
    // The largest profile does not fit next to the instance of others.
    let large = isolated("large", 50_000);
    let none = "no GPU that makes a MIG instance as large";
    refused(&case.client, large, none).await?;
    let made = bound(&case.client, isolated("half", 35_000)).await?;
    let held = assignment(&made)?;
    let instance = held.instance.context("no instance")?;
    assert_eq!(
        (&*instance.profile, instance.start, instance.slices),
        ("4g.40gb", 0, 4)
    );
    // The container's device is called by the pod, as the instance is not made yet.
    let device = format!("{}={}", names::CDI_MIG, made.uid().context("no UID")?);
    for key in [
        "devices.gpustow.dev/main",
        "nvidia.cdi.k8s.io/container.main",
    ] {
        assert_eq!(made.annotations().get(key), Some(&device));
    }
    let spec = made.spec.as_ref().context("no spec")?;
    let given = spec.containers[0].env.iter().flatten();
    let given: Vec<&str> = given.map(|env| env.name.as_str()).collect();
    assert!(given.contains(&names::VISIBLE_DEVICES), "{given:?}");

    // 30,000 MiB are free, in no piece of 40,000 that an instance could have.
    let waits = isolated("waits", 30_000);
    let waits = refused(&case.client, waits, "no room for the pod's MIG instance").await?;
    bound(&case.client, isolated("small", 10_000)).await?;
    let at_once = DeleteParams::default().grace_period(0);
    case.pods().delete("half", &at_once).await?;
    wait_bound(&case.client, &waits, SOON).await?;
    rig.end(case).await
}
