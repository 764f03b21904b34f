//! Gangs of Kubernetes' own PodGroups: all of a gang gets its room, or no pod is kept from any.

use std::time::Duration;

use gpustow_api::config::Action;
use gpustow_api::{Group, GroupPolicy, PodFacts, PodGroupFacts};
use gpustow_ledger::{Ask, Config, Filtered, Ledger, Outcome};

use crate::build::{assumed, at, bound, card, choose, free, joins, ledger, node, pod, report};

fn group(name: &str) -> Group {
    Group::in_tree("default", name)
}

fn pod_group(name: &str, uid: &str, policy: GroupPolicy) -> PodGroupFacts {
    PodGroupFacts {
        group: group(name),
        uid: uid.into(),
        policy,
        disrupted_singly: false,
        part_of: None,
    }
}

/// A pod that is in this group.
fn in_group(name: &str, pod: PodFacts) -> PodFacts {
    PodFacts {
        group: Some(group(name)),
        ..pod
    }
}

/// Applies a gang with this `min_count`, and its pods.
pub(crate) fn gang(
    ledger: &mut Ledger,
    name: &str,
    min_count: usize,
    pods: Vec<PodFacts>,
) -> Vec<PodFacts> {
    ledger.apply_pod_group(pod_group(name, name, GroupPolicy::Gang(min_count)));
    let pods = pods.into_iter().map(|pod| in_group(name, pod));
    let pods: Vec<PodFacts> = pods.collect();
    pods.iter().for_each(|pod| ledger.apply_pod(pod.clone()));
    pods
}

fn equal(name: &str, count: usize, mib: u64) -> Vec<PodFacts> {
    let pods = (0..count).map(|index| pod(&format!("{name}{index}"), mib));
    pods.collect()
}

fn filter<'a>(
    ledger: &mut Ledger,
    pod: &PodFacts,
    nodes: &[&'a str],
    now: Duration,
) -> Filtered<'a> {
    ledger.filter(&Ask::of(pod), nodes, now)
}

fn bind(ledger: &mut Ledger, pod: &PodFacts, node: &str, now: Duration) {
    let begun = ledger.begin_bind(pod, node, now);
    assert!(begun.is_ok(), "{begun:?}");
    ledger.end_bind(pod, Outcome::Bound, now);
}

#[test]
fn gang_that_does_not_fit_is_refused_at_its_first_pod_and_holds_nothing() {
    let mut ledger = ledger(&[("n", &[15_000, 15_000])]);
    let pods = gang(&mut ledger, "g", 3, equal("g", 3, 10_000));
    for second in 0..3 {
        let answer = filter(&mut ledger, &pods[0], &["n"], at(second));
        let shortfall = answer.shortfall.map(|it| it.to_string());
        assert_eq!(shortfall.as_deref(), Some("group default/g: 2 of 3 fit"));
        assert!(answer.nodes.is_empty());
        assert_eq!(assumed(&ledger), (0, 0));
    }
    assert_eq!(
        choose(&mut ledger, &pod("lone", 10_000), &["n"], at(3)),
        ["n"]
    );
}

/// kube-scheduler goes on with the others of a gang as long as enough of them are left.
#[test]
fn pod_that_is_asked_about_after_its_gang_was_refused_holds_nothing() {
    let mut ledger = ledger(&[("n", &[100])]);
    let pods = [("g0", 40), ("g1", 50), ("g2", 50), ("g3", 301)];
    let pods = pods.map(|(name, mib)| pod(name, mib));
    let pods = gang(&mut ledger, "g", 3, pods.to_vec());
    for pod in &pods {
        assert!(choose(&mut ledger, pod, &["n"], at(0)).is_empty());
        assert_eq!(assumed(&ledger), (0, 0));
    }
    // The next cycle may begin with any of them.
    ledger.apply_gpunode("n", report(&[card("n-0", 200)]), at(1));
    for pod in [&pods[2], &pods[0], &pods[1]] {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(1)), ["n"]);
    }
}

#[test]
fn cycle_of_long_ago_is_over_when_another_pod_comes_first() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    assert_eq!(choose(&mut ledger, &pods[1], &["n"], at(0)), ["n"]);
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(9)), ["n"]);
    }
    assert_eq!(assumed(&ledger).0, 2);
}

