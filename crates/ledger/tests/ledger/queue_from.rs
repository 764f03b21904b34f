//! Which new pods are queued because of pods that wait.

use crate::build::{asking, at, bound, choose, ledger};

/// Containers of one pod need different amounts: a pod as small as the smallest could take its room.
#[test]
fn each_pod_that_could_take_the_room_of_a_container_that_waits_is_queued() {
    let sizes = [(1, 20), (1, 60), (2, 20), (2, 60)];
    for one in sizes {
        for other in sizes {
            let mut ledger = ledger(&[("n", &[100; 4])]);
            for index in 0..4 {
                let card = format!("n-{index}");
                ledger.apply_pod(bound(&format!("on-{card}"), "n", &card, 90));
            }
            let pod = asking("p", &[one, other]);
            ledger.apply_pod(pod.clone());
            assert!(choose(&mut ledger, &pod, &["n"], at(1)).is_empty());
            let from = ledger.queue_from();
            for (gpus, mib) in [one, other] {
                let queues = from.iter().any(|it| it.queues(0, Some((mib, gpus.into()))));
                assert!(queues, "{one:?} {other:?}: {from:?}");
            }
        }
    }
}
