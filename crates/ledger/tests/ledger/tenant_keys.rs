//! docs/tenant-keys.md, row by row: no annotation or label that a tenant may write takes memory that other pods hold.

use std::collections::BTreeMap;
use std::time::Duration;

use gpustow_api::config::Action;
use gpustow_api::{PodFacts, names};
use gpustow_ledger::{Config, Ledger, Outcome, TURNS};
use serde_json::json;

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, node, report};

const PAGE: &str = include_str!("../../../../docs/tenant-keys.md");

/// The keys in the tables of the page.
fn keys() -> Vec<&'static str> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let keys = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    keys.collect()
}

/// The values that a tenant may write who wants as much as possible. Admission refuses values that cannot be read.
fn values(key: &str) -> &'static [&'static str] {
    match key {
        names::GPU_COUNT | "gpu-count.gpustow.dev/CONTAINER" => &["1", "2"],
        names::GPU_MEM_PERCENTAGE | "gpu-mem-percentage.gpustow.dev/CONTAINER" => &["40", "100"],
        names::EXCLUSIVE => &["true", "false"],
        names::MEM_LIMIT | "gpu-mem-limit.gpustow.dev/CONTAINER" => &["60", "100", "100000"],
        names::ENFORCE => &["driver", "watch", "none"],
        names::RECLAIM_ACTION => &["event", "none", "evict"],
        names::EVICTABLE | names::ASLEEP => &["true", "false"],
        names::GPU_MODELS | names::NOT_GPU_MODELS => &["*", "NVIDIA*"],
        names::GPU_UUIDS | names::NOT_GPU_UUIDS => &["n-0", "n-1"],
        names::GPU_AFFINITY | names::GPU_ANTI_AFFINITY => &["others", "mine"],
        names::COMPUTE_PERCENT => &["1", "100"],
        names::ISOLATION => &["mig"],
        names::START => &["alone", "beside"],
        names::POLICY => &["tight", "spread", "first-fit"],
        names::MADE_FOR | names::ADOPTED => &["0.0.1", "9.9.9"],
        names::MANAGED_LABEL => &["true", "false"],
        label if names::POD_GROUP_LABELS.contains(&label) => &["others", "mine"],
        _ => &[],
    }
}

fn tenant(key: &str, value: &str, mib: u64) -> Option<PodFacts> {
    let key = key.replace("CONTAINER", "c0");
    let keys = json!({ key: value });
    let pod = json!({
        "metadata": { "namespace": "team", "name": "p", "uid": "p", "annotations": keys, "labels": keys },
        "spec": { "schedulerName": names::SCHEDULER, "containers": [{
            "name": "c0", "resources": { "limits": { names::GPU_MEM: mib.to_string() } },
        }] },
    });
    PodFacts::from_pod(&serde_json::from_value(pod).ok()?, names::GPU_MEM)
}

/// One GPU of which a pod has 60 of 100, and one that a pod has whole; every means is on.
fn taken() -> Ledger {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        action: Action::Evict,
        owners_soften: false,
        preempt_fragmented: true,
        defragment: true,
        reserve_after: Some(Duration::from_secs(5)),
        ..Config::default()
    });
    ledger.apply_node(node("n"));
    ledger.apply_gpunode("n", report(&[card("n-0", 100), card("n-1", 100)]), at(0));
    ledger.apply_pod(bound("others", "n", "n-0", 60));
    ledger.apply_pod(bound("whole", "n", "n-1", 100));
    ledger
}

/// The memory that each pod holds of each GPU.
fn shares(ledger: &Ledger) -> BTreeMap<(String, String), u64> {
    let snapshot = ledger.snapshot(at(0));
    let cards = snapshot.iter().flat_map(|node| &node.cards);
    let shares = cards.flat_map(|card| {
        let share = |pod: &gpustow_ledger::PodShare| {
            ((card.uuid.clone(), pod.uid.to_string()), pod.charged.0)
        };
        card.pods.iter().map(share).collect::<Vec<_>>()
    });
    shares.collect()
}

#[test]
fn no_key_of_a_tenant_takes_what_other_pods_hold() {
    let share = |card: &str, pod: &str| (card.to_owned(), pod.to_owned());
    let mut placed = 0;
    for key in keys() {
        assert!(!values(key).is_empty(), "say what {key} may be");
        for (value, mib) in values(key).iter().flat_map(|it| [(it, 30), (it, 50)]) {
            let mut ledger = taken();
            let pod = tenant(key, value, mib).unwrap();
            ledger.apply_pod(PodFacts {
                waiting: true,
                ..pod.clone()
            });
            if choose(&mut ledger, &pod, &["n"], at(1)) == ["n"] {
                placed += 1;
                assert!(ledger.begin_bind(&pod, "n", at(1)).is_ok());
                ledger.end_bind(&pod, Outcome::Bound, at(1));
            }
            for second in 2..30 {
                for means in TURNS {
                    ledger.look(means, 9, at(second));
                }
                let demands = ledger.demands(ledger.shortages(at(second)), at(second));
                assert!(demands.all.is_empty(), "{key}: {value}: {demands:?}");
            }
            let mut shares = shares(&ledger);
            assert_eq!(shares.remove(&share("n-0", "others")), Some(60), "{key}");
            assert_eq!(shares.remove(&share("n-1", "whole")), Some(100), "{key}");
            let own = shares.remove(&share("n-0", "p")).unwrap_or_default();
            assert!(
                own <= 40 && shares.is_empty(),
                "{key}: {value}: {own} {shares:?}"
            );
        }
    }
    assert!(placed > 20, "{placed}");
}
