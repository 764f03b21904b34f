//! Limits that the driver holds: where it would, and whether it does.
#![allow(unsafe_code, reason = "the calls are those of a C library")]

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fake_nvml::{Gpu, Limits, Machine, Mig};
use gpustow_agent::devices::{Ask, Group, Limit};
use gpustow_agent::limits::Means;
use gpustow_agent::metrics::Metrics;
use gpustow_agent::notices::{Notice, Notices};
use gpustow_agent::pods::NodePods;
use gpustow_agent::state::{Settings, State};
use gpustow_api::names;
use k8s_openapi::api::core::v1::Pod;
use nvml_wrapper::Nvml;
use serde_json::{Value, json};

use crate::set_limits::SETTING;
use crate::support::{
    CONTAINER, Host, UID, at, cgroup_of, h100, machine, pod, pods, process, settings,
};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn newer(gpus: Vec<Gpu>) -> Machine {
    Machine {
        driver: "615.71.09".to_owned(),
        ..machine(gpus)
    }
}

/// A pod whose container the driver is to hold to 8192 MiB of its card.
fn limited_pod() -> Pod {
    with_limit("8192")
}

/// The same after its annotation was changed.
pub(crate) fn with_limit(mib: &str) -> Pod {
    let mut pod = serde_json::to_value(pod(&[("GPU-0", 8192)])).unwrap();
    pod["metadata"]["annotations"][names::ENFORCE] = json!("driver");
    pod["metadata"]["annotations"][names::MEM_LIMIT] = json!(mib);
    pod["metadata"]["resourceVersion"] = json!("1");
    pod["spec"]["nodeName"] = json!("n");
    let literal = |name: &str, value: &str| json!({ "name": name, "value": value });
    pod["spec"]["containers"][0]["env"] = Value::from(vec![
        literal(names::MEMORY_LIMIT, "8192"),
        literal(names::MEMORY_REQUEST, "0"),
    ]);
    serde_json::from_value(pod).unwrap()
}

/// A node whose cgroups are in a folder.
pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) state: State,
    pub(crate) pods: NodePods,
}

impl Node {
    pub(crate) fn new(means: Means) -> Self {
        let settings = Settings {
            means,
            ..settings()
        };
        Self {
            host: Host::new(&newer(vec![h100(0), h100(1)])),
            state: State::new(settings, None, at(0)),
            pods: pods(&[limited_pod()]),
        }
    }

