//! The notices for users, and how often they come.

use std::time::Duration;

use fake_nvml::{Event, Gpu};
use gpustow_agent::claims::Held;
use gpustow_agent::notices::{Notice, Notices};
use gpustow_agent::pods::NodePods;
use gpustow_agent::state::State;
use gpustow_api::gpunode::HeldBy;
use k8s_openapi::api::core::v1::Pod;

use crate::support::{Host, UID, at, cgroup_of, h100, machine, pod, pods, process, state};

struct Scene {
    host: Host,
    state: State,
    notices: Notices,
}

impl Scene {
    fn new() -> Self {
        let host = Host::new(&machine(vec![h100(0), h100(1)]));
        host.process(1, &cgroup_of(UID));
        Self {
            host,
            state: state(),
            notices: Notices::new(Duration::from_secs(60)),
        }
    }

    /// The pod's process uses these MiB of the two cards.
    fn uses(&self, first: u64, second: u64) {
        let card = |index: u32, mib: u64| Gpu {
            processes: (mib > 0).then(|| process(1, mib)).into_iter().collect(),
            ..h100(index)
        };
        self.host
            .shows(&machine(vec![card(0, first), card(1, second)]));
    }

    fn look(&mut self, pods: &NodePods, second: u64) -> Vec<Notice> {
        let condemned = self.host.sample(&mut self.state, pods, at(second));
        self.notices
            .look(&self.state, pods, &condemned, at(second).age)
    }

    fn reasons(&mut self, pods: &NodePods, second: u64) -> Vec<&'static str> {
        let notices = self.look(pods, second);
        let reason = |notice: &Notice| match notice {
            Notice::Confirm { .. } => "Confirm",
            Notice::WarnNode { reason, .. }
            | Notice::Tell { reason, .. }
            | Notice::Warn { reason, .. } => reason,
        };
        notices.iter().map(reason).collect()
    }
}

fn confirmed(mut pod: Pod, devices: &str) -> NodePods {
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(gpustow_api::names::CONFIRMED.to_owned(), devices.to_owned());
    pods(&[pod])
}

#[test]
fn a_pod_is_confirmed_once_and_again_when_it_is_seen_elsewhere() {
    let mut scene = Scene::new();
    let mine = || pod(&[("GPU-0", 100), ("GPU-1", 100)]);
    assert_eq!(scene.look(&pods(&[mine()]), 1), [], "no process yet");
    scene.uses(50, 0);
    let confirm = |devices: &str| Notice::Confirm {
        uid: UID.into(),
        devices: devices.to_owned(),
    };
    assert_eq!(scene.look(&pods(&[mine()]), 2), [confirm("GPU-0")]);
    assert_eq!(scene.look(&confirmed(mine(), "GPU-0"), 3), []);
    scene.uses(50, 50);
    assert_eq!(
        scene.look(&confirmed(mine(), "GPU-0"), 4),
        [confirm("GPU-0,GPU-1")]
    );
    scene.uses(0, 50);
    assert_eq!(
        scene.look(&confirmed(mine(), "GPU-0,GPU-1"), 5),
        [],
        "an idle card stays confirmed"
    );
    // Another agent takes over from the annotation.
    scene.notices = Notices::new(Duration::from_secs(60));
    assert_eq!(scene.look(&confirmed(mine(), "GPU-0,GPU-1"), 6), []);
}

#[test]
fn a_pod_on_a_card_that_is_not_its_own_is_told_once() {
    let mut scene = Scene::new();
    scene.uses(0, 50);
    let mine = pods(&[pod(&[("GPU-0", 100)])]);
    let notices = scene.look(&mine, 1);
    let Notice::Warn { reason, note, .. } = &notices[0] else {
        panic!("{notices:?}")
    };
    assert_eq!(*reason, "WrongGpu");
    assert!(
        note.contains("GPU-1, which is not its own; its own is GPU-0"),
        "{note}"
    );
    assert_eq!(scene.reasons(&mine, 2), ["Confirm"]);
}

