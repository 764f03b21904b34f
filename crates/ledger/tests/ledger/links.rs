//! From the paths that an agent reports to the cards that a pod gets, and the sentence on why.

use gpustow_api::gpunode::{Gpu, GpuNodeStatus, Near, Place};
use gpustow_ledger::{Ledger, Outcome};
use gpustow_pack::Mib;

use crate::build::{asking, at, bound, card, choose, ledger, report};

/// Four cards of 100 MiB, joined by NVLink crosswise.
fn crossed(node: &str) -> GpuNodeStatus {
    let gpu = |index: u32| {
        let near = (0..4).filter(|other| *other != index).map(|other| Near {
            gpu: other,
            path: if index + other == 3 { "NV4" } else { "SYS" }.to_owned(),
        });
        let place = Place {
            near: near.collect(),
            ..Place::default()
        };
        Gpu {
            index,
            place: Some(Box::new(place)),
            ..card(&format!("{node}-{index}"), 100)
        }
    };
    report(&[0, 1, 2, 3].map(gpu))
}

fn one_node() -> Ledger {
    let mut ledger = ledger(&[("a", &[])]);
    ledger.apply_gpunode("a", crossed("a"), at(0));
    ledger
}

#[test]
fn a_pod_of_two_gpus_gets_a_linked_pair() {
    let mut ledger = one_node();
    ledger.apply_pod(bound("old", "a", "a-0", 100));
    let pod = asking("p", &[(2, 60)]);
    assert_eq!(choose(&mut ledger, &pod, &["a"], at(1)), ["a"]);
    let assignment = ledger.begin_bind(&pod, "a", at(1)).unwrap();
    let charges = ["a-1", "a-2"].map(|uuid| (uuid.into(), Mib(60)));
    assert_eq!(assignment.charges, charges);
    assert_eq!(
        ledger.reserved_because("p"),
        Some(
            "tight (waste the least memory): it wastes 108 MiB (88 in pieces of little use, 20 \
             for want of places for several GPUs); 80 of 200 MiB stay free on its 2 GPUs, joined by NVLink"
        )
    );
    ledger.end_bind(&pod, Outcome::Bound, at(1));
    assert_eq!(ledger.reserved_because("p"), None);
}

#[test]
fn one_gpu_is_taken_from_the_broken_pair() {
    let mut ledger = one_node();
    ledger.apply_pod(bound("old", "a", "a-2", 100));
    for (uid, uuid) in [("p", "a-1"), ("q", "a-0"), ("r", "a-3")] {
        let pod = asking(uid, &[(1, 100)]);
        assert_eq!(choose(&mut ledger, &pod, &["a"], at(1)), ["a"]);
        let assignment = ledger.begin_bind(&pod, "a", at(1)).unwrap();
        assert_eq!(assignment.charges, [(uuid.into(), Mib(100))]);
    }
}

#[test]
fn of_two_equal_nodes_the_linked_one_takes_the_pod_of_two() {
    let mut ledger = ledger(&[("a", &[100, 100, 100, 100]), ("b", &[])]);
    ledger.apply_gpunode("b", crossed("b"), at(0));
    let (pair, single) = (asking("p", &[(2, 60)]), asking("s", &[(1, 60)]));
    assert_eq!(choose(&mut ledger, &single, &["a", "b"], at(1)), ["a"]);
    ledger.delete_pod("s");
    assert_eq!(choose(&mut ledger, &pair, &["a", "b"], at(1)), ["b"]);
}

#[test]
fn the_sentence_is_about_the_cards_that_are_named() {
    let ledger = one_node();
    let pod = asking("p", &[(2, 60)]);
    let said = |cards: [usize; 2]| ledger.speaks_for(&pod, "a", &cards.map(|card| (card, Mib(60))));
    assert!(said([0, 3]).unwrap().ends_with("joined by NVLink"));
    assert!(
        said([0, 1])
            .unwrap()
            .ends_with("joined by the link between NUMA nodes")
    );
    assert_eq!(said([0, 9]), None, "no such card");
}
