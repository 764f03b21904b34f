//! Looks at every node for queued pods: how long they keep a pod outside the queue waiting.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, node, pod, report, requesting, used};

fn with_cpu(pod: PodFacts, cpu_milli: u64) -> PodFacts {
    requesting(pod, |request| request.cpu_milli = cpu_milli)
}

/// Nodes with one GPU of 100 MiB, of which pods hold so much, and all CPU.
fn taken(nodes: usize, mib: u64) -> (Ledger, Vec<String>) {
    let mut ledger = Ledger::new(Config {
        queue: true,
        ..Config::default()
    });
    let names: Vec<String> = (0..nodes).map(|index| format!("n{index:04}")).collect();
    for name in &names {
        ledger.apply_node(node(name));
        let gpu = format!("{name}-0");
        ledger.apply_gpunode(name, report(&[card(&gpu, 100)]), at(0));
        let busy = bound(&format!("on-{name}"), name, &gpu, mib);
        ledger.apply_pod(with_cpu(busy, 64_000));
    }
    (ledger, names)
}

/// So many queued pods of 60 MiB, each of another kind.
fn queue(ledger: &mut Ledger, kinds: u64) {
    for number in 1..=kinds {
        let pod = with_cpu(pod(&format!("p{number}"), 60), number);
        ledger.apply_pod(PodFacts {
            queued: true,
            ..pod
        });
    }
}

/// Does a pod get room that is queued nowhere, and comes after the others?
fn is_placed(ledger: &mut Ledger, names: &[String]) -> bool {
    let beside = PodFacts {
        created: 1,
        ..pod("beside", 30)
    };
    let candidates: Vec<&str> = names.iter().map(String::as_str).collect();
    choose(ledger, &beside, &candidates, at(1)).len() == 1
}

#[test]
fn looks_for_queued_pods_go_on_until_a_pod_beside_the_queue_has_its_room() {
    // Memory would suffice for them, CPU does not: a look for all of them takes more than one call.
    let (mut ledger, names) = taken(200, 30);
    queue(&mut ledger, 300);
    assert!(ledger.wake(100, at(1)).is_empty());
    assert!(ledger.wakes_on(), "the looks go on");
    let calls = (1..100).find(|_| {
        assert!(ledger.wake(100, at(1)).is_empty());
        !ledger.wakes_on()
    });
    assert!(calls.is_some_and(|calls| calls <= 20), "{calls:?}");
    assert!(is_placed(&mut ledger, &names));
}

#[test]
fn look_for_a_queued_pod_copies_no_list_of_nodes() {
    let (mut ledger, _) = taken(5000, 30);
    queue(&mut ledger, 1);
    let views = ledger.snapshot(at(1)).into_iter();
    let names: Vec<Arc<str>> = views.map(|view| view.name).collect();
    let held = || names.iter().map(Arc::strong_count).sum::<usize>();
    let before = held();
    assert!(ledger.wake(100, at(1)).is_empty());
    assert!(ledger.wakes_on(), "the look goes on");
    assert!(held() <= before + 8, "{before} and {}", held());
}

#[test]
fn many_kinds_that_want_more_than_is_free_keep_no_pod_beside_the_queue_waiting() {
    let (mut ledger, names) = taken(1000, 60);
    queue(&mut ledger, 1000);
    let calls = (1..100).find(|_| {
        assert!(ledger.wake(100, at(1)).is_empty());
        !ledger.wakes_on()
    });
    assert!(calls.is_some_and(|calls| calls <= 5), "{calls:?}");
    assert!(is_placed(&mut ledger, &names));
}

#[test]
fn room_that_is_kept_for_a_pod_on_one_node_lets_it_go_before_no_other_elsewhere() {
    let (mut ledger, names) = taken(2, 100);
    let [a, b] = [0, 1].map(|index| names[index].clone());
    let queued = |uid: &str, mib, created| PodFacts {
        queued: true,
        created,
        ..pod(uid, mib)
    };
    ledger.delete_pod(&format!("on-{a}"));
    let first = queued("first", 60, 1);
    ledger.apply_pod(first.clone());
    let ungated = ledger.wake(10, at(1)).pop();
    assert_eq!(
        ungated.map(|pod| pod.uid.to_string()).as_deref(),
        Some("first")
    );
    let first = PodFacts {
        queued: false,
        ..first
    };
    ledger.apply_pod(first.clone());
    // One whose turn is before wants a whole GPU, and the other node comes free.
    ledger.apply_pod(queued("older", 100, 0));
    ledger.delete_pod(&format!("on-{b}"));
    assert!(choose(&mut ledger, &first, &[&b], at(2)).is_empty());
    let ungated = ledger.wake(10, at(2)).pop();
    assert_eq!(
        ungated.map(|pod| pod.uid.to_string()).as_deref(),
        Some("older")
    );
}

#[test]
fn queued_pod_of_higher_priority_goes_before_one_for_which_memory_was_reclaimed() {
    let mut ledger = Ledger::new(Config {
        queue: true,
        reclaim: true,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    ledger.apply_pod(bound("greedy", "a", "a-0", 10));
    let says = |ledger: &mut Ledger, mib, second| {
        let mut gpu = card("a-0", 100);
        gpu.pods = vec![used("greedy", mib)];
        ledger.apply_gpunode("a", report(&[gpu]), at(second));
    };
    says(&mut ledger, 100, 0);
    let low = pod("low", 60);
    ledger.apply_pod(low.clone());
    assert!(choose(&mut ledger, &low, &["a"], at(0)).is_empty());
    assert_eq!(ledger.reclaims(at(0)).len(), 1);
    ledger.apply_pod(PodFacts {
        queued: true,
        priority: 1,
        ..pod("high", 60)
    });
    says(&mut ledger, 10, 1);
    assert!(choose(&mut ledger, &low, &["a"], at(1)).is_empty());
    let ungated = ledger.wake(10, at(1)).pop();
    assert_eq!(
        ungated.map(|pod| pod.uid.to_string()).as_deref(),
        Some("high")
    );
}
