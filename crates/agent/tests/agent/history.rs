//! The most that a pod used of a card in the last half hour, and since when it is idle there.

use fake_nvml::{Gpu, Process};
use gpustow_agent::pods::NodePods;
use gpustow_agent::processes::Processes;
use gpustow_agent::state::State;
use gpustow_api::gpunode::{GpuNodeStatus, PodUse};

use crate::support::{
    Host, UID, at, cgroup_of, h100, machine, pod, pods, process, settings, state, status_of, take,
};

/// A machine whose only card is used by process 1 of the pod.
fn host() -> Host {
    let host = Host::new(&machine(vec![h100(0)]));
    host.process(1, &cgroup_of(UID));
    host
}

/// The report at this second if the pod's process then uses so much, and works so hard.
fn report(
    host: &Host,
    state: &mut State,
    second: u64,
    mib: u64,
    utilization: Option<u32>,
) -> GpuNodeStatus {
    let process = Process {
        utilization,
        ..process(1, mib)
    };
    host.shows(&machine(vec![Gpu {
        processes: vec![process],
        ..h100(0)
    }]));
    let pods = pods(&[pod(&[("GPU-0", 4096)])]);
    let mut processes = Processes::new(host.proc());
    take(state, host.read(), &pods, at(second), |pid| {
        processes.who(pid)
    });
    GpuNodeStatus {
        heartbeat: Some(at(second).wall.to_string()),
        ..status_of(state, &pods)
    }
}

fn share(status: &GpuNodeStatus) -> &PodUse {
    &status.gpus[0].pods[0]
}

#[test]
fn the_most_of_half_an_hour_is_reported_and_forgotten_after_it() {
    let (host, mut state) = (host(), state());
    let seen = [(0, 100), (60, 3000), (61, 50), (1700, 70), (2200, 60)]
        .map(|(second, mib)| share(&report(&host, &mut state, second, mib, None)).high_mib);
    assert_eq!(
        seen,
        [Some(100), Some(3000), Some(3000), Some(3000), Some(70)]
    );
}

#[test]
fn a_pod_is_idle_from_when_none_of_its_processes_works_and_unknown_where_the_driver_does_not_tell()
{
    let (host, mut state) = (host(), state());
    let mut since = |second, percent| {
        share(&report(&host, &mut state, second, 10, percent))
            .idle_since
            .clone()
    };
    let said = |second| Some(at(second).wall.to_string());
    assert_eq!(since(0, Some(7)), None);
    assert_eq!(since(5, Some(0)), said(5));
    assert_eq!(since(9, Some(0)), said(5));
    assert_eq!(since(10, Some(1)), None);
    assert_eq!(since(11, Some(0)), said(11));
    assert_eq!(since(12, None), None);
}

/// The pod, which starts or has started.
fn holder(starts: bool) -> NodePods {
    let mut pod = pod(&[("GPU-0", 4096)]);
    let ready = if starts { "False" } else { "True" };
    let conditions = serde_json::json!([{ "type": "Ready", "status": ready }]);
    let status = pod.status.get_or_insert_default();
    status.conditions = serde_json::from_value(conditions).unwrap();
    pods(&[pod])
}

/// The report if the pod then uses so much of the 4096 MiB that it holds.
fn starting(
    host: &Host,
    state: &mut State,
    pods: &NodePods,
    second: u64,
    mib: u64,
) -> GpuNodeStatus {
    host.shows(&machine(vec![Gpu {
        processes: vec![process(1, mib)],
        ..h100(0)
    }]));
    let mut processes = Processes::new(host.proc());
    take(state, host.read(), pods, at(second), |pid| {
        processes.who(pid)
    });
    status_of(state, pods)
}

#[test]
fn memory_of_a_pod_that_starts_settles_when_it_stays_the_same_near_what_the_pod_holds() {
    let said = |second| Some(at(second).wall.to_string());
    let (host, mut state) = (host(), state());
    let starts = holder(true);
    let mut seen = |second, mib| {
        let status = starting(&host, &mut state, &starts, second, mib);
        share(&status).settled_at.clone()
    };
    assert_eq!(seen(0, 3000), None);
    assert_eq!(seen(14, 3000), None, "three quarters, and not long enough");
    assert_eq!(seen(20, 4000), None, "it grew");
    assert_eq!(seen(34, 4010), None);
    assert_eq!(seen(36, 4010), said(36), "a hundredth more is the same");
    assert_eq!(seen(40, 3500), said(36), "that stays");
    assert_eq!(seen(41, 100), None, "its server starts again");
    assert_eq!(seen(100, 100), None, "so little is no server's memory");
    let (host, mut state) = (self::host(), self::state());
    for second in [0, 100] {
        let status = starting(&host, &mut state, &holder(false), second, 4000);
        assert_eq!(share(&status).settled_at, None, "it is Ready");
    }
}

#[test]
fn settling_is_told_at_once_and_once() {
    let (host, mut state) = (host(), state());
    let starts = holder(true);
    let statuses = [0, 16, 17].map(|second| starting(&host, &mut state, &starts, second, 4000));
    assert!(state.is_news(&statuses[0], &statuses[1], &starts));
    assert!(!state.is_news(&statuses[1], &statuses[2], &starts));
}

#[test]
fn neither_is_worth_a_write() {
    let (host, mut state) = (host(), state());
    let pods = pods(&[pod(&[("GPU-0", 4096)])]);
    let old = report(&host, &mut state, 0, 100, Some(9));
    let new = report(&host, &mut state, 5, 120, Some(0));
    assert!(share(&old) != share(&new) && !state.is_news(&old, &new, &pods));
}

#[test]
fn the_next_agent_knows_what_was_reported_unless_that_is_old() {
    let (host, mut before) = (host(), state());
    let status = report(&host, &mut before, 0, 3000, Some(0));
    for (second, high) in [(100, 3000), (1900, 20)] {
        let mut after = State::new(settings(), Some(&status), at(second));
        let status = report(&host, &mut after, second, 20, Some(0));
        let seen = share(&status);
        assert_eq!(seen.high_mib, Some(high));
        assert_eq!(seen.idle_since, Some(at(second).wall.to_string()));
    }
}

#[test]
fn peak_of_each_container_counts_from_the_last_report() {
    let (host, mut state) = (host(), state());
    let mut peaks = Vec::new();
    for (second, mib, written) in [
        (0, 100, true),
        (1, 3000, false),
        (2, 50, true),
        (3, 60, true),
    ] {
        let status = report(&host, &mut state, second, mib, None);
        let used = &share(&status).containers;
        peaks.extend(used.iter().map(|used| (used.name.clone(), used.peak_mib)));
        if written {
            state.reported();
        }
    }
    let main = |mib: u64| ("main".to_owned(), mib);
    assert_eq!(peaks, [main(100), main(3000), main(3000), main(60)]);
}