#[test]
fn gang_holds_its_room_until_its_binds_and_extra_pods_are_placed_like_others() {
    let mut ledger = ledger(&[("n", &[100, 100]), ("m", &[100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 4, 100));
    for pod in &pods[..3] {
        assert_eq!(choose(&mut ledger, pod, &["m", "n"], at(0)).len(), 1);
    }
    // The fourth does not fit, and three others are enough.
    assert!(choose(&mut ledger, &pods[3], &["m", "n"], at(0)).is_empty());
    assert_eq!(assumed(&ledger).0, 3);
    assert!(choose(&mut ledger, &pod("lone", 100), &["m", "n"], at(1)).is_empty());
    for pod in &pods[..3] {
        let node = ledger.pod(&pod.uid).and_then(|pod| pod.node.clone());
        assert!(node.is_none());
    }
    let nodes = ["m", "n", "n"];
    let at_once = Duration::from_millis(1500);
    let mut left: Vec<&PodFacts> = pods[..3].iter().collect();
    for node in nodes {
        let fits = left
            .iter()
            .position(|pod| ledger.begin_bind(pod, node, at_once).is_ok());
        let pod = left.remove(fits.expect("one of them is assumed there"));
        ledger.end_bind(pod, Outcome::Bound, at_once);
    }
    assert_eq!(assumed(&ledger), (0, 0));
}

#[test]
fn gang_whose_binds_do_not_come_holds_its_room_for_seconds() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(0)), ["n"]);
    }
    assert!(choose(&mut ledger, &pod("lone", 100), &["n"], at(1)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("lone", 100), &["n"], at(4)), ["n"]);
}

#[test]
fn cycle_starts_without_what_the_gang_held_before() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    assert_eq!(choose(&mut ledger, &pods[0], &["n"], at(0)), ["n"]);
    assert_eq!(choose(&mut ledger, &pods[1], &["n"], at(0)), ["n"]);
    // kube-scheduler's own filters refuse the second from now on.
    assert_eq!(choose(&mut ledger, &pods[0], &["n"], at(1)), ["n"]);
    assert_eq!(assumed(&ledger), (1, 0));
    assert_eq!(free(&ledger, "n").iter().sum::<u64>(), 100);
}

#[test]
fn bind_that_begins_keeps_the_gang_together_while_a_pod_joins_it() {
    let mut ledger = ledger(&[("n", &[100, 100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(0)), ["n"]);
    }
    let late = in_group("g", pod("late", 100));
    ledger.apply_pod(late.clone());
    bind(&mut ledger, &pods[0], "n", at(0));
    assert_eq!(choose(&mut ledger, &late, &["n"], at(0)), ["n"]);
    // The pod that joined has not been bound in time.
    assert_eq!(choose(&mut ledger, &pod("lone", 100), &["n"], at(9)), ["n"]);
    assert!(choose(&mut ledger, &pod("next", 100), &["n"], at(9)).is_empty());
    bind(&mut ledger, &pods[1], "n", at(9));
}

#[test]
fn pods_without_gpu_memory_and_bound_ones_count_and_basic_groups_are_no_gangs() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    let mut pods = equal("g", 3, 100);
    pods.push(PodFacts::new("default", "driver", "driver"));
    let pods = gang(&mut ledger, "g", 4, pods);
    let refused = filter(&mut ledger, &pods[0], &["n"], at(0)).shortfall;
    assert_eq!(refused.map(|it| (it.fit, it.of)), Some((3, 4)));
    // Two of the GPU pods and the other one are enough.
    ledger.apply_pod_group(pod_group("g", "g", GroupPolicy::Gang(3)));
    assert_eq!(choose(&mut ledger, &pods[0], &["n"], at(1)), ["n"]);
    assert_eq!(choose(&mut ledger, &pods[1], &["n"], at(1)), ["n"]);
    assert!(choose(&mut ledger, &pods[2], &["n"], at(1)).is_empty());
    pods[..2]
        .iter()
        .for_each(|pod| bind(&mut ledger, pod, "n", at(1)));
    ledger.delete_pod("g1");
    // Two are there, and one more is wanted.
    ledger.apply_pod_group(pod_group("g", "g", GroupPolicy::Gang(3)));
    assert_eq!(choose(&mut ledger, &pods[2], &["n"], at(2)), ["n"]);
    ledger.delete_pod("g2");
    ledger.apply_pod_group(pod_group("b", "b", GroupPolicy::Basic));
    let basic: Vec<_> = equal("b", 2, 100)
        .into_iter()
        .map(|pod| in_group("b", pod))
        .collect();
    basic.iter().for_each(|pod| ledger.apply_pod(pod.clone()));
    assert_eq!(choose(&mut ledger, &basic[0], &["n"], at(3)), ["n"]);
    assert!(choose(&mut ledger, &basic[1], &["n"], at(3)).is_empty());
    assert_eq!(assumed(&ledger).0, 1);
}

