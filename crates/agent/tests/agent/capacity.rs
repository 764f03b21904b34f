//! The node's capacity against the components that subtract from it: kube-scheduler, and a kubelet that starts.

use std::time::Duration;

use gpustow_agent::capacity::{Capacity, Cards, capacity};
use gpustow_agent::pods::{NodePod, NodePods};
use gpustow_api::names;
use gpustow_pack::Mib;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use serde_json::json;

/// A pod, as far as the capacity goes.
#[derive(Clone, Debug, Default)]
struct Asks {
    /// MiB that kube-scheduler and kubelet count.
    requested: u64,
    /// Its assignment: cards and the MiB on each.
    assigned: Vec<(&'static str, u64)>,
    accepted: bool,
    ended: bool,
}

impl Asks {
    fn assigned(uuid: &'static str, mib: u64) -> Self {
        Self {
            requested: mib,
            assigned: vec![(uuid, mib)],
            ..Self::default()
        }
    }

    fn stray(mib: u64) -> Self {
        Self {
            requested: mib,
            ..Self::default()
        }
    }

    fn accepted(self) -> Self {
        Self {
            accepted: true,
            ..self
        }
    }

    fn ended(self) -> Self {
        Self {
            ended: true,
            ..self
        }
    }
}

fn pods(list: &[Asks]) -> NodePods {
    let pod = |(number, asks): (usize, &Asks)| {
        let mut pod = crate::support::pod(&asks.assigned);
        pod.metadata.uid = Some(format!("uid-{number}"));
        let container = &mut pod.spec.as_mut().unwrap().containers[0];
        let amounts = json!({ names::GPU_MEM: asks.requested.to_string() });
        let resources = json!({ "requests": amounts, "limits": amounts });
        container.resources = serde_json::from_value(resources).ok();
        let phase = if asks.ended { "Failed" } else { "Running" };
        let started = asks.accepted.then_some("2026-11-21T00:00:00Z");
        let status = json!({ "phase": phase, "startTime": started });
        pod.status = serde_json::from_value(status).ok();
        NodePod::from_pod(&pod, names::GPU_MEM).unwrap()
    };
    NodePods::new(list.iter().enumerate().map(pod))
}

fn cards(list: &[(&str, u64)]) -> Cards {
    let cards = list.iter().map(|&(uuid, mib)| (uuid.to_owned(), Mib(mib)));
    cards.collect()
}

#[test]
fn it_is_what_present_cards_hold_and_what_others_subtract_beside_them() {
    let cards = cards(&[("a", 100), ("b", 100)]);
    let huge = 1_000_000_000_000_000;
    let cases = [
        (vec![], 200, "the cards"),
        (vec![Asks::assigned("a", 60)], 200, "on a card"),
        (
            vec![Asks::assigned("gone", 100)],
            300,
            "a vanished card takes no room of the others, from the Binding on",
        ),
        (
            vec![Asks::assigned("gone", 100).ended()],
            200,
            "it has ended",
        ),
        (vec![Asks::stray(98)], 200, "not accepted: counts nothing"),
        (vec![Asks::stray(98).accepted()], 298, "accepted"),
        (vec![Asks::stray(98).accepted().ended()], 200, "ended"),
        (vec![Asks::stray(huge)], 200, "no pod can inflate it"),
        (
            vec![Asks::assigned("a", 60), Asks::assigned("a", 60)],
            220,
            "a card that has become smaller than what is bound there",
        ),
    ];
    for (list, expected, why) in cases {
        assert_eq!(capacity(&cards, &pods(&list)), Mib(expected), "{why}");
    }
    // Charged for whole cards, and asked for at least 10 MiB each.
    let whole = Asks {
        requested: 20,
        assigned: vec![("gone", 100), ("lost", 100)],
        ..Asks::default()
    };
    assert_eq!(capacity(&cards, &pods(&[whole])), Mib(240));
}

#[test]
fn it_grows_at_once_and_shrinks_when_cards_have_been_gone_for_a_while() {
    let mut it = Capacity::new(Duration::from_secs(60), None);
    let (two, one, none) = (
        cards(&[("a", 100), ("b", 100)]),
        cards(&[("a", 100)]),
        Cards::new(),
    );
    let stray = [Asks::stray(30).accepted()];
    let on_b = [Asks::assigned("b", 70)];
    // Second, cards, pods, present, written.
    type Step<'a> = (
        u64,
        &'a Cards,
        &'a [Asks],
        Option<u64>,
        Option<u64>,
        &'a str,
    );
    let steps: [Step<'_>; 16] = [
        (
            0,
            &none,
            &[],
            None,
            None,
            "a node without cards is left alone",
        ),
        (0, &two, &[], None, Some(200), "new cards"),
        (1, &two, &[], Some(200), None, "nothing to do"),
        (2, &two, &[], Some(0), Some(200), "the kubelet zeroed it"),
        (
            3,
            &two,
            &stray,
            Some(200),
            Some(230),
            "a kubelet took it in",
        ),
        (
            4,
            &two,
            &[],
            Some(230),
            Some(200),
            "it has ended: no room is left that no pod has",
        ),
        (5, &one, &[], Some(200), None, "a card less, but only now"),
        (64, &one, &[], Some(200), None, "not yet a minute"),
        (
            64,
            &two,
            &[],
            Some(200),
            None,
            "it is back: the minute starts again",
        ),
        (65, &one, &on_b, Some(200), None, "less again"),
        (124, &one, &on_b, Some(200), None, "not yet"),
        (
            125,
            &one,
            &on_b,
            Some(200),
            Some(170),
            "a minute: but for what is bound there",
        ),
        (126, &one, &[], Some(170), Some(100), "it has ended"),
        (
            127,
            &none,
            &stray,
            Some(100),
            Some(130),
            "all cards gone, but only now",
        ),
        (187, &none, &stray, Some(130), Some(30), "for a minute"),
        (188, &one, &stray, Some(30), Some(130), "one is back"),
    ];
    for (second, cards, list, present, written, why) in steps {
        let now = Duration::from_secs(second);
        let decided = it.decide(cards, &pods(list), present.map(Mib), now);
        assert_eq!(decided, written.map(Mib), "second {second}: {why}");
    }
}

