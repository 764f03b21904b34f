//! Limits that the driver holds: pod, admission, NVIDIA's own hook, the container's real cgroup, the agent that reads
//! them back; and every combination in which they cannot hold.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use fake_nvml::{Limit, Mig};
use gpustow_api::gpunode::Gpu;
use gpustow_api::names;
use gpustow_testkit::{PodBuilder, eventually, wait_refused};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::driver::cgroup;
use crate::kubelet::SOON;
use crate::node::{LIMITS, RealNode, on_limiting_node};

const OLD: &str = "580.1";
/// The message for a pod that waits for a card that can limit memory.
const NOWHERE: &str = "no GPU here can limit memory";

/// A pod that asks the driver for so many MiB, one amount after the other.
fn taking(node: &RealNode, name: &str, kernel: &Path, mib: &[&str]) -> PodBuilder {
    let volume = json!({ "name": "kernel", "hostPath": { "path": kernel } });
    let mount = json!({ "name": "kernel", "mountPath": "/kernel" });
    let args = mib.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    node.pod(name).gpu_mem(4096).with(|spec| {
        spec.restart_policy = Some("Always".to_owned());
        spec.volumes = serde_json::from_value(json!([volume])).ok();
        for container in &mut spec.containers {
            container.args = Some(args.clone());
            container.volume_mounts = serde_json::from_value(json!([mount])).ok();
        }
    })
}

fn limited(node: &RealNode, name: &str, kernel: &Path, mib: &[&str]) -> PodBuilder {
    taking(node, name, kernel, mib).annotation(names::ENFORCE, "driver")
}

/// Waits until the report states that limits hold on the first card, or this reason why not.
async fn says(node: &RealNode, word: &str) -> Result<()> {
    let what = format!("limits: {word}");
    node.card(&what, |gpu| gpu.memory_limit.as_deref() == Some(word))
        .await
}

