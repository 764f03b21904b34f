//! The preferences of `tight`, in cases that a reader can check by hand.

use gpustow_pack::{
    Card, Claim, ClaimKind, Class, Compute, Cost, Lending, Mib, ModelId, NodeGpus, PolicyKind,
    Request, Starts, Tight, cost, fit,
};

fn node(cards: &[(u64, u64)], cpu: u64) -> NodeGpus {
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
        cpu_free_milli: cpu,
        ram_free: Mib(1 << 20).into(),
        links: None,
    }
}

fn pod(gpus: u32, mib: u64, cpu_milli: u64) -> Request {
    let kind = ClaimKind::Main;
    let claims = vec![Claim::new(kind, gpus, Mib(mib))];
    Request {
        claims,
        cpu_milli,
        ..Request::default()
    }
}

/// The policy on `nodes` after these pods.
fn learn(mix: &[(Request, usize)], nodes: &[NodeGpus]) -> Tight {
    let class = |(request, pods): &(Request, usize)| Class::of(request, Vec::new(), *pods);
    Tight::learn(
        &mix.iter().map(class).collect::<Vec<_>>(),
        nodes.iter().map(|node| (node, 1)),
    )
}

fn on(node: &NodeGpus, request: &Request, tight: &Tight) -> Cost {
    cost(node, request, PolicyKind::Tight.with(tight), &mut 0).unwrap()
}

#[test]
fn a_piece_is_used_by_the_pod_that_fills_it() {
    let mix = [
        (pod(1, 600, 0), 10),
        (pod(1, 400, 0), 10),
        (pod(1, 250, 0), 1),
    ];
    let node = node(&[(1000, 1000), (1000, 400), (1000, 600)], 0);
    let tight = learn(&mix, std::slice::from_ref(&node));
    let card = |mib| {
        let choice = fit(&node, &pod(1, mib, 0), PolicyKind::Tight.with(&tight)).unwrap();
        choice.placement.charges[0].0
    };
    assert_eq!((card(600), card(400)), (2, 1));
}

#[test]
fn a_pod_that_asks_for_little_cpu_goes_where_little_is_left() {
    let mix = [(pod(1, 500, 8000), 10), (pod(1, 500, 1000), 10)];
    let cards = [(1000, 0), (1000, 1000)];
    let (poor, rich) = (node(&cards, 9_000), node(&cards, 64_000));
    let tight = learn(&mix, &[poor.clone(), rich.clone()]);
    let (light, heavy) = (pod(1, 500, 1000), pod(1, 500, 8000));
    assert!(on(&poor, &light, &tight) < on(&rich, &light, &tight));
    assert!(on(&rich, &heavy, &tight) < on(&poor, &heavy, &tight));
}

#[test]
fn scarce_places_for_several_cards_are_left_alone() {
    let mix = [(pod(1, 1000, 0), 50), (pod(2, 1000, 0), 50)];
    let (whole, broken) = (
        node(&[(1000, 1000); 2], 0),
        node(&[(1000, 1000), (1000, 0)], 0),
    );
    let tight = learn(&mix, &[whole.clone(), broken.clone()]);
    let single = pod(1, 1000, 0);
    assert!(on(&broken, &single, &tight) < on(&whole, &single, &tight));
}

#[test]
fn what_is_nearly_a_place_for_several_cards_is_left_alone() {
    let mix = [(pod(1, 1000, 0), 50), (pod(4, 1000, 0), 50)];
    let free = |whole: usize| {
        let cards: Vec<_> = (0..4)
            .map(|at| (1000, 1000 * u64::from(at < whole)))
            .collect();
        node(&cards, 0)
    };
    let (nearly, hardly) = (free(3), free(1));
    let tight = learn(&mix, &[nearly.clone(), hardly.clone()]);
    let single = pod(1, 1000, 0);
    assert!(on(&hardly, &single, &tight) < on(&nearly, &single, &tight));
}

/// CPU alone would spread the first pods over all nodes: each node has a little less of it than
/// plenty.
#[test]
fn a_whole_node_is_kept_for_a_pod_that_has_not_come_yet() {
    let fresh = node(&[(1000, 1000); 4], 48_000);
    let begun = node(
        &[(1000, 0), (1000, 1000), (1000, 1000), (1000, 1000)],
        38_000,
    );
    let single = pod(1, 1000, 10_000);
    let tight = learn(&[(single.clone(), 5)], &[fresh.clone(), begun.clone()]);
    assert!(on(&begun, &single, &tight) < on(&fresh, &single, &tight));
}

