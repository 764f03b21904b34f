//! Which processes end when their pod is to give memory back, and which never do.

use std::process::{Child, Command};
use std::time::Duration;

use fake_nvml::{Gpu, Kind, Process};
use gpustow_agent::cgroup::Owner;
use gpustow_agent::giveback::{GiveBack, Target};
use gpustow_agent::kill;
use gpustow_agent::pods::NodePods;
use gpustow_agent::processes::Processes;
use gpustow_api::config::Action;
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::support::{
    CONTAINER, Host, UID, at, cgroup_of, h100, machine, pod, pods, process, state, take,
};

/// The pod with 4096 MiB of the card and this condition, since this second.
fn asked(status: &str, reason: &str, second: u64) -> Pod {
    let mut pod = serde_json::to_value(pod(&[("GPU-0", 4096)])).unwrap();
    pod["status"]["conditions"] = json!([{
        "type": names::RECLAIM_CONDITION, "status": status, "reason": reason,
        "message": "Pod team/q is promised the memory.",
        "lastTransitionTime": at(second).wall.to_string(),
    }]);
    serde_json::from_value(pod).unwrap()
}

fn demand(second: u64) -> NodePods {
    pods(&[asked("True", Action::KillProcess.word(), second)])
}

/// The processes of the card that are ended at this second.
fn ended(give_back: &mut GiveBack, pods: &NodePods, second: u64, list: &[Process]) -> Vec<Target> {
    let host = Host::new(&machine(vec![Gpu {
        processes: list.to_vec(),
        ..h100(0)
    }]));
    for pid in [1, 2, 3] {
        host.process(pid, &cgroup_of(UID));
    }
    host.process(4, "0::/system.slice/x.service");
    host.process(5, &cgroup_of("ffffffff-4d5e-6f70-8192-a3b4c5d6e7f8"));
    let (mut state, mut processes) = (state(), Processes::new(host.proc()));
    let reading = host.read().unwrap();
    take(&mut state, Ok(reading.clone()), pods, at(second), |pid| {
        processes.who(pid)
    });
    let who = |pid| (processes.who(pid), processes.started(pid));
    give_back.decide(&reading, &state, pods, who, at(second))
}

fn pids(targets: &[Target]) -> Vec<u32> {
    targets.iter().map(|target| target.pid).collect()
}

const NO_PID: [u32; 0] = [];
const OVER: [(u32, u64); 5] = [(1, 1000), (2, 3000), (3, 2000), (4, 9000), (5, 9000)];

fn over() -> Vec<Process> {
    OVER.map(|(pid, mib)| process(pid, mib)).to_vec()
}

#[test]
fn the_largest_processes_of_the_pod_end_until_it_is_within_its_request() {
    let mut give_back = GiveBack::new(6);
    let targets = ended(&mut give_back, &demand(0), 1, &over());
    assert_eq!(pids(&targets), [2], "6000 MiB less 3000 are within 4096");
    let note = &targets[0].note;
    for part in ["process 2", "3000 MiB", "6000 MiB", "4096 MiB", "team/q"] {
        assert!(note.contains(part), "{part}: {note}");
    }
    let more = [process(1, 5000), process(2, 4000), process(3, 100)];
    let targets = ended(&mut GiveBack::new(6), &demand(0), 1, &more);
    assert_eq!(pids(&targets), [1, 2]);
}

#[test]
fn a_demand_is_met_once_a_minute_while_the_pod_is_over_its_request() {
    let mut give_back = GiveBack::new(6);
    let within = [process(1, 4096)];
    assert_eq!(pids(&ended(&mut give_back, &demand(0), 1, &within)), NO_PID);
    assert_eq!(pids(&ended(&mut give_back, &demand(0), 2, &over())), [2]);
    assert_eq!(pids(&ended(&mut give_back, &demand(0), 3, &over())), NO_PID);
    assert_eq!(pids(&ended(&mut give_back, &demand(4), 4, &over())), [2]);
    // The program began its next process before that one was gone: the demand has not changed.
    let next = [process(1, 1000), process(3, 4000)];
    assert_eq!(pids(&ended(&mut give_back, &demand(4), 63, &next)), NO_PID);
    assert_eq!(pids(&ended(&mut give_back, &demand(4), 64, &next)), [3]);
    assert_eq!(
        pids(&ended(&mut give_back, &demand(4), 124, &within)),
        NO_PID
    );
}

#[test]
fn an_agent_that_restarts_acts_on_a_demand_again_by_what_it_sees_then_alone() {
    let restarted = |list: &[Process]| {
        let targets = ended(&mut GiveBack::new(6), &demand(0), 9, list);
        pids(&targets)
    };
    assert_eq!(
        pids(&ended(&mut GiveBack::new(6), &demand(0), 1, &over())),
        [2]
    );
    // It has ended meanwhile; or it does not listen, and is still to be killed.
    assert_eq!(restarted(&[process(1, 1000), process(3, 2000)]), NO_PID);
    assert_eq!(restarted(&over()), [2]);
}

#[test]
fn a_process_that_may_not_be_ended_is_reported_with_the_remedy() {
    let own = Own::start();
    let target = own.target(own.started(), UID);
    let note = target.not_ended(&std::io::Error::from_raw_os_error(1));
    for part in [&*own.0.id().to_string(), "not permitted", "CAP_KILL"] {
        assert!(note.contains(part), "{part}: {note}");
    }
}