#[test]
fn group_that_is_created_again_or_deleted_holds_nothing_of_the_earlier_one() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    let ask_all = |ledger: &mut Ledger, now| {
        for pod in &pods {
            assert_eq!(choose(ledger, pod, &["n"], now), ["n"]);
        }
        assert_eq!(assumed(ledger).0, 2);
    };
    ask_all(&mut ledger, at(0));
    ledger.apply_pod_group(pod_group("g", "another", GroupPolicy::Gang(2)));
    assert_eq!(assumed(&ledger).0, 0);
    ask_all(&mut ledger, at(0));
    ledger.delete_pod_group(&group("g"));
    assert_eq!(assumed(&ledger).0, 0);
    ask_all(&mut ledger, at(0));
    ledger.reset_pod_groups(vec![pod_group("g", "third", GroupPolicy::Gang(2))]);
    ledger.reset_pod_groups(Vec::new());
    assert_eq!(assumed(&ledger).0, 0);
}

#[test]
fn placement_with_some_of_the_nodes_is_not_taken_for_the_cluster() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    // In the first placement one of the two fits, in the second both do.
    assert_eq!(choose(&mut ledger, &pods[0], &["a"], at(0)), ["a"]);
    assert!(choose(&mut ledger, &pods[1], &["a"], at(0)).is_empty());
    assert_eq!(assumed(&ledger), (0, 0));
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["b"], at(0)), ["b"]);
    }
    pods.iter()
        .for_each(|pod| bind(&mut ledger, pod, "b", at(0)));
}

#[test]
fn gated_gang_is_ungated_as_a_whole_once_all_of_it_fits() {
    let mut ledger = Ledger::new(Config {
        queue: true,
        ..Config::default()
    });
    joins(&mut ledger, "n", &[100, 100]);
    ledger.apply_pod(bound("holds", "n", "n-0", 100));
    let queued = |pod: PodFacts| PodFacts {
        queued: true,
        ..pod
    };
    gang(
        &mut ledger,
        "g",
        2,
        equal("g", 2, 100).into_iter().map(queued).collect(),
    );
    for second in 1..20 {
        assert!(ledger.wake(64, at(second)).is_empty());
        assert!(ledger.stalled(at(second)).is_empty());
    }
    ledger.delete_pod("holds");
    let woken = ledger.wake(64, at(20));
    assert_eq!(woken.len(), 2);
    // The room of both is kept from others.
    assert!(choose(&mut ledger, &pod("lone", 100), &["n"], at(20)).is_empty());
}

/// kube-scheduler waits for the others too.
#[test]
fn pods_of_a_gang_stay_gated_and_keep_no_room_until_enough_of_them_exist() {
    // The last pod requests as much as the first two do, or less.
    for mib in [100, 60] {
        let mut ledger = Ledger::new(Config {
            queue: true,
            ..Config::default()
        });
        ledger.apply_node(node("n"));
        let cards = ["n-0", "n-1", "n-2"].map(|name| card(name, 100));
        ledger.apply_gpunode("n", report(&cards), at(0));
        let queued = |pod: PodFacts| PodFacts {
            queued: true,
            ..pod
        };
        let pods = equal("g", 2, 100).into_iter().map(queued).collect();
        gang(&mut ledger, "g", 3, pods);
        for second in 1..40 {
            assert!(ledger.wake(64, at(second)).is_empty(), "{second} s");
            assert!(ledger.stalled(at(second)).is_empty(), "{second} s");
        }
        let wide = pod("wide", 100);
        ledger.apply_pod(wide.clone());
        assert_eq!(choose(&mut ledger, &wide, &["n"], at(40)), ["n"]);
        ledger.delete_pod(&wide.uid);
        gang(&mut ledger, "g", 3, vec![queued(pod("late", mib))]);
        assert_eq!(ledger.wake(64, at(40)).len(), 3);
    }
}

