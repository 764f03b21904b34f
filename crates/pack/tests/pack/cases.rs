//! Cases that a reader can check by hand, and requests that no pod should have.

use gpustow_pack::{
    Card, Claim, ClaimKind, Compute, Lending, Mib, ModelId, NodeGpus, PolicyKind, Refusal, Request,
    Starts, Tight, fit,
    policy::{Binpack, FirstFit},
};

/// A node of `(capacity, free)` cards.
fn node(cards: &[(u64, u64)]) -> NodeGpus {
    let card = |&(capacity, free): &(u64, u64)| Card {
        capacity: Mib(capacity),
        free: Mib(free),
        model: ModelId(0),
        usable: true,
        limit: Mib::ZERO,
        lending: Lending::default(),
        compute: Compute::default(),
        slices: None,
        starts: Starts::None,
    };
    NodeGpus {
        cards: cards.iter().map(card).collect(),
        ..NodeGpus::default()
    }
}

fn main(gpus: u32, mib: u64) -> Claim {
    Claim::new(ClaimKind::Main, gpus, Mib(mib))
}

fn init(mib: u64) -> Claim {
    Claim::new(ClaimKind::Init, 1, Mib(mib))
}

fn pod(claims: &[Claim]) -> Request {
    Request {
        claims: claims.to_vec(),
        ..Request::default()
    }
}

/// `cards` of every claim, or the refusal.
fn check(
    node: &NodeGpus,
    request: &Request,
    policy: PolicyKind,
    expected: Result<&[&[usize]], Refusal>,
) {
    let cards =
        fit(node, request, policy.with(&Tight::default())).map(|choice| choice.placement.cards);
    assert_eq!(
        cards,
        expected.map(|cards| cards.iter().map(|c| c.to_vec()).collect())
    );
}

#[test]
fn each_policy_has_its_own_card() {
    let node = node(&[(80, 60), (80, 80), (80, 20), (40, 15)]);
    let pod = pod(&[main(1, 10)]);
    check(&node, &pod, PolicyKind::FirstFit, Ok(&[&[0]]));
    check(&node, &pod, PolicyKind::Binpack, Ok(&[&[3]]));
    check(&node, &pod, PolicyKind::Spread, Ok(&[&[1]]));
}

#[test]
fn containers_share_a_card_where_they_fit() {
    let two = pod(&[main(1, 30), main(1, 30)]);
    check(
        &node(&[(40, 40), (80, 80), (40, 40)]),
        &two,
        PolicyKind::Binpack,
        Ok(&[&[1], &[1]]),
    );
    check(
        &node(&[(40, 40), (40, 40)]),
        &two,
        PolicyKind::Binpack,
        Ok(&[&[0], &[1]]),
    );
}

#[test]
fn an_init_container_hands_its_memory_on() {
    let node = node(&[(40, 40)]);
    let placed = fit(&node, &pod(&[init(40), main(1, 25)]), &Binpack).unwrap();
    assert_eq!(placed.placement.charges, [(0, Mib(40))]);
    let sidecar = Claim {
        kind: ClaimKind::Sidecar,
        ..init(10)
    };
    check(
        &node,
        &pod(&[init(40), sidecar, main(1, 30)]),
        PolicyKind::Binpack,
        Ok(&[&[0], &[0], &[0]]),
    );
    check(
        &node,
        &pod(&[sidecar, init(31)]),
        PolicyKind::Binpack,
        Err(Refusal::TooLarge),
    );
}

#[test]
fn an_exclusive_pod_is_charged_whole_free_cards() {
    let pod = Request {
        exclusive: true,
        ..pod(&[main(1, 30)])
    };
    let node = node(&[(80, 79), (80, 80), (40, 40)]);
    let placed = fit(&node, &pod, &FirstFit).unwrap();
    assert_eq!(placed.placement.charges, [(1, Mib(80))]);
}

