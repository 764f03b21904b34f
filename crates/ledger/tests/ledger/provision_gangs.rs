//! Placeholders for gangs: as many nodes as all pods of one need together, or none.

use gpustow_api::PodFacts;
use gpustow_ledger::Ledger;

use crate::build::{at, bound, card, pod, report};
use crate::pod_groups::gang;
use crate::provision::{
    Kind, LARGE, SMALL, WIDE, comes, create, created, deleted, full, ledger, of_type,
};
use crate::provision_fewest::{draw, minimum};

/// They wait with a scheduling gate.
fn queued(sizes: &[u64]) -> Vec<PodFacts> {
    let pods = sizes.iter().enumerate().map(|(nth, mib)| PodFacts {
        queued: true,
        ..pod(&format!("g{nth}"), *mib)
    });
    pods.collect()
}

/// The pods of each placeholder that is to be created.
fn wanted(ledger: &mut Ledger, second: u64) -> Vec<Vec<String>> {
    let all = created(ledger, at(second));
    let pods = all.iter().map(|it| it.pods.iter().map(ToString::to_string));
    pods.map(Iterator::collect).collect()
}

#[test]
fn a_gang_of_which_some_fit_needs_a_node_for_the_others() {
    let mut ledger = ledger(5);
    comes(&mut ledger, "n", WIDE);
    gang(&mut ledger, "g", 6, queued(&[40; 6]));
    assert_eq!(wanted(&mut ledger, 1), [["g4", "g5"]]);
}

#[test]
fn a_gang_needs_no_more_than_must_be_placed_and_nothing_while_pods_are_missing() {
    let mut ledger = ledger(5);
    comes(&mut ledger, "n", WIDE);
    gang(&mut ledger, "g", 7, queued(&[40; 6]));
    assert_eq!(wanted(&mut ledger, 1), Vec::<Vec<String>>::new());
    gang(&mut ledger, "g", 5, queued(&[40; 6]));
    assert_eq!(wanted(&mut ledger, 2), [["g4"]]);
    gang(&mut ledger, "g", 4, queued(&[40; 6]));
    assert_eq!(wanted(&mut ledger, 3), Vec::<Vec<String>>::new());
}

#[test]
fn a_gang_has_as_many_nodes_as_it_needs_and_no_more_at_a_time_than_allowed() {
    for (max, at_first) in [(5, 3), (2, 2)] {
        let mut ledger = ledger(max);
        full(&mut ledger, "n", WIDE);
        gang(&mut ledger, "g", 12, queued(&[40; 12]));
        let first = created(&mut ledger, at(1));
        let sizes: Vec<_> = first.iter().map(|it| it.pods.len()).collect();
        assert_eq!(sizes, vec![4; at_first]);
        first.iter().for_each(|it| drop(create(&mut ledger, it)));
        assert_eq!(wanted(&mut ledger, 2), Vec::<Vec<String>>::new());
        // A node comes: one placeholder has served its purpose, whichever brought the node.
        comes(&mut ledger, "new-0", WIDE);
        let gone = deleted(&mut ledger, at(3));
        assert_eq!(gone, ["placeholder-g0"]);
        ledger.delete_pod("placeholder-g0");
        assert_eq!(wanted(&mut ledger, 4).len(), 3 - at_first);
        assert_eq!(deleted(&mut ledger, at(4)), Vec::<String>::new());
    }
}

#[test]
fn placeholders_of_a_gang_go_when_it_fits_is_gone_or_is_bound() {
    type End = fn(&mut Ledger);
    let ends: [(&str, End); 4] = [
        ("it fits", |ledger| {
            (0..4).for_each(|nth| ledger.delete_pod(&format!("n-holder-{nth}")));
            comes(ledger, "new", WIDE);
        }),
        ("it is gone", |ledger| {
            (0..8).for_each(|nth| ledger.delete_pod(&format!("g{nth}")));
        }),
        ("too few are left", |ledger| ledger.delete_pod("g5")),
        ("it is bound", |ledger| {
            for (nth, pod) in queued(&[40; 8]).into_iter().enumerate() {
                let node = if nth < 4 { "x" } else { "y" };
                let card = format!("{node}-{}", nth % 4);
                ledger.apply_pod(PodFacts {
                    group: pod.group,
                    ..bound(&pod.uid, node, &card, 40)
                });
            }
        }),
    ];
    for (why, end) in ends {
        let mut ledger = ledger(5);
        full(&mut ledger, "n", WIDE);
        gang(&mut ledger, "g", 8, queued(&[40; 8]));
        let first = created(&mut ledger, at(1));
        assert_eq!(first.len(), 2);
        first.iter().for_each(|it| drop(create(&mut ledger, it)));
        end(&mut ledger);
        assert_eq!(deleted(&mut ledger, at(2)).len(), 2, "{why}");
    }
}