#[test]
fn one_pod_of_a_gang_is_woken_when_all_of_it_fits() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    ledger.apply_pod(bound("holds", "n", "n-0", 100));
    let waits = |pod: PodFacts| PodFacts {
        waiting: true,
        ..pod
    };
    let pods = gang(
        &mut ledger,
        "g",
        2,
        equal("g", 2, 100).into_iter().map(waits).collect(),
    );
    assert!(choose(&mut ledger, &pods[0], &["n"], at(0)).is_empty());
    for second in 1..20 {
        assert!(ledger.wake(64, at(second)).is_empty());
    }
    ledger.delete_pod("holds");
    assert_eq!(ledger.wake(64, at(20)).len(), 1);
}

#[test]
fn pods_of_a_group_are_disrupted_alone_only_if_its_mode_says_so() {
    let mut ledger = Ledger::new(Config {
        action: Action::Evict,
        ..Config::default()
    });
    joins(&mut ledger, "n", &[100]);
    let member = in_group("g", bound("u", "n", "n-0", 100));
    ledger.apply_pod(member.clone());
    let mut is_victim = |facts: Option<PodGroupFacts>| {
        ledger.reset_pod_groups(facts.into_iter().collect());
        let evicted = ledger.evictable("n", 1).len() == 1;
        let reclaimed = ledger.action_on(&member) == Action::Evict;
        assert_eq!(evicted, reclaimed);
        evicted
    };
    let all = pod_group("g", "g", GroupPolicy::Gang(2));
    let single = PodGroupFacts {
        disrupted_singly: true,
        part_of: None,
        ..all.clone()
    };
    let basic = PodGroupFacts {
        policy: GroupPolicy::Basic,
        ..all.clone()
    };
    for (facts, victim) in [
        (Some(all), false),
        (Some(single), true),
        (Some(basic), false),
        (None, false),
    ] {
        assert_eq!(is_victim(facts.clone()), victim, "{facts:?}");
    }
}

#[test]
fn label_of_a_group_is_no_shield() {
    let ledger = |owners_soften| {
        let mut ledger = Ledger::new(Config {
            action: Action::Evict,
            owners_soften,
            ..Config::default()
        });
        joins(&mut ledger, "n", &[100]);
        ledger
    };
    let member = |name: &str| PodFacts {
        group: Some("default/g".into()),
        ..bound(name, "n", "n-0", 50)
    };
    let mut one = ledger(true);
    one.apply_pod(member("u"));
    assert_eq!(one.action_on(&member("u")), Action::Evict);
    assert_eq!(one.evictable("n", 1).len(), 1);
    // Two are a group, and their owner softens by it only if owners may.
    for (may, action) in [(true, Action::Event), (false, Action::Evict)] {
        let mut two = ledger(may);
        two.apply_pod(member("u"));
        two.apply_pod(member("v"));
        assert_eq!(two.action_on(&member("u")), action);
    }
    // Its other pod has ended.
    one.apply_pod(PodFacts {
        released: true,
        ..member("v")
    });
    assert_eq!(one.action_on(&member("u")), Action::Evict);
}

