//! The values that the agent reads through the library's C functions.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use fake_nvml::{Event, Gpu, Kind, Machine, Mig};
use gpustow_agent::devices::{
    DeviceError, Devices as _, Fault, FaultKind, Memory, NvmlDevices, Process,
};
use gpustow_api::gpunode::{Near, Place};

use crate::support::{Host, h100, machine, process};

const MIB: u64 = 1 << 20;

#[test]
fn every_field_of_a_card_is_read() {
    let near = vec![fake_nvml::Near {
        gpu: 2,
        level: 10,
        nvlinks: None,
    }];
    let mut first = Gpu {
        near,
        processes: vec![process(41, 1000), process(42, 24)],
        ..h100(0)
    };
    first.processes[1].kind = Kind::Graphics;
    let host = Host::new(&machine(vec![first, h100(1), h100(2)]));
    let reading = host.read().unwrap();
    assert_eq!(reading.driver.as_deref(), Some("580.105.08"));
    let card = &reading.cards[0];
    assert_eq!((card.uuid.as_str(), card.index), ("GPU-0", 0));
    assert_eq!(card.model, "NVIDIA H100 80GB HBM3");
    let near = [(2, "PIX"), (1, "SYS")].map(|(gpu, path)| Near {
        gpu,
        path: path.to_owned(),
    });
    assert_eq!(
        card.place,
        Place {
            minor: Some(0),
            pci_bus_id: Some("00000000:10:00.0".to_owned()),
            architecture: Some("Hopper".to_owned()),
            numa_node: Some(0),
            nvlinks: Some(18),
            near: near.into(),
            ..Place::default()
        }
    );
    let memory = Memory {
        total: 81_559 * MIB,
        reserved: 480 * MIB,
        used: 1024 * MIB,
    };
    assert_eq!(card.memory, Some(memory));
    assert_eq!(card.utilization, Some(7));
    let processes = [(41, 1000), (42, 24)].map(|(pid, mib)| Process {
        pid,
        used: Some(mib * MIB),
        ..Process::default()
    });
    assert_eq!(card.processes.as_deref(), Some(&processes[..]));
    assert_eq!(card.failure, None);
}

/// Pairs joined directly, and all cards joined through switches.
#[test]
fn cards_joined_by_nvlink_are_nearer_than_any_other_path() {
    let joined = |gpu, level, nvlinks| fake_nvml::Near {
        gpu,
        level,
        nvlinks,
    };
    let paths = |near: Vec<fake_nvml::Near>| {
        let first = Gpu {
            near,
            nvlinks: 12,
            ..h100(0)
        };
        let host = Host::new(&machine(vec![first, h100(1), h100(2), h100(3)]));
        let words = |card: &gpustow_agent::devices::Card| -> Vec<String> {
            let near = card.place.near.iter();
            near.map(|near| format!("{} {}", near.gpu, near.path))
                .collect()
        };
        words(&host.read().unwrap().cards[0])
    };
    let direct = vec![
        joined(1, 10, None),
        joined(2, 40, Some(4)),
        joined(3, 50, Some(8)),
    ];
    assert_eq!(paths(direct), ["3 NV8", "2 NV4", "1 PIX"]);
    let switched = vec![joined(1, 10, Some(0)), joined(2, 50, Some(0))];
    assert_eq!(paths(switched), ["1 NV12", "2 NV12", "3 SYS"]);
}

#[test]
fn a_process_in_several_lists_counts_once() {
    let kinds = [Kind::Both, Kind::Mps, Kind::Compute];
    let processes = kinds.map(|kind| fake_nvml::Process {
        kind,
        ..process(5, 100)
    });
    let host = Host::new(&machine(vec![Gpu {
        processes: processes.into(),
        ..h100(0)
    }]));
    let card = host.read().unwrap().cards.remove(0);
    assert_eq!(
        card.processes,
        Some(vec![Process {
            pid: 5,
            used: Some(100 * MIB),
            mps: true,
            ..Process::default()
        }])
    );
}

