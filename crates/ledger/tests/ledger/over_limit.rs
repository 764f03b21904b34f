//! Pods that use more of a card than their limit, on a card that no other pod wants.

use std::sync::Arc;

use gpustow_api::config::Action;
use gpustow_api::gpunode::Gpu;
use gpustow_api::limit::{Enforce, Support};
use gpustow_api::{Asks, PodFacts};
use gpustow_ledger::{Config, Ledger};
use gpustow_pack::Mib;

use crate::build::{at, bound, card, exclusive, node, report, used};

const CARD: u64 = 100;

/// A ledger with a node and this pod on its one card; a pod may be over its limit for a minute.
fn with(pod: PodFacts) -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    ledger.apply_pod(pod);
    ledger
}

/// `p` holds 30 and may use this much.
fn may_use(limit: u64) -> PodFacts {
    PodFacts {
        limits: Arc::from([Mib(limit)]),
        ..bound("p", "a", "a-0", 30)
    }
}

/// The agent reports the use of `p`.
fn says(ledger: &mut Ledger, mib: u64, second: u64, change: impl FnOnce(&mut Gpu)) {
    let mut gpu = card("a-0", CARD);
    gpu.pods = vec![used("p", mib)];
    change(&mut gpu);
    let mut status = report(&[gpu]);
    status.heartbeat = Some(second.to_string());
    ledger.apply_gpunode("a", status, at(second));
}

fn uses(ledger: &mut Ledger, mib: u64, second: u64) {
    says(ledger, mib, second, |_| {});
}

/// The use of `p`, and its limit, if it is to give back.
fn over(ledger: &Ledger, second: u64) -> Option<(u64, u64)> {
    let over = ledger.over_limits(at(second));
    assert!(over.len() < 2);
    let over = over.first()?;
    assert_eq!((&*over.node, &*over.victim.uuid), ("a", "a-0"));
    Some((over.victim.used.0, over.limit.0))
}

#[test]
fn a_pod_gives_back_what_it_has_used_beyond_its_limit_for_a_minute_of_reports() {
    let mut ledger = with(may_use(50));
    uses(&mut ledger, 52, 0);
    // Time alone is no proof, and neither is use within the limit.
    assert_eq!(over(&ledger, 100), None);
    uses(&mut ledger, 60, 59);
    assert_eq!(over(&ledger, 100), None);
    uses(&mut ledger, 70, 60);
    assert_eq!(over(&ledger, 100), Some((70, 50)));
    uses(&mut ledger, 50, 61);
    assert_eq!(over(&ledger, 61), None);
    uses(&mut ledger, 70, 62);
    assert_eq!(over(&ledger, 62), None);
}

#[test]
fn it_begins_again_after_a_report_that_says_otherwise_and_after_a_silence() {
    let mut ledger = with(may_use(50));
    for (mib, second) in [(60, 0), (50, 30), (60, 31), (60, 90)] {
        uses(&mut ledger, mib, second);
    }
    assert_eq!(over(&ledger, 90), None);
    // 180 seconds are no silence yet.
    uses(&mut ledger, 60, 270);
    assert_eq!(over(&ledger, 270), Some((60, 50)));
    assert_eq!(over(&ledger, 450), Some((60, 50)));
    assert_eq!(over(&ledger, 451), None);
    uses(&mut ledger, 60, 451);
    assert_eq!(over(&ledger, 451), None);
}

#[test]
fn a_pod_that_sets_no_limit_has_its_request_as_limit_and_one_may_use_the_whole_card() {
    for (pod, expected) in [
        (bound("p", "a", "a-0", 30), Some((32, 30))),
        (may_use(32), None),
        (may_use(u64::MAX), None),
        (exclusive(bound("p", "a", "a-0", 30)), None),
    ] {
        let mut ledger = with(pod);
        uses(&mut ledger, 32, 0);
        uses(&mut ledger, 32, 60);
        assert_eq!(over(&ledger, 60), expected);
    }
}

