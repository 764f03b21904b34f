//! Pods that state which GPUs they may get, and with which pods they share one.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_ledger::{Ledger, Reason};
use gpustow_pack::{Refusal, Rules};

use crate::build::{ask, at, bound, card, choose, ledger, pod, report, requesting};
use crate::model::Random;

pub(crate) fn with(pod: PodFacts, rules: Rules) -> PodFacts {
    requesting(pod, |request| request.rules = Some(Arc::new(rules)))
}

fn together(uid: &str, mib: u64) -> PodFacts {
    let affinity = Some("default/x".into());
    let rules = Rules {
        affinity,
        ..Rules::default()
    };
    with(pod(uid, mib), rules)
}

fn apart(uid: &str, mib: u64) -> PodFacts {
    let anti_affinity = Some("default/x".into());
    let rules = Rules {
        anti_affinity,
        ..Rules::default()
    };
    with(pod(uid, mib), rules)
}

/// Where filter puts a pod: the node and its GPUs.
fn put(ledger: &mut Ledger, pod: &PodFacts) -> Result<(String, Vec<String>), Reason> {
    ledger.apply_pod(pod.clone());
    let found = ledger.filter(&ask(pod), &["a", "b"], at(1));
    let Some(&node) = found.nodes.first() else {
        return Err(found.refused[0].1);
    };
    let begun = ledger.begin_bind(pod, node, at(1));
    let assignment = begun.map_err(|_| Reason::BindUnderWay)?;
    ledger.end_bind(pod, gpustow_ledger::Outcome::Bound, at(1));
    let cards = assignment.charges.iter().map(|(uuid, _)| uuid.to_string());
    Ok((node.to_owned(), cards.collect()))
}

#[test]
fn models_and_uuids_choose_the_gpus_of_a_mixed_node() {
    let mut ledger = ledger(&[("a", &[])]);
    let of = |uuid: &str, model: &str| Gpu {
        model: model.into(),
        ..card(uuid, 100)
    };
    let cards = [
        of("a-0", "NVIDIA A100"),
        of("a-1", "NVIDIA H100"),
        of("a-2", "NVIDIA H100"),
    ];
    ledger.apply_gpunode("a", report(&cards), at(0));
    let list = |text: &str| vec![Box::from(text)];
    let mut ends = |uid: &str, rules: Rules| {
        let pod = with(pod(uid, 10), rules);
        let found = put(&mut ledger, &pod).map(|(_, cards)| cards.join(","));
        ledger.delete_pod(&pod.uid);
        found
    };
    let models = Rules {
        models: list("*h100*"),
        ..Rules::default()
    };
    assert_eq!(ends("1", models).as_deref(), Ok("a-1"));
    let not_models = Rules {
        not_models: list("*A100"),
        ..Rules::default()
    };
    assert_eq!(ends("2", not_models).as_deref(), Ok("a-1"));
    let uuids = Rules {
        uuids: list("a-2"),
        ..Rules::default()
    };
    assert_eq!(ends("3", uuids).as_deref(), Ok("a-2"));
    let not_uuids = Rules {
        not_uuids: list("a-0"),
        ..Rules::default()
    };
    assert_eq!(ends("4", not_uuids).as_deref(), Ok("a-1"));
    let none = Rules {
        models: list("*B200*"),
        ..Rules::default()
    };
    assert_eq!(ends("5", none), Err(Reason::Fit(Refusal::Unselected)));
}

#[test]
fn a_pod_is_told_and_refused_for_the_same_reason() {
    let mut ledger = ledger(&[("a", &[100])]);
    let uuids = vec!["GPU-of-another-node".into()];
    let picky = with(
        pod("p", 10),
        Rules {
            uuids,
            ..Rules::default()
        },
    );
    let told = ledger.explain(&picky, "a", at(1)).err();
    assert_eq!(told, Some(Reason::Fit(Refusal::Unselected)));
    let refused = ledger.filter(&ask(&picky), &["a"], at(1)).refused;
    assert_eq!(refused, [("a", Reason::Fit(Refusal::Unselected))]);
}