#[test]
fn what_the_driver_lacks_is_unknown_and_not_zero() {
    let unsupported = [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetMigMode",
    ];
    let lacking = |names: &[&str]| Machine {
        unsupported: names.iter().map(|&name| name.to_owned()).collect(),
        ..machine(vec![Gpu {
            processes: vec![process(5, 100)],
            ..h100(0)
        }])
    };
    let card = Host::new(&lacking(&unsupported))
        .read()
        .unwrap()
        .cards
        .remove(0);
    assert_eq!(card.utilization, None);
    assert_eq!(
        card.processes.as_ref().map(Vec::len),
        Some(1),
        "the list that there is"
    );
    let address = card.place.pci_bus_id.clone();
    assert_eq!(
        card.place,
        Place {
            pci_bus_id: address,
            ..Place::default()
        }
    );

    let card = Host::new(&lacking(&["nvmlDeviceGetComputeRunningProcesses_v3"])).read();
    assert_eq!(card.unwrap().cards[0].processes, None);
    let card = Host::new(&lacking(&["nvmlDeviceGetMemoryInfo_v2"]))
        .read()
        .unwrap()
        .cards
        .remove(0);
    assert_eq!(
        (card.memory, card.failure),
        (None, None),
        "it shares the host's memory"
    );
}

#[test]
fn memory_that_the_driver_cannot_tell_is_none() {
    let unknown = fake_nvml::Process {
        used_mib: None,
        ..process(5, 0)
    };
    let host = Host::new(&machine(vec![Gpu {
        processes: vec![unknown],
        ..h100(0)
    }]));
    let card = host.read().unwrap().cards.remove(0);
    assert_eq!(
        card.processes,
        Some(vec![Process {
            pid: 5,
            used: None,
            ..Process::default()
        }])
    );
}

#[test]
fn rows_that_cannot_be_are_not_believed() {
    for nonsense in [process(0, 5), process(7, 1 << 40)] {
        let used_mib = Some(5);
        let host = Host::new(&machine(vec![Gpu {
            processes: vec![nonsense],
            used_mib,
            ..h100(0)
        }]));
        let card = host.read().unwrap().cards.remove(0);
        assert_eq!(card.processes, None);
        assert_eq!(
            card.memory.map(|memory| memory.used),
            Some(5 * MIB),
            "the sum is right"
        );
    }
}

#[test]
fn the_instances_of_a_divided_card_are_cards() {
    let instance = |number: u32| Mig {
        uuid: format!("MIG-{number}"),
        profile: "1g.10gb".to_owned(),
        total_mib: 9856,
        reserved_mib: 13,
        processes: vec![process(60 + number, 200)],
        ..Mig::default()
    };
    let divided = Gpu {
        mig: vec![instance(1), instance(2)],
        ..h100(0)
    };
    let host = Host::new(&machine(vec![divided, h100(1)]));
    let reading = host.read().unwrap();
    let uuids: Vec<_> = reading
        .cards
        .iter()
        .map(|card| card.uuid.as_str())
        .collect();
    assert_eq!(uuids, ["MIG-1", "MIG-2", "GPU-1"]);
    let card = &reading.cards[1];
    assert_eq!(card.place.parent.as_deref(), Some("GPU-0"));
    assert_eq!(card.place.profile.as_deref(), Some("1g.10gb"));
    assert_eq!(card.memory.map(|memory| memory.total), Some(9856 * MIB));
    assert_eq!(
        card.processes,
        Some(vec![Process {
            pid: 62,
            used: Some(200 * MIB),
            ..Process::default()
        }])
    );
}

#[test]
fn each_way_to_have_no_cards_has_its_own_words() {
    let empty = tempfile::tempdir().unwrap();
    let broken = empty.path().join("libnvidia-ml.so.1");
    std::fs::write(&broken, "not a library").unwrap();
    let mut devices = NvmlDevices::new(
        vec![empty.path().into()],
        Duration::from_secs(1),
        Arc::default(),
    );
    let error = devices.watch(&mut |_| ControlFlow::Break(())).unwrap_err();
    assert_eq!(error.reason(), "LibraryMissing");
    let text = error.to_string();
    assert!(text.contains(&broken.display().to_string()), "{text}");

    let host = Host::new(&Machine {
        error: 9,
        ..machine(vec![h100(0)])
    });
    assert_eq!(host.read(), Err(DeviceError::DriverNotLoaded));
    host.shows(&Machine {
        error: 18,
        ..machine(vec![h100(0)])
    });
    assert_eq!(host.read().unwrap_err().reason(), "DriverFailed");
    std::fs::write(host.file(), "gpus: 7").unwrap();
    assert_eq!(host.read().unwrap_err().reason(), "DriverFailed");
    host.shows(&machine(Vec::new()));
    assert_eq!(host.read().unwrap().cards, []);
}

