//! Cards that fail and return.

use clap::Parser as _;
use fake_nvml::{Event, Gpu, Machine};
use gpustow_agent::clock::Now;
use gpustow_agent::state::State;

use crate::support::{Host, at, h100, machine, pods, present, settings, state, status_of, take};

/// The health and the reason of the first card in the report.
fn first(state: &State) -> (bool, Option<String>) {
    let gpu = status_of(state, &pods(&[])).gpus.remove(0);
    (gpu.healthy, gpu.reason)
}

fn reading(host: &Host, xid: u64) -> gpustow_agent::devices::Reading {
    let mut reading = host.read().unwrap();
    let kind = gpustow_agent::devices::FaultKind::Xid(xid);
    reading.faults.push(gpustow_agent::devices::Fault {
        uuid: "GPU-0".to_owned(),
        kind,
    });
    reading
}

fn host() -> Host {
    Host::new(&machine(vec![h100(0), h100(1)]))
}

#[test]
fn a_fault_condemns_a_card_until_its_probation_is_over() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    let gone = |_| gpustow_agent::processes::Who::Gone;
    let condemned = take(&mut state, Ok(reading(&host, 79)), &none, at(10), gone);
    assert_eq!(condemned, ["GPU-0"]);
    assert_eq!(first(&state), (false, Some("XID 79".to_owned())));
    assert!(
        status_of(&state, &none).gpus[1].healthy,
        "the other card is well"
    );
    host.sample(&mut state, &none, at(609));
    assert!(!first(&state).0);
    host.sample(&mut state, &none, at(610));
    assert_eq!(first(&state), (true, None));
}

#[test]
fn a_further_fault_restarts_the_probation() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    let gone = |_| gpustow_agent::processes::Who::Gone;
    take(&mut state, Ok(reading(&host, 79)), &none, at(10), gone);
    take(&mut state, Ok(reading(&host, 74)), &none, at(600), gone);
    host.sample(&mut state, &none, at(1199));
    assert_eq!(first(&state), (false, Some("XID 74".to_owned())));
    host.sample(&mut state, &none, at(1200));
    assert!(first(&state).0);
}

#[test]
fn an_applications_fault_condemns_nothing() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    for xid in [13, 31, 43, 45, 68, 109] {
        let gone = |_| gpustow_agent::processes::Who::Gone;
        assert!(take(&mut state, Ok(reading(&host, xid)), &none, at(1), gone).is_empty());
    }
    assert!(first(&state).0);
}

#[test]
fn which_xids_are_an_applications_is_the_operators_choice() {
    let args = [
        "gpustow-agent",
        "--once",
        "--application-xids=79,140",
        "--probation=60",
    ];
    let args = gpustow_agent::Args::try_parse_from(args).unwrap();
    let (host, none) = (host(), pods(&[]));
    let mut state = State::new(args.settings(), None, at(0));
    let gone = |_| gpustow_agent::processes::Who::Gone;
    for xid in [79, 140] {
        assert!(take(&mut state, Ok(reading(&host, xid)), &none, at(1), gone).is_empty());
    }
    take(&mut state, Ok(reading(&host, 31)), &none, at(2), gone);
    assert_eq!(first(&state), (false, Some("XID 31".to_owned())));
    host.sample(&mut state, &none, at(61));
    assert!(!first(&state).0);
    host.sample(&mut state, &none, at(62));
    assert!(first(&state).0, "after the probation that was chosen");
}

#[test]
fn a_memory_error_that_cannot_be_corrected_condemns() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    let mut reading = host.read().unwrap();
    reading.faults.push(gpustow_agent::devices::Fault {
        uuid: "GPU-0".to_owned(),
        kind: gpustow_agent::devices::FaultKind::Ecc,
    });
    let gone = |_| gpustow_agent::processes::Who::Gone;
    assert_eq!(take(&mut state, Ok(reading), &none, at(1), gone), ["GPU-0"]);
    let reason = "uncorrectable memory error".to_owned();
    assert_eq!(first(&state), (false, Some(reason)));
}

