//! A pod's process: its view of the GPU, the report of its usage, and the state after its end.

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{eventually, wait_refused};
use kube::ResourceExt as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::kubelet::SOON;
use crate::node::on_node;

#[tokio::test]
async fn a_container_sees_its_card_and_what_it_uses_is_its_pods() -> Result<()> {
    on_node("sees", 1, async |node| {
        let uuid = node.case.uuid("n", 0);
        let pod = node.run(node.pod("p").gpu_mem(60_000)).await?;
        let before = node.container("p").await?;
        let environment = std::fs::read(format!("/proc/{}/environ", before.pid))?;
        let environment = String::from_utf8(environment)?;
        let seen = format!("NVIDIA_VISIBLE_DEVICES={uuid}");
        ensure!(
            environment.split('\0').any(|line| line == seen),
            "{environment:?}"
        );
        let log = node.log(&pod)?;
        ensure!(log.trim_end().ends_with(&seen), "{log}");

        node.uses(&[(before.pid, 5000)])?;
        let uid = pod.uid().context("a pod without UID")?;
        node.card("the pod's memory", |gpu| {
            let of_pod = gpu.pods.iter().map(|share| (&share.uid, share.used_mib));
            of_pod.eq([(&uid, 5000)]) && gpu.unmanaged_mib == 0
        })
        .await?;
        let labels = [
            &*uuid,
            &*node.case.namespace,
            "pod=\"p\"",
            "container=\"main\"",
        ];
        node.metric("gpustow_pod_gpu_memory_used_bytes", &labels, 5000 << 20)
            .await?;
        eventually(SOON, "the pod is confirmed", async || {
            let pod = node.case.pods().get("p").await?;
            let confirmed = pod.annotations().get(names::CONFIRMED);
            ensure!(confirmed == Some(&uuid), "{confirmed:?}");
            Ok(())
        })
        .await?;

        // A restarted agent and kubelet report the same state.
        let report = node.report().await?;
        let annotations = node.case.pods().get("p").await?.annotations().clone();
        node.restart_agent().await?;
        node.restart_kubelet().await?;
        let again = node.report().await?;
        assert_eq!(
            (again.gpus, again.conditions),
            (report.gpus, report.conditions)
        );
        assert_eq!(node.container("p").await?, before);
        let now = node.case.pods().get("p").await?;
        assert_eq!(now.annotations(), &annotations);
        node.amounts(79_000, 79_000).await?;

        // The process ends: another pod gets its GPU memory.
        let next = node.pod("q").gpu_mem(60_000);
        let next = next.create(&node.case.client).await?;
        wait_refused(&node.case.client, &next, "", SOON).await?;
        kill(Pid::from_raw(before.pid.try_into()?), Signal::SIGTERM)?;
        node.uses(&[])?;
        node.phase(&pod, "Succeeded").await?;
        let next = node.runs(&next).await?;
        let log = node.log(&next)?;
        ensure!(log.trim_end().ends_with(&seen), "{log}");
        node.card("nothing is used", |gpu| gpu.pods.is_empty())
            .await
    })
    .await
}
