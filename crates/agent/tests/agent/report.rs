//! Whose memory a report names, and when it is worth a write.

use fake_nvml::{Gpu, Process};
use gpustow_agent::claims::Held;
use gpustow_agent::devices::Reading;
use gpustow_agent::pods::{NodePod, NodePods};
use gpustow_agent::processes::Who;
use gpustow_agent::state::State;
use gpustow_api::gpunode::{ClaimUse, ContainerUse, GpuNodeStatus, HeldBy, PodUse};
use gpustow_api::names;
use gpustow_pack::Mib;
use serde_json::json;

use crate::support::{
    Host, UID, at, cgroup_of, h100, machine, pod, pods, present, process, settings, state,
    status_of, take,
};

const OTHER: &str = "ffffffff-4d5e-6f70-8192-a3b4c5d6e7f8";

#[test]
fn each_mib_has_one_user() {
    let gpu = Gpu {
        processes: vec![
            process(1, 1000),
            process(2, 200),
            process(3, 30),
            process(4, 4),
            process(5, 5),
        ],
        used_mib: Some(2000),
        ..h100(0)
    };
    let host = Host::new(&machine(vec![gpu]));
    host.process(1, &cgroup_of(UID));
    host.process(2, &cgroup_of(UID));
    host.process(3, &cgroup_of(OTHER));
    host.process(4, "0::/system.slice/x.service");
    let (mut state, pods) = (state(), pods(&[pod(&[("GPU-0", 4096)])]));
    host.sample(&mut state, &pods, at(0));
    let gpu = &status_of(&state, &pods).gpus[0];
    assert_eq!(
        gpu.pods,
        [PodUse {
            uid: UID.to_owned(),
            used_mib: 1200,
            high_mib: Some(1200),
            idle_since: None,
            settled_at: None,
            mps: false,
            containers: vec![ContainerUse {
                name: "main".to_owned(),
                peak_mib: 1200,
            }],
        }]
    );
    assert_eq!((gpu.other_pods_mib, gpu.host_mib), (30, 4));
    assert_eq!(
        gpu.unmanaged_mib, 34,
        "what no pod owns may be a process that is starting"
    );
    host.sample(&mut state, &pods, at(1));
    assert_eq!(
        status_of(&state, &pods).gpus[0].unmanaged_mib,
        34 + (2000 - 1234)
    );
    let seen = state.cards().next().unwrap();
    assert_eq!(seen.used.pod(UID), 1200 << 20);
    assert!(seen.used.has(UID, Some("main")) && !seen.used.has(UID, Some("other")));
}

#[test]
fn a_static_pods_processes_are_its_own() {
    let hash = "0f1a2b3c4d5e6f708192a3b4c5d6e7f8";
    let mut mirror = pod(&[("GPU-0", 4096)]);
    mirror.metadata.uid = Some(OTHER.to_owned());
    let annotations = mirror.metadata.annotations.get_or_insert_default();
    annotations.insert("kubernetes.io/config.hash".to_owned(), hash.to_owned());
    let host = Host::new(&machine(vec![Gpu {
        processes: vec![process(1, 10)],
        ..h100(0)
    }]));
    host.process(1, &cgroup_of(hash));
    let (mut state, pods) = (state(), pods(&[mirror]));
    host.sample(&mut state, &pods, at(0));
    assert_eq!(status_of(&state, &pods).gpus[0].pods[0].uid, OTHER);
}

#[test]
fn what_the_driver_does_not_measure_is_first_the_pods_own() {
    let unmeasured = Process {
        used_mib: None,
        ..process(1, 0)
    };
    let gpu = Gpu {
        processes: vec![unmeasured],
        used_mib: Some(5000),
        ..h100(0)
    };
    let host = Host::new(&machine(vec![gpu]));
    host.process(1, &cgroup_of(UID));
    let (mut state, pods) = (state(), pods(&[pod(&[("GPU-0", 4096)])]));
    host.sample(&mut state, &pods, at(0));
    host.sample(&mut state, &pods, at(1));
    let status = status_of(&state, &pods);
    assert_eq!(status.gpus[0].unmanaged_mib, 5000 - 4096);
    assert_eq!(status.conditions[1].reason, "NotMeasured");
}

#[test]
fn processes_that_cannot_be_seen_are_strangers_and_told() {
    let host = Host::new(&machine(vec![Gpu {
        processes: vec![process(1, 700)],
        ..h100(0)
    }]));
    let (mut state, none) = (state(), pods(&[]));
    host.sample(&mut state, &none, at(0));
    host.sample(&mut state, &none, at(1));
    let status = status_of(&state, &none);
    assert_eq!(status.gpus[0].unmanaged_mib, 700);
    assert_eq!(status.conditions[1].reason, "HostProcessesHidden");
}