/// Each way in which a node can be without cards is a condition, and passes by itself.
#[test]
fn every_state_of_the_driver_is_a_condition_and_passes() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    let library = host.shared_object();
    let aside = host.dir.path().join("aside");
    let with_error = |error| Machine {
        error,
        ..machine(vec![h100(0), h100(1)])
    };
    let well = machine(vec![h100(0), h100(1)]);
    let ready = |state: &State| {
        let conditions = status_of(state, &pods(&[])).conditions;
        let ready = conditions
            .into_iter()
            .find(|it| it.r#type == "Ready")
            .unwrap();
        (ready.status, ready.reason)
    };
    let mut second = 0;
    let mut sees = |shown: &Machine, reason: &str| {
        host.shows(shown);
        second += 1;
        host.sample(&mut state, &none, at(second));
        let status = if reason == "Reading" { "True" } else { "False" };
        assert_eq!(ready(&state), (status.to_owned(), reason.to_owned()));
    };
    sees(&machine(Vec::new()), "NoGpus");
    sees(&well, "Reading");
    sees(&with_error(9), "DriverNotLoaded");
    sees(&well, "Reading");
    sees(&with_error(18), "DriverFailed");
    sees(&well, "Reading");
    std::fs::rename(&library, &aside).unwrap();
    std::fs::write(&library, "not a library").unwrap();
    sees(&well, "LibraryMissing");
    std::fs::rename(&aside, &library).unwrap();
    sees(&well, "Reading");
}

#[test]
fn a_restarted_agent_keeps_the_verdict() {
    let (host, mut before, none) = (host(), state(), pods(&[]));
    let gone = |_| gpustow_agent::processes::Who::Gone;
    take(&mut before, Ok(reading(&host, 79)), &none, at(10), gone);
    let report = status_of(&before, &none);
    let mut after = State::new(settings(), Some(&report), at(100));
    host.sample(&mut after, &none, at(100));
    assert_eq!(first(&after), (false, Some("XID 79".to_owned())));
    host.sample(&mut after, &none, at(610));
    assert!(first(&after).0);
}

#[test]
fn a_fault_of_a_divided_card_condemns_its_instances() {
    let part = |number: u32| fake_nvml::Mig {
        uuid: format!("MIG-{number}"),
        total_mib: 9856,
        ..fake_nvml::Mig::default()
    };
    let host = Host::new(&machine(vec![Gpu {
        mig: vec![part(1), part(2)],
        ..h100(0)
    }]));
    let (mut state, none) = (state(), pods(&[]));
    let gone = |_| gpustow_agent::processes::Who::Gone;
    take(&mut state, Ok(reading(&host, 79)), &none, at(10), gone);
    let status = status_of(&state, &none);
    assert!(status.gpus.iter().all(|gpu| !gpu.healthy), "{status:?}");
    assert_eq!(status.summary.healthy, 0);
}

#[test]
fn a_card_that_does_not_answer_keeps_its_size_and_returns() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    host.sample(&mut state, &none, at(0));
    host.shows(&machine(vec![
        Gpu {
            error: 999,
            ..h100(0)
        },
        h100(1),
    ]));
    // The library opens no card that does not answer.
    host.sample(&mut state, &none, at(1));
    let status = status_of(&state, &none);
    let lost = status.gpus.iter().find(|gpu| gpu.uuid == "GPU-0").unwrap();
    assert_eq!((lost.healthy, lost.total_mib), (false, 81_559));
    assert_eq!(lost.reason.as_deref(), Some("not there any more"));
    host.shows(&machine(vec![h100(0), h100(1)]));
    host.sample(&mut state, &none, at(2));
    assert!(first(&state).0);
}

#[test]
fn without_a_driver_every_card_is_kept_and_takes_no_pods() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    host.sample(&mut state, &none, at(0));
    let capacity = present(&state);
    host.shows(&Machine {
        error: 9,
        ..machine(Vec::new())
    });
    host.sample(&mut state, &none, at(1000));
    let status = status_of(&state, &none);
    assert_eq!((status.summary.gpus, status.summary.healthy), (2, 0));
    assert_eq!(
        status.gpus[0].reason.as_deref(),
        Some("the NVIDIA driver is not loaded")
    );
    assert_eq!(status.conditions[0].reason, "DriverNotLoaded");
    assert_eq!(
        present(&state),
        capacity,
        "no driver is no smaller hardware"
    );
    // It comes back with an error of its own kind under way.
    let mut back = machine(vec![h100(0), h100(1)]);
    back.events.push(Event {
        gpu: "GPU-0".to_owned(),
        xid: Some(79),
    });
    host.shows(&back);
    host.sample(&mut state, &none, at(1001));
    assert_eq!(status_of(&state, &none).summary.healthy, 2);
}

