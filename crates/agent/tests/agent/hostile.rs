//! Files with values that no driver reports: the agent reports the possible ones, and goes on.

use fake_nvml::{Event, Gpu, Kind, Machine, Mig, Near, Process};
use gpustow_agent::processes::Who;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::support::{Host, at, pod, pods, state, status_of, take};

/// The largest amount of MiB that the API server accepts.
const MAX_MIB: u64 = 16_777_216;

/// Twice: a report comes of it that the API server takes.
fn is_survived(host: &Host) {
    let pods = pods(&[pod(&[("GPU-0", 100)])]);
    let mut state = state();
    for second in 0..2 {
        take(&mut state, host.read(), &pods, at(second), |_| Who::Host);
        let status = status_of(&state, &pods);
        for gpu in &status.gpus {
            let mib = [gpu.total_mib, gpu.reserved_mib, gpu.unmanaged_mib];
            assert!(mib.iter().all(|mib| *mib <= MAX_MIB), "{gpu:?}");
            assert!(gpu.reserved_mib <= gpu.total_mib, "{gpu:?}");
        }
        let _ = state.present();
    }
}

fn uuid() -> impl Strategy<Value = String> {
    "GPU-[0-2]|GPU-[0-2]|MIG-[0-9]|\\PC{0,9}|[a-z]{90,100}"
}

fn amount() -> impl Strategy<Value = u64> {
    prop_oneof![0..100_000u64, any::<u64>()]
}

fn processes() -> impl Strategy<Value = Vec<Process>> {
    let kinds = prop_oneof![
        Just(Kind::Compute),
        Just(Kind::Graphics),
        Just(Kind::Both),
        Just(Kind::Mps)
    ];
    let process = (any::<u32>(), option::of(amount()), kinds);
    vec(
        process.prop_map(|(pid, used_mib, kind)| Process {
            pid,
            used_mib,
            kind,
            utilization: None,
        }),
        0..4,
    )
}

fn gpu() -> impl Strategy<Value = Gpu> {
    let mig = (uuid(), "\\PC{0,9}", amount(), amount(), processes());
    let mig = mig.prop_map(|(uuid, profile, total_mib, reserved_mib, processes)| Mig {
        uuid,
        profile,
        total_mib,
        reserved_mib,
        processes,
        ..Mig::default()
    });
    let near = (any::<u32>(), any::<u32>(), option::of(any::<u32>()));
    let near = near.prop_map(|(gpu, level, nvlinks)| Near {
        gpu,
        level,
        nvlinks,
    });
    let place = (
        option::of(any::<u32>()),
        "[0-9a-f:.]{0,40}",
        option::of(any::<u32>()),
        option::of(any::<u32>()),
        any::<u32>(),
        vec(near, 0..3),
    );
    let error = prop_oneof![4 => Just(0), 1 => any::<u32>()];
    let memory = (amount(), amount(), option::of(amount()), processes());
    let rest = (error, option::of(any::<u32>()), vec(mig, 0..3));
    (uuid(), "\\PC{0,200}", place, memory, rest).prop_map(|(uuid, name, place, memory, rest)| {
        let (minor, pci_bus_id, architecture, numa_node, nvlinks, near) = place;
        let (total_mib, reserved_mib, used_mib, processes) = memory;
        let (error, utilization, mig) = rest;
        Gpu {
            uuid,
            name,
            minor,
            pci_bus_id,
            architecture,
            numa_node,
            error,
            total_mib,
            reserved_mib,
            used_mib,
            utilization,
            processes,
            mig,
            near,
            nvlinks,
            ..Gpu::default()
        }
    })
}

fn machine() -> impl Strategy<Value = Machine> {
    let event = (uuid(), option::of(any::<u64>())).prop_map(|(gpu, xid)| Event { gpu, xid });
    let error = prop_oneof![4 => Just(0), 1 => any::<u32>()];
    let parts = ("\\PC{0,90}", error, vec(gpu(), 0..4), vec(event, 0..3));
    parts.prop_map(|(driver, error, gpus, events)| Machine {
        driver,
        error,
        gpus,
        events,
        unsupported: Vec::new(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_machine_breaks_it(machine in machine()) {
        is_survived(&Host::new(&machine));
    }

    #[test]
    fn no_text_breaks_it(
        text in "(gpus: |events: |uuid: |totalMiB: |error: |[\\[\\]{}&*,:-]|\n|  |[0-9]{1,20}|\\PC){0,40}",
    ) {
        let host = Host::new(&Machine::default());
        std::fs::write(host.file(), text)?;
        is_survived(&host);
    }
}