#[test]
fn an_instance_of_unified_memory_takes_pods_once_its_size_is_set() {
    let mut shown = machine(vec![h100(0)]);
    shown.unsupported = vec!["nvmlDeviceGetMemoryInfo_v2".to_owned()];
    let host = Host::new(&shown);
    let (mut state, none) = (state(), pods(&[]));
    host.sample(&mut state, &none, at(0));
    let gpu = status_of(&state, &none).gpus.remove(0);
    assert_eq!((gpu.total_mib, gpu.healthy), (0, false));
    assert!(gpu.reason.unwrap().contains("--unified-memory-mib"));
    let settings = gpustow_agent::state::Settings {
        unified_memory: Some(Mib(100_000)),
        ..settings()
    };
    let mut state = State::new(settings, None, at(0));
    host.sample(&mut state, &none, at(0));
    let gpu = status_of(&state, &none).gpus.remove(0);
    assert_eq!((gpu.total_mib, gpu.healthy), (100_000, true));
}

#[test]
fn a_card_held_through_nvidias_plugin_takes_no_pods_while_held() {
    let host = Host::new(&machine(vec![h100(0)]));
    let (mut state, none) = (state(), pods(&[]));
    let by = HeldBy {
        pod: "team/whole".to_owned(),
        through: names::NVIDIA_GPU.to_owned(),
    };
    let whole = Some(by.clone());
    let claims = Vec::new();
    let held = [("GPU-0".to_owned(), Held { whole, claims })].into();
    state.read(host.read().as_ref(), &none, &held, |_| Who::Gone, at(0));
    let gpu = status_of(&state, &none).gpus.remove(0);
    assert_eq!(gpu.held_by, Some(by));
    assert_eq!(
        gpu.reason,
        Some(format!(
            "held by pod team/whole through {}",
            names::NVIDIA_GPU
        ))
    );
    assert_eq!(present(&state), 81_079);
    host.sample(&mut state, &none, at(1));
    let gpu = status_of(&state, &none).gpus.remove(0);
    assert_eq!((gpu.healthy, gpu.held_by), (true, None));
}

#[test]
fn a_claim_is_charged_for_what_it_holds_or_uses_and_the_rest_takes_pods() {
    let other = json!({ "metadata": { "namespace": "team", "name": "dra", "uid": OTHER }, "spec": { "containers": [] } });
    let other = serde_json::from_value(other).unwrap();
    let other = NodePods::new(NodePod::from_pod(&other, names::GPU_MEM));
    let claim = ClaimUse {
        claim: "team/c".to_owned(),
        pod: "team/dra".to_owned(),
        held_mib: 8192,
    };
    let held = Held {
        whole: None,
        claims: vec![claim.clone()],
    };
    let held = [("GPU-0".to_owned(), held)].into();
    // In use by the claim's pod, and by the host.
    for (used, host, unmanaged) in [
        (0, 0, 8192),
        (1000, 0, 8192),
        (9000, 0, 9000),
        (1000, 500, 8692),
    ] {
        let processes = [process(1, used), process(2, host)];
        let machine = machine(vec![Gpu {
            processes: processes
                .into_iter()
                .filter(|it| it.used_mib > Some(0))
                .collect(),
            used_mib: Some(used + host),
            ..h100(0)
        }]);
        let node = Host::new(&machine);
        node.process(1, &cgroup_of(OTHER));
        let mut state = state();
        let who = |pid| match pid {
            1 => Who::Pod(gpustow_agent::cgroup::Owner {
                pod: OTHER.into(),
                container: None,
            }),
            _ => Who::Host,
        };
        state.read(node.read().as_ref(), &other, &held, who, at(0));
        let gpu = status_of(&state, &other).gpus.remove(0);
        assert!(gpu.healthy && gpu.held_by.is_none());
        assert_eq!(
            (gpu.unmanaged_mib, &gpu.claims),
            (unmanaged, &vec![claim.clone()])
        );
    }
}

/// Force-deleted: the API server did not wait for its end.
#[test]
fn a_pod_that_is_gone_and_still_runs_is_a_stranger_at_the_next_look() {
    let host = Host::new(&machine(vec![Gpu {
        processes: vec![process(1, 900)],
        ..h100(0)
    }]));
    host.process(1, &cgroup_of(UID));
    let (mut state, holder, none) = (state(), pods(&[pod(&[("GPU-0", 1000)])]), pods(&[]));
    host.sample(&mut state, &holder, at(0));
    let before = status_of(&state, &holder);
    assert_eq!(before.gpus[0].unmanaged_mib, 0);
    host.sample(&mut state, &none, at(1));
    let after = status_of(&state, &none);
    assert_eq!(
        (after.gpus[0].unmanaged_mib, after.gpus[0].pods.len()),
        (900, 0)
    );
    assert!(state.is_news(&before, &after, &none));
}