#[test]
fn a_pod_that_uses_too_much_is_told_and_not_every_second() {
    let mut scene = Scene::new();
    let mine = confirmed(pod(&[("GPU-0", 100)]), "GPU-0");
    scene.uses(100, 0);
    assert_eq!(scene.look(&mine, 0), []);
    scene.uses(101, 0);
    let told = (1..=1300).filter(|second| !scene.reasons(&mine, *second).is_empty());
    assert_eq!(told.collect::<Vec<_>>(), [1, 601, 1201]);
}

#[test]
fn a_container_without_a_process_is_told_of_once_after_a_minute() {
    let mut scene = Scene::new();
    let mine = pods(&[pod(&[("GPU-0", 100)])]);
    let told: Vec<u64> = (0..200)
        .filter(|second| !scene.look(&mine, *second).is_empty())
        .collect();
    assert_eq!(told, [60]);
}

#[test]
fn a_container_that_had_a_process_may_rest() {
    let mut scene = Scene::new();
    scene.uses(50, 0);
    let mine = pods(&[pod(&[("GPU-0", 100)])]);
    assert_eq!(scene.reasons(&mine, 1), ["Confirm"]);
    scene.uses(0, 0);
    assert_eq!(scene.reasons(&mine, 1000), [""; 0]);
}

#[test]
fn a_pod_without_an_assignment_is_told_what_to_do() {
    let mut scene = Scene::new();
    let mut stray = pod(&[]);
    stray.metadata.annotations = None;
    let stray = pods(&[stray]);
    assert_eq!(scene.reasons(&stray, 1), ["NoGpuAssignment"]);
    assert_eq!(scene.reasons(&stray, 2), [""; 0]);
}

#[test]
fn pods_on_a_card_that_fails_are_told() {
    let scene = Scene::new();
    let mine = confirmed(pod(&[("GPU-0", 100)]), "GPU-0");
    let mut notices = Notices::new(Duration::from_secs(6000));
    let mut state = state();
    let (mut looks, mut told) = (0, Vec::new());
    let gone = |_| gpustow_agent::processes::Who::Gone;
    gpustow_agent::devices::Devices::watch(&mut scene.host.devices(), &mut |reading| {
        let condemned = crate::support::take(&mut state, Ok(reading), &mine, at(looks), gone);
        told.push(notices.look(&state, &mine, &condemned, at(looks).age));
        let mut failing = machine(vec![h100(0), h100(1)]);
        failing.events.push(Event {
            gpu: "GPU-0".to_owned(),
            xid: Some(79),
        });
        scene.host.shows(&failing);
        looks += 1;
        if looks == 3 {
            std::ops::ControlFlow::Break(())
        } else {
            std::ops::ControlFlow::Continue(())
        }
    })
    .unwrap();
    let [
        Notice::WarnNode {
            reason: "GpuFailed",
            note: of_node,
        },
        Notice::Warn {
            reason: "GpuFailed",
            note: of_pod,
            ..
        },
    ] = &told[1][..]
    else {
        panic!("{told:?}")
    };
    for note in [of_node, of_pod] {
        let words = "GPU 0 GPU-0 gets no new pods: XID 79 (GPU has fallen off the bus).";
        assert!(note.starts_with(words), "{note}");
    }
    assert_eq!((told[0].len(), told[2].len()), (0, 0));
}

#[test]
fn a_pod_whose_card_was_given_away_once_more_is_told() {
    let scene = Scene::new();
    let mine = confirmed(pod(&[("GPU-0", 100)]), "GPU-0");
    let by = HeldBy {
        pod: "team/whole".to_owned(),
        through: "claim c of gpu.nvidia.com".to_owned(),
    };
    let held = Held {
        whole: Some(by),
        claims: Vec::new(),
    };
    let held = ["GPU-0", "GPU-1"]
        .map(|uuid| (uuid.to_owned(), held.clone()))
        .into();
    let mut state = state();
    let gone = |_| gpustow_agent::processes::Who::Gone;
    state.read(scene.host.read().as_ref(), &mine, &held, gone, at(0));
    let mut notices = Notices::new(Duration::from_secs(6000));
    let told = notices.look(&state, &mine, &[], at(0).age);
    let [
        Notice::Warn {
            reason: "GpuSharedUnknowingly",
            note,
            ..
        },
    ] = &told[..]
    else {
        panic!("{told:?}");
    };
    assert!(
        note.contains("GPU-0") && note.contains("team/whole"),
        "{note}"
    );
    assert_eq!(notices.look(&state, &mine, &[], at(1).age), []);
}