#[test]
fn percentage_is_of_the_card_that_the_pod_gets() {
    let part = |percentage, mib| Claim {
        percentage,
        ..main(1, mib)
    };
    let node = node(&[(80, 30), (40, 40)]);
    let charges = |claims: &[Claim]| {
        fit(&node, &pod(claims), &FirstFit).map(|choice| choice.placement.charges)
    };
    assert_eq!(charges(&[part(25, 1)]), Ok(vec![(0, Mib(20))]));
    assert_eq!(charges(&[part(50, 1)]), Ok(vec![(1, Mib(20))]));
    // The amount is the least.
    assert_eq!(charges(&[part(25, 30)]), Ok(vec![(0, Mib(30))]));
    let two = Claim {
        gpus: 2,
        ..part(25, 1)
    };
    assert_eq!(charges(&[two]), Ok(vec![(0, Mib(20)), (1, Mib(10))]));
    let third = part(33, 1);
    assert_eq!(charges(&[third; 3]), Ok(vec![(1, Mib(39))]));
    assert_eq!(charges(&[part(100, 1), part(50, 1)]), Err(Refusal::NoRoom));
}

#[test]
fn refusals_name_the_most_lasting_reason() {
    let mut node = node(&[(80, 10), (40, 40)]);
    let binpack = PolicyKind::Binpack;
    check(
        &node,
        &pod(&[main(3, 1)]),
        binpack,
        Err(Refusal::TooFewCards),
    );
    check(&node, &pod(&[main(1, 81)]), binpack, Err(Refusal::TooLarge));
    check(&node, &pod(&[main(1, 41)]), binpack, Err(Refusal::NoRoom));
    let exclusive = Request {
        exclusive: true,
        ..pod(&[main(1, 41)])
    };
    check(&node, &exclusive, binpack, Err(Refusal::NoWholeCard));
    node.cards[1].usable = false;
    check(
        &node,
        &pod(&[main(1, 40)]),
        binpack,
        Err(Refusal::Unhealthy),
    );
}

#[test]
fn between_nodes_binpack_likes_the_fuller_and_spread_the_emptier() {
    let cost = |node: &NodeGpus, policy| {
        fit(
            node,
            &pod(&[main(1, 10)]),
            PolicyKind::with(policy, &Tight::default()),
        )
        .unwrap()
        .cost
    };
    let (fuller, emptier) = (node(&[(40, 20)]), node(&[(40, 40)]));
    assert!(cost(&fuller, PolicyKind::Binpack) < cost(&emptier, PolicyKind::Binpack));
    assert!(cost(&emptier, PolicyKind::Spread) < cost(&fuller, PolicyKind::Spread));
    let (beside_full, beside_empty) = (node(&[(40, 20), (40, 0)]), node(&[(40, 20), (40, 20)]));
    assert!(cost(&beside_full, PolicyKind::Binpack) < cost(&beside_empty, PolicyKind::Binpack));
    assert!(cost(&beside_empty, PolicyKind::Spread) < cost(&beside_full, PolicyKind::Spread));
}

#[test]
fn absurd_amounts_are_refused_without_overflow() {
    let node = node(&[(u64::MAX, u64::MAX), (80, 80), (0, 0)]);
    for policy in PolicyKind::ALL {
        check(
            &node,
            &pod(&[main(u32::MAX, 1)]),
            policy,
            Err(Refusal::TooFewCards),
        );
        check(
            &node,
            &pod(&[main(2, u64::MAX)]),
            policy,
            Err(Refusal::TooLarge),
        );
        check(&node, &pod(&[main(1, u64::MAX)]), policy, Ok(&[&[0]]));
    }
    check(
        &NodeGpus::default(),
        &pod(&[main(1, 1)]),
        PolicyKind::Binpack,
        Err(Refusal::TooFewCards),
    );
    check(
        &NodeGpus::default(),
        &pod(&[]),
        PolicyKind::Binpack,
        Ok(&[]),
    );
}

/// Six containers on sixteen cards of sixteen sizes that would hold them, were they one.
#[test]
fn the_search_gives_up_beyond_its_bound() {
    let cards: Vec<_> = (0..16).map(|card| (100 + card, 100 + card)).collect();
    let hopeless = pod(&[main(8, 34); 6]);
    check(
        &node(&cards),
        &hopeless,
        PolicyKind::Binpack,
        Err(Refusal::TooComplex),
    );
    let easy = pod(&[main(8, 10); 10]);
    assert!(fit(&node(&cards), &easy, &Binpack).is_ok());
}