#[test]
fn a_restarted_agent_waits_as_long() {
    let (two, one) = (cards(&[("a", 100), ("b", 100)]), cards(&[("a", 100)]));
    let at = Duration::from_secs;
    for before in [Some(two), None] {
        let mut it = Capacity::new(at(60), before);
        assert_eq!(it.decide(&one, &pods(&[]), Some(Mib(200)), at(0)), None);
        assert_eq!(it.decide(&one, &pods(&[]), Some(Mib(200)), at(59)), None);
        let written = it.decide(&one, &pods(&[]), Some(Mib(200)), at(60));
        assert_eq!(written, Some(Mib(100)));
    }
}

/// A pod that the watch has yet to show is in the list that the agent requests before it writes less.
#[test]
fn it_does_not_shrink_below_a_bind_under_way() {
    let mut it = Capacity::new(Duration::ZERO, Some(cards(&[("a", 100), ("b", 100)])));
    let one = cards(&[("a", 100)]);
    let seen = pods(&[Asks::assigned("a", 100)]);
    let written = it.decide(&one, &seen, Some(Mib(200)), Duration::ZERO);
    assert_eq!(written, Some(Mib(100)));
    let listed = pods(&[Asks::assigned("a", 100), Asks::assigned("b", 50)]);
    assert_eq!(it.now(&listed), Some(Mib(150)));
}

const UUIDS: [&str; 3] = ["a", "b", "c"];

fn asks() -> impl Strategy<Value = Asks> {
    let assigned = vec((0..3usize, 1..60u64), 0..3);
    let strange = option::weighted(0.1, any::<u64>());
    let flags = (any::<bool>(), any::<bool>());
    (assigned, 1..60u64, strange, flags).prop_map(|(assigned, stray, strange, flags)| {
        let mut charges = std::collections::BTreeMap::new();
        for (card, mib) in assigned {
            *charges.entry(UUIDS[card]).or_default() += mib;
        }
        let sum: u64 = charges.values().sum();
        let requested = if sum == 0 { stray } else { sum };
        Asks {
            // An amount that no kubelet would accept.
            requested: strange.filter(|_| sum == 0).unwrap_or(requested),
            assigned: charges.into_iter().collect(),
            accepted: flags.0 && strange.is_none(),
            ended: flags.1,
        }
    })
}

fn some_cards() -> impl Strategy<Value = Cards> {
    vec(option::of(1..100u64), 3).prop_map(|sizes| {
        let cards = UUIDS.into_iter().zip(sizes);
        cards
            .filter_map(|(uuid, size)| Some((uuid.to_owned(), Mib(size?))))
            .collect()
    })
}

fn counted(list: &[Asks]) -> impl Iterator<Item = &Asks> {
    list.iter().filter(|asks| !asks.ended)
}

proptest! {
    /// Kube-scheduler subtracts the requests of bound pods. The rest is the room of the present cards, whatever has
    /// vanished and whichever pods came without an assignment.
    #[test]
    fn what_kube_scheduler_sees_free_is_free_on_present_cards(
        cards in some_cards(), list in vec(asks(), 0..8),
    ) {
        let free: u64 = cards.iter().map(|(uuid, size)| {
            let held = counted(&list).flat_map(|asks| &asks.assigned);
            let held: u64 = held.filter(|(card, _)| card == uuid).map(|(_, mib)| mib).sum();
            size.0.saturating_sub(held)
        }).sum();
        // A kubelet takes in no pod that is larger than its node.
        let Mib(capacity) = capacity(&cards, &pods(&list));
        let hardware = capacity.saturating_sub(counted(&list).filter(|asks| asks.accepted && asks.assigned.is_empty()).map(|asks| asks.requested).sum());
        prop_assume!(counted(&list).all(|asks| !asks.accepted || !asks.assigned.is_empty() || asks.requested <= hardware));
        let taken: u64 = counted(&list)
            .filter(|asks| asks.accepted || !asks.assigned.is_empty())
            .map(|asks| asks.requested)
            .sum();
        prop_assert_eq!(capacity - taken, free);
    }

    /// However cards and pods come and go, the node reports at least the amount that its kubelet has accepted. A pod
    /// that it has not accepted does not raise the reported amount.
    #[test]
    fn it_never_says_less_than_a_kubelet_has_accepted(
        steps in vec((0..100u64, some_cards(), vec(asks(), 0..6)), 1..30),
        present in option::of(0..200u64),
    ) {
        let mut it = Capacity::new(Duration::from_secs(60), None);
        let (mut present, mut second) = (present, 0);
        for (later, cards, list) in steps {
            second += later;
            let now = Duration::from_secs(second);
            let written = it.decide(&cards, &pods(&list), present.map(Mib), now);
            present = written.map(|mib| mib.0).or(present);
            let accepted: u64 = counted(&list)
                .filter(|asks| asks.accepted)
                .map(|asks| asks.requested)
                .sum();
            prop_assert!(present.unwrap_or(0) >= accepted);
            prop_assert!(present.unwrap_or(0) <= 200 + 300 + 6 * 2 * 180);
        }
    }
}
