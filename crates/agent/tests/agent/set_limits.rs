//! Limits that the agent sets itself, and limits of running pods.

use std::time::Duration;

use fake_nvml::{Gpu, Limits};
use gpustow_agent::limits::Means;
use gpustow_agent::notices::{Notice, Notices};

use crate::limits::{MIB, Node, newer, with_limit};
use crate::support::{at, h100, pods, process};

/// Its agent sets limits, its toolkit does not.
pub(crate) const SETTING: Means = Means {
    toolkit: false,
    agent: true,
    cgroup2: true,
};

/// The limits that the driver holds for the first card, by cgroup, the pod's own first.
fn held(node: &Node) -> Vec<u64> {
    let mut all = Limits::beside(&node.host.file()).all().unwrap();
    all.retain(|limit| limit.gpu == "GPU-0");
    all.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
    let unkept = all.iter().all(|limit| limit.soft == 0);
    assert!(unkept, "nothing is kept from others: {all:?}");
    all.iter().map(|limit| limit.hard / MIB).collect()
}

/// The notes that pods get, in some looks, about limits that have changed.
fn changes(notices: &mut Notices, node: &mut Node, second: u64) -> Vec<String> {
    let mut told = Vec::new();
    for _ in 0..3 {
        node.host.wanted.set(node.state.limits().asks());
        node.host.sample(&mut node.state, &node.pods, at(second));
        let all = notices.look(&node.state, &node.pods, &[], Duration::from_secs(second));
        told.extend(all.into_iter().filter_map(|notice| match notice {
            Notice::Tell {
                reason: "GpuMemoryLimitChanged",
                note,
                ..
            } => Some(note),
            _ => None,
        }));
    }
    told
}

#[test]
fn an_agent_that_sets_limits_sets_the_pods_before_its_containers_and_has_them_follow_the_annotation()
 {
    let mut node = Node::new(SETTING);
    let mut notices = Notices::new(Duration::from_secs(60));
    let slice = node.container();
    let slice = slice.parent().unwrap();
    std::fs::remove_dir_all(slice).unwrap();
    node.look();
    std::fs::create_dir_all(slice).unwrap();
    node.look();
    assert_eq!(held(&node), [8192], "the pod's, before it has a container");
    node.container();
    // After a look without result the next but one looks for the cgroup again.
    node.look();
    let (words, condition) = node.look();
    assert_eq!(held(&node), [8192, 8192]);
    assert_eq!(words, ["Holds", "Holds"]);
    assert_eq!(condition, Some(("True".to_owned(), "Held".to_owned())));
    assert_eq!(
        changes(&mut notices, &mut node, 1),
        Vec::<String>::new(),
        "its first is no change"
    );

    // Other processes use most of the card: the limit is the free memory.
    let full = Gpu {
        processes: vec![process(9, 65_000)],
        ..h100(0)
    };
    let free = full.total_mib - full.reserved_mib - 65_000;
    node.host.shows(&newer(vec![full, h100(1)]));
    node.pods = pods(&[with_limit("20000")]);
    let expected =
        format!("Container main may use {free} MiB of GPU GPU-0 now, 8192 before, and up to 20000");
    let told = changes(&mut notices, &mut node, 2);
    assert!(
        told.len() == 1 && told[0].starts_with(&expected),
        "{told:?}"
    );
    assert_eq!(held(&node), [free, free]);
    assert_eq!(node.look().0, ["Holds", "Holds"], "it has a limit");
    node.host.shows(&newer(vec![h100(0), h100(1)]));
    let expected = format!("Container main may use 20000 MiB of GPU GPU-0 now, {free} before.");
    assert_eq!(changes(&mut notices, &mut node, 3), [expected]);
    assert_eq!(held(&node), [20_000, 20_000]);
    node.pods = pods(&[with_limit("9000")]);
    assert_eq!(changes(&mut notices, &mut node, 4).len(), 1);
    assert_eq!(held(&node), [9000, 9000]);
}

#[test]
fn limit_that_is_changed_to_max_is_raised_to_the_whole_card_and_one_that_was_max_sets_none() {
    let mut node = Node::new(SETTING);
    let mut notices = Notices::new(Duration::from_secs(60));
    node.container();
    node.pods = pods(&[with_limit("max")]);
    node.look();
    assert_eq!(held(&node), Vec::<u64>::new(), "it has no limit");

    node.pods = pods(&[with_limit("8192")]);
    node.look();
    assert_eq!(held(&node), [8192, 8192]);
    let full = Gpu {
        processes: vec![process(9, 65_000)],
        ..h100(0)
    };
    let usable = full.total_mib - full.reserved_mib;
    node.host.shows(&newer(vec![full, h100(1)]));
    node.pods = pods(&[with_limit("max")]);
    let told = changes(&mut notices, &mut node, 1);
    let free = usable - 65_000;
    let expected = format!(
        "Container main may use {free} MiB of GPU GPU-0 now, 8192 before, and the rest of the GPU as memory there \
         becomes free."
    );
    assert_eq!(told, [expected]);
    assert_eq!(held(&node), [free, free]);
    node.host.shows(&newer(vec![h100(0), h100(1)]));
    let (words, condition) = node.look();
    assert_eq!(held(&node), [usable, usable]);
    assert_eq!(words, ["Holds", "Holds"]);
    assert_eq!(condition, Some(("True".to_owned(), "Held".to_owned())));
}

#[test]
fn a_limit_that_the_driver_does_not_take_is_missing() {
    let mut node = Node::new(SETTING);
    let mut refusing = newer(vec![h100(0), h100(1)]);
    refusing.unsupported = vec!["nvmlDeviceSetMemoryLimits_v1".to_owned()];
    node.host.shows(&refusing);
    node.container();
    let (words, condition) = node.look();
    assert_eq!(words, ["Missing", "Missing"]);
    let expected = ("False".to_owned(), "LimitMissing".to_owned());
    assert_eq!(condition, Some(expected));
    assert_eq!(held(&node), Vec::<u64>::new());
}
