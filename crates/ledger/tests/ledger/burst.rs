//! Where pods go among equal cards whose memory is used differently.

use gpustow_api::gpunode::PodUse;
use gpustow_ledger::{Config, Ledger};

use crate::build::{at, bound, card, choose, node, pod, report, requesting, used};

/// Three cards of 160 with as much free, of each of which a pod holds 40: it borrows, has used much for a moment, or has
/// used little of late.
fn ledger(reclaim: bool) -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    let peak = PodUse {
        high_mib: Some(38),
        ..used("p1", 5)
    };
    let uses = [used("p0", 55), peak, used("p2", 20)];
    let gpus = uses.into_iter().enumerate().map(|(index, used)| {
        let mut gpu = card(&format!("a-{index}"), 160);
        gpu.pods = vec![used];
        gpu.unmanaged_mib = [0, 15, 15][index];
        gpu
    });
    ledger.apply_gpunode("a", report(&gpus.collect::<Vec<_>>()), at(0));
    for index in 0..3 {
        ledger.apply_pod(bound(&format!("p{index}"), "a", &format!("a-{index}"), 40));
    }
    ledger
}

#[test]
fn who_may_use_more_goes_where_least_was_used_and_others_where_least_is_lent() {
    let goes = |reclaim, bursts| {
        let mut ledger = ledger(reclaim);
        let asks = requesting(pod("new", 60), |request| request.bursts = bursts);
        ledger.apply_pod(asks.clone());
        assert_eq!(choose(&mut ledger, &asks, &["a"], at(1)), ["a"]);
        let assignment = ledger.begin_bind(&asks, "a", at(1)).unwrap();
        assignment.charges[0].0.to_string()
    };
    // 55, 53 and 35 of 160 are likely to be in use, and 15, 0 and 0 are lent.
    assert_eq!(goes(true, true), "a-2");
    assert_eq!(goes(true, false), "a-1");
    assert_eq!(
        goes(false, true),
        "a-0",
        "where no memory is lent use does not count"
    );
}
