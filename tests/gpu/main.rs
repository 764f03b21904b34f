//! gpustow on a machine's real GPU: the control plane is real, the agent reads NVML, and programs of CUDA stand for the
//! pods' containers. It needs root: `make test-gpu`.

mod program;
mod site;

use std::time::Instant;

use anyhow::{Result, ensure};
use gpustow_api::{Assignment, names};
use gpustow_testkit::{wait_bound, wait_refused};
use kube::ResourceExt as _;
use site::{SOON, Site};

/// Upper bound on the memory of a CUDA program's context, apart from the program's allocations, MiB.
const CONTEXT: u64 = 1024;

#[tokio::test]
async fn a_pod_gets_the_gpu_and_the_report_shows_what_its_program_uses() -> Result<()> {
    let site = Site::open(&[]).await?;
    let pod = site.pod("model", 8192).await?;
    let assignment = Assignment::decode(&pod.annotations()[names::ASSIGNMENT])?;
    let uuids: Vec<_> = assignment.charges.iter().map(|(uuid, _)| &**uuid).collect();
    assert_eq!(uuids, [site.uuid.as_str()]);
    let program = site.runs_in(&pod, 4096).await?;
    let used = site.used(&pod, 4096).await?;
    ensure!(used <= 4096 + CONTEXT, "{used} MiB of 4096");
    println!("a program that allocates 4096 MiB uses {used} MiB");
    drop(program);
    site.gpu("nothing in use", |gpu| {
        gpu.pods.iter().all(|it| it.used_mib == 0).then_some(())
    })
    .await?;
    site.end().await
}

#[tokio::test]
async fn memory_of_a_program_outside_of_pods_is_promised_to_no_pod() -> Result<()> {
    let site = Site::open(&[]).await?;
    let foreign = site.runs_outside(site.total - 10_240)?;
    site.gpu("unmanaged memory", |gpu| {
        (gpu.host_mib >= site.total - 10_240).then_some(())
    })
    .await?;
    let pod = site.case.pod("waits").gpu_mem(20_480);
    let pod = pod.create(&site.case.client).await?;
    wait_refused(&site.case.client, &pod, "any one GPU", SOON).await?;
    // Pods still get the free memory.
    site.pod("small", 4096).await?;
    let gone = Instant::now();
    drop(foreign);
    wait_bound(&site.case.client, &pod, SOON).await?;
    println!("memory freed → waiting pod bound: {:?}", gone.elapsed());
    site.end().await
}

#[tokio::test]
async fn reclaim_ends_the_program_that_uses_more_than_its_pod_requested() -> Result<()> {
    let site = Site::open(&["reclaim: {action: KillProcess, after: 1s}"]).await?;
    let within = site.pod("within", 4096).await?;
    let borrower = site.borrower(4096).await?;
    let kept = site.runs_in(&within, 2048).await?;
    let mut ended = site.runs_in(&borrower, site.total - 12_288).await?;
    site.used(&borrower, site.total - 12_288).await?;
    let pod = site.case.pod("waits").gpu_mem(site.total / 2);
    let pod = pod.create(&site.case.client).await?;
    let asked = Instant::now();
    wait_bound(&site.case.client, &pod, SOON).await?;
    println!(
        "memory reclaimed and waiting pod bound: {:?}",
        asked.elapsed()
    );
    let status = ended.wait()?;
    ensure!(!status.success(), "the borrower's program ended by itself");
    ensure!(kept.runs()?, "the program within its request was ended");
    let pods = site.case.pods();
    for pod in [&within, &borrower] {
        let seen = pods.get(&pod.name_any()).await?;
        ensure!(
            seen.metadata.deletion_timestamp.is_none(),
            "{}",
            pod.name_any()
        );
    }
    site.end().await
}

#[tokio::test]
async fn model_that_wakes_gets_the_memory_that_another_pod_borrowed() -> Result<()> {
    let site = Site::open(&["reclaim: {action: KillProcess}"]).await?;
    let awake = site.total / 2;
    let model = site.case.pod("model").gpu_mem(awake);
    let model = site.bound(model.annotation(names::ASLEEP, "true")).await?;
    let borrower = site.borrower(4096).await?;
    let _asleep = site.runs_in(&model, 2048).await?;
    let borrowed = site.total - 8192;
    let mut ended = site.runs_in(&borrower, borrowed).await?;
    site.used(&borrower, borrowed).await?;

    let asked = Instant::now();
    site.wake(&model).await?;
    println!(
        "asked for its memory → told that it is free: {:?}",
        asked.elapsed()
    );
    ensure!(
        !ended.wait()?.success(),
        "the borrower's program ended by itself"
    );
    let awake = site.runs_in(&model, awake - 2048 - 2 * CONTEXT).await?;
    ensure!(awake.runs()?, "the model has no memory");
    site.end().await
}