#[test]
fn a_card_taken_out_is_forgotten_unless_a_pod_holds_it() {
    let (host, mut state) = (host(), state());
    let holder = pods(&[crate::support::pod(&[("GPU-0", 100)])]);
    host.sample(&mut state, &holder, at(0));
    host.shows(&machine(vec![h100(1)]));
    host.sample(&mut state, &holder, at(1));
    assert_eq!(present(&state), 81_559 - 480);
    host.sample(&mut state, &holder, at(1000));
    assert_eq!(status_of(&state, &holder).summary.gpus, 2);
    host.sample(&mut state, &pods(&[]), at(1001));
    assert_eq!(status_of(&state, &pods(&[])).summary.gpus, 1);
}

#[test]
fn a_driver_that_fails_brings_no_vanished_card_back() {
    let (host, mut state, none) = (host(), state(), pods(&[]));
    let one = 81_559 - 480;
    host.sample(&mut state, &none, at(0));
    assert_eq!(present(&state), 2 * one);
    host.shows(&machine(vec![h100(1)]));
    host.sample(&mut state, &none, at(1));
    for second in [2, 1000] {
        host.shows(&Machine {
            error: 9,
            ..machine(vec![h100(0), h100(1)])
        });
        host.sample(&mut state, &none, at(second));
        assert_eq!(present(&state), one, "second {second}");
    }
    host.shows(&machine(vec![h100(0), h100(1)]));
    host.sample(&mut state, &none, at(1001));
    assert_eq!(present(&state), 2 * one);
}

/// The report of an earlier agent is all that one knows which starts without a driver.
#[test]
fn an_agent_that_starts_without_a_driver_brings_no_vanished_card_back() {
    let (host, mut before, none) = (host(), state(), pods(&[]));
    host.sample(&mut before, &none, at(0));
    host.shows(&machine(vec![h100(1)]));
    host.sample(&mut before, &none, at(1));
    let report = status_of(&before, &none);
    assert_eq!((report.gpus.len(), present(&before)), (2, 81_559 - 480));
    let mut after = State::new(settings(), Some(&report), at(2));
    host.shows(&Machine {
        error: 9,
        ..machine(Vec::new())
    });
    host.sample(&mut after, &none, at(3));
    assert_eq!(present(&after), 81_559 - 480);
}

/// The clock at a second of the agent's life, when the host's clock is set to `wall`.
fn set_to(second: u64, wall: u64) -> Now {
    Now {
        wall: at(wall).wall,
        ..at(second)
    }
}

#[test]
fn a_step_of_the_hosts_clock_ends_no_probation_and_forgets_no_card() {
    for wall in [0, 500_000] {
        let (host, mut state, none) = (host(), state(), pods(&[]));
        let gone = |_| gpustow_agent::processes::Who::Gone;
        let fails = set_to(10, 100_010);
        take(&mut state, Ok(reading(&host, 79)), &none, fails, gone);
        host.sample(&mut state, &none, set_to(11, wall));
        assert_eq!(first(&state), (false, Some("XID 79".to_owned())));
        host.shows(&machine(vec![h100(1)]));
        host.sample(&mut state, &none, set_to(12, 100_012));
        host.sample(&mut state, &none, set_to(13, wall));
        assert_eq!(status_of(&state, &none).summary.gpus, 2);
        host.shows(&machine(vec![h100(0), h100(1)]));
        host.sample(&mut state, &none, set_to(609, wall));
        assert!(!first(&state).0, "not yet");
        host.sample(&mut state, &none, set_to(610, wall));
        assert!(first(&state).0);
    }
}

/// An agent that starts knows the time before its life only from the host's clock.
#[test]
fn a_fault_that_is_yet_to_come_was_just_now() {
    let (host, mut before, none) = (host(), state(), pods(&[]));
    let gone = |_| gpustow_agent::processes::Who::Gone;
    let ahead = set_to(10, 100_010);
    take(&mut before, Ok(reading(&host, 79)), &none, ahead, gone);
    let report = status_of(&before, &none);
    let mut after = State::new(settings(), Some(&report), at(0));
    host.sample(&mut after, &none, at(599));
    assert!(!first(&after).0);
    host.sample(&mut after, &none, at(600));
    assert!(first(&after).0);
}
