//! MIG instances that the agent makes for pods and ends after them, through the library's C functions.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fake_nvml::{Gpu, Machine, Mig, Profile};
use gpustow_agent::devices::{Card, Wanted};
use gpustow_agent::instances::{Makes, Places, orders};
use gpustow_agent::notices::{Notice, Notices};
use gpustow_agent::pods::NodePods;
use gpustow_api::instances::{Instance, OnDemand};
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::support::{Host, UID, at, h100, machine, pod, pods, process, state};

/// Calls that make an instance, in their order, and calls that end one.
const MAKE: [&str; 2] = [
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
];
const END: [&str; 2] = ["nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"];

/// An H100 in MIG mode with these instances.
fn divided(mig: Vec<Mig>) -> Machine {
    let profile = |name: &str, mib, slices, compute_slices, starts: &[u8]| Profile {
        name: name.to_owned(),
        total_mib: mib,
        slices,
        compute_slices,
        starts: starts.into(),
    };
    machine(vec![Gpu {
        mig,
        profiles: vec![
            profile("1g.10gb", 9_856, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("1g.10gb+me", 9_856, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("2g.20gb", 19_968, 2, 2, &[0, 2, 4]),
            profile("3g.40gb", 40_192, 4, 3, &[0, 4]),
            profile("7g.80gb", 80_896, 8, 7, &[0]),
        ],
        ..h100(0)
    }])
}

fn by_others(start: u8) -> Mig {
    Mig {
        uuid: format!("MIG-{start}"),
        profile: "1g.10gb".to_owned(),
        start,
        total_mib: 9_856,
        ..Mig::default()
    }
}

/// A pod with an instance of two slices.
fn isolated(start: u8) -> Pod {
    let mut pod = pod(&[("GPU-0", 20_224)]);
    let notes = pod.metadata.annotations.get_or_insert_default();
    let text = notes.get(names::ASSIGNMENT).cloned().unwrap();
    let mut assignment: Value = serde_json::from_str(&text).unwrap();
    assignment["mig"] = json!({ "profile": "2g.20gb", "start": start, "slices": 2 });
    notes.insert(names::ASSIGNMENT.to_owned(), assignment.to_string());
    pod
}

/// A node whose agent makes instances.
struct Node {
    host: Host,
    places: Places,
}

impl Node {
    fn new(machine: &Machine) -> Self {
        let mut host = Host::new(machine);
        let at = |name: &str| host.dir.path().join(name);
        let places = Places {
            records: at("run/instances"),
            cdi: vec![at("cdi"), at("etc")],
            proc: host.proc(),
        };
        let base = json!({ "kind": "nvidia.com/gpu", "containerEdits": { "env": ["A=1"] } });
        for folder in &places.cdi {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(places.cdi[1].join("nvidia.yaml"), base.to_string()).unwrap();
        let caps = host.proc().join("driver/nvidia-caps");
        std::fs::create_dir_all(&caps).unwrap();
        let line = |gi| {
            format!(
                "gpu0/gi{gi}/access {}\ngpu0/gi{gi}/ci0/access {}\n",
                10 * gi,
                10 * gi + 1
            )
        };
        let minors: String = (0..9).map(line).collect();
        std::fs::write(caps.join("mig-minors"), minors).unwrap();
        std::fs::write(host.proc().join("devices"), "236 nvidia-caps\n").unwrap();
        host.wanted = Self::wanted(&host, &places);
        Self { host, places }
    }

    fn wanted(host: &Host, places: &Places) -> Arc<Wanted> {
        let makes = Makes {
            places: places.clone(),
            orders: None,
        };
        Arc::new(Wanted::below(host.cgroups()).making(Some(makes)))
    }

    /// A look of an agent that has just started, and knows these pods.
    fn looks(&mut self, pods: Option<&NodePods>) -> Vec<Card> {
        self.host.wanted = Self::wanted(&self.host, &self.places);
        if let Some(pods) = pods {
            self.host.wanted.order(orders(pods));
        }
        self.host.read().unwrap().cards
    }

    fn machine(&self) -> Machine {
        Machine::read(&self.host.file()).unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut Machine)) {
        let mut machine = self.machine();
        change(&mut machine);
        self.host.shows(&machine);
    }

    fn specification(&self) -> PathBuf {
        self.places.cdi[0].join(format!("gpustow-mig-{UID}.json"))
    }

    /// Profile and first slice of each instance. Instances without a compute instance are in brackets.
    fn there(&self) -> Vec<String> {
        let all = &self.machine().gpus[0].mig;
        let text = |it: &Mig| match it.bare {
            true => format!("({}@{})", it.profile, it.start),
            false => format!("{}@{}", it.profile, it.start),
        };
        all.iter().map(text).collect()
    }

    fn notes(&self) -> usize {
        let list = std::fs::read_dir(&self.places.records);
        list.map_or(0, Iterator::count)
    }
}

fn on_demand(cards: &[Card]) -> &OnDemand {
    cards[0].on_demand.as_ref().unwrap()
}

fn none() -> NodePods {
    pods(&[])
}

#[test]
fn a_card_in_mig_mode_is_shown_with_its_profiles_and_the_instances_of_others() {
    let mut node = Node::new(&divided(vec![by_others(3)]));
    let cards = node.looks(None);
    let uuids: Vec<&str> = cards.iter().map(|card| card.uuid.as_str()).collect();
    assert_eq!(uuids, ["GPU-0", "MIG-3"]);
    let told = on_demand(&cards);
    let names: Vec<&str> = told.profiles.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]);
    let two = &told.profiles[1];
    assert_eq!(
        (two.memory_mib, two.slices, two.compute_slices),
        (19_968, 2, 2)
    );
    assert_eq!(two.starts, [0, 2, 4]);
    let other = Instance {
        profile: "1g.10gb".to_owned(),
        start: 3,
        slices: 1,
        pod: None,
    };
    assert_eq!(told.instances, [other]);
    let mut state = state();
    node.host.sample(&mut state, &none(), at(1));
    let gpu = &state.status(&none()).gpus[0];
    // Seven slices of an eighth of the largest profile.
    assert_eq!(gpu.capacity(gpustow_pack::Mib(100)).0, 7 * 10_112);
    assert!(gpu.healthy, "{:?}", gpu.reason);
    // Taken slices, and slices that are free again, do not wait for a heartbeat.
    let before = state.status(&none());
    let bound = pods(&[isolated(4)]);
    node.looks(Some(&bound));
    node.host.sample(&mut state, &bound, at(2));
    assert!(state.is_news(&before, &state.status(&bound), &bound));
}