/// A shortage of an empty node is no reason to open it: any later pod can make up for it.
#[test]
fn a_pod_that_asks_for_little_cpu_opens_no_node_for_that() {
    let empty = node(&[(1000, 1000); 2], 20_000);
    let begun = node(&[(1000, 500), (1000, 1000)], 30_000);
    let (light, heavy) = (pod(1, 500, 2000), pod(1, 500, 12_000));
    let tight = learn(
        &[(light.clone(), 10), (heavy, 10)],
        &[empty.clone(), begun.clone()],
    );
    assert!(on(&begun, &light, &tight) < on(&empty, &light, &tight));
}

#[test]
fn of_empty_nodes_the_one_with_the_most_cpu_is_kept_for_a_pod_that_takes_it_all() {
    let cards = [(1000, 1000); 4];
    let (plain, rich) = (node(&cards, 48_000), node(&cards, 96_000));
    let mut nodes = vec![plain.clone(); 20];
    nodes.push(rich.clone());
    let single = pod(1, 1000, 1000);
    let tight = learn(&[(single.clone(), 200)], &nodes);
    assert!(on(&plain, &single, &tight) < on(&rich, &single, &tight));
    // The others are no part of such a place, however many cards of theirs are free.
    let begun = |free| {
        node(
            &[(1000, 0), (1000, free), (1000, 1000), (1000, 1000)],
            48_000,
        )
    };
    let waste = |node| on(node, &single, &tight).policy.0;
    assert_eq!(waste(&begun(0)), waste(&begun(1000)));
}

#[test]
fn a_pod_that_does_as_any_would_opens_no_node() {
    // Pods ask for more CPU than nodes have: each that asks for less than the mean is a gain.
    let empty = node(&[(1000, 1000); 8], 64_000);
    let mut cards = [(1000, 1000); 8];
    cards[..6].fill((1000, 0));
    let nodes = vec![empty.clone(); 20];
    let tight = learn(
        &[(pod(1, 1000, 11_000), 200), (pod(1, 1000, 9000), 200)],
        &nodes,
    );
    let begun = node(&cards, 16_000);
    let usual = pod(1, 1000, 9000);
    assert!(on(&begun, &usual, &tight) < on(&empty, &usual, &tight));
}

#[test]
fn places_are_kept_where_those_are_bound_who_need_them() {
    let plain = node(&[(1000, 1000); 4], 48_000);
    let mut scarce = plain.clone();
    scarce
        .cards
        .iter_mut()
        .for_each(|card| card.model = ModelId(1));
    let mut nodes = vec![plain.clone(); 40];
    nodes.push(scarce.clone());
    let (single, four) = (pod(1, 1000, 1000), pod(4, 1000, 1000));
    let class = |request, models, pods| Class::of(request, models, pods);
    let mix = [
        class(&single, Vec::new(), 100),
        class(&four, vec![ModelId(1)], 1),
    ];
    let tight = Tight::learn(&mix, nodes.iter().map(|node| (node, 1)));
    // One such pod hardly makes its cards scarce, but it has a single place.
    let premium = Tight::learn(
        &[
            class(&single, Vec::new(), 100),
            class(&pod(1, 1000, 4000), vec![ModelId(1)], 4),
        ],
        nodes.iter().map(|node| (node, 1)),
    );
    let more =
        |tight: &Tight| on(&scarce, &single, tight).policy.0 - on(&plain, &single, tight).policy.0;
    assert!(
        more(&tight) > more(&premium),
        "{} {}",
        more(&tight),
        more(&premium)
    );
}

#[test]
fn a_large_card_is_kept_for_those_who_need_one() {
    let small = node(&[(1000, 1000)], 0);
    let large = node(&[(4000, 4000)], 0);
    let nodes = [small.clone(), large.clone()];
    let light = pod(1, 500, 0);
    let whole = Request {
        exclusive: true,
        ..pod(1, 3000, 0)
    };
    for needs_it in [pod(1, 3000, 0), whole] {
        let tight = learn(&[(light.clone(), 20), (needs_it, 8)], &nodes);
        assert!(on(&small, &light, &tight) < on(&large, &light, &tight));
        // The rest of a card next to a large pod is of no use to the next.
        let rest = node(&[(4000, 1000)], 0);
        assert!(on(&rest, &light, &tight) < on(&large, &light, &tight));
    }
}