#[test]
fn a_driver_that_goes_and_comes_is_followed() {
    let host = Host::new(&machine(vec![h100(0)]));
    let mut devices = host.devices();
    let mut looks = 0;
    let gone = devices.watch(&mut |_| {
        looks += 1;
        host.shows(&Machine {
            error: 9,
            ..machine(vec![h100(0)])
        });
        ControlFlow::Continue(())
    });
    assert_eq!((gone, looks), (Err(DeviceError::DriverNotLoaded), 1));
    host.shows(&machine(vec![h100(0), h100(1)]));
    let mut cards = 0;
    let ended = devices.watch(&mut |reading| {
        cards = reading.cards.len();
        ControlFlow::Break(())
    });
    assert_eq!((ended, cards), (Ok(()), 2));
}

#[test]
fn a_lost_card_is_told_and_the_others_are_read() {
    let host = Host::new(&machine(vec![h100(0), h100(1)]));
    let mut devices = host.devices();
    let mut failures = Vec::new();
    devices
        .watch(&mut |reading| {
            failures.push(
                reading
                    .cards
                    .iter()
                    .map(|card| card.failure.clone())
                    .collect::<Vec<_>>(),
            );
            host.shows(&machine(vec![
                Gpu {
                    error: 15,
                    ..h100(0)
                },
                h100(1),
            ]));
            if failures.len() == 2 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    assert_eq!(failures[0], [None, None]);
    assert!(
        failures[1][0]
            .as_ref()
            .unwrap()
            .contains("fallen off the bus")
            || failures[1][0]
                .as_ref()
                .unwrap()
                .contains("fell off the bus")
    );
    assert_eq!(failures[1][1], None);
}

#[test]
fn errors_arrive_once_and_only_new_ones() {
    let event = |gpu: &str, xid: Option<u64>| Event {
        gpu: gpu.to_owned(),
        xid,
    };
    let mut shown = machine(vec![h100(0), h100(1)]);
    shown.events = vec![event("GPU-0", Some(31))];
    let host = Host::new(&shown);
    let mut seen = Vec::new();
    let each = &mut |reading: gpustow_agent::devices::Reading| {
        seen.push(reading.faults);
        let mut more = shown.clone();
        more.events
            .extend([event("GPU-1", Some(79)), event("GPU-0", None)]);
        host.shows(&more);
        if seen.len() == 3 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    host.devices().watch(each).unwrap();
    let fault = |uuid: &str, kind| Fault {
        uuid: uuid.to_owned(),
        kind,
    };
    seen[1].sort_by(|one, other| one.uuid.cmp(&other.uuid));
    let new = [
        fault("GPU-0", FaultKind::Ecc),
        fault("GPU-1", FaultKind::Xid(79)),
    ];
    assert_eq!(seen, [&[][..], &new, &[]]);
}

#[test]
fn what_hardly_changes_is_read_again_after_the_refresh() {
    let host = Host::new(&machine(vec![h100(0)]));
    let names = |refresh: Duration| {
        host.shows(&machine(vec![h100(0)]));
        let mut devices =
            NvmlDevices::new(vec![host.dir.path().to_owned()], refresh, Arc::default());
        let mut names = Vec::new();
        let each = &mut |reading: gpustow_agent::devices::Reading| {
            names.push(reading.cards[0].model.clone());
            let name = "renamed".to_owned();
            host.shows(&machine(vec![Gpu { name, ..h100(0) }]));
            if names.len() == 3 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        devices.watch(each).unwrap();
        names.pop().unwrap()
    };
    assert_eq!(names(Duration::ZERO), "renamed");
    assert_eq!(names(Duration::from_secs(3600)), "NVIDIA H100 80GB HBM3");
}

#[test]
fn the_file_may_be_json() {
    let host = Host::new(&machine(Vec::new()));
    let text = r#"{"driver": "1", "gpus": [{"uuid": "GPU-7", "totalMiB": 100, "usedMiB": 5}]}"#;
    std::fs::write(host.file(), text).unwrap();
    let card = &host.read().unwrap().cards[0];
    let used = card.memory.map(|memory| memory.used);
    assert_eq!((&*card.uuid, used), ("GPU-7", Some(5 * MIB)));
}
