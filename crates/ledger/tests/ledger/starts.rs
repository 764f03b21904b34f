//! Pods that start alone on their GPU: which wait, until when, and which are not disturbed.

use gpustow_api::PodFacts;
use gpustow_api::gpunode::PodUse;
use gpustow_ledger::{Config, Ledger, Outcome, Reason, Victims};
use gpustow_pack::Refusal;
use proptest::prelude::*;

use crate::act::Act as _;
use crate::build::{
    ask, at, bound, card, choose, configured, holder, ledger, offer_all, pod, report, requesting,
    used, waiting,
};
use crate::gang_victims::{in_group, pod_group};

const STARTING: Option<Reason> = Some(Reason::Fit(Refusal::Starting));
/// The time of day at second zero.
const DAWN: i64 = 1_000;

fn alone(pod: PodFacts) -> PodFacts {
    requesting(pod, |request| request.alone = true)
}

/// A bound pod that has been starting since that second.
fn starting(pod: PodFacts, second: i64) -> PodFacts {
    PodFacts {
        starting_since: Some(DAWN + second),
        ..pod
    }
}

fn on(uid: &str, card: &str) -> PodFacts {
    bound(uid, "a", card, 10)
}

/// Why such a pod that comes at this second of the day is refused, by filter and by the explanation for people.
fn refused(ledger: &mut Ledger, pod: &PodFacts, second: i64) -> Option<Reason> {
    let pod = &PodFacts {
        uid: format!("{}-{}", pod.uid, ledger.copies()).into(),
        ..pod.clone()
    };
    ledger.tell_time(DAWN + second);
    ledger.apply_pod(pod.clone());
    let told = ledger.explain(pod, "a", at(4)).err();
    let refused = ledger.filter(&ask(pod), &["a"], at(4)).refused;
    ledger.delete_pod(&pod.uid);
    assert_eq!(told, refused.first().map(|(_, why)| *why));
    told
}

#[test]
fn pod_that_starts_alone_waits_for_other_starts_and_others_wait_for_it() {
    let beside = || starting(on("old", "a-0"), 0);
    let probe = |ledger: &mut Ledger, number: u64, is_alone: bool| {
        let pod = pod(&format!("probe-{number}"), 10);
        let pod = if is_alone { alone(pod) } else { pod };
        refused(ledger, &pod, 2)
    };
    let rows = [
        (on("old", "a-0"), None, None),
        (beside(), None, STARTING),
        (alone(on("old", "a-0")), None, None),
        (alone(beside()), STARTING, STARTING),
    ];
    for (number, (old, plain, is_alone)) in rows.into_iter().enumerate() {
        let mut ledger = ledger(&[("a", &[100])]);
        ledger.tell_time(DAWN + 1);
        ledger.apply_pod(old);
        let seen = [probe(&mut ledger, 1, true), probe(&mut ledger, 2, false)];
        assert_eq!(seen, [is_alone, plain], "row {number}");
    }
}

