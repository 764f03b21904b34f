//! Manners of the real library that `fake-nvml` has too, seen through the functions that agents and
//! other programs call.

use fake_nvml::{Event, Gpu};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::error::NvmlError;

use crate::support::{Host, h100, machine, process};

fn open(host: &Host) -> Nvml {
    let library = host.dir.path().join("libnvidia-ml.so.1");
    Nvml::builder()
        .lib_path(library.as_os_str())
        .init()
        .unwrap()
}

#[test]
fn a_wait_for_events_ends_when_there_is_one() {
    let host = Host::new(&machine(vec![h100(0)]));
    let nvml = open(&host);
    let set = nvml.create_event_set().unwrap();
    let device = nvml.device_by_index(0).unwrap();
    let set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set);
    let set = set.map_err(|error| error.error).unwrap();
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut later = machine(vec![h100(0)]);
            later.events.push(Event {
                gpu: "GPU-0".to_owned(),
                xid: Some(79),
            });
            host.shows(&later);
        });
        let event = set.wait(60_000).unwrap();
        assert_eq!(event.event_type, EventTypes::CRITICAL_XID_ERROR);
    });
}

#[test]
fn more_processes_than_the_caller_has_room_for_are_counted() {
    let processes: Vec<_> = (1..=40).map(|pid| process(pid, 10)).collect();
    let host = Host::new(&machine(vec![Gpu {
        processes,
        ..h100(0)
    }]));
    let nvml = open(&host);
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.running_compute_processes_count().unwrap(), 40);
    assert_eq!(device.running_compute_processes().unwrap().len(), 40);
}

#[test]
fn a_card_that_is_lost_answers_nothing_and_the_others_do() {
    let host = Host::new(&machine(vec![h100(0), h100(1)]));
    let nvml = open(&host);
    let (lost, other) = (
        nvml.device_by_index(0).unwrap(),
        nvml.device_by_index(1).unwrap(),
    );
    host.shows(&machine(vec![
        Gpu {
            error: 15,
            ..h100(0)
        },
        h100(1),
    ]));
    assert!(matches!(lost.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(lost.name(), Err(NvmlError::GpuLost)));
    assert!(other.memory_info().is_ok());
}