    /// The cgroup of the pod's container.
    pub(crate) fn container(&self) -> PathBuf {
        let path =
            format!("kubepods.slice/kubepods-pod{UID}.slice/cri-containerd-{CONTAINER}.scope");
        let path = self.host.cgroups().join(path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    /// Sets a limit as NVIDIA's hook does.
    fn set(&self, cgroup: &Path, mib: u64) {
        let limit = fake_nvml::Limit {
            gpu: "GPU-0".to_owned(),
            cgroup: cgroup.to_owned(),
            soft: 0,
            hard: mib * MIB,
        };
        Limits::beside(&self.host.file()).set(limit).unwrap();
    }

    /// Looks twice: the first look finds the questions for the driver, the second asks them. Returns the report's words
    /// about limits on the cards, and its condition.
    pub(crate) fn look(&mut self) -> (Vec<String>, Option<(String, String)>) {
        for _ in 0..2 {
            self.host.sample(&mut self.state, &self.pods, at(1));
            self.host.wanted.set(self.state.limits().asks());
        }
        let status = self.state.status(&self.pods);
        let words = status
            .gpus
            .iter()
            .filter_map(|gpu| gpu.memory_limit.clone());
        let condition = status
            .conditions
            .iter()
            .find(|it| it.r#type == "LimitsHold");
        let condition = condition.map(|it| (it.status.clone(), it.reason.clone()));
        (words.collect(), condition)
    }
}

const ABLE: Means = Means {
    toolkit: true,
    agent: false,
    cgroup2: true,
};
#[test]
fn a_card_says_whether_limits_hold_and_if_not_why() {
    let unified = Gpu {
        total_mib: 0,
        ..h100(0)
    };
    let mut no_call = newer(vec![unified]);
    no_call.unsupported = vec!["nvmlDeviceGetMemoryInfo_v2".to_owned()];
    let instance = Mig {
        uuid: "MIG-1".to_owned(),
        profile: "1g.10gb".to_owned(),
        total_mib: 9_856,
        ..Mig::default()
    };
    let divided = Gpu {
        mig: vec![instance],
        ..h100(0)
    };
    let mut refuses = newer(vec![h100(0)]);
    refuses.unsupported = vec!["nvmlDeviceGetMemoryLimits_v1".to_owned()];
    let (no_toolkit, cgroup1) = (
        Means {
            toolkit: false,
            ..ABLE
        },
        Means {
            cgroup2: false,
            ..ABLE
        },
    );
    for (machine, means, word) in [
        (newer(vec![h100(0)]), ABLE, "Holds"),
        (newer(vec![h100(0)]), no_toolkit, "Toolkit"),
        (newer(vec![h100(0)]), SETTING, "Holds"),
        (newer(vec![h100(0)]), cgroup1, "Cgroup"),
        (machine(vec![h100(0)]), ABLE, "Driver"),
        (refuses, ABLE, "Driver"),
        (newer(vec![divided]), ABLE, "Mig"),
        (no_call, ABLE, "UnifiedMemory"),
    ] {
        let host = Host::new(&machine);
        let settings = Settings {
            means,
            ..settings()
        };
        let mut state = State::new(settings, None, at(0));
        host.sample(&mut state, &pods(&[]), at(1));
        let gpu = state.status(&pods(&[])).gpus.remove(0);
        assert_eq!(gpu.memory_limit.as_deref(), Some(word));
        let limit = if word == "Holds" { 81_559 } else { 0 };
        assert_eq!(gpu.limit().0, limit, "{word}");
    }
}

/// The driver's library before 615.
#[test]
fn a_library_without_the_call_limits_nothing() {
    let host = Host::new(&newer(vec![h100(0)]));
    let mut library = std::fs::read(host.shared_object()).unwrap();
    let name = b"MemoryLimits_v1\0";
    let places = library.windows(name.len()).enumerate();
    let places: Vec<usize> = places
        .filter(|(_, is)| is == name)
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty());
    for at in places {
        library[at + name.len() - 2] = b'0';
    }
    std::fs::remove_file(host.shared_object()).unwrap();
    std::fs::write(host.shared_object(), library).unwrap();
    assert!(!host.read().unwrap().cards[0].can_limit);
}

#[test]
fn a_container_without_its_limit_is_told_of_and_its_node_takes_no_other_until_one_holds() {
    let mut node = Node::new(ABLE);
    let both = |word: &str| vec![word.to_owned(); 2];
    let says = |status: &str, reason: &str| Some((status.to_owned(), reason.to_owned()));
    assert_eq!(
        node.look(),
        (both("Holds"), says("Unknown", "NotReadable")),
        "its cgroup is not there yet"
    );
    let cgroup = node.container();
    assert_eq!(
        node.look(),
        (both("Missing"), says("False", "LimitMissing"))
    );
    let mut notices = Notices::new(Duration::from_secs(60));
    let mut told = || {
        let all = notices.look(&node.state, &node.pods, &[], Duration::from_secs(1));
        let warnings = all.into_iter().filter_map(|notice| match notice {
            Notice::Warn {
                reason: "LimitMissing",
                note,
                ..
            } => Some(note),
            _ => None,
        });
        warnings.collect::<Vec<_>>()
    };
    let first = told();
    assert!(
        first.len() == 1 && first[0].starts_with("Container main has no limit on GPU GPU-0"),
        "{first:?}"
    );
    assert_eq!(told(), Vec::<String>::new(), "once");
    let metrics = Metrics::new("n").unwrap();
    metrics.sampled(None, &node.state, &node.pods);
    let families = metrics.gather().unwrap();
    let sum = |name: &str| {
        let family = families.iter().find(|family| family.name() == name);
        let values = family.iter().flat_map(|family| family.get_metric());
        values.map(|it| it.get_gauge().get_value()).sum::<f64>()
    };
    assert_eq!(sum("gpustow_pod_gpu_memory_limit_missing"), 1.0);
    assert_eq!(sum("gpustow_gpu_memory_limit_holds"), 0.0);

    node.set(&cgroup, 9000);
    assert_eq!(
        node.look(),
        (both("Missing"), says("False", "LimitMissing")),
        "another one"
    );
    // It ends; nothing shows that the next would have its limit.
    std::fs::remove_dir_all(&cgroup).unwrap();
    node.pods = pods(&[]);
    assert_eq!(
        node.look(),
        (both("Missing"), says("False", "NotSeenSince"))
    );
    node.pods = pods(&[limited_pod()]);
    let cgroup = node.container();
    node.set(&cgroup, 8192);
    assert_eq!(node.look(), (both("Holds"), says("True", "Held")));
}

/// The use of one card's container in the report, with an equal use in the metrics, and its limit there.
fn used(node: &Node) -> (u64, u64) {
    let status = node.state.status(&node.pods);
    let mib = status.gpus[0].pods[0].used_mib;
    let metrics = Metrics::new("n").unwrap();
    metrics.sampled(None, &node.state, &node.pods);
    let families = metrics.gather().unwrap();
    let of = |name: &str| {
        let family = families.iter().find(|family| family.name() == name);
        family.unwrap().get_metric()[0].get_gauge().get_value() as u64
    };
    assert_eq!(of("gpustow_pod_gpu_memory_used_bytes"), mib * MIB);
    (mib, of("gpustow_pod_gpu_memory_limit_bytes") / MIB)
}

#[test]
fn what_a_whole_container_uses_counts_instead_of_the_processes_that_can_be_seen() {
    let mut node = Node::new(ABLE);
    let hidden = Gpu {
        processes: vec![process(7, 500), process(8, 900)],
        ..h100(0)
    };
    node.host.shows(&newer(vec![hidden]));
    node.host.process(7, &cgroup_of(UID));
    let cgroup = node.container();
    std::fs::write(cgroup.join("cgroup.procs"), "7\n8\n").unwrap();
    node.look();
    assert_eq!(used(&node), (500, 8192), "no source tells of the container");
    let kernels = "drm/0000:10:00.0/vram0 1\nnvidia/0000:11:00.0/vidmem 2\nnvidia/0000:10:00.0/vidmem 1363148800\n";
    std::fs::write(cgroup.join("dmem.current"), kernels).unwrap();
    node.look();
    assert_eq!(used(&node), (1300, 8192), "the kernel does");
    node.set(&cgroup, 8192);
    node.look();
    assert_eq!(used(&node), (1400, 8192), "the driver does");
    let gpu = &node.state.status(&node.pods).gpus[0];
    assert_eq!(gpu.unmanaged_mib, 0, "what no other process uses");
    for broken in [
        "nvidia/0000:10:00.0/vidmem x\n",
        "nvidia/0000:10:00.0/vidmem\n",
        "\n",
    ] {
        std::fs::write(cgroup.join("dmem.current"), broken).unwrap();
        node.look();
        assert_eq!(used(&node), (1400, 8192), "{broken:?}");
    }
}

/// CRI-O with crun runs a container one level below its own cgroup.
#[test]
fn a_limit_on_the_cgroup_below_counts() {
    let mut node = Node::new(ABLE);
    let below = node.container().join("container");
    std::fs::create_dir_all(&below).unwrap();
    node.set(&below, 8192);
    assert_eq!(node.look().0, ["Holds", "Holds"]);
}

#[test]
fn limits_of_the_cards_that_are_there_are_read() {
    let node = Node::new(ABLE);
    let cgroup = node.container();
    node.set(&cgroup, 8192);
    let ask = |uuid: &str| Ask {
        uuid: uuid.to_owned(),
        of: Group::Container(CONTAINER.into()),
        set: None,
    };
    node.host
        .wanted
        .set(vec![ask("GPU-0"), ask("GPU-1"), ask("GPU-9")]);
    let reading = node.host.read().unwrap();
    let limit = |uuid: &str, bytes| Limit {
        uuid: uuid.to_owned(),
        container: CONTAINER.into(),
        bytes,
        used: bytes.map(|_| 0),
    };
    let expected = [limit("GPU-0", Some(8192 * MIB)), limit("GPU-1", None)];
    assert_eq!(reading.limits, expected);
    assert!(reading.cards[0].can_limit);
}

#[repr(C)]
struct Call {
    name_space: *const std::ffi::c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

type Function = unsafe extern "C" fn(*mut c_void, *mut Call) -> u32;

/// The calls of the library without a GPU, with their errors.
struct Library(Nvml);

impl Library {
    fn open(host: &Host) -> Self {
        let path = host.shared_object();
        Self(Nvml::builder().lib_path(path.as_os_str()).init().unwrap())
    }

    fn call(&self, name: &[u8], mig: bool, cgroup: &Path, soft: u64, hard: u64) -> (u32, [u64; 3]) {
        let card = self.0.device_by_index(0).unwrap();
        let card = if mig {
            card.mig_device_by_index(0).unwrap()
        } else {
            card
        };
        let path = CString::new(cgroup.as_os_str().as_bytes()).unwrap();
        let mut call = Call {
            name_space: path.as_ptr(),
            soft,
            hard,
            used: 0,
        };
        let code = unsafe {
            let function = self.0.lib().__library.get::<Function>(name).unwrap();
            function(card.handle().cast(), &mut call)
        };
        (code, [call.soft, call.hard, call.used])
    }

    fn set(&self, cgroup: &Path, soft: u64, hard: u64) -> u32 {
        self.call(b"nvmlDeviceSetMemoryLimits_v1\0", false, cgroup, soft, hard)
            .0
    }

    fn get(&self, cgroup: &Path) -> (u32, [u64; 3]) {
        self.call(b"nvmlDeviceGetMemoryLimits_v1\0", false, cgroup, 0, 0)
    }
}

#[test]
fn the_library_without_a_gpu_answers_as_the_drivers_does() {
    let user = Gpu {
        processes: vec![process(7, 500), process(8, 900)],
        ..h100(0)
    };
    let host = Host::new(&newer(vec![user.clone()]));
    let cgroup = host.dir.path().join("cgroup");
    std::fs::create_dir(&cgroup).unwrap();
    let library = Library::open(&host);
    assert_eq!(library.get(&cgroup).0, 6, "no limit: not found");
    assert_eq!(library.set(&cgroup, 2, 1), 2, "soft above hard");
    assert_eq!(library.set(&cgroup, 0, 81_560 * MIB), 2, "above the card");
    assert_eq!(
        library.set(&host.dir.path().join("none"), 0, MIB),
        17,
        "no such cgroup"
    );
    assert_eq!(
        library.set(Path::new("cgroup"), 0, MIB),
        17,
        "not a full path"
    );
    assert_eq!(library.set(&cgroup, 0, 8192 * MIB), 0);
    std::fs::write(cgroup.join("cgroup.procs"), "7\n").unwrap();
    assert_eq!(library.get(&cgroup), (0, [0, 8192 * MIB, 500 * MIB]));
    let total = || {
        library
            .0
            .device_by_index(0)
            .unwrap()
            .memory_info()
            .unwrap()
            .total
    };
    assert_eq!(total(), 81_559 * MIB);
    std::fs::write(
        cgroup.join("cgroup.procs"),
        format!("7\n{}\n", std::process::id()),
    )
    .unwrap();
    assert_eq!(
        total(),
        8192 * MIB,
        "inside, the limit is all that there is"
    );
    assert_eq!(library.set(&cgroup, 0, u64::MAX), 0, "no limit any more");
    assert_eq!(library.get(&cgroup).1[1], u64::MAX);
    std::fs::remove_dir_all(&cgroup).unwrap();
    assert_eq!(library.get(&cgroup).0, 17, "the limit went with its cgroup");

    let instance = Mig {
        uuid: "MIG-1".to_owned(),
        total_mib: 9_856,
        ..Mig::default()
    };
    host.shows(&newer(vec![Gpu {
        mig: vec![instance],
        ..h100(0)
    }]));
    let name = b"nvmlDeviceGetMemoryLimits_v1\0";
    assert_eq!(
        library.call(name, true, host.dir.path(), 0, 0).0,
        3,
        "not of an instance"
    );
    host.shows(&machine(vec![h100(0)]));
    assert_eq!(library.get(host.dir.path()).0, 13, "no such function");
}