#[test]
fn no_pod_is_asked_whose_limit_is_held_elsewhere_or_not_at_all_or_cannot_be_read() {
    let seen_to_by = |enforce| PodFacts {
        enforce,
        ..may_use(50)
    };
    let broken = PodFacts {
        assignment: Some(Err(gpustow_api::BrokenAssignment("no GPUs".into()))),
        ..may_use(50)
    };
    let unreadable = PodFacts {
        asks: Asks::Unreadable(gpustow_api::BadRequest {
            field: "metadata".into(),
            problem: "is wrong".into(),
        }),
        ..may_use(50)
    };
    let driver = || seen_to_by(Enforce::Driver);
    for (pod, card_says, is_asked) in [
        (seen_to_by(Enforce::Watch), None, true),
        (seen_to_by(Enforce::None), None, false),
        (driver(), Some(Support::Holds), false),
        (driver(), Some(Support::Toolkit), false),
        (driver(), None, false),
        (driver(), Some(Support::Missing), true),
        (broken, None, false),
        (unreadable, None, false),
    ] {
        let mut ledger = with(pod.clone());
        for second in [0, 60] {
            says(&mut ledger, 60, second, |gpu| {
                gpu.memory_limit = card_says.map(|word| <&str>::from(word).to_owned());
            });
        }
        let found = over(&ledger, 60).is_some();
        assert_eq!(found, is_asked, "{card_says:?} {pod:?}");
    }
}

#[test]
fn no_pod_is_asked_by_a_card_that_failed_nor_one_that_ends_nor_where_it_is_off() {
    let mut ledger = with(may_use(50));
    uses(&mut ledger, 60, 0);
    says(&mut ledger, 60, 60, |gpu| gpu.healthy = false);
    assert_eq!(over(&ledger, 60), None);

    let mut ledger = with(may_use(50));
    uses(&mut ledger, 60, 0);
    uses(&mut ledger, 60, 60);
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..may_use(50)
    });
    assert_eq!(over(&ledger, 60), None);

    let mut ledger = Ledger::new(Config::default());
    ledger.apply_node(node("a"));
    ledger.apply_pod(may_use(50));
    uses(&mut ledger, 60, 0);
    uses(&mut ledger, 60, 60);
    assert_eq!(over(&ledger, 60), None);
}

#[test]
fn a_limit_that_is_raised_ends_it_and_a_successor_goes_on_at_once() {
    let mut ledger = with(may_use(50));
    uses(&mut ledger, 60, 0);
    uses(&mut ledger, 60, 60);
    ledger.apply_pod(may_use(60));
    assert_eq!(over(&ledger, 60), None);

    let asked = PodFacts {
        asked_back: Some(Action::Event),
        ..may_use(50)
    };
    let mut ledger = with(asked);
    uses(&mut ledger, 60, 0);
    assert_eq!(over(&ledger, 0), Some((60, 50)));
}

#[test]
fn a_hundredth_more_than_the_limit_is_no_offence_nor_a_mib_that_a_report_rounds_up() {
    for (limit, used, is_over) in [
        (50, 51, false),
        (50, 52, true),
        (199, 200, false),
        (20_000, 20_200, false),
        (20_000, 20_201, true),
        (u64::MAX, u64::MAX, false),
    ] {
        let mut ledger = with(may_use(limit));
        for second in [0, 60] {
            says(&mut ledger, used, second, |gpu| gpu.total_mib = 40_000);
        }
        let expected = is_over.then_some((used, limit));
        assert_eq!(over(&ledger, 60), expected, "{used} of {limit}");
    }
}

/// A pod of this controller comes at `from`, and every report then shows it over its limit. Returns the seconds until
/// it is to give back. Then it is evicted.
fn lasts(ledger: &mut Ledger, uid: &str, controller: &str, from: u64) -> u64 {
    let pod = PodFacts {
        controller: Some(controller.into()),
        limits: Arc::from([Mib(50)]),
        ..bound(uid, "a", "a-0", 30)
    };
    ledger.apply_pod(pod.clone());
    let mut second = from;
    loop {
        says(ledger, 0, second, |gpu| gpu.pods = vec![used(uid, 70)]);
        if !ledger.over_limits(at(second)).is_empty() {
            break;
        }
        second += 20;
    }
    let asked = PodFacts {
        asked_back: Some(Action::Evict),
        ..pod
    };
    ledger.apply_pod(asked.clone());
    ledger.apply_pod(PodFacts {
        deleting: true,
        ..asked
    });
    ledger.delete_pod(uid);
    second - from
}

#[test]
fn each_pod_of_a_controller_is_given_twice_the_time_of_the_one_that_ended_before_it() {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    let expected = [60, 120, 240, 480, 960, 960];
    for (number, expected) in expected.into_iter().enumerate() {
        let from = 2000 * number as u64;
        let found = lasts(&mut ledger, &format!("p{number}"), "c", from);
        assert_eq!(found, expected, "after {number} pods");
    }
    assert_eq!(lasts(&mut ledger, "other", "d", 12_000), 60);
    assert_eq!(lasts(&mut ledger, "later", "c", 16_000), 60);
}
