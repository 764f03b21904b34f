//! Pods that preempt hold the room they wait for.

use std::ops::RangeInclusive;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_ledger::{Config, Ledger, Outcome, Reason};

use crate::act::Act as _;
use crate::build::{ask, at, bound, card, choose, ledger, node, offer_all, pod, report, used};

fn nominated(uid: &str, mib: u64, priority: i32) -> PodFacts {
    PodFacts {
        nominated: Some("a".into()),
        priority,
        ..pod(uid, mib)
    }
}

fn with_priority(uid: &str, mib: u64, priority: i32) -> PodFacts {
    PodFacts {
        priority,
        ..pod(uid, mib)
    }
}

#[test]
fn a_nominated_pod_holds_its_room_against_its_equals_and_below() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(nominated("first", 80, 5));
    for priority in [0, 5] {
        let other = with_priority("other", 30, priority);
        let refused = ledger.filter(&ask(&other), &["a"], at(0)).refused;
        assert_eq!(refused, [("a", Reason::Nominated)]);
        assert!(ledger.begin_bind(&other, "a", at(0)).is_err());
    }
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["a"], at(0)), ["a"]);
    ledger.delete_pod("small");
    assert_eq!(
        choose(&mut ledger, &with_priority("higher", 30, 6), &["a"], at(0)),
        ["a"]
    );
    ledger.delete_pod("higher");
    assert_eq!(
        choose(&mut ledger, &nominated("first", 80, 5), &["a"], at(0)),
        ["a"]
    );
}

#[test]
fn room_is_held_though_a_report_still_shows_the_victims_that_are_gone() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("victim", "a", "a-0", 60));
    let mut gpu = card("a-0", 100);
    gpu.pods = vec![used("victim", 60)];
    ledger.apply_gpunode("a", report(&[gpu]), at(0));
    ledger.apply_pod(nominated("first", 80, 5));
    ledger.delete_pod("victim");
    // 40 are free now, and 100 with the next report, of which 20 are for others.
    assert!(choose(&mut ledger, &pod("large", 21), &["a"], at(0)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["a"], at(0)), ["a"]);
}

#[test]
fn room_that_victims_will_leave_is_not_held_twice() {
    let mut ledger = ledger(&[("a", &[100])]);
    let victim = PodFacts {
        deleting: true,
        ..bound("victim", "a", "a-0", 60)
    };
    ledger.apply_pod(victim);
    ledger.apply_pod(nominated("first", 80, 5));
    // The victim leaves 60 of the 80; 20 of the 40 that are free now are kept.
    assert!(choose(&mut ledger, &pod("large", 21), &["a"], at(0)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["a"], at(0)), ["a"]);
}

#[test]
fn a_nomination_ends_when_the_pod_reserves_or_goes() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    let first = nominated("first", 80, 5);
    ledger.apply_pod(first.clone());
    assert_eq!(choose(&mut ledger, &first, &["b"], at(0)), ["b"]);
    assert_eq!(choose(&mut ledger, &pod("other", 30), &["a"], at(0)), ["a"]);
    ledger.delete_pod("other");
    ledger.delete_pod("first");
    assert_eq!(choose(&mut ledger, &pod("next", 30), &["a"], at(0)), ["a"]);
}

#[test]
fn a_preemptor_makes_room_beside_those_nominated_before_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("low", "a", "a-0", 30));
    ledger.apply_pod(nominated("first", 40, 5));
    let second = with_priority("second", 50, 5);
    let victims = ledger.preempt(&second, "a", &[], &mut ledger.budget(), at(0));
    let uids = victims.map(|victims| victims.uids);
    assert_eq!(uids, Some(vec!["low".into()]));
}

/// A ledger where `first` was refused before the watch showed that its victim, 100 of 100 MiB, was gone. Its nomination
/// is cleared, and `rival` waits for the same room.
fn refused_too_early() -> Ledger {
    let mut ledger = ledger(&[("a", &[100])]);
    let victim = PodFacts {
        deleting: true,
        ..bound("victim", "a", "a-0", 100)
    };
    ledger.apply_pod(victim);
    ledger.apply_pod(pod("rival", 60));
    let first = nominated("first", 80, 5);
    ledger.apply_pod(first.clone());
    assert!(choose(&mut ledger, &pod("rival", 60), &["a"], at(0)).is_empty());
    assert!(choose(&mut ledger, &first, &["a"], at(0)).is_empty());
    ledger.delete_pod("victim");
    ledger.apply_pod(with_priority("first", 80, 5));
    ledger
}

