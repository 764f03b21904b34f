//! The most that a pod used of a card in the last half hour, and since when it is idle there.

use fake_nvml::{Gpu, Process};
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

/// What is reported at this second if the pod's process then uses so much, and works so hard.
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
