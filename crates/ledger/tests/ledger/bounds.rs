//! The hard bound and the soft one, and the memory that bound pods hold.

use gpustow_api::gpunode::Gpu;
use gpustow_api::{Asks, BrokenAssignment, PodFacts};
use gpustow_ledger::{BindRefusal, Outcome, Problem, Reason};
use gpustow_pack::Refusal;

use crate::build::{
    ask, assumed, at, bound, card, choose, exclusive, free, ledger, node, pod, report, used,
};

const NO_ROOM: Reason = Reason::Fit(Refusal::NoRoom);

fn problems(ledger: &gpustow_ledger::Ledger) -> Vec<Problem> {
    let nodes = ledger.snapshot(at(0)).into_iter();
    nodes.flat_map(|node| node.problems).collect()
}

#[test]
fn strangers_refuse_at_filter_and_never_at_bind() {
    let mut ledger = ledger(&[("a", &[100])]);
    let first = pod("first", 60);
    choose(&mut ledger, &first, &["a"], at(0));
    let strangers = Gpu {
        unmanaged_mib: 70,
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(&[strangers]), at(1));
    let late = pod("late", 10);
    assert_eq!(
        ledger.filter(&ask(&late), &["a"], at(1)).refused,
        [("a", NO_ROOM)]
    );
    assert!(ledger.begin_bind(&first, "a", at(1)).is_ok());
}

#[test]
fn live_use_beyond_the_request_refuses_at_filter_and_never_at_bind() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("greedy", "a", "a-0", 20));
    let first = pod("first", 60);
    choose(&mut ledger, &first, &["a"], at(0));
    let greedy = Gpu {
        pods: vec![used("greedy", 35)],
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(&[greedy]), at(1));
    assert_eq!(free(&ledger, "a"), [5]);
    let late = pod("late", 10);
    assert_eq!(
        ledger.filter(&ask(&late), &["a"], at(1)).refused,
        [("a", NO_ROOM)]
    );
    assert!(ledger.begin_bind(&first, "a", at(1)).is_ok());
}

#[test]
fn use_below_the_request_frees_nothing() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("modest", "a", "a-0", 20));
    let pods = vec![used("modest", 5)];
    ledger.apply_gpunode(
        "a",
        report(&[Gpu {
            pods,
            ..card("a-0", 100)
        }]),
        at(1),
    );
    assert_eq!(free(&ledger, "a"), [80]);
}

#[test]
fn the_hard_bound_is_checked_again_at_bind() {
    let mut ledger = ledger(&[("a", &[100])]);
    let pod = pod("p", 60);
    choose(&mut ledger, &pod, &["a"], at(0));
    ledger.apply_gpunode("a", report(&[card("a-0", 50)]), at(1));
    let refusal = BindRefusal::NoFit {
        node: "a".into(),
        reason: NO_ROOM,
    };
    assert_eq!(ledger.begin_bind(&pod, "a", at(1)), Err(refusal));
    assert_eq!(assumed(&ledger), (0, 0));
}

#[test]
fn headroom_and_what_the_driver_reserves_are_no_capacity() {
    let mut ledger = ledger(&[("a", &[])]);
    let gpu = Gpu {
        reserved_mib: 10,
        ..card("a-0", 100)
    };
    let mut status = report(&[gpu]);
    status.headroom_mib = 5;
    ledger.apply_gpunode("a", status, at(0));
    assert!(choose(&mut ledger, &pod("large", 86), &["a"], at(0)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("exact", 85), &["a"], at(0)), ["a"]);
}

#[test]
fn memory_is_held_until_the_pod_is_released() {
    let mut ledger = ledger(&[("a", &[100])]);
    let running = bound("p", "a", "a-0", 60);
    ledger.apply_pod(running.clone());
    let deleting = PodFacts {
        deleting: true,
        ..running.clone()
    };
    ledger.apply_pod(deleting.clone());
    assert_eq!(free(&ledger, "a"), [40]);
    ledger.apply_pod(PodFacts {
        released: true,
        ..deleting
    });
    assert_eq!(free(&ledger, "a"), [100]);
    ledger.apply_pod(bound("q", "a", "a-0", 60));
    ledger.delete_pod("p");
    assert_eq!(free(&ledger, "a"), [40]);
    ledger.delete_pod("q");
    assert_eq!(free(&ledger, "a"), [100]);
}

