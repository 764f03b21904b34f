//! Which pods count in the mix that `tight` learns from.

use std::sync::Arc;

use gpustow_api::PodFacts;

use crate::build::{asking, at, bound, choose, ledger, pod, requesting};

fn with_cpu(pod: PodFacts, cpu_milli: u64) -> PodFacts {
    requesting(pod, |request| request.cpu_milli = cpu_milli)
}

/// Where pods of many sizes would go one after another on cards that are partly taken, while 300 pods
/// like `extra` wait.
fn choices(extra: Option<&PodFacts>) -> Vec<String> {
    let names: Vec<String> = (0..12).map(|at| format!("node-{at:02}")).collect();
    let nodes: Vec<(&str, &[u64])> = names
        .iter()
        .map(|name| (name.as_str(), &[1000_u64, 1000][..]))
        .collect();
    let mut ledger = ledger(&nodes);
    for (at, name) in names.iter().enumerate() {
        let holds = bound(
            &format!("b{at}"),
            name,
            &format!("{name}-0"),
            60 * at as u64 + 40,
        );
        ledger.apply_pod(with_cpu(holds, 1000 * at as u64));
    }
    for copy in extra
        .iter()
        .flat_map(|pod| (0..300).map(move |at| (pod, at)))
    {
        let (pod, at) = copy;
        ledger.apply_pod(PodFacts {
            uid: format!("extra-{at}").into(),
            ..(**pod).clone()
        });
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut chosen = Vec::new();
    for step in 0..24_u64 {
        let probe = with_cpu(pod(&format!("p{step}"), 150 + 70 * (step % 8)), 500 * step);
        ledger.apply_pod(probe.clone());
        ledger.learn();
        chosen.extend(
            choose(&mut ledger, &probe, &names, at(0))
                .into_iter()
                .map(str::to_owned),
        );
    }
    chosen
}

#[test]
fn what_no_node_could_ever_hold_does_not_count() {
    let quiet = choices(None);
    for impossible in [
        asking("many", &[(3, 450)]),
        pod("large", 1001),
        with_cpu(pod("cpu", 450), 64_001),
        PodFacts {
            models: Arc::from([Box::from("no-such-model")]),
            ..pod("bound", 450)
        },
    ] {
        assert_eq!(choices(Some(&impossible)), quiet, "{}", impossible.uid);
    }
    // The same sizes from pods that could run are heeded.
    let possible = with_cpu(pod("possible", 450), 30_000);
    assert_ne!(choices(Some(&possible)), quiet);
}

#[test]
fn gated_pods_do_not_count() {
    let waits = with_cpu(pod("waits", 450), 30_000);
    let gated = PodFacts {
        gated: true,
        ..waits.clone()
    };
    let quiet = choices(None);
    assert_ne!(choices(Some(&waits)), quiet);
    assert_eq!(choices(Some(&gated)), quiet);
}