#[test]
fn no_process_ends_without_a_demand_or_for_one_that_is_old() {
    let mut give_back = GiveBack::new(6);
    for (pod, second) in [
        (pod(&[("GPU-0", 4096)]), 1),
        (asked("False", Action::KillProcess.word(), 0), 1),
        (asked("True", Action::Evict.word(), 0), 1),
        (asked("True", Action::Event.word(), 0), 1),
        (asked("True", Action::KillProcess.word(), 0), 700),
    ] {
        let targets = ended(&mut give_back, &pods(&[pod]), second, &over());
        assert_eq!(pids(&targets), NO_PID);
    }
}

#[test]
fn no_process_ends_by_a_sample_that_lacks_something() {
    let unmeasured = Process {
        used_mib: None,
        ..process(3, 0)
    };
    let gone = process(99, 10);
    for odd in [unmeasured, gone] {
        let list = [vec![process(1, 9000)], vec![odd]].concat();
        assert_eq!(
            pids(&ended(&mut GiveBack::new(6), &demand(0), 1, &list)),
            NO_PID
        );
    }
}

#[test]
fn clients_of_mps_are_left_alone() {
    let client = Process {
        kind: Kind::Mps,
        ..process(1, 9000)
    };
    let list = [client, process(2, 500)];
    assert_eq!(
        pids(&ended(&mut GiveBack::new(6), &demand(0), 1, &list)),
        [2]
    );
}

#[test]
fn no_more_end_in_a_minute_than_may() {
    let mut give_back = GiveBack::new(2);
    let two = [process(1, 4000), process(2, 3000), process(3, 3000)];
    assert_eq!(pids(&ended(&mut give_back, &demand(0), 1, &two)), [1, 2]);
    assert_eq!(pids(&ended(&mut give_back, &demand(5), 5, &over())), NO_PID);
    assert_eq!(pids(&ended(&mut give_back, &demand(5), 62, &over())), [2]);
}

/// A process of this machine that ends with the test.
struct Own(Child);

impl Own {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn target(&self, started: u64, cgroup: &str) -> Target {
        Target {
            uid: UID.into(),
            owner: Owner {
                pod: cgroup.into(),
                container: Some(CONTAINER.into()),
            },
            pid: self.0.id(),
            started,
            note: String::new(),
        }
    }

    fn started(&self) -> u64 {
        let mut processes = Processes::new("/proc".into());
        processes.who(self.0.id());
        processes.started(self.0.id()).unwrap()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test]
async fn a_process_that_is_another_one_by_now_gets_no_signal() {
    let mut own = Own::start();
    let elsewhere = tempfile::tempdir().unwrap();
    let (pid, started) = (own.0.id(), own.started());
    let dir = elsewhere.path().join(pid.to_string());
    std::fs::create_dir(&dir).unwrap();
    let says = |cgroup: &str, program: &str| {
        std::fs::copy(format!("/proc/{pid}/stat"), dir.join("stat")).unwrap();
        std::fs::write(dir.join("cgroup"), cgroup).unwrap();
        std::fs::write(dir.join("comm"), program).unwrap();
    };
    let begin = |target: Target| kill::begin(elsewhere.path(), &target).unwrap();
    // No pod's at all, another container's, started at another time, a server of MPS.
    assert!(
        kill::begin("/proc".as_ref(), &own.target(started, UID))
            .unwrap()
            .is_none()
    );
    says(&cgroup_of(&UID.replace('0', "1")), "sleep\n");
    assert!(begin(own.target(started, UID)).is_none());
    says(&cgroup_of(UID), "sleep\n");
    assert!(begin(own.target(started + 1, UID)).is_none());
    says(&cgroup_of(UID), "nvidia-cuda-mps-server\n");
    assert!(begin(own.target(started, UID)).is_none());
    assert!(own.0.try_wait().unwrap().is_none(), "it runs on");

    says(&cgroup_of(UID), "sleep\n");
    let ending = begin(own.target(started, UID)).unwrap();
    assert!(!own.0.wait().unwrap().success());
    ending.finish(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_process_that_does_not_listen_is_killed() {
    let deaf = r#"trap "" TERM; echo; exec sleep 600"#;
    let mut child = Command::new("sh");
    let child = child
        .args(["-c", deaf])
        .stdout(std::process::Stdio::piped());
    let mut own = Own(child.spawn().unwrap());
    // The line on its output shows that it ignores the signal.
    let mut line = [0];
    let mut said = own.0.stdout.take().unwrap();
    std::io::Read::read_exact(&mut said, &mut line).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let (pid, started) = (own.0.id(), own.started());
    let dir = elsewhere.path().join(pid.to_string());
    std::fs::create_dir(&dir).unwrap();
    std::fs::copy(format!("/proc/{pid}/stat"), dir.join("stat")).unwrap();
    std::fs::write(dir.join("cgroup"), cgroup_of(UID)).unwrap();
    let ending = kill::begin(elsewhere.path(), &own.target(started, UID)).unwrap();
    ending.unwrap().finish(Duration::ZERO).await.unwrap();
    assert!(!own.0.wait().unwrap().success());
}