#[test]
fn pods_for_two_kinds_of_node_leave_the_large_gpu_to_the_one_that_needs_it() {
    let sizes = [20_000, 20_000, 70_000];
    for order in [[0, 1, 2], [1, 2, 0], [2, 0, 1]] {
        for (large, fit) in [(80_000, 4), (60_000, 3)] {
            let mut ledger = ledger(&[("large", &[large]), ("small", &[24_000, 24_000])]);
            let pods = sizes.iter().enumerate();
            let pods = pods.map(|(index, mib)| pod(&format!("g{index}"), *mib));
            let driver = PodFacts::new("default", "driver", "driver");
            let pods = gang(&mut ledger, "g", 4, pods.chain([driver]).collect());
            let mut nodes = Vec::new();
            for index in order {
                let answer = filter(&mut ledger, &pods[index], &["large", "small"], at(0));
                match fit {
                    4 => nodes.push((sizes[index], answer.nodes[0])),
                    _ => {
                        let shortfall = answer.shortfall.map(|it| (it.fit, it.of));
                        assert_eq!(shortfall, Some((3, 4)), "{order:?}");
                        assert_eq!(assumed(&ledger), (0, 0));
                    }
                }
            }
            nodes.sort_unstable();
            let wanted = [(20_000, "small"), (20_000, "small"), (70_000, "large")];
            assert_eq!(nodes, wanted[..nodes.len()], "{order:?}");
        }
    }
}

#[test]
fn room_of_a_pod_deleted_before_its_bind_is_free_at_once_for_another_of_its_gang() {
    let mut ledger = ledger(&[("n", &[100, 100])]);
    let pods = gang(&mut ledger, "g", 2, equal("g", 2, 100));
    for pod in &pods {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(0)), ["n"]);
    }
    ledger.delete_pod(&pods[0].uid);
    assert_eq!(assumed(&ledger), (1, 0));
    bind(&mut ledger, &pods[1], "n", at(0));
    let other = in_group("g", pod("other", 100));
    ledger.apply_pod(other.clone());
    assert_eq!(choose(&mut ledger, &other, &["n"], at(0)), ["n"]);
    bind(&mut ledger, &other, "n", at(0));
}

/// kube-scheduler may have reasons of its own to offer the other node to none of the rest.
#[test]
fn pod_of_a_gang_goes_elsewhere_once_its_bind_to_a_node_was_refused() {
    let mut ledger = ledger(&[("n", &[70]), ("m", &[100])]);
    let pods = vec![pod("small", 40), pod("large", 70)];
    let pods = gang(&mut ledger, "g", 1, pods);
    assert_eq!(choose(&mut ledger, &pods[0], &["n", "m"], at(0)), ["m"]);
    assert!(ledger.begin_bind(&pods[0], "m", at(0)).is_ok());
    ledger.end_bind(&pods[0], Outcome::Refused, at(1));
    assert_eq!(choose(&mut ledger, &pods[0], &["n", "m"], at(2)), ["n"]);
    assert!(ledger.begin_bind(&pods[0], "n", at(2)).is_ok());
    ledger.end_bind(&pods[0], Outcome::Refused, at(3));
    // All were tried.
    assert_eq!(choose(&mut ledger, &pods[0], &["n", "m"], at(4)).len(), 1);
}

#[test]
fn pod_whose_room_others_of_its_gang_need_is_told_so() {
    let mut ledger = ledger(&[("n", &[100])]);
    let pods = vec![pod("large", 100), pod("g0", 50), pod("g1", 50)];
    let pods = gang(&mut ledger, "g", 2, pods);
    let answer = filter(&mut ledger, &pods[0], &["n"], at(0));
    let told = answer.shortfall.map(|it| it.to_string());
    let needed = "group default/g: its other pods need the room";
    assert_eq!(told.as_deref(), Some(needed));
    for pod in &pods[1..] {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(0)), ["n"]);
    }
}

#[test]
fn gang_fits_where_kube_scheduler_passes_its_pods_once_they_were_refused() {
    let mut ledger = ledger(&[("closed", &[100, 100]), ("n", &[100])]);
    let pods = vec![pod("large", 70), pod("g0", 40), pod("g1", 40)];
    let pods = gang(&mut ledger, "g", 2, pods);
    assert_eq!(choose(&mut ledger, &pods[0], &["n"], at(0)), ["n"]);
    for pod in &pods[1..] {
        assert!(choose(&mut ledger, pod, &["n"], at(0)).is_empty());
    }
    assert!(choose(&mut ledger, &pods[0], &["n"], at(1)).is_empty());
    for pod in &pods[1..] {
        assert_eq!(choose(&mut ledger, pod, &["n"], at(1)), ["n"]);
    }
}