#[test]
fn of_two_pods_that_start_alone_the_second_waits_from_the_first_ones_reservation_on() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.tell_time(DAWN);
    let [one, two, three] = ["one", "two", "three"].map(|uid| alone(pod(uid, 10)));
    for pod in [&one, &two] {
        assert_eq!(choose(&mut ledger, pod, &["a"], at(0)), ["a"]);
    }
    let cards = |ledger: &Ledger| {
        let [view] = ledger.snapshot(at(0)).try_into().unwrap();
        view.cards
            .iter()
            .map(|card| card.held.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(cards(&ledger), [10, 10], "each has a GPU of its own");
    assert_eq!(refused(&mut ledger, &three, 1), STARTING);
    assert!(ledger.begin_bind(&one, "a", at(2)).is_ok());
    ledger.end_bind(&one, Outcome::Bound, at(2));
    let bound_by_us = refused(&mut ledger, &three, 3);
    assert_eq!(bound_by_us, STARTING, "it is bound and not Ready");
}

#[test]
fn start_is_over_when_the_pod_is_ready_gone_settled_or_after_its_time() {
    let settled = |ledger: &mut Ledger, at_second: i64| {
        let second = DAWN + at_second;
        let time = format!("1970-01-01T00:{}:{:02}Z", second / 60, second % 60);
        let used = PodUse {
            settled_at: Some(time),
            ..used("old", 10)
        };
        let mut gpu = card("a-0", 100);
        gpu.pods = vec![used];
        ledger.apply_gpunode("a", report(&[gpu]), at(3));
    };
    type Then<'t> = &'t dyn Fn(&mut Ledger);
    let rows: [(&str, Then<'_>, i64, bool); 8] = [
        ("nothing", &|_| {}, 3, false),
        (
            "Ready",
            &|it| it.apply_pod(alone(on("old", "a-0"))),
            3,
            true,
        ),
        ("gone", &|it| it.delete_pod("old"), 3, true),
        ("settled", &|it| settled(it, 2), 3, true),
        ("settled before", &|it| settled(it, -2), 3, false),
        ("nearly late", &|_| {}, 299, false),
        ("late", &|_| {}, 300, true),
        (
            "again",
            &|it| it.apply_pod(alone(starting(on("old", "a-0"), 200))),
            300,
            false,
        ),
    ];
    for (what, then, second, is_over) in rows {
        let mut ledger = ledger(&[("a", &[100])]);
        ledger.tell_time(DAWN);
        ledger.apply_pod(alone(starting(on("old", "a-0"), 0)));
        assert_eq!(refused(&mut ledger, &pod("before", 10), 1), STARTING);
        ledger.tell_time(DAWN + 201);
        then(&mut ledger);
        let seen = refused(&mut ledger, &pod("p", 10), second);
        assert_eq!(seen.is_none(), is_over, "{what}: {seen:?}");
    }
}

#[test]
fn waiting_pods_are_woken_one_per_gpu_when_a_start_is_over() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.tell_time(DAWN);
    ledger.apply_pod(alone(starting(on("old", "a-0"), 0)));
    for uid in ["one", "two"] {
        let waits = alone(pod(uid, 10));
        ledger.apply_pod(waits.clone());
        assert!(choose(&mut ledger, &waits, &["a"], at(1)).is_empty());
    }
    assert!(ledger.wake(9, at(2)).is_empty());
    ledger.apply_pod(alone(on("old", "a-0")));
    assert_eq!(ledger.wake(9, at(3)).len(), 1);
}

#[test]
fn start_that_takes_the_longest_time_is_told_of_once_and_wakes_who_waits() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.tell_time(DAWN);
    ledger.apply_pod(alone(starting(on("old", "a-0"), 0)));
    let waits = pod("p", 10);
    ledger.apply_pod(waits.clone());
    assert!(choose(&mut ledger, &waits, &["a"], at(1)).is_empty());
    assert!(ledger.take_late_starts().is_empty());
    ledger.tell_time(DAWN + 300);
    assert_eq!(ledger.wake(9, at(4)).len(), 1);
    let late = ledger.take_late_starts();
    assert_eq!(late.iter().map(|it| &*it.uid).collect::<Vec<_>>(), ["old"]);
    ledger.tell_time(DAWN + 301);
    assert!(ledger.take_late_starts().is_empty());
}

#[test]
fn no_pod_is_evicted_for_a_start_that_ends_by_itself() {
    let config = Config {
        preempt_fragmented: true,
        defragment: true,
        reclaim: true,
        provision: 9,
        ..Config::default()
    };
    let mut ledger = configured(config, &[("a", &[100])]);
    ledger.tell_time(DAWN);
    ledger.apply_pod(alone(starting(holder("old", "a-0", 10, 0), 0)));
    let high = waiting(9, pod("high", 10));
    ledger.apply_pod(high.clone());
    assert_eq!(refused_keeping(&mut ledger, &high), STARTING);
    offer_all(&mut ledger, at(1));
    assert!(ledger.fragmented(at(1)).is_empty());
    assert!(ledger.defragment(9, at(1)).is_none());
    assert!(
        ledger.shortages(at(1)).is_empty(),
        "no node is added for it"
    );
    let victims = ledger.preempt(&high, "a", &[], &mut ledger.budget(), at(1));
    assert_eq!(
        victims,
        Some(Victims::default()),
        "kube-scheduler's preemption adds none"
    );
}

fn refused_keeping(ledger: &mut Ledger, pod: &PodFacts) -> Option<Reason> {
    let refused = ledger.filter(&ask(pod), &["a"], at(1)).refused;
    refused.first().map(|(_, why)| *why)
}

/// The state of a pod, in the words of the test.
#[derive(Clone, Debug)]
struct Shadow {
    pod: PodFacts,
    card: String,
    is_alone: bool,
    starts: bool,
}

