//! A machine without a GPU: the library in a folder of its own, and a `/proc` next to it.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fake_nvml::{Gpu, Machine, Process};
use gpustow_agent::clock::Now;
use gpustow_agent::devices::Devices as _;
use gpustow_agent::devices::{DeviceError, NvmlDevices, Reading, Wanted};
use gpustow_agent::limits::Means;
use gpustow_agent::pods::{NodePod, NodePods};
use gpustow_agent::processes::{Processes, Who};
use gpustow_agent::state::{Settings, State};
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::names;
use gpustow_pack::Mib;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tempfile::TempDir;

pub(crate) const UID: &str = "0f1a2b3c-4d5e-6f70-8192-a3b4c5d6e7f8";
pub(crate) const CONTAINER: &str =
    "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// A folder with the library, the file that drives it, and processes.
pub(crate) struct Host {
    pub(crate) dir: TempDir,
    pub(crate) wanted: Arc<Wanted>,
}

impl Host {
    pub(crate) fn new(machine: &Machine) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let wanted = Arc::new(Wanted::below(dir.path().join("cgroups")));
        fake_nvml::install(&fake_nvml::library().unwrap(), dir.path(), machine).unwrap();
        Self { dir, wanted }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.dir.path().join(fake_nvml::FILE)
    }

    pub(crate) fn shared_object(&self) -> PathBuf {
        self.dir.path().join("libnvidia-ml.so.1")
    }

    pub(crate) fn proc(&self) -> PathBuf {
        self.dir.path().join("proc")
    }

    /// The root of its cgroups.
    pub(crate) fn cgroups(&self) -> PathBuf {
        self.dir.path().join("cgroups")
    }

    pub(crate) fn shows(&self, machine: &Machine) {
        machine.write(&self.file()).unwrap();
    }

    pub(crate) fn process(&self, pid: u32, cgroup: &str) {
        let dir = self.proc().join(pid.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(
            dir.join("stat"),
            format!("{pid} (x) S {}7 0", "0 ".repeat(18)),
        )
        .unwrap();
        std::fs::write(dir.join("cgroup"), cgroup).unwrap();
    }

    pub(crate) fn devices(&self) -> NvmlDevices {
        NvmlDevices::new(
            vec![self.dir.path().to_owned()],
            Duration::from_secs(3600),
            self.wanted.clone(),
        )
    }

    /// One reading by a library that was opened again.
    pub(crate) fn read(&self) -> Result<Reading, DeviceError> {
        let mut seen = None;
        self.devices().watch(&mut |reading| {
            seen = Some(reading);
            ControlFlow::Break(())
        })?;
        Ok(seen.unwrap())
    }

    /// Passes a fresh reading to the state.
    pub(crate) fn sample(&self, state: &mut State, pods: &NodePods, now: Now) -> Vec<String> {
        let mut processes = Processes::new(self.proc());
        take(state, self.read(), pods, now, |pid| processes.who(pid))
    }
}

pub(crate) fn take(
    state: &mut State,
    reading: Result<Reading, DeviceError>,
    pods: &NodePods,
    now: Now,
    who: impl FnMut(u32) -> Who,
) -> Vec<String> {
    state.read(reading.as_ref(), pods, &HashMap::new(), who, now)
}

/// So many seconds after the agent has started, by a clock that was not set since.
pub(crate) fn at(second: u64) -> Now {
    let wall = 1_800_000_000 + i64::try_from(second).unwrap();
    Now {
        age: Duration::from_secs(second),
        wall: Timestamp::from_second(wall).unwrap(),
    }
}

pub(crate) fn settings() -> Settings {
    Settings {
        headroom: Mib::ZERO,
        unified_memory: None,
        threshold: Mib(256),
        application_xids: [13, 31, 43, 45, 68, 109].into(),
        probation: Duration::from_secs(600),
        forget_after: Duration::from_secs(60),
        means: Means::default(),
        mps: false,
    }
}

pub(crate) fn state() -> State {
    State::new(settings(), None, at(0))
}

/// MiB that the cards that are there hold.
pub(crate) fn present(state: &State) -> u64 {
    state.present().values().copied().sum::<Mib>().0
}

pub(crate) fn status_of(state: &State, pods: &NodePods) -> GpuNodeStatus {
    state.status(pods)
}

/// An H100 as driver 580 shows it.
pub(crate) fn h100(index: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index}"),
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        minor: Some(index),
        pci_bus_id: format!("00000000:1{index}:00.0"),
        architecture: Some(9),
        numa_node: Some(index / 4),
        total_mib: 81_559,
        reserved_mib: 480,
        utilization: Some(7),
        nvlinks: 18,
        ..Gpu::default()
    }
}

pub(crate) fn machine(gpus: Vec<Gpu>) -> Machine {
    Machine {
        driver: "580.105.08".to_owned(),
        gpus,
        ..Machine::default()
    }
}

pub(crate) fn process(pid: u32, mib: u64) -> Process {
    Process {
        pid,
        used_mib: Some(mib),
        ..Process::default()
    }
}

/// A pod `team/p` with one container `main`, `mib` of each card, running since second 0.
pub(crate) fn pod(assigned: &[(&str, u64)]) -> Pod {
    let gpus: Vec<_> = assigned
        .iter()
        .map(|(uuid, mib)| json!({ "uuid": uuid, "mib": mib }))
        .collect();
    let uuids: Vec<_> = assigned.iter().map(|(uuid, _)| uuid).collect();
    let assignment = json!({ "version": 1, "gpus": gpus, "containers": { "main": uuids } });
    let mib: u64 = assigned.iter().map(|(_, mib)| mib).sum();
    let mut annotations = json!({ names::GPU_COUNT: assigned.len().to_string() });
    if !assigned.is_empty() {
        annotations[names::ASSIGNMENT] = json!(assignment.to_string());
    }
    serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "team", "uid": UID, "annotations": annotations },
        "spec": { "nodeName": "n", "containers": [{
            "name": "main",
            "resources": { "limits": { names::GPU_MEM: mib.max(1).to_string() } },
        }] },
        "status": { "phase": "Running", "containerStatuses": [{
            "name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "containerID": format!("containerd://{CONTAINER}"),
            "state": { "running": { "startedAt": at(0).wall.to_string() } },
        }] },
    }))
    .unwrap()
}

pub(crate) fn pods(list: &[Pod]) -> NodePods {
    NodePods::new(
        list.iter()
            .filter_map(|pod| NodePod::from_pod(pod, names::GPU_MEM)),
    )
}

pub(crate) fn cgroup_of(uid: &str) -> String {
    format!("0::/kubepods/burstable/pod{uid}/{CONTAINER}\n")
}