#[test]
fn a_pod_recreated_under_its_name_is_another_pod() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("old", "a", "a-0", 60));
    ledger.apply_pod(PodFacts {
        name: "old".into(),
        ..pod("new", 30)
    });
    assert_eq!(choose(&mut ledger, &pod("new", 30), &["a"], at(0)), ["a"]);
    assert_eq!(free(&ledger, "a"), [10]);
    ledger.delete_pod("old");
    assert_eq!(free(&ledger, "a"), [70]);
}

#[test]
fn a_pod_bound_around_us_holds_no_card_and_is_reported() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(PodFacts {
        node: Some("a".into()),
        ..pod("p", 60)
    });
    assert_eq!(free(&ledger, "a"), [100]);
    assert_eq!(
        problems(&ledger),
        [Problem::Unassigned {
            pod: "default/p".into()
        }]
    );
    ledger.apply_pod(PodFacts {
        node: Some("a".into()),
        ..crate::build::asking("idle", &[])
    });
    assert_eq!(problems(&ledger).len(), 1);
}

#[test]
fn an_unreadable_assignment_is_charged_on_every_card_and_reported() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    let newer = BrokenAssignment("version 2, and this gpustow reads version 1".into());
    let broken = PodFacts {
        assignment: Some(Err(newer.clone())),
        node: Some("a".into()),
        ..pod("p", 60)
    };
    ledger.apply_pod(broken.clone());
    assert_eq!(free(&ledger, "a"), [40, 40]);
    let problem = Problem::Broken {
        pod: "default/p".into(),
        error: newer.to_string(),
    };
    assert_eq!(problems(&ledger), [problem]);
    let field = gpustow_api::BadRequest {
        field: "spec".into(),
        problem: "none".into(),
    };
    ledger.apply_pod(PodFacts {
        asks: Asks::Unreadable(field),
        ..broken
    });
    assert_eq!(free(&ledger, "a"), [0, 0]);
}

#[test]
fn a_card_that_goes_shrinks_or_comes_back_takes_its_pods_along() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(bound("p", "a", "a-0", 60));
    ledger.apply_gpunode("a", report(&[card("a-1", 100)]), at(1));
    let gone = Problem::CardGone {
        pod: "default/p".into(),
        uuid: "a-0".into(),
    };
    assert_eq!(
        (free(&ledger, "a"), problems(&ledger)),
        (vec![100], vec![gone])
    );
    ledger.apply_gpunode("a", report(&[card("a-0", 50)]), at(2));
    let over = problems(&ledger);
    assert!(matches!(&over[..], [Problem::Overcommitted { uuid, .. }] if uuid == "a-0"));
    ledger.delete_node("a");
    ledger.delete_gpunode("a");
    ledger.apply_node(node("a"));
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), at(3));
    assert_eq!(free(&ledger, "a"), [40]);
}

#[test]
fn no_pod_joins_an_exclusive_pod_whose_card_grew() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(exclusive(bound("alone", "a", "a-0", 100)));
    ledger.apply_gpunode("a", report(&[card("a-0", 150)]), at(1));
    assert!(choose(&mut ledger, &pod("p", 20), &["a"], at(1)).is_empty());
}

/// A user that may write the pod's annotations may write this one; only the extender's assignment counts.
#[test]
fn what_a_running_pod_says_of_itself_later_takes_no_card() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 10);
    let assignment = ledger.begin_bind(&p, "a", at(0)).expect("it fits");
    ledger.end_bind(&p, Outcome::Bound, at(0));
    let greedy = PodFacts {
        node: Some("a".into()),
        assignment: Some(Ok(assignment)),
        ..exclusive(p)
    };
    ledger.apply_pod(greedy);
    assert_eq!(free(&ledger, "a"), [90]);
    // An assignment of an older version does not state this; then the annotation counts, as it did.
    ledger.apply_pod(exclusive(bound("old", "a", "a-0", 10)));
    assert_eq!(free(&ledger, "a"), [0]);
}