#[test]
fn a_model_that_others_are_bound_to_costs_more() {
    let any = node(&[(1000, 1000)], 0);
    let mut scarce = any.clone();
    scarce.cards[0].model = ModelId(1);
    let bound = Class::of(&pod(1, 1000, 0), vec![ModelId(1)], 10);
    let free = Class::of(&pod(1, 1000, 0), Vec::new(), 10);
    let nodes = [any.clone(), scarce.clone()];
    let tight = Tight::learn(&[bound, free.clone()], nodes.iter().map(|node| (node, 1)));
    assert!(on(&any, &pod(1, 1000, 0), &tight) < on(&scarce, &pod(1, 1000, 0), &tight));
    let none_bound = Tight::learn(&[free], nodes.iter().map(|node| (node, 1)));
    let costs = nodes
        .each_ref()
        .map(|node| on(node, &pod(1, 1000, 0), &none_bound));
    assert_eq!(costs[0], costs[1]);
}

/// Pieces of its cards that no pod bound to a model could use are no room for such pods.
#[test]
fn a_model_is_scarce_if_its_free_pieces_are_too_small() {
    let usual = pod(1, 1000, 0);
    let of = |model, free: &[u64]| {
        let cards: Vec<_> = free.iter().map(|free| (1000, *free)).collect();
        let mut node = node(&cards, 0);
        node.cards
            .iter_mut()
            .for_each(|card| card.model = ModelId(model));
        node
    };
    let premium = |pieces: &[u64]| {
        let mix = [
            Class::of(&usual, vec![ModelId(1)], 10),
            Class::of(&usual, Vec::new(), 90),
        ];
        let mut nodes = vec![of(0, &[1000]); 40];
        nodes.extend([of(1, &[1000]), of(1, pieces)]);
        let tight = Tight::learn(&mix, nodes.iter().map(|node| (node, 1)));
        on(&of(1, &[1000]), &usual, &tight).policy.0 - on(&of(0, &[1000]), &usual, &tight).policy.0
    };
    assert!(premium(&[500; 10]) > premium(&[1000; 5]));
}

#[test]
fn a_whole_card_is_the_smallest_that_does() {
    let whole = Request {
        exclusive: true,
        ..pod(1, 700, 0)
    };
    let node = node(&[(2000, 2000), (800, 800), (600, 600)], 0);
    let tight = learn(
        &[(whole.clone(), 5), (pod(1, 200, 0), 5)],
        std::slice::from_ref(&node),
    );
    let choice = fit(&node, &whole, PolicyKind::Tight.with(&tight)).unwrap();
    assert_eq!(choice.placement.charges, [(1, Mib(800))]);
}

#[test]
fn the_order_of_nodes_teaches_nothing() {
    let mix = [
        (pod(1, 300, 4000), 7),
        (pod(1, 450, 2000), 5),
        (pod(2, 800, 9000), 1),
    ];
    let mut nodes: Vec<NodeGpus> = (1..40)
        .map(|size| node(&[(size * 100, size * 60); 3], size * 1000))
        .collect();
    let tight = learn(&mix, &nodes);
    nodes.reverse();
    assert_eq!(tight, learn(&mix, &nodes));
}

/// Cards whose node has too little CPU for its pods are fewer than they look.
#[test]
fn a_model_is_scarce_if_its_nodes_are_short_of_cpu() {
    let any = node(&[(1000, 1000); 2], 96_000);
    let bound = Class::of(&pod(1, 1000, 12_000), vec![ModelId(1)], 10);
    let free = Class::of(&pod(1, 1000, 12_000), Vec::new(), 40);
    let mix = [bound, free];
    let premium = |cpu| {
        let mut special = node(&[(1000, 1000); 2], cpu);
        special.cards[0].model = ModelId(1);
        special.cards[1].model = ModelId(1);
        let tight = Tight::learn(&mix, [(&any, 2), (&special, 1)].into_iter());
        let light = pod(1, 1000, 0);
        on(&special, &light, &tight).policy.0 - on(&any, &light, &tight).policy.0
    };
    assert!(premium(12_000) > premium(96_000));
}