#[test]
fn pods_of_an_affinity_group_share_their_gpu() {
    let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[100])]);
    assert!(put(&mut ledger, &pod("other", 60)).is_ok());
    let first = put(&mut ledger, &together("1", 50)).unwrap();
    assert_eq!(put(&mut ledger, &together("2", 40)).as_ref(), Ok(&first));
    let full = put(&mut ledger, &together("3", 40));
    assert!(
        matches!(
            full,
            Err(Reason::Fit(Refusal::Neighbours | Refusal::NoRoom))
        ),
        "{full:?}"
    );
    // Once no pod of the group is left, any GPU will do.
    ledger.delete_pod("1");
    ledger.delete_pod("2");
    assert!(put(&mut ledger, &together("3", 100)).is_ok());
}

#[test]
fn pods_of_an_anti_affinity_group_share_no_gpu_and_wait_for_each_other() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    let first = put(&mut ledger, &apart("1", 10)).unwrap();
    let second = put(&mut ledger, &apart("2", 10)).unwrap();
    assert_ne!(first, second);
    let third = apart("3", 10);
    assert_eq!(
        put(&mut ledger, &third),
        Err(Reason::Fit(Refusal::Neighbours))
    );
    assert!(ledger.wake(9, at(2)).is_empty());
    ledger.delete_pod("1");
    assert_eq!(ledger.wake(9, at(3)).len(), 1);
    assert_eq!(put(&mut ledger, &third), Ok(first));
}

#[test]
fn memory_that_is_only_assumed_counts_for_a_group() {
    let mut ledger = ledger(&[("a", &[100])]);
    assert_eq!(choose(&mut ledger, &apart("1", 10), &["a"], at(1)), ["a"]);
    let second = apart("2", 10);
    let refused = ledger.filter(&ask(&second), &["a"], at(1)).refused;
    assert_eq!(refused, [("a", Reason::Fit(Refusal::Neighbours))]);
}

#[test]
fn preemption_counts_that_a_neighbour_is_gone() {
    let mut ledger = ledger(&[("a", &[100])]);
    let rules = Rules {
        anti_affinity: Some("default/x".into()),
        ..Rules::default()
    };
    ledger.apply_pod(with(bound("old", "a", "a-0", 10), rules));
    let high = PodFacts {
        priority: 10,
        ..apart("high", 10)
    };
    let budget = &mut ledger.budget();
    let victims = ledger.preempt(&high, "a", &[], budget, at(1));
    assert_eq!(victims.unwrap().uids, ["old".into()]);
}

/// Whatever comes and goes: no GPU is over-committed, none has two pods of an anti-affinity group, and each affinity group has
/// one GPU, since every pod here has one.
#[test]
fn no_history_breaks_a_rule() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[100])]);
        let mut there: BTreeMap<u64, (u64, u64, String)> = BTreeMap::new();
        for _ in 0..60 {
            let (index, kind, mib) = (random.below(12), random.below(5), 1 + random.below(60));
            if there.remove(&index).is_some() {
                ledger.delete_pod(&format!("p{index}"));
                continue;
            }
            let pod = with(pod(&format!("p{index}"), mib), rules_of(kind));
            match put(&mut ledger, &pod) {
                Ok((_, cards)) => drop(there.insert(index, (kind, mib, cards.concat()))),
                Err(_) => ledger.delete_pod(&pod.uid),
            }
            check(&there);
        }
    }
}

fn rules_of(kind: u64) -> Rules {
    let group = |name: &str| Some(Arc::from(name));
    let mut rules = Rules::default();
    match kind {
        0 => rules.affinity = group("x"),
        1 => rules.affinity = group("y"),
        2 => rules.anti_affinity = group("x"),
        3 => (rules.affinity, rules.anti_affinity) = (group("x"), group("z")),
        _ => rules.not_uuids = vec!["a-1".into()],
    }
    rules
}

fn check(there: &BTreeMap<u64, (u64, u64, String)>) {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (kind, mib, card) in there.values() {
        *sums.entry(card).or_default() += mib;
        assert!(*kind != 4 || card != "a-1");
    }
    assert!(sums.values().all(|sum| *sum <= 100), "{sums:?}");
    let of = |kinds: &[u64]| -> Vec<&str> {
        let some = there.values().filter(|(kind, ..)| kinds.contains(kind));
        some.map(|(.., card)| &**card).collect()
    };
    for group in [of(&[0, 3]), of(&[1])] {
        assert!(group.windows(2).all(|pair| pair[0] == pair[1]), "{group:?}");
    }
    for mut group in [of(&[2]), of(&[3])] {
        let all = group.len();
        group.sort_unstable();
        group.dedup();
        assert_eq!(all, group.len());
    }
}