#[test]
fn an_instance_is_made_for_a_pod_and_ended_after_it() {
    let mut node = Node::new(&divided(vec![by_others(0)]));
    let bound = pods(&[isolated(4)]);
    let cards = node.looks(Some(&bound));
    assert_eq!(node.there(), ["1g.10gb@0", "2g.20gb@4"]);
    // The pod's instance is no card of its own: no other pod may get it.
    let uuids: Vec<&str> = cards.iter().map(|card| card.uuid.as_str()).collect();
    assert_eq!(uuids, ["GPU-0", "MIG-0"]);
    let own = on_demand(&cards).instances.last().unwrap();
    assert_eq!(own.pod.as_deref(), Some(UID));
    let text = std::fs::read_to_string(node.specification()).unwrap();
    let cdi: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&cdi["kind"], &cdi["devices"][0]["name"]),
        (&json!(names::CDI_MIG), &json!(UID))
    );
    assert_eq!(cdi["containerEdits"], json!({ "env": ["A=1"] }));
    let nodes = &cdi["devices"][0]["containerEdits"]["deviceNodes"];
    let number = node.machine().gpus[0].mig[1].id.unwrap();
    let cap = json!({ "path": format!("/dev/nvidia-caps/nvidia-cap{}", 10 * number), "type": "c", "major": 236, "minor": 10 * number });
    assert_eq!(
        (&nodes[0]["path"], &nodes[1]),
        (&json!("/dev/nvidia0"), &cap)
    );

    // Its processes are the pod's use of the card.
    node.change(|machine| machine.gpus[0].mig[1].processes = vec![process(41, 100)]);
    let cards = node.looks(Some(&bound));
    assert_eq!(cards[0].processes.as_ref().map(Vec::len), Some(1));
    // Nothing is ended before the pods are known, while its containers may run, or while a program runs there.
    node.looks(None);
    assert_eq!(node.there().len(), 2);
    let cgroup = node.host.cgroups().join(format!("kubepods/pod{UID}"));
    std::fs::create_dir_all(&cgroup).unwrap();
    node.looks(Some(&none()));
    assert!(node.specification().exists());
    std::fs::remove_dir(&cgroup).unwrap();
    node.looks(Some(&none()));
    assert!(!node.specification().exists());
    assert_eq!((node.there().len(), node.notes()), (2, 1));
    node.change(|machine| machine.gpus[0].mig[1].processes.clear());
    node.looks(Some(&none()));
    assert_eq!(
        (node.there(), node.notes()),
        (vec!["1g.10gb@0".to_owned()], 0)
    );
}