fn woken(ledger: &mut Ledger, second: u64) -> Vec<String> {
    let woken = ledger.wake(9, at(second));
    woken.iter().map(|pod| pod.uid.to_string()).collect()
}

#[test]
fn a_preemptor_that_asks_before_we_see_its_victim_go_gets_its_room() {
    let mut ledger = refused_too_early();
    assert_eq!(woken(&mut ledger, 1), ["first"]);
    let rival = pod("rival", 60);
    let refused = ledger.filter(&ask(&rival), &["a"], at(1)).refused;
    assert_eq!(refused, [("a", Reason::Nominated)]);
    assert!(ledger.begin_bind(&rival, "a", at(1)).is_err());
    assert_eq!(choose(&mut ledger, &pod("small", 20), &["a"], at(1)), ["a"]);
    let first = with_priority("first", 80, 5);
    assert_eq!(choose(&mut ledger, &first, &["a"], at(1)), ["a"]);
}

#[test]
fn a_claim_known_only_from_the_question_counts_too() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("victim", "a", "a-0", 100));
    ledger.apply_pod(with_priority("first", 80, 5));
    assert!(choose(&mut ledger, &nominated("first", 80, 5), &["a"], at(0)).is_empty());
    ledger.delete_pod("victim");
    assert!(choose(&mut ledger, &pod("rival", 60), &["a"], at(4)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("rival", 60), &["a"], at(5)), ["a"]);
}

#[test]
fn a_claim_ends_by_time_and_wakes_those_behind_it() {
    let mut ledger = refused_too_early();
    assert_eq!(woken(&mut ledger, 1), ["first"]);
    // Something else keeps it from asking again.
    ledger.apply_pod(PodFacts {
        gated: true,
        ..with_priority("first", 80, 5)
    });
    assert_eq!(woken(&mut ledger, 1), ["rival"]);
    ledger.apply_pod(with_priority("first", 80, 5));
    let rival = pod("rival", 60);
    assert!(choose(&mut ledger, &rival, &["a"], at(4)).is_empty());
    assert!(woken(&mut ledger, 4).is_empty());
    assert_eq!(woken(&mut ledger, 5), ["rival"]);
    assert_eq!(choose(&mut ledger, &rival, &["a"], at(5)), ["a"]);
}

#[test]
fn a_claim_lasts_as_long_as_the_nomination_and_then_some() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("victim", "a", "a-0", 100));
    let first = nominated("first", 80, 5);
    ledger.apply_pod(first.clone());
    assert!(choose(&mut ledger, &first, &["a"], at(0)).is_empty());
    ledger.expire(at(60));
    ledger.delete_pod("victim");
    ledger.apply_pod(with_priority("first", 80, 5));
    assert!(choose(&mut ledger, &pod("rival", 60), &["a"], at(64)).is_empty());
    assert_eq!(
        choose(&mut ledger, &pod("rival", 60), &["a"], at(65)),
        ["a"]
    );
}

#[test]
fn a_claim_ends_with_a_reservation_a_bind_a_deletion_or_another_nomination() {
    let first = with_priority("first", 80, 5);
    let ends: [fn(&mut Ledger, &PodFacts); 5] = [
        |ledger, first| {
            assert_eq!(choose(ledger, first, &["a"], at(1)), ["a"]);
            ledger.begin_bind(first, "a", at(1)).expect("it fits");
            ledger.end_bind(first, Outcome::Failed, at(1));
        },
        |ledger, _| ledger.apply_pod(bound("first", "b", "b-0", 80)),
        |ledger, _| ledger.delete_pod("first"),
        |ledger, _| ledger.reset_pods(vec![pod("rival", 60).into()], ledger.copies()),
        |ledger, first| {
            ledger.apply_pod(PodFacts {
                nominated: Some("b".into()),
                ..first.clone()
            });
        },
    ];
    for end in ends {
        let mut ledger = refused_too_early();
        end(&mut ledger, &first);
        assert_eq!(choose(&mut ledger, &pod("rival", 60), &["a"], at(1)), ["a"]);
    }
}

