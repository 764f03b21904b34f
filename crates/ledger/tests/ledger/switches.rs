//! Settings that set from when on something is done hold at each way by which it can be done. The ways are
//! kube-scheduler's call, a look at single pods and one at gangs. Settings that turn it off hold there, too.

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, choose, configured, holder, offer_all, pod, used, waiting};
use crate::gang_victims::{in_group, pod_group};
use crate::reclaim::uses;

/// The age from which on all of these help, in seconds.
const AFTER: u64 = 60;

/// A way by which a setting has its effect.
struct Way {
    name: &'static str,
    on: Config,
    off: Config,
    /// A ledger in which a pod of priority 9, created at second zero of the day, could be helped.
    needs_help: fn(Config) -> Ledger,
    /// Is the pod helped now?
    helps: fn(&mut Ledger) -> bool,
}

fn high(uid: &str, mib: u64) -> PodFacts {
    waiting(9, pod(uid, mib))
}

/// Two GPUs with 60 of 100 MiB free each, and pods that want 80 on one.
fn fragmented(config: Config) -> Ledger {
    let mut ledger = configured(config, &[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 40, 1));
    ledger.apply_pod(holder("y", "a-1", 40, 1));
    ledger
}

/// The pod comes at second zero, and is refused.
fn refused(mut ledger: Ledger, pod: &PodFacts) -> Ledger {
    ledger.tell_time(0);
    ledger.apply_pod(pod.clone());
    assert!(choose(&mut ledger, pod, &["a"], at(0)).is_empty());
    ledger
}

fn single(config: Config) -> Ledger {
    refused(fragmented(config), &high("p", 80))
}

fn gang(config: Config) -> Ledger {
    let mut ledger = fragmented(config);
    ledger.apply_pod_group(pod_group("g", 2, true));
    for uid in ["g0", "g1"] {
        ledger.apply_pod(in_group("g", high(uid, 80)));
    }
    ledger
}

/// A GPU of which a pod that requested 10 uses all.
fn lent(config: Config) -> Ledger {
    let mut ledger = configured(config, &[("a", &[100])]);
    ledger.apply_pod(holder("x", "a-0", 10, 1));
    uses(&mut ledger, "a", &[&[used("x", 100)]], 0);
    refused(ledger, &high("p", 50))
}

fn full(config: Config) -> Ledger {
    let mut ledger = configured(config, &[("a", &[100])]);
    ledger.apply_pod(holder("x", "a-0", 100, 1));
    refused(ledger, &waiting(0, pod("p", 50)))
}

/// A look, and one three seconds later, as loops take them.
fn preempts(ledger: &mut Ledger) -> bool {
    offer_all(ledger, at(1));
    ledger.fragmented(at(1));
    ledger.fragmented(at(4));
    !ledger.preemptions(at(4)).is_empty()
}

fn ways() -> Vec<Way> {
    let after = at(AFTER);
    let preempts_after = Config {
        preempt_fragmented: true,
        preempt_after: after,
        ..Config::default()
    };
    let preempts_never = Config {
        preempt_fragmented: false,
        ..preempts_after
    };
    let reclaims = Config {
        reclaim: true,
        reclaim_after: after,
        ..Config::default()
    };
    let reclaims_never = Config {
        reclaim: false,
        ..reclaims
    };
    let reserves = Config {
        reserve_after: Some(after),
        ..Config::default()
    };
    let of = |name, (on, off), needs_help, helps| Way {
        name,
        on,
        off,
        needs_help,
        helps,
    };
    let preempt = (preempts_after, preempts_never);
    let reclaim = (reclaims, reclaims_never);
    vec![
        of("preempt, by kube-scheduler", preempt, single, |ledger| {
            ledger.may_preempt_fragmented(&high("p", 80), at(1))
        }),
        of("preempt, by a look", preempt, single, preempts),
        of("preempt, by a look for a gang", preempt, gang, preempts),
        of("reclaim, by a call of filter", reclaim, lent, |ledger| {
            choose(ledger, &high("p", 50), &["a"], at(1));
            !ledger.reclaims(at(1)).is_empty()
        }),
        of("reclaim, by a look", reclaim, lent, |ledger| {
            ledger.reclaim(at(1));
            !ledger.reclaims(at(1)).is_empty()
        }),
        of(
            "reserve, by a look",
            (reserves, Config::default()),
            full,
            |ledger| {
                ledger.keep_reservations(at(1));
                !ledger.reservations().is_empty()
            },
        ),
    ]
}

#[test]
fn setting_that_says_when_or_never_holds_at_each_way() {
    for way in ways() {
        let helped = |config: Config, age: u64| {
            let mut ledger = (way.needs_help)(config);
            ledger.tell_time(age.cast_signed());
            (way.helps)(&mut ledger)
        };
        let seen = [
            helped(way.on, AFTER - 1),
            helped(way.on, AFTER),
            helped(way.off, 100 * AFTER),
        ];
        assert_eq!(seen, [false, true, false], "{}", way.name);
    }
}