#[test]
fn an_agent_that_ends_at_any_step_leaves_nothing_behind_and_shows_no_pod_the_instance_of_another() {
    for step in MAKE.iter().chain(&END) {
        for ends in [false, true] {
            let mut node = Node::new(&divided(vec![by_others(0)]));
            let bound = pods(&[isolated(4)]);
            node.change(|machine| machine.unsupported = vec![(*step).to_owned()]);
            node.looks(Some(&bound));
            let complete = node.there() == ["1g.10gb@0", "2g.20gb@4"];
            assert_eq!(node.specification().exists(), complete, "{step}");
            node.looks(Some(&none()));
            assert!(!node.specification().exists(), "{step}");
            node.change(|machine| machine.unsupported.clear());
            let (pods, left) = match ends {
                true => (none(), vec!["1g.10gb@0"]),
                false => (pods(&[isolated(4)]), vec!["1g.10gb@0", "2g.20gb@4"]),
            };
            node.looks(Some(&pods));
            assert_eq!(node.there(), left, "{step} {ends}");
            assert_eq!(node.notes(), usize::from(!ends), "{step} {ends}");
            assert_eq!(node.specification().exists(), !ends, "{step} {ends}");
        }
    }
}

#[test]
fn what_was_made_just_before_the_agent_ended_is_found_by_its_note() {
    for bare in [true, false] {
        let mut node = Node::new(&divided(vec![by_others(0)]));
        let bound = pods(&[isolated(4)]);
        node.looks(Some(&bound));
        // Made, and not noted yet.
        let note = node.places.records.join(format!("{UID}.json"));
        let text = std::fs::read_to_string(&note).unwrap();
        let mut record: Value = serde_json::from_str(&text).unwrap();
        record.as_object_mut().unwrap().remove("id").unwrap();
        std::fs::write(&note, record.to_string()).unwrap();
        node.change(|machine| machine.gpus[0].mig[1].bare = bare);
        std::fs::remove_file(node.specification()).unwrap();
        node.looks(Some(&bound));
        assert_eq!(node.there(), ["1g.10gb@0", "2g.20gb@4"]);
        assert!(node.specification().exists());
        std::fs::write(&note, record.to_string()).unwrap();
        node.looks(Some(&none()));
        assert_eq!(
            (node.there(), node.notes()),
            (vec!["1g.10gb@0".to_owned()], 0)
        );
    }
}