async fn condition(node: &RealNode, status: &str, reason: &str) -> Result<()> {
    eventually(SOON, &format!("LimitsHold is {status}"), async || {
        let all = node.report().await?.conditions;
        let of = all.iter().find(|it| it.r#type == "LimitsHold");
        let is = of.is_some_and(|it| it.status == status && it.reason == reason);
        ensure!(is, "{all:?}");
        Ok(())
    })
    .await
}

/// Waits until the pod's log ends with these lines.
async fn tells(node: &RealNode, pod: &Pod, lines: &str) -> Result<()> {
    eventually(SOON, lines, async || {
        let log = node.log(pod)?;
        // After the time and the stream.
        let said = log.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
        let said = said.collect::<Vec<_>>().join("\n");
        ensure!(said.ends_with(lines), "{log}");
        Ok(())
    })
    .await
}

/// Waits until there is such an Event on the pod.
pub(crate) async fn event(node: &RealNode, pod: &Pod, reason: &str) -> Result<Event> {
    let events = Api::<Event>::namespaced(node.case.client.clone(), &node.case.namespace);
    let uid = pod.uid().context("no UID")?;
    let of = ListParams::default().fields(&format!("reason={reason},involvedObject.uid={uid}"));
    eventually(SOON, reason, async || {
        let all = events.list(&of).await?.items;
        all.into_iter().next().context("no such Event")
    })
    .await
}

/// A new pod with a limit goes nowhere.
async fn refused(node: &RealNode, kernel: &Path) -> Result<()> {
    let pod = limited(node, "waits", kernel, &[]);
    let pod = pod.create(&node.case.client).await?;
    wait_refused(&node.case.client, &pod, NOWHERE, SOON).await?;
    gone(node, "waits").await
}

async fn gone(node: &RealNode, name: &str) -> Result<()> {
    let now = DeleteParams::default().grace_period(0);
    node.case.pods().delete(name, &now).await?;
    eventually(SOON, "the pod is gone", async || {
        ensure!(node.case.pods().get_opt(name).await?.is_none(), "{name}");
        Ok(())
    })
    .await
}

/// Kills the pod's process and waits until its container cannot start again, for this.
async fn fails(node: &RealNode, name: &str, why: &str) -> Result<()> {
    let pid = node.container(name).await?.pid;
    kill(Pid::from_raw(pid.try_into()?), Signal::SIGKILL)?;
    eventually(SOON, &format!("{name} fails: {why}"), async || {
        let status = node.case.pods().get(name).await?.status;
        let status = serde_json::to_string(&status)?;
        ensure!(status.contains(why), "{status}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_limit_holds_and_where_it_cannot_no_pod_comes() -> Result<()> {
    on_limiting_node("limits", "--toolkit-limits", async |node| {
        let (_driver, kernel) = node.kernel()?;
        says(node, "Holds").await?;
        let held = limited(node, "held", &kernel, &["3000", "2000", "1000"]);
        let held = node.run(held).await?;
        tells(
            node,
            &held,
            "3000 MiB: granted\n2000 MiB: out of memory\n1000 MiB: granted",
        )
        .await?;
        let main = node.container("held").await?;
        let limits = std::fs::read_to_string(node.limits())?;
        let own = cgroup(main.pid)?.display().to_string();
        ensure!(limits.contains(&own), "{own} is not in {limits}");
        let uid = held.uid().context("no UID")?;
        node.card("what the driver says of the container", |gpu| {
            gpu.pods
                .iter()
                .map(|it| (&it.uid, it.used_mib))
                .eq([(&uid, 4000)])
        })
        .await?;
        condition(node, "True", "Held").await?;
        let second = limited(node, "second", &kernel, &["100"]);
        let second = node.run(second).await?;
        tells(node, &second, "100 MiB: granted").await?;

        // The administrator's word was wrong: the pod starts without its limit, and is the last.
        node.has("toolkit", "1.20.0")?;
        let free = limited(node, "free", &kernel, &["30000"]);
        let free = node.run(free).await?;
        tells(node, &free, "30000 MiB: granted").await?;
        event(node, &free, "LimitMissing").await?;
        says(node, "Missing").await?;
        refused(node, &kernel).await?;
        gone(node, "free").await?;
        node.has("flags", "")?;
        node.restart_agent().await?;
        says(node, "Toolkit").await?;
        refused(node, &kernel).await?;

        // An older driver: a container that comes back there does not start, for its variables are left.
        node.has("toolkit", "1.20.1")?;
        node.has("flags", "--toolkit-limits")?;
        node.has_driver(OLD)?;
        node.restart_agent().await?;
        says(node, "Driver").await?;
        refused(node, &kernel).await?;
        fails(node, "held", "nvmlDeviceSetMemoryLimits_v1").await?;
        condition(node, "Unknown", "NotReadable").await?;
        // With an older toolkit the container starts without a limit, and the condition reports it.
        node.has("toolkit", "1.20.0")?;
        node.runs_again("held").await?;
        condition(node, "Unknown", "NotReadable").await?;
        gone(node, "held").await?;

        // Cgroups of version 1.
        node.has("toolkit", "1.20.1")?;
        node.has("cgroups", "1")?;
        node.has_driver(LIMITS)?;
        node.restart_agent().await?;
        says(node, "Cgroup").await?;
        refused(node, &kernel).await?;
        fails(node, "second", "cgroup").await?;
        // With an older toolkit it starts without a limit, which no agent could read.
        node.has("toolkit", "1.20.0")?;
        node.runs_again("second").await?;
        condition(node, "Unknown", "NotReadable").await?;
        // As above, with an older driver.
        node.has_driver(OLD)?;
        node.restart_agent().await?;
        says(node, "Driver").await?;
        refused(node, &kernel).await?;
        node.has("toolkit", "1.20.1")?;
        fails(node, "second", "cgroup").await?;
        node.has("toolkit", "1.20.0")?;
        node.runs_again("second").await?;
        condition(node, "Unknown", "NotReadable").await?;
        gone(node, "second").await?;

        // A card that is divided, with either driver, toolkit and cgroups: the instance itself is the limit.
        let instance = Mig {
            uuid: node.machine.gpus[0].uuid.replace("GPU-", "MIG-"),
            profile: "1g.10gb".to_owned(),
            total_mib: 9_856,
            ..Mig::default()
        };
        for (driver, toolkit, cgroups) in [
            (LIMITS, "1.20.1", "2"),
            (LIMITS, "1.20.1", "1"),
            (OLD, "1.20.1", "2"),
            (OLD, "1.20.0", "1"),
        ] {
            node.has("toolkit", toolkit)?;
            node.has("cgroups", cgroups)?;
            node.has_driver(driver)?;
            node.machine.gpus[0].mig = vec![instance.clone()];
            node.shows()?;
            node.restart_agent().await?;
            says(node, "Mig").await?;
            refused(node, &kernel).await?;
            node.run(node.pod("divided").gpu_mem(9_000)).await?;
            let main = node.container("divided").await?;
            let sees = format!("/proc/{}/root/dev/nvidia-caps", main.pid);
            let mut sees: Vec<_> = std::fs::read_dir(&sees)?
                .map(|it| it.map(|it| it.file_name()))
                .collect::<std::io::Result<_>>()?;
            sees.sort();
            assert_eq!(sees, ["nvidia-cap3", "nvidia-cap4"], "its instance");
            let limits = std::fs::read_to_string(node.limits())?;
            let own = cgroup(main.pid)?.display().to_string();
            ensure!(!limits.contains(&own), "{own} is in {limits}");
            gone(node, "divided").await?;
        }
        Ok(())
    })
    .await
}

/// Waits until the driver holds the pod's container, and the pod as a whole, to so many MiB.
async fn holds(node: &RealNode, own: &Path, mib: u64) -> Result<()> {
    eventually(SOON, &format!("a limit of {mib} MiB"), async || {
        let text = std::fs::read_to_string(node.limits())?;
        let all: Vec<Limit> = serde_yaml::from_str(&text)?;
        for group in [own, own.parent().context("no pod")?] {
            let held = all.iter().find(|limit| limit.cgroup == group);
            ensure!(held.is_some_and(|it| it.hard == mib << 20), "{text}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_agent_sets_limits_where_the_toolkit_is_too_old_and_changes_those_of_pods_that_run()
-> Result<()> {
    on_limiting_node("sets", "--set-limits", async |node| {
        node.has("toolkit", "1.20.0")?;
        says(node, "Holds").await?;
        let (_driver, kernel) = node.kernel()?;
        let amounts = ["@limit", "3000", "2000", "@more", "2000"];
        let pod = limited(node, "held", &kernel, &amounts);
        let pod = node.run(pod).await?;
        let main = node.container("held").await?;
        let own = cgroup(main.pid)?;
        holds(node, &own, 4096).await?;
        condition(node, "True", "Held").await?;
        std::fs::write(kernel.join("limit"), "")?;
        let first = "3000 MiB: granted\n2000 MiB: out of memory";
        tells(node, &pod, first).await?;

        let notes = json!({ "metadata": { "annotations": { names::MEM_LIMIT: "6000" } } });
        let patch = Patch::Merge(notes);
        node.case
            .pods()
            .patch("held", &PatchParams::default(), &patch)
            .await?;
        holds(node, &own, 6000).await?;
        let told = event(node, &pod, "GpuMemoryLimitChanged").await?;
        let told = told.message.context("no message")?;
        ensure!(
            told.contains("6000 MiB") && told.contains("4096 before"),
            "{told}"
        );
        std::fs::write(kernel.join("more"), "")?;
        tells(node, &pod, &format!("{first}\n2000 MiB: granted")).await?;
        assert_eq!(node.container("held").await?, main, "without a restart");
        condition(node, "True", "Held").await?;
        says(node, "Holds").await
    })
    .await
}

#[tokio::test]
async fn what_uses_lent_memory_ends_for_who_waits_and_its_pod_stays() -> Result<()> {
    on_limiting_node("gives-back", "--kill-processes", async |node| {
        let (_driver, kernel) = node.kernel()?;
        let pod = taking(node, "borrows", &kernel, &["--fork", "6000"]);
        let pod = pod.annotation(names::MEM_LIMIT, "max");
        let pod = node.run(pod).await?;
        let main = node.container("borrows").await?;
        let uid = pod.uid().context("no UID")?;
        let uses = |mib: Option<u64>| {
            let uid = uid.clone();
            move |gpu: &Gpu| {
                let of = gpu.pods.iter().find(|it| it.uid == uid);
                of.map(|it| it.used_mib) == mib
            }
        };
        node.card("it borrows", uses(Some(6000))).await?;
        // The pod fits next to the other pod's request, but not next to its usage.
        let waits = node.pod("waits").gpu_mem(74_000);
        let waits = waits.create(&node.case.client).await?;
        let kept = event(node, &waits, "GpuMemoryReserved").await?;
        let kept = kept.message.context("no message")?;
        ensure!(kept.contains("/borrows"), "{kept}");
        let told = event(node, &pod, "GpuProcessEnded").await?;
        let told = told.message.context("no message")?;
        for part in ["6000 MiB", "4096 MiB", "/waits"] {
            ensure!(told.contains(part), "{told}");
        }
        node.runs(&waits).await?;
        node.card("it has given back", uses(None)).await?;
        assert_eq!(node.container("borrows").await?, main, "the pod stays");
        eventually(SOON, "nothing is demanded any more", async || {
            let pod = node.case.pods().get("borrows").await?;
            let conditions = pod.status.and_then(|status| status.conditions);
            let mut all = conditions.into_iter().flatten();
            let asked = all.find(|it| it.type_ == names::RECLAIM_CONDITION);
            let asked = asked.context("it was asked")?;
            ensure!(asked.status == "False", "{asked:?}");
            Ok(())
        })
        .await?;
        node.metric("gpustow_killed_processes_total", &[], 1).await
    })
    .await
}