#[test]
fn an_older_equal_does_not_hide_the_pod_with_the_claim() {
    let mut ledger = refused_too_early();
    let older = PodFacts {
        created: -1,
        waiting: true,
        ..with_priority("older", 80, 5)
    };
    ledger.apply_pod(older);
    assert_eq!(woken(&mut ledger, 1), ["first"]);
}

/// A ledger with room for 80 on a, for which no pod was woken. These pods have been asleep since before it.
fn asleep(pods: &[PodFacts]) -> Ledger {
    let mut ledger = ledger(&[("a", &[100]), ("full", &[10])]);
    for pod in pods {
        ledger.apply_pod(PodFacts {
            waiting: true,
            ..pod.clone()
        });
    }
    ledger
}

/// The pods that looks at every node wake in these seconds, if no pod comes.
fn woken_within(ledger: &mut Ledger, seconds: RangeInclusive<u64>) -> Vec<String> {
    let mut all: Vec<String> = seconds.flat_map(|second| woken(ledger, second)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn a_look_for_an_equal_finds_the_room_that_is_kept_for_the_nominated_one() {
    let equal = PodFacts {
        created: -1,
        ..with_priority("equal", 80, 5)
    };
    let mut ledger = asleep(&[equal, nominated("kept", 80, 5)]);
    assert_eq!(woken_within(&mut ledger, 0..=4), ["kept"]);
}

#[test]
fn room_that_is_kept_from_a_pod_is_offered_to_one_of_higher_priority() {
    // All but the nominated one ask for as much; the high one stands last, since it woke without result.
    let low = PodFacts {
        created: -1,
        ..with_priority("low", 80, 0)
    };
    let high = with_priority("high", 80, 9);
    let mut ledger = asleep(&[low, high]);
    assert_eq!(woken_within(&mut ledger, 0..=4), ["high", "low"]);
    ledger.apply_pod(nominated("kept", 60, 5));
    ledger.delete_pod("low");
    let low = PodFacts {
        created: -1,
        waiting: true,
        ..with_priority("later", 80, 0)
    };
    ledger.apply_pod(low);
    let then = woken_within(&mut ledger, 5..=40);
    assert!(then.contains(&"high".to_owned()), "{then:?}");
    assert!(!then.contains(&"later".to_owned()), "{then:?}");
}

/// The victim on its node never ends.
#[test]
fn pod_whose_nomination_is_over_is_helped_elsewhere() {
    let mut ledger = Ledger::new(Config {
        preempt_fragmented: true,
        ..Config::default()
    });
    for (name, gpus) in [("a", 1), ("b", 2)] {
        ledger.apply_node(node(name));
        let cards: Vec<_> = (0..gpus)
            .map(|index| card(&format!("{name}-{index}"), 100))
            .collect();
        ledger.apply_gpunode(name, report(&cards), at(0));
    }
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..bound("stuck", "a", "a-0", 100)
    });
    for (uid, card) in [("x", "b-0"), ("y", "b-1")] {
        ledger.apply_pod(bound(uid, "b", card, 60));
    }
    ledger.apply_pod(PodFacts {
        waiting: true,
        ..nominated("first", 80, 5)
    });
    let mut helped = (0..40).map(|round| {
        let now = at(10 * round);
        for (name, gpus) in [("a", 1), ("b", 2)] {
            let cards: Vec<_> = (0..gpus)
                .map(|index| card(&format!("{name}-{index}"), 100))
                .collect();
            let heartbeat = Some(format!("{round}"));
            let report = GpuNodeStatus {
                heartbeat,
                ..report(&cards)
            };
            ledger.apply_gpunode(name, report, now);
        }
        offer_all(&mut ledger, now);
        ledger.fragmented(now);
        ledger.preemptions(now).iter().any(|it| *it.node == *"b")
    });
    assert!(
        !helped.by_ref().take(5).any(|helped| helped),
        "its nomination lasts"
    );
    assert!(helped.any(|helped| helped));
}
