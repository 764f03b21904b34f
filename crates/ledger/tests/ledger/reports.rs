//! Nodes that may not be asked: no report, a stale one, no healthy card.

use gpustow_api::NodeFacts;
use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_ledger::{BindRefusal, Ledger, Reason};
use gpustow_pack::Refusal;

use crate::build::{
    able, ask, at, bound, card, choose, free, ledger, limited, node, pod, report, used,
};

#[test]
fn a_node_without_a_report_is_refused() {
    let mut ledger = ledger(&[]);
    ledger.apply_node(node("bare"));
    let refused = ledger
        .filter(&ask(&pod("p", 1)), &["bare", "unknown"], at(0))
        .refused;
    assert_eq!(
        refused,
        [("bare", Reason::NoReport), ("unknown", Reason::NoReport)]
    );
    assert!(ledger.begin_bind(&pod("p", 1), "bare", at(0)).is_err());
}

#[test]
fn a_report_is_stale_when_it_has_not_changed_for_too_long() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 10);
    let same = report(&[card("a-0", 100)]);
    ledger.apply_gpunode("a", same.clone(), at(179));
    assert_eq!(choose(&mut ledger, &p, &["a"], at(180)), ["a"]);
    ledger.delete_pod("p");
    let p = pod("q", 10);
    assert_eq!(
        ledger.filter(&ask(&p), &["a"], at(181)).refused,
        [("a", Reason::Stale)]
    );
    assert!(ledger.begin_bind(&p, "a", at(181)).is_err());
    assert_eq!(
        ledger.preempt(&p, "a", &[], &mut ledger.budget(), at(181)),
        None
    );
    assert_eq!(ledger.rank(&p, &|_| true, &["a"], at(181)), [0]);
    assert!(ledger.snapshot(at(181))[0].stale);
    let mut heartbeat = same;
    heartbeat.heartbeat = Some("now".into());
    ledger.apply_gpunode("a", heartbeat, at(182));
    assert_eq!(choose(&mut ledger, &p, &["a"], at(182)), ["a"]);
}

/// A new extender sees every report for the first time; the node itself shows which report is old.
#[test]
fn a_report_that_its_kubelet_has_outlived_is_stale_from_the_start() {
    let mut ledger = ledger(&[]);
    let written = |heartbeat: &str| GpuNodeStatus {
        heartbeat: Some(heartbeat.into()),
        ..report(&[card("a-0", 100)])
    };
    let spoke = |heartbeat| NodeFacts {
        heartbeat: Some(heartbeat),
        ..node("a")
    };
    ledger.apply_gpunode("a", written("1970-01-01T00:10:00Z"), at(0));
    let p = pod("p", 10);
    for (kubelet, stale) in [(600, false), (0, false), (780, false), (781, true)] {
        ledger.apply_node(spoke(kubelet));
        let refused = ledger.filter(&ask(&p), &["a"], at(0)).refused;
        assert_eq!(
            refused.first().map(|(_, why)| *why),
            stale.then_some(Reason::Stale)
        );
        assert_eq!(ledger.snapshot(at(0))[0].stale, stale);
    }
    ledger.apply_gpunode("a", written("1970-01-01T00:11:00Z"), at(0));
    assert_eq!(choose(&mut ledger, &p, &["a"], at(0)), ["a"]);
}

/// Deleted by force, its processes live on until the agent has looked again.
#[test]
fn what_a_pod_that_is_gone_still_uses_is_taken_until_the_report_changes() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("p", "a", "a-0", 90));
    let busy = Gpu {
        pods: vec![used("p", 90)],
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(&[busy]), at(0));
    ledger.delete_pod("p");
    assert_eq!(free(&ledger, "a"), [10]);
    ledger.apply_gpunode("a", report(&[card("a-0", 100)]), at(1));
    assert_eq!(free(&ledger, "a"), [100]);
}

#[test]
fn a_reservation_is_bound_though_the_report_went_stale_meanwhile() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 10);
    choose(&mut ledger, &p, &["a"], at(175));
    assert!(ledger.begin_bind(&p, "a", at(185)).is_ok());
}

#[test]
fn an_unhealthy_card_takes_no_pod() {
    let mut ledger = ledger(&[("a", &[100])]);
    let p = pod("p", 10);
    choose(&mut ledger, &p, &["a"], at(0));
    let ill = Gpu {
        healthy: false,
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(&[ill]), at(1));
    assert!(ledger.begin_bind(&p, "a", at(1)).is_err());
    let refused = ledger.filter(&ask(&p), &["a"], at(1)).refused;
    assert_eq!(refused, [("a", Reason::Fit(Refusal::Unhealthy))]);
}