#[test]
fn instances_of_others_are_never_changed() {
    // Where the pod's should go, and of the same profile.
    let two = Mig {
        profile: "2g.20gb".to_owned(),
        ..by_others(4)
    };
    let mut node = Node::new(&divided(vec![by_others(0), two]));
    let bound = pods(&[isolated(4)]);
    let before = node.machine();
    for pods in [&bound, &none()] {
        node.looks(Some(pods));
        assert_eq!(node.machine(), before);
        assert!(!node.specification().exists());
    }
    // After a reboot there are no notes, and an instance in the pod's place is another's.
    let mut node = Node::new(&divided(vec![]));
    node.looks(Some(&bound));
    std::fs::remove_dir_all(&node.places.records).unwrap();
    let before = node.machine();
    node.looks(Some(&none()));
    assert_eq!(node.machine(), before);
}

#[test]
fn pod_is_told_why_its_instance_is_not_there_once_it_has_waited_for_ten_seconds() {
    let mut node = Node::new(&divided(vec![]));
    let bound = pods(&[isolated(4)]);
    node.looks(Some(&bound));
    let (mut state, mut notices) = (state(), Notices::new(Duration::from_secs(6000)));
    let mut told = |node: &Node, second| {
        node.host.sample(&mut state, &bound, at(second));
        let all = notices.look(&state, &bound, &[], at(second).age);
        let warned = all.into_iter().filter_map(|notice| match notice {
            Notice::Warn { reason, note, .. } => Some((reason, note)),
            _ => None,
        });
        let about = |(reason, note)| (reason == "MigInstanceMissing").then_some(note);
        warned.filter_map(about).collect::<Vec<String>>()
    };
    assert_eq!(told(&node, 0), [""; 0], "it is there");
    let base = node.places.cdi[1].join("nvidia.yaml");
    let nvidias = std::fs::read(&base).unwrap();
    let failing = |node: &Node, call: &[&str]| {
        let call = call.iter().map(|it| (*it).to_owned()).collect();
        node.change(|machine| {
            machine.unsupported = call;
            machine.gpus[0].mig.clear();
        });
    };
    type Break<'a> = &'a dyn Fn(&Node);
    let ways: [(Break<'_>, &str); 4] = [
        (&|node| failing(node, &MAKE[..1]), MAKE[0]),
        (&|_| std::fs::remove_file(&base).unwrap(), "nvidia-ctk"),
        (
            &|node| node.change(|machine| machine.gpus[0].mig = vec![by_others(5)]),
            "another instance has its slices",
        ),
        (
            &|node| {
                node.change(|machine| {
                    machine.gpus[0].profiles.clear();
                    machine.gpus[0].mig.clear();
                });
            },
            "not in MIG mode",
        ),
    ];
    for (number, (breaks, why)) in (1..).zip(ways) {
        failing(&node, &[]);
        std::fs::write(&base, &nvidias).unwrap();
        let since = 1000 * number;
        assert_eq!(told(&node, since), [""; 0], "{why}");
        breaks(&node);
        assert_eq!(told(&node, since + 1), [""; 0], "{why}");
        let notes = told(&node, since + 11);
        assert!(notes.len() == 1 && notes[0].contains(why), "{notes:?}");
        assert!(notes[0].contains("2g.20gb on GPU GPU-0"), "{notes:?}");
        assert_eq!(told(&node, since + 20), [""; 0], "{why}, once");
    }
}

#[test]
fn without_nvidias_specification_no_container_starts_and_the_instance_stays_noted() {
    let mut node = Node::new(&divided(vec![]));
    std::fs::remove_file(node.places.cdi[1].join("nvidia.yaml")).unwrap();
    let bound = pods(&[isolated(0)]);
    node.looks(Some(&bound));
    assert!(!node.specification().exists());
    assert_eq!(node.notes(), 1);
    node.looks(Some(&none()));
    assert_eq!((node.there().len(), node.notes()), (0, 0));
}

#[test]
fn an_agent_that_makes_none_shows_a_divided_card_as_before() {
    let host = Host::new(&divided(vec![by_others(3)]));
    let cards = host.read().unwrap().cards;
    assert_eq!(cards.len(), 1);
    assert_eq!(
        (cards[0].uuid.as_str(), &cards[0].on_demand),
        ("MIG-3", &None)
    );
}
