//! The effects of links, in cases that a reader can check by hand.

use Link::{NvLink, PcieSwitch, System};
use gpustow_pack::{
    Card, Choice, Claim, ClaimKind, Compute, Lending, Link, Links, Mib, ModelId, NodeGpus,
    PolicyKind, Request, Starts, Tight, fit,
};

/// A node of cards of 80 MiB with so much free; pairs that `near` does not list are far apart.
pub(crate) fn node(free: &[u64], near: &[(usize, usize, Link)]) -> NodeGpus {
    let card = |&free: &u64| Card {
        capacity: Mib(80),
        free: Mib(free),
        model: ModelId(0),
        usable: true,
        limit: Mib::ZERO,
        lending: Lending::default(),
        compute: Compute::default(),
        slices: None,
        starts: Starts::None,
    };
    let link = |one, other| {
        let pair =
            |near: &&(usize, usize, Link)| [(one, other), (other, one)].contains(&(near.0, near.1));
        Some(near.iter().find(pair).map_or(System, |near| near.2))
    };
    NodeGpus {
        cards: free.iter().map(card).collect(),
        cpu_free_milli: 64_000,
        ram_free: Mib(1 << 20).into(),
        links: Links::new(free.len(), link),
    }
}

pub(crate) fn pod(claims: &[(u32, u64)]) -> Request {
    let claim = |&(gpus, mib): &(u32, u64)| Claim::new(ClaimKind::Main, gpus, Mib(mib));
    Request {
        claims: claims.iter().map(claim).collect(),
        ..Request::default()
    }
}

fn place(node: &NodeGpus, request: &Request, policy: PolicyKind) -> Choice {
    fit(node, request, policy.with(&Tight::default())).unwrap()
}

fn cards(node: &NodeGpus, request: &Request, policy: PolicyKind) -> Vec<Vec<usize>> {
    place(node, request, policy).placement.cards
}

const LINKED: [PolicyKind; 3] = [PolicyKind::Tight, PolicyKind::Binpack, PolicyKind::Spread];

#[test]
fn two_cards_are_a_linked_pair() {
    let pairs = [(0, 3, NvLink(4)), (1, 2, NvLink(4))];
    let node = node(&[0, 80, 80, 80], &pairs);
    for policy in LINKED {
        assert_eq!(cards(&node, &pod(&[(2, 40)]), policy), [[1, 2]]);
    }
}

#[test]
fn first_fit_heeds_no_links() {
    let node = node(&[80; 4], &[(2, 3, NvLink(4))]);
    assert_eq!(
        cards(&node, &pod(&[(2, 40)]), PolicyKind::FirstFit),
        [[0, 1]]
    );
    assert_eq!(cards(&node, &pod(&[(1, 40)]), PolicyKind::FirstFit), [[0]]);
}

#[test]
fn more_links_are_nearer_and_any_nvlink_is_nearer_than_a_switch() {
    let near = [(0, 1, PcieSwitch), (1, 2, NvLink(1)), (2, 3, NvLink(2))];
    let mut node = node(&[80; 4], &near);
    assert_eq!(cards(&node, &pod(&[(2, 80)]), PolicyKind::Tight), [[2, 3]]);
    node.cards[3].free = Mib(10);
    assert_eq!(cards(&node, &pod(&[(2, 80)]), PolicyKind::Tight), [[1, 2]]);
    node.cards[2].free = Mib(10);
    assert_eq!(cards(&node, &pod(&[(2, 80)]), PolicyKind::Tight), [[0, 1]]);
}

#[test]
fn memory_comes_before_links() {
    let node = node(&[40, 80, 80, 40], &[(1, 2, NvLink(4))]);
    assert_eq!(
        cards(&node, &pod(&[(2, 40)]), PolicyKind::Binpack),
        [[0, 3]]
    );
}

#[test]
fn between_equal_nodes_the_one_with_the_closer_cards_wins() {
    let linked = node(&[80, 80], &[(0, 1, NvLink(4))]);
    let far = node(&[80, 80], &[]);
    let unknown = NodeGpus {
        links: None,
        ..far.clone()
    };
    let cost = |node| place(node, &pod(&[(2, 40)]), PolicyKind::Tight).cost;
    assert!(cost(&linked) < cost(&unknown) && cost(&unknown) < cost(&far));
    let alone = |node| place(node, &pod(&[(1, 40)]), PolicyKind::Tight).cost;
    assert!(alone(&linked) == alone(&unknown) && alone(&unknown) == alone(&far));
}

#[test]
fn one_card_is_taken_where_it_breaks_no_close_group() {
    let quad = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
    let pairs = quad.iter().chain(&[(4, 5)]);
    let near: Vec<_> = pairs.map(|&(one, other)| (one, other, NvLink(4))).collect();
    let mut node = node(&[80; 7], &near);
    let mut taken = Vec::new();
    for _ in 0..7 {
        let card = cards(&node, &pod(&[(1, 80)]), PolicyKind::Tight)[0][0];
        node.cards[card].free = Mib(0);
        taken.push(card);
    }
    assert_eq!(taken, [6, 4, 5, 0, 1, 2, 3]);
}

#[test]
fn a_pair_leaves_the_group_of_four_to_others() {
    let quad = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
    let pairs = quad.iter().chain(&[(4, 5)]);
    let near: Vec<_> = pairs.map(|&(one, other)| (one, other, NvLink(4))).collect();
    let node = node(&[80; 6], &near);
    assert_eq!(
        cards(&node, &pod(&[(2, 80)]), PolicyKind::Binpack),
        [[4, 5]]
    );
}

#[test]
fn each_container_gets_a_linked_pair() {
    let near = [(0, 2, NvLink(4)), (1, 3, NvLink(4))];
    let node = node(&[80; 4], &near);
    let request = pod(&[(2, 60), (2, 60)]);
    assert_eq!(
        cards(&node, &request, PolicyKind::Binpack),
        [[0, 2], [1, 3]]
    );
}

#[test]
fn sixteen_cards_are_searched_within_the_bound() {
    let near: Vec<_> = (0..8).map(|pair| (pair, 15 - pair, NvLink(4))).collect();
    let node = node(&[80; 16], &near);
    for gpus in 1..=16 {
        let chosen = cards(&node, &pod(&[(gpus, 40)]), PolicyKind::Tight);
        assert_eq!(chosen[0].len(), gpus as usize);
    }
    assert_eq!(cards(&node, &pod(&[(2, 40)]), PolicyKind::Tight), [[0, 15]]);
}