#[test]
fn a_confirmation_is_no_longer_than_the_api_server_takes() {
    let cards = (0..120).map(|index| Gpu {
        uuid: format!("MIG-{index:060}"),
        processes: vec![process(1, 10)],
        ..h100(index)
    });
    let host = Host::new(&machine(cards.collect()));
    host.process(1, &cgroup_of(UID));
    let mut state = state();
    let mine = pods(&[pod(&[("GPU-0", 100)])]);
    host.sample(&mut state, &mine, at(0));
    let told = Notices::new(Duration::from_secs(60)).look(&state, &mine, &[], at(0).age);
    let confirmed = told.iter().find_map(|notice| match notice {
        Notice::Confirm { devices, .. } => Some(devices),
        Notice::WarnNode { .. } | Notice::Tell { .. } | Notice::Warn { .. } => None,
    });
    let confirmed = confirmed.unwrap();
    assert!(
        confirmed.len() <= 4096 && confirmed.len() > 4000,
        "{}",
        confirmed.len()
    );
    assert!(confirmed.split(',').all(|uuid| uuid.len() == 64));
}

#[test]
fn a_node_whose_driver_is_not_loaded_is_told_once_for_all_its_cards() {
    let mut scene = Scene::new();
    let none = pods(&[]);
    assert_eq!(scene.look(&none, 1), []);
    scene.host.shows(&fake_nvml::Machine {
        error: 9,
        ..machine(Vec::new())
    });
    let notices = scene.look(&none, 2);
    let [Notice::WarnNode { reason, note }] = notices.as_slice() else {
        panic!("{notices:?}")
    };
    assert_eq!(*reason, "GpuNodeFailed");
    for part in [
        "driver is not loaded",
        "load the NVIDIA driver",
        "by itself",
    ] {
        assert!(note.contains(part), "{note}");
    }
    assert!(!note.contains("replace"), "{note}");
    assert_eq!(scene.look(&none, 3), []);
    // It comes and goes.
    scene.host.shows(&machine(vec![h100(0), h100(1)]));
    assert_eq!(scene.look(&none, 4), []);
    scene.host.shows(&fake_nvml::Machine {
        error: 9,
        ..machine(Vec::new())
    });
    assert_eq!(scene.look(&none, 5), []);
    assert_eq!(scene.reasons(&none, 603), ["GpuNodeFailed"]);
}

#[test]
fn pod_whose_gpu_is_replaced_divided_or_made_whole_is_told_once_to_be_deleted() {
    let replaced = Gpu {
        uuid: "GPU-new".to_owned(),
        ..h100(0)
    };
    for others in [vec![replaced, h100(1)], vec![h100(1)]] {
        let mut scene = Scene::new();
        let mine = pods(&[pod(&[("GPU-0", 100)])]);
        assert!(!scene.reasons(&mine, 0).contains(&"GpuGone"));
        scene.host.shows(&machine(others));
        let told = scene.look(&mine, 10);
        let gone = told.iter().find_map(|notice| match notice {
            Notice::Warn {
                reason: "GpuGone",
                note,
                ..
            } => Some(note.as_str()),
            _ => None,
        });
        let note = gone.unwrap_or_default();
        assert!(
            note.starts_with("GPU GPU-0 of this pod is no longer there")
                && note.contains("Delete the pod"),
            "{told:?}"
        );
        assert!(!scene.reasons(&mine, 20).contains(&"GpuGone"));
        // A pod on a GPU that stays gets no notice.
        let others = pods(&[pod(&[("GPU-1", 100)])]);
        assert!(!scene.reasons(&others, 30).contains(&"GpuGone"));
    }
}
