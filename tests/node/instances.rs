//! MIG instances that the agent makes: a pod, the driver, NVIDIA's own toolkit, and the devices in the container.

use std::fs::read_dir;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use fake_nvml::{Mig, Profile};
use gpustow_api::names;
use gpustow_testkit::eventually;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use tokio::process::Command;

use crate::kubelet::{SOON, output};
use crate::limits::event;
use crate::node::{RealNode, on_limiting_node};
use crate::site::inline;

/// Where the toolkit looks for CDI specifications that are gone after a reboot.
const CDI: &str = "/var/run/cdi";

/// The device files of the GPU and of its two instances, each followed by the file of its compute instance.
const NAMES: [&str; 5] = [
    "nvidia0",
    "nvidia-caps/nvidia-cap5",
    "nvidia-caps/nvidia-cap6",
    "nvidia-caps/nvidia-cap7",
    "nvidia-caps/nvidia-cap8",
];

/// A GPU in MIG mode without instances, that may have two of 40 GB.
fn divide(node: &mut RealNode) -> Result<()> {
    node.machine.gpus[0].profiles = vec![Profile {
        name: "3g.40gb".to_owned(),
        total_mib: 39_000,
        slices: 4,
        compute_slices: 3,
        starts: vec![0, 4],
    }];
    node.shows()
}

/// Runs the documentation's command that prepares a node, with this node's driver and hook, and not into the machine's
/// /etc.
async fn prepare(node: &RealNode) -> Result<()> {
    let command = inline("docs/compute-share.md", "nvidia-ctk cdi generate")?;
    let command = command.replace("/etc/cdi", CDI);
    let mut words = command.split(' ');
    let program = words.next().context("no command")?;
    let dir = node.kubelet.dir();
    let mut run = Command::new(node.tools.join(program));
    run.args(words);
    for (flag, path) in [
        ("driver-root", "driver"),
        ("dev-root", "driver"),
        ("nvidia-cdi-hook-path", "hook"),
    ] {
        run.arg(format!("--{flag}={}", dir.join(path).display()));
    }
    output(run).await?;
    Ok(())
}

/// The GPU and capabilities whose device files a process has, each the driver's own.
fn devices(node: &RealNode, pid: u32) -> Result<Vec<String>> {
    let drivers = node.kubelet.dir().join("driver/dev");
    let its = Path::new("/proc").join(pid.to_string()).join("root/dev");
    let mut found = Vec::new();
    for name in NAMES {
        if let Ok(file) = std::fs::metadata(its.join(name)) {
            let same = std::fs::metadata(drivers.join(name))?.rdev() == file.rdev();
            ensure!(same, "another device is {name}");
            found.push(name.to_owned());
        }
    }
    Ok(found)
}

/// Waits until the driver shows an instance in each of these places, and the agent a specification for as many.
async fn has(node: &RealNode, starts: &[u8]) -> Result<()> {
    eventually(SOON, &format!("instances at {starts:?}"), async || {
        let mut all = node.driver_shows()?.gpus.remove(0).mig;
        all.sort_by_key(|it| it.start);
        ensure!(
            all.iter().map(|it| it.start).eq(starts.iter().copied()),
            "{all:?}"
        );
        let whole = |it: &Mig| !it.bare;
        ensure!(all.iter().all(whole), "{all:?}");
        let names = read_dir(CDI)?.filter_map(|it| it.ok()?.file_name().into_string().ok());
        let own: Vec<String> = names.filter(|it| it.starts_with("gpustow-")).collect();
        ensure!(own.len() == starts.len(), "{own:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn pod_gets_an_instance_of_its_own_from_nvidias_toolkit_and_it_ends_after_the_pod()
-> Result<()> {
    on_limiting_node("instances", "--make-instances", async |node| {
        std::fs::create_dir_all(CDI)?;
        divide(node)?;
        node.restart_agent().await?;
        node.card("instances can be made", |gpu| gpu.mig.is_some())
            .await?;
        let isolated = |node: &RealNode, name: &str| {
            let pod = node.pod(name).gpu_mem(30_000);
            let pod = pod.annotation(names::ISOLATION, "mig");
            pod.with(|spec| spec.restart_policy = Some("OnFailure".to_owned()))
        };

        // Before the node is prepared, containers do not start, and an Event names the missing command.
        let first = isolated(node, "first").create(&node.case.client).await?;
        let told = event(node, &first, "MigInstanceMissing").await?;
        let told = told.message.context("no message")?;
        ensure!(told.contains("nvidia-ctk cdi generate"), "{told}");
        prepare(node).await?;
        let main = node.runs_again("first").await?;
        has(node, &[0]).await?;
        let sees = |pid| devices(node, pid);
        let [gpu, one, of_one, two, of_two] = NAMES;
        assert_eq!(sees(main.pid)?, [gpu, one, of_one]);

        // The second has the other place and sees no device of the first's instance. An agent that is killed changes nothing.
        isolated(node, "second").create(&node.case.client).await?;
        let second = node.runs_again("second").await?;
        has(node, &[0, 4]).await?;
        assert_eq!(sees(second.pid)?, [gpu, two, of_two]);
        node.restart_agent().await?;
        has(node, &[0, 4]).await?;
        assert_eq!(node.container("first").await?, main);

        node.case
            .pods()
            .delete(&first.name_any(), &DeleteParams::default())
            .await?;
        has(node, &[4]).await?;
        assert_eq!(node.container("second").await?, second);
        isolated(node, "third").create(&node.case.client).await?;
        let third = node.runs_again("third").await?;
        assert_eq!(sees(third.pid)?, [gpu, one, of_one]);
        has(node, &[0, 4]).await
    })
    .await
}
