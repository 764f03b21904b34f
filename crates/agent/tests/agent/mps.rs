//! GPUs with NVIDIA's MPS: they take pods while the control daemon answers and no pod goes past it.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::time::Duration;

use fake_nvml::{self as machine, Kind, Machine, Process};
use gpustow_agent::mps;
use gpustow_agent::notices::{Notice, Notices};
use gpustow_agent::pods::NodePods;
use gpustow_agent::state::{Settings, State};
use gpustow_api::gpunode::Gpu;
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::support::{
    Host, UID, at, cgroup_of, h100, machine, pod, pods, process, settings, status_of,
};

/// An agent of a node with MPS, whose daemon answers.
fn state() -> State {
    let settings = Settings {
        mps: true,
        ..settings()
    };
    let mut state = State::new(settings, None, at(0));
    state.heard_of_mps(None);
    state
}

/// A pod with 30 % of GPU-0.
fn sharing() -> Pod {
    let mut pod = pod(&[("GPU-0", 8000)]);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    let text = &annotations[names::ASSIGNMENT];
    let mut assignment: Value = serde_json::from_str(text).unwrap();
    assignment["computePercent"] = json!(30);
    annotations.insert(names::ASSIGNMENT.to_owned(), assignment.to_string());
    pod
}

/// A host on whose GPU a process of the pod is of this kind.
fn uses(kind: Kind) -> Machine {
    machine(vec![machine::Gpu {
        processes: vec![Process {
            kind,
            ..process(1, 700)
        }],
        ..h100(0)
    }])
}

fn look(host: &Host, state: &mut State, pods: &NodePods, second: u64) -> Gpu {
    host.sample(state, pods, at(second));
    status_of(state, pods).gpus.swap_remove(0)
}

#[tokio::test]
async fn daemon_answers_if_a_process_has_its_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("control");
    let fails = async || mps::fails(dir.path()).await;
    let says = |fails: Option<String>, what: &str| {
        let text = fails.unwrap();
        let place = socket.display().to_string();
        assert!(text.contains(&place) && text.contains(what), "{text}");
    };
    says(fails().await, "No such file");
    let daemon = UnixListener::bind(&socket).unwrap();
    assert_eq!(fails().await, None);
    // It is killed, and its socket stays.
    drop(daemon);
    says(fails().await, "refused");
    std::fs::remove_file(&socket).unwrap();
    let daemon = UnixDatagram::bind(&socket).unwrap();
    assert_eq!(fails().await, None, "a socket of another kind");
    drop(daemon);
    says(fails().await, "refused");
}

#[tokio::test]
async fn daemon_that_takes_no_connection_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("control");
    let _daemon = UnixListener::bind(&socket).unwrap();
    // Each connection waits in the queue of the socket.
    let mut connections = 0;
    while mps::fails(dir.path()).await.is_none() {
        connections += 1;
        assert!(connections < 100_000, "the queue has no end");
    }
}

#[test]
fn directory_of_the_clients_is_open_to_all_users() {
    let dir = tempfile::tempdir().unwrap();
    mps::share(dir.path()).unwrap();
    let mode = dir.path().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o1777);
    assert!(mps::share(&dir.path().join("absent")).is_err());
}

#[test]
fn gpu_takes_no_pods_until_the_daemon_answers_and_while_it_does_not() {
    let host = Host::new(&machine(vec![h100(0)]));
    let settings = Settings {
        mps: true,
        ..settings()
    };
    let (mut state, pods) = (State::new(settings, None, at(0)), pods(&[]));
    let gpu = look(&host, &mut state, &pods, 0);
    assert!(gpu.mps && !gpu.healthy, "{gpu:?}");
    state.heard_of_mps(None);
    let gpu = look(&host, &mut state, &pods, 1);
    assert!(gpu.mps && gpu.healthy, "{gpu:?}");
    let before = status_of(&state, &pods);
    state.heard_of_mps(Some("it does not answer".to_owned()));
    let gpu = look(&host, &mut state, &pods, 2);
    assert_eq!(gpu.reason.as_deref(), Some("it does not answer"));
    assert!(gpu.mps, "other pods do not come instead");
    assert!(state.is_news(&before, &status_of(&state, &pods), &pods));
    // That is no failure of the GPU: nothing is waited for.
    state.heard_of_mps(None);
    assert!(look(&host, &mut state, &pods, 3).healthy);
}