/// A report of an older agent, without limits, and a report of a later agent, with an unknown reason.
#[test]
fn who_must_be_limited_goes_where_limits_hold_and_nowhere_else() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    let p = limited(pod("p", 10));
    let refused = |ledger: &mut Ledger| ledger.filter(&ask(&p), &["a"], at(1)).refused;
    let no_limit = [("a", Reason::Fit(Refusal::NoLimit))];
    assert_eq!(refused(&mut ledger), no_limit);
    for word in ["Toolkit", "NotKnownYet"] {
        let unable = Gpu {
            memory_limit: Some(word.into()),
            ..card("a-0", 100)
        };
        ledger.apply_gpunode("a", report(&[unable]), at(1));
        assert_eq!(refused(&mut ledger), no_limit, "{word}");
    }
    ledger.apply_gpunode("b", report(&[able(card("b-0", 100))]), at(1));
    assert_eq!(choose(&mut ledger, &p, &["a", "b"], at(1)), ["b"]);
    assert!(ledger.begin_bind(&p, "b", at(1)).is_ok());
    // A container there turns out to be without a limit before the next pod is bound.
    let q = limited(pod("q", 10));
    assert_eq!(choose(&mut ledger, &q, &["b"], at(1)), ["b"]);
    ledger.apply_gpunode("b", report(&[card("b-0", 100)]), at(2));
    let refusal = ledger.begin_bind(&q, "b", at(2));
    assert!(
        matches!(&refusal, Err(BindRefusal::NoFit { reason, .. }) if *reason == no_limit[0].1),
        "{refusal:?}"
    );
    assert_eq!(choose(&mut ledger, &pod("r", 10), &["b"], at(2)), ["b"]);
}

#[test]
fn a_pod_that_waits_for_a_limit_is_woken_when_limits_hold() {
    let mut ledger = ledger(&[("a", &[100])]);
    let mut p = limited(pod("p", 10));
    choose(&mut ledger, &p, &["a"], at(0));
    (p.waiting, p.refusal) = (true, 1);
    ledger.apply_pod(p);
    assert_eq!(ledger.wake(10, at(10)), []);
    ledger.apply_gpunode("a", report(&[able(card("a-0", 100))]), at(11));
    let woken: Vec<_> = ledger
        .wake(10, at(11))
        .into_iter()
        .map(|pod| pod.uid.clone())
        .collect();
    assert_eq!(woken, ["p".into()]);
}

#[test]
fn lists_replace_what_was_known() {
    let mut ledger = ledger(&[("a", &[100]), ("b", &[100])]);
    ledger.reset_nodes(vec![node("b")]);
    ledger.reset_gpunodes(vec![("b".into(), report(&[card("b-9", 50)]))], at(1));
    let snapshot = ledger.snapshot(at(1));
    assert_eq!(snapshot.len(), 1);
    assert_eq!(
        (&*snapshot[0].name, &*snapshot[0].cards[0].uuid),
        ("b", "b-9")
    );
}

#[test]
fn every_reason_has_its_own_text_and_label() {
    let count = Reason::all().count();
    let texts: std::collections::BTreeSet<_> = Reason::all().map(Reason::text).collect();
    let labels: std::collections::BTreeSet<_> = Reason::all().map(Reason::label).collect();
    assert_eq!((texts.len(), labels.len()), (count, count));
}

#[test]
fn what_is_seen_elsewhere_than_assigned_is_counted() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    let mismatches = |ledger: &gpustow_ledger::Ledger, now: u64| {
        let found = ledger.snapshot(at(now))[0].mismatches;
        [found.unconfirmed, found.wrong_gpu, found.orphan]
    };
    ledger.apply_pod(bound("seen", "a", "a-0", 10));
    ledger.apply_pod(bound("unseen", "a", "a-0", 10));
    ledger.apply_pod(bound("strays", "a", "a-1", 10));
    let first = Gpu {
        pods: vec![used("seen", 5), used("strays", 5), used("gone", 5)],
        ..card("a-0", 100)
    };
    ledger.apply_gpunode("a", report(&[first, card("a-1", 100)]), at(1));
    // The one that strays is not where it should be, either.
    assert_eq!(mismatches(&ledger, 1), [2, 1, 1]);
    assert_eq!(mismatches(&ledger, 182), [0, 0, 0], "no agent reports");
}

#[test]
fn cards_that_pods_hold_and_no_agent_reports_are_counted() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("one", "a", "a-7", 10));
    ledger.apply_pod(bound("two", "a", "a-7", 10));
    ledger.apply_pod(bound("three", "b", "b-0", 10));
    let unreported = |ledger: &gpustow_ledger::Ledger| -> Vec<usize> {
        let views = ledger.snapshot(at(0)).into_iter();
        views.map(|view| view.unreported).collect()
    };
    assert_eq!(unreported(&ledger), [1, 1]);
    ledger.apply_gpunode("b", report(&[card("b-0", 100)]), at(0));
    assert_eq!(unreported(&ledger), [1, 0]);
}

#[test]
fn a_reservation_without_a_bind_is_counted_when_it_ends() {
    let mut ledger = ledger(&[("a", &[100])]);
    choose(&mut ledger, &pod("p", 10), &["a"], at(0));
    ledger.expire(at(29));
    assert_eq!(ledger.expirations(), 0);
    ledger.expire(at(30));
    assert_eq!(ledger.expirations(), 1);
}

#[test]
fn the_oldest_waiting_pod_is_known() {
    let mut ledger = ledger(&[("a", &[100])]);
    assert_eq!(ledger.oldest_waiting(), None);
    for (uid, created) in [("young", 9), ("old", 5)] {
        let pod = gpustow_api::PodFacts {
            created,
            waiting: true,
            ..pod(uid, 500)
        };
        ledger.apply_pod(pod);
    }
    assert_eq!(ledger.oldest_waiting(), Some(5));
}