#[test]
fn a_gang_counts_nodes_that_arrive_or_that_may_report_again() {
    let mut ledger = ledger(5);
    full(&mut ledger, "n", WIDE);
    comes(&mut ledger, "lapsed", WIDE);
    gang(&mut ledger, "g", 8, queued(&[40; 8]));
    let cards = [0, 1, 2, 3].map(|nth| card(&format!("n-{nth}"), 40));
    ledger.apply_gpunode("n", report(&cards), at(190));
    // This node has not reported for three minutes.
    assert_eq!(wanted(&mut ledger, 200), [["g4", "g5", "g6", "g7"]]);
    ledger.apply_node(of_type("new", "wide"));
    assert_eq!(wanted(&mut ledger, 201), Vec::<Vec<String>>::new());
}

/// kube-scheduler's other filters, and the rest of its gang, keep a pod waiting that would fit.
#[test]
fn an_autoscaler_that_sees_what_a_gang_lacks_adds_the_node_by_itself() {
    let mut ledger = ledger(5);
    full(&mut ledger, "full", LARGE);
    comes(&mut ledger, "n", LARGE);
    let pods = queued(&[80, 80]).into_iter().map(|pod| PodFacts {
        queued: false,
        ..pod
    });
    let pods = gang(&mut ledger, "g", 2, pods.collect());
    let answer = ledger.filter(&crate::build::ask(&pods[0]), &["full", "n"], at(0));
    assert!(answer.nodes.is_empty());
    assert_eq!(wanted(&mut ledger, 1), Vec::<Vec<String>>::new());
}

/// The fewest nodes that hold `count` of these pods, together with the free memory.
fn fewest(sizes: &[u64], count: usize, free: &[u64], kinds: &[Kind]) -> usize {
    let sets = 0_u32..1 << sizes.len();
    let sets = sets.filter(|set| set.count_ones() as usize == count);
    let nodes = sets.map(|set| {
        let of = sizes.iter().enumerate();
        let of = of
            .filter(|(nth, _)| set >> nth & 1 == 1)
            .map(|(_, mib)| (1, *mib));
        minimum(&of.collect::<Vec<_>>(), kinds, &[free.to_vec()])
    });
    nodes.min().unwrap_or_default()
}

/// If pods differ, the pods that fit now are not always the pods that leave the fewest nodes.
#[test]
fn nodes_asked_for_are_the_fewest_that_hold_the_gang() {
    let kinds = [SMALL, LARGE, WIDE];
    let sizes = [8, 12, 16, 20, 24, 30, 36, 40, 50, 60, 80];
    let mut state = 11;
    let mut size = move |below: u64| usize::try_from(draw(&mut state, below)).unwrap();
    let (mut asked_for, mut fewest_in_all, mut none) = (0, 0, 0);
    for case in 0..600 {
        let mut ledger = ledger(10);
        for kind in kinds {
            full(&mut ledger, kind.0, kind);
        }
        let free = sizes[size(11)];
        ledger.apply_node(of_type("free", "piece"));
        ledger.apply_gpunode("free", report(&[card("free-0", free)]), at(0));
        let count = 1 + size(6);
        let are_equal = case % 2 == 0;
        let of: Vec<u64> = match are_equal {
            true => vec![sizes[size(11)]; count],
            false => (0..count).map(|_| sizes[size(11)]).collect(),
        };
        let min = 1 + size(count as u64);
        gang(&mut ledger, "g", min, queued(&of));
        let found = created(&mut ledger, at(1)).len();
        let least = fewest(&of, min, &[free], &kinds);
        let is_right = found == least || !are_equal && found > least;
        assert!(
            is_right,
            "case {case}: {min} of {of:?} beside {free}: {found}, {least} are the fewest"
        );
        asked_for += found;
        fewest_in_all += least;
        none += usize::from(least == 0);
    }
    assert!(
        none > 50 && asked_for * 100 <= fewest_in_all * 102,
        "{asked_for} nodes asked for, {fewest_in_all} are the fewest"
    );
}