#[test]
fn mig_instance_has_no_mps() {
    let parent = machine::Gpu {
        mig: vec![machine::Mig {
            uuid: "MIG-0".to_owned(),
            profile: "1g.10gb".to_owned(),
            total_mib: 9856,
            reserved_mib: 13,
            ..machine::Mig::default()
        }],
        ..h100(0)
    };
    let host = Host::new(&machine(vec![parent]));
    let gpu = look(&host, &mut state(), &pods(&[]), 0);
    assert!(!gpu.mps && gpu.healthy, "{gpu:?}");
}

#[test]
fn pod_that_goes_past_mps_is_told_and_its_gpu_takes_no_pods_meanwhile() {
    let host = Host::new(&uses(Kind::Mps));
    host.process(1, &cgroup_of(UID));
    let (mut state, pods) = (state(), pods(&[sharing()]));
    let mut notices = Notices::new(Duration::from_secs(6000));
    let mut warned = |state: &State, second| {
        let told = notices.look(state, &pods, &[], at(second).age);
        let warnings = told.into_iter().filter_map(|notice| match notice {
            Notice::Warn { reason, note, .. } => Some((reason, note)),
            _ => None,
        });
        warnings.collect::<Vec<_>>()
    };
    assert!(look(&host, &mut state, &pods, 0).healthy);
    assert_eq!(warned(&state, 0), []);
    host.shows(&uses(Kind::Compute));
    let gpu = look(&host, &mut state, &pods, 1);
    assert!(gpu.healthy, "it may be about to become a client");
    let gpu = look(&host, &mut state, &pods, 2);
    let reason = gpu.reason.as_deref();
    assert_eq!(reason, Some("pod team/p uses it without MPS"));
    let told = warned(&state, 2);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].0 == "MpsMissing" && told[0].1.contains("GPU-0"));
    look(&host, &mut state, &pods, 3);
    assert_eq!(warned(&state, 3), []);
    host.shows(&machine(vec![h100(0)]));
    assert!(look(&host, &mut state, &pods, 4).healthy);
}

#[test]
fn pod_from_before_mps_is_left_alone() {
    let host = Host::new(&uses(Kind::Compute));
    host.process(1, &cgroup_of(UID));
    let (mut state, pods) = (state(), pods(&[pod(&[("GPU-0", 8000)])]));
    for second in 0..3 {
        assert!(look(&host, &mut state, &pods, second).healthy);
    }
}

/// A driver in that mode lets one process use the GPU.
#[test]
fn gpu_in_exclusive_process_takes_one_pod_and_names_it() {
    let host = Host::new(&machine(vec![machine::Gpu {
        compute_mode: 3,
        ..h100(0)
    }]));
    let (mut alone, mut shared) = (State::new(settings(), None, at(0)), state());
    let (none, one) = (pods(&[]), pods(&[pod(&[("GPU-0", 8000)])]));
    assert!(look(&host, &mut alone, &none, 0).healthy);
    let reason = |gpu: Gpu| gpu.reason.unwrap_or_default();
    let says = |by: &str| format!("compute mode EXCLUSIVE_PROCESS, and {by} has it");
    let gpu = look(&host, &mut alone, &one, 1);
    assert!(!gpu.healthy);
    assert_eq!(reason(gpu), says("pod team/p"));
    assert!(
        look(&host, &mut alone, &none, 2).healthy,
        "the pod has ended"
    );
    // Its processes are one to the driver: MPS's server.
    assert!(look(&host, &mut shared, &one, 3).healthy);
    // The daemon of another is a process of the host.
    host.process(7, "0::/system.slice/mps.service\n");
    host.shows(&machine(vec![machine::Gpu {
        compute_mode: 3,
        processes: vec![process(7, 30)],
        ..h100(0)
    }]));
    let gpu = look(&host, &mut alone, &none, 4);
    assert_eq!(reason(gpu), says("a process"));
}

#[test]
fn gpu_whose_compute_mode_is_prohibited_takes_no_pods() {
    let host = Host::new(&machine(vec![machine::Gpu {
        compute_mode: 2,
        ..h100(0)
    }]));
    for mut state in [State::new(settings(), None, at(0)), state()] {
        let gpu = look(&host, &mut state, &pods(&[]), 0);
        let reason = gpu.reason.as_deref();
        assert_eq!(reason, Some("compute mode PROHIBITED: set it to DEFAULT"));
    }
}