proptest! {
    #[test]
    fn no_pod_starts_beside_one_that_starts_alone_and_none_waits_for_another_reason(
        steps in prop::collection::vec((0..6_u8, any::<prop::sample::Index>(), any::<bool>()), 1..60),
    ) {
        let mut ledger = ledger(&[("a", &[1000, 1000, 1000])]);
        let mut shadows: Vec<Shadow> = Vec::new();
        let mut second = DAWN;
        ledger.tell_time(second);
        // Starts count from the first pod on that starts alone.
        ledger.apply_pod(alone(pod("first", 1)));
        for (number, (step, which, is_alone)) in steps.into_iter().enumerate() {
            let known = (!shadows.is_empty()).then(|| which.index(shadows.len()));
            match (step, known) {
                (0, Some(at)) => {
                    let ready = PodFacts { starting_since: None, ..shadows[at].pod.clone() };
                    shadows[at].starts = false;
                    ledger.apply_pod(ready);
                }
                (1, Some(at)) => ledger.delete_pod(&shadows.remove(at).pod.uid),
                (2, Some(at)) => {
                    shadows[at].starts = true;
                    ledger.apply_pod(PodFacts { starting_since: Some(second), ..shadows[at].pod.clone() });
                }
                (3, _) => {
                    second += 301;
                    ledger.tell_time(second);
                    shadows.iter_mut().for_each(|it| it.starts = false);
                }
                _ => {
                    let name = format!("p{number}");
                    // A start that fails is one of its own namespace.
                    let asked = PodFacts { namespace: name.as_str().into(), ..pod(&name, 10) };
                    let asked = if is_alone { alone(asked) } else { asked };
                    let answer = ledger.filter(&ask(&asked), &["a"], at(1));
                    let starting = |card: &str| {
                        let here = shadows.iter().filter(|it| it.starts && *it.card == *card);
                        here.clone().any(|it| is_alone || it.is_alone)
                    };
                    if answer.nodes.is_empty() {
                        prop_assert_eq!(answer.refused.first().map(|it| it.1), STARTING);
                        prop_assert!(["a-0", "a-1", "a-2"].into_iter().all(starting));
                        continue;
                    }
                    let assigned = ledger.begin_bind(&asked, "a", at(1)).unwrap();
                    ledger.end_bind(&asked, Outcome::Bound, at(1));
                    let card = assigned.charges[0].0.to_string();
                    prop_assert!(!starting(&card), "{card} of {shadows:?}");
                    let pod = ledger.pod(&asked.uid).unwrap().as_ref().clone();
                    shadows.push(Shadow { pod, card, is_alone, starts: true });
                }
            }
        }
    }
}

#[test]
fn namespace_whose_starts_fail_closes_no_gpu_for_the_rest_of_an_hour() {
    let mut ledger = ledger(&[("a", &[1000])]);
    ledger.tell_time(DAWN);
    for number in 0..10 {
        let uid = format!("bad-{number}");
        ledger.apply_pod(alone(starting(on(&uid, "a-0"), 0)));
        let other = refused(&mut ledger, &pod("p", 10), 1);
        assert_eq!(other, STARTING, "{number}");
        ledger.delete_pod(&uid);
    }
    ledger.apply_pod(alone(starting(on("bad-10", "a-0"), 0)));
    assert_eq!(refused(&mut ledger, &pod("p", 10), 1), None);
    ledger.tell_time(DAWN + 3600);
    ledger.apply_pod(alone(starting(on("later", "a-0"), 3600)));
    assert_eq!(refused(&mut ledger, &pod("p", 10), 3601), STARTING);
}

#[test]
fn start_timeout_of_zero_turns_the_annotation_off() {
    let config = Config {
        start_timeout: at(0),
        ..Config::default()
    };
    let mut ledger = configured(config, &[("a", &[100])]);
    ledger.tell_time(DAWN);
    ledger.apply_pod(alone(starting(on("old", "a-0"), 0)));
    assert_eq!(refused(&mut ledger, &alone(pod("p", 10)), 1), None);
}

#[test]
fn gang_whose_pods_start_alone_needs_a_gpu_for_each() {
    for (gpus, placed) in [(1, false), (2, true)] {
        let mut ledger = ledger(&[("a", &[1000, 1000][..gpus])]);
        ledger.tell_time(DAWN);
        ledger.apply_pod_group(pod_group("g", 2, true));
        let pods = ["one", "two"].map(|uid| in_group("g", alone(pod(uid, 10))));
        pods.iter().for_each(|pod| ledger.apply_pod(pod.clone()));
        let chosen = pods
            .iter()
            .filter(|pod| !choose(&mut ledger, pod, &["a"], at(1)).is_empty());
        assert_eq!(chosen.count() == 2, placed, "{gpus} GPUs");
    }
}

#[test]
fn queued_pods_that_start_alone_are_ungated_one_per_gpu() {
    let config = Config {
        queue: true,
        ..Config::default()
    };
    let mut ledger = configured(config, &[("a", &[1000, 1000])]);
    ledger.tell_time(DAWN);
    for number in 0..4 {
        let queued = alone(pod(&format!("q{number}"), 10));
        ledger.apply_pod(PodFacts {
            queued: true,
            ..queued
        });
    }
    assert_eq!(ledger.wake(9, at(1)).len(), 2);
}
