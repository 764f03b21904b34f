//! State that we did not write, or that an agent made up.

use gpustow_api::{Assignment, PodFacts};
use gpustow_ledger::{Ledger, Problem};
use gpustow_pack::Mib;

use crate::build::{asking, at, bound, card, exclusive, ledger, pod, report};

fn problems(ledger: &Ledger) -> Vec<Problem> {
    let nodes = ledger.snapshot(at(0)).into_iter();
    nodes.flat_map(|node| node.problems).collect()
}

/// The pod with an assignment of these charges, and these cards for its containers.
fn assigned(pod: PodFacts, charges: &[(&str, u64)], containers: &[(&str, &[&str])]) -> PodFacts {
    let charges = charges.iter().map(|&(uuid, mib)| (uuid.into(), Mib(mib)));
    let sees = |uuids: &[&str]| uuids.iter().map(|&uuid| uuid.into()).collect();
    let containers = containers
        .iter()
        .map(|&(name, uuids)| (name.into(), sees(uuids)));
    let assignment = Assignment {
        charges: charges.collect(),
        containers: containers.collect(),
        exclusive: None,
        compute: 0,
        instance: None,
    };
    PodFacts {
        node: Some("a".into()),
        assignment: Some(Ok(assignment.into())),
        ..pod
    }
}

#[test]
fn an_assignment_that_the_request_cannot_have_led_to_is_told() {
    let told = |pod: PodFacts| {
        let mut ledger = ledger(&[("a", &[100, 100])]);
        ledger.apply_pod(pod);
        let forged = Problem::Forged {
            pod: "default/p".into(),
        };
        problems(&ledger).contains(&forged)
    };
    let (c0, both): (&str, &[&str]) = ("c0", &["a-0", "a-1"]);
    let two = || asking("p", &[(1, 30), (1, 20)]);
    for honest in [
        bound("p", "a", "a-0", 60),
        assigned(
            asking("p", &[(2, 30)]),
            &[("a-0", 30), ("a-1", 30)],
            &[(c0, both)],
        ),
        assigned(two(), &[("a-0", 50)], &[(c0, &["a-0"]), ("c1", &["a-0"])]),
        assigned(
            two(),
            &[("a-0", 30), ("a-1", 20)],
            &[(c0, &["a-0"]), ("c1", &["a-1"])],
        ),
        assigned(exclusive(pod("p", 1)), &[("a-0", 100)], &[(c0, &["a-0"])]),
    ] {
        assert!(!told(honest.clone()), "{:?}", honest.assignment);
    }
    for forged in [
        assigned(pod("p", 80), &[("a-0", 1)], &[(c0, &["a-0"])]),
        assigned(pod("p", 10), &[("a-0", 80)], &[(c0, &["a-0"])]),
        assigned(pod("p", 10), &[("a-0", 10)], &[(c0, both)]),
        assigned(pod("p", 10), &[("a-0", 10), ("a-1", 10)], &[(c0, &["a-0"])]),
        assigned(pod("p", 10), &[("a-0", 10)], &[("other", &["a-0"])]),
        assigned(
            pod("p", 10),
            &[("a-0", 10)],
            &[(c0, &["a-0"]), ("c1", &["a-1"])],
        ),
        assigned(two(), &[("a-0", 29)], &[(c0, &["a-0"]), ("c1", &["a-0"])]),
        assigned(exclusive(pod("p", 90)), &[("a-0", 1)], &[(c0, &["a-0"])]),
    ] {
        assert!(told(forged.clone()), "{:?}", forged.assignment);
    }
}

#[test]
fn a_card_that_two_nodes_report_is_told_on_both() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    assert_eq!(problems(&ledger), []);
    ledger.apply_gpunode("b", report(&[card("b-0", 100), card("a-0", 100)]), at(0));
    let twice = |other: &str| Problem::Twice {
        uuid: "a-0".into(),
        other: other.into(),
    };
    assert_eq!(problems(&ledger), [twice("b"), twice("a")]);
}