/// The node is searched quickly, as most of its cards are full; were they empty, the search would
/// be given up. That is not a proof that the pod is too large.
#[test]
fn a_reason_that_cannot_be_found_is_not_invented() {
    let cards: Vec<_> = (0..16).map(|card| (100 + card, 0)).collect();
    let hopeless = pod(&[main(8, 34); 6]);
    check(
        &node(&cards),
        &hopeless,
        PolicyKind::Binpack,
        Err(Refusal::TooComplex),
    );
}

#[test]
fn where_the_search_gives_up_large_containers_first_may_do() {
    // In the order of the pod the small ones take the room of the large ones.
    let cards: Vec<_> = (0..12).map(|card| (100 + card, 100 + card)).collect();
    let small = [
        main(1, 11),
        main(1, 13),
        main(1, 17),
        main(1, 19),
        main(1, 23),
    ];
    let large = [main(6, 98), main(6, 62)];
    let request = pod(&[small.as_slice(), &large].concat());
    let placement = fit(&node(&cards), &request, &Binpack)
        .expect("it fits")
        .placement;
    assert!(
        placement
            .charges
            .iter()
            .all(|&(card, mib)| mib <= Mib(100 + card as u64))
    );
}

#[test]
fn policies_are_found_by_name() {
    for policy in PolicyKind::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    let unknown = "best".parse::<PolicyKind>().unwrap_err().to_string();
    assert_eq!(
        unknown,
        "unknown policy \"best\": use one of tight binpack spread first-fit"
    );
}

#[test]
fn among_equal_cards_who_may_use_more_goes_where_most_stays_free_and_others_where_least_is_lent() {
    let mut node = node(&[(100, 60), (100, 60), (100, 60)]);
    for (card, (used, lent)) in node.cards.iter_mut().zip([(5, 2), (3, 3), (6, 0)]) {
        card.lending = Lending { used, lent };
    }
    let promised = pod(&[main(1, 20)]);
    let bursts = Request {
        bursts: true,
        ..promised.clone()
    };
    for policy in [PolicyKind::Tight, PolicyKind::Binpack, PolicyKind::Spread] {
        check(&node, &promised, policy, Ok(&[&[2]]));
        check(&node, &bursts, policy, Ok(&[&[1]]));
    }
    check(&node, &bursts, PolicyKind::FirstFit, Ok(&[&[0]]));
    // A better place for the policy still wins.
    node.cards[0].free = Mib(20);
    check(&node, &bursts, PolicyKind::Binpack, Ok(&[&[0]]));
}

#[test]
fn share_of_compute_goes_only_to_gpus_with_mps_and_only_as_far_as_it_is_free() {
    let shared = |free| Compute {
        capacity: 100,
        free,
    };
    let mut node = node(&[(80, 80), (80, 80), (80, 80)]);
    node.cards[1].compute = shared(20);
    node.cards[2].compute = shared(50);
    let asks = |compute| Request {
        compute,
        ..pod(&[main(1, 8)])
    };
    let got = |compute| {
        let choice = fit(&node, &asks(compute), &FirstFit);
        choice.map(|choice| choice.placement.charges[0].0)
    };
    assert_eq!(
        [got(0), got(20), got(30), got(60)],
        [Ok(0), Ok(1), Ok(2), Err(Refusal::NoCompute)]
    );
    let only = |compute| NodeGpus {
        cards: vec![Card {
            compute,
            ..node.cards[0]
        }],
        ..NodeGpus::default()
    };
    let refused = |node: &NodeGpus, compute| fit(node, &asks(compute), &FirstFit).err();
    assert_eq!(refused(&only(shared(100)), 0), Some(Refusal::OnlyMps));
    assert_eq!(refused(&only(Compute::default()), 10), Some(Refusal::NoMps));
    // Two containers of a pod on one GPU share the pod's compute there.
    let both = Request {
        claims: vec![main(1, 8), main(1, 8)],
        ..asks(50)
    };
    let mut left = only(shared(100)).cards[0];
    let choice = fit(&only(shared(100)), &both, &FirstFit).unwrap();
    left.take(&both, choice.placement.charges[0].1);
    assert_eq!((left.free, left.compute.free), (Mib(64), 50));
}