#[test]
fn news_is_what_a_scheduler_must_know() {
    let holder = pods(&[pod(&[("GPU-0", 1000)])]);
    let with = |state: &mut State, own: u64, foreign: u64| -> GpuNodeStatus {
        let processes = vec![process(1, own), process(2, foreign)];
        let host = Host::new(&machine(vec![Gpu {
            processes,
            ..h100(0)
        }]));
        host.process(1, &cgroup_of(UID));
        host.process(2, "0::/init.scope");
        host.sample(state, &holder, at(0));
        status_of(state, &holder)
    };
    let mut state = state();
    let base = with(&mut state, 500, 100);
    for (own, foreign, news, why) in [
        (500, 100, false, "nothing"),
        (900, 100, false, "a pod within its request"),
        (500, 355, false, "a little"),
        (500, 356, true, "a stranger"),
        (1256, 100, true, "a pod beyond its request"),
    ] {
        let now = with(&mut state, own, foreign);
        assert_eq!(state.is_news(&base, &now, &holder), news, "{why}");
        assert_eq!(state.is_news(&now, &base, &holder), news, "{why}, and back");
    }
    let over = with(&mut state, 1001, 100);
    assert!(
        state.is_news(&base, &over, &holder),
        "the condition changes"
    );
    assert_eq!(over.conditions[2].reason, "OverRequest");
    assert_eq!(over.conditions[2].message, "team/p");
}

#[test]
fn all_use_of_a_gpu_is_news_if_one_of_its_pods_sleeps() {
    for (sleep, news) in [("?", false), ("true", true), ("false", true)] {
        let mut sleeper = pod(&[("GPU-0", 1000)]);
        let notes = sleeper.metadata.annotations.get_or_insert_default();
        notes.insert(names::ASLEEP.to_owned(), sleep.to_owned());
        let holder = pods(&[sleeper]);
        let mut state = state();
        let mut with = |own: u64| -> GpuNodeStatus {
            let host = Host::new(&machine(vec![Gpu {
                processes: vec![process(1, own)],
                ..h100(0)
            }]));
            host.process(1, &cgroup_of(UID));
            host.sample(&mut state, &holder, at(0));
            status_of(&state, &holder)
        };
        let (base, now) = (with(100), with(900));
        assert_eq!(state.is_news(&base, &now, &holder), news, "{sleep}");
    }
}

#[test]
fn nothing_that_a_driver_says_is_refused_by_the_api_server() {
    let long = "x".repeat(5000);
    let mut gpus = vec![
        Gpu {
            name: long.clone(),
            total_mib: 1 << 43,
            reserved_mib: 1 << 43,
            used_mib: Some(1 << 43),
            utilization: Some(4_000_000),
            ..h100(0)
        },
        h100(0),
        Gpu {
            uuid: "a,b".to_owned(),
            ..h100(1)
        },
        Gpu {
            uuid: String::new(),
            ..h100(1)
        },
        Gpu {
            uuid: "ü".repeat(20),
            ..h100(1)
        },
    ];
    gpus[0].processes = vec![process(1, 1 << 42)];
    let host = Host::new(&machine(gpus));
    let (mut state, none) = (state(), pods(&[]));
    for second in 0..3 {
        host.sample(&mut state, &none, at(second));
    }
    let status = status_of(&state, &none);
    assert_eq!(status.gpus.len(), 1, "no UUID twice, none that is none");
    let gpu = &status.gpus[0];
    let mib = [gpu.total_mib, gpu.reserved_mib, gpu.unmanaged_mib];
    assert!(mib.iter().all(|mib| *mib <= 16_777_216), "{mib:?}");
    assert!(gpu.reserved_mib <= gpu.total_mib && gpu.model.len() <= 128);
    assert!(gpu.utilization.is_none_or(|percent| percent <= 100));
}

#[test]
fn a_capture_of_real_hardware_has_the_capacity_that_it_should() {
    // Totals and reserves as real drivers reported them.
    let captured = [(15_360, 448), (46_068, 609), (81_559, 480), (284_208, 947)];
    let gpus = captured
        .iter()
        .zip(0..)
        .map(|(&(total_mib, reserved_mib), index)| Gpu {
            total_mib,
            reserved_mib,
            ..h100(index)
        });
    let host = Host::new(&machine(gpus.collect()));
    let settings = gpustow_agent::state::Settings {
        headroom: Mib(512),
        ..settings()
    };
    let (mut state, none) = (State::new(settings, None, at(0)), pods(&[]));
    host.sample(&mut state, &none, at(0));
    let bounds: Vec<u64> = captured
        .iter()
        .map(|(total, reserved)| total - reserved - 512)
        .collect();
    let status = status_of(&state, &none);
    assert_eq!(present(&state), bounds.iter().sum::<u64>());
    assert_eq!(status.summary.capacity_mib, bounds.iter().sum::<u64>());
    assert_eq!(status.headroom_mib, 512);
}

#[test]
fn a_report_is_plain_json_without_what_is_unknown() {
    let (mut state, none) = (state(), pods(&[]));
    let reading = Reading {
        cards: vec![gpustow_agent::devices::Card {
            uuid: "GPU-0".to_owned(),
            ..Default::default()
        }],
        ..Reading::default()
    };
    take(&mut state, Ok(reading), &none, at(0), |_| Who::Gone);
    let gpu = json!(status_of(&state, &none).gpus[0]);
    assert_eq!(gpu["place"], json!({}));
    assert_eq!(gpu.get("utilization"), None);
}
