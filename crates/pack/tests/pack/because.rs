//! The sentence about a choice.

use gpustow_pack::{Class, Link, NodeGpus, PolicyKind, Request, Tight, because, fit};

use crate::links::{node, pod};

fn sentence(node: &NodeGpus, request: &Request, policy: PolicyKind, tight: &Tight) -> String {
    let choice = fit(node, request, policy.with(tight)).unwrap();
    because(node, request, &choice.placement.charges, policy, tight)
}

#[test]
fn every_policy_says_in_a_sentence_what_it_found() {
    let one = node(&[80, 50], &[]);
    let nothing = Tight::default();
    assert_eq!(
        sentence(&one, &pod(&[(1, 30)]), PolicyKind::Binpack, &nothing),
        "binpack (leave the least free): 20 of 80 MiB stay free on its GPU"
    );
    assert_eq!(
        sentence(&one, &pod(&[(1, 30)]), PolicyKind::Spread, &nothing),
        "spread (have the fewest neighbours): 50 of 80 MiB stay free on its GPU"
    );
    let linked = node(&[80, 80], &[(0, 1, Link::NvLink(4))]);
    assert_eq!(
        sentence(&linked, &pod(&[(2, 30)]), PolicyKind::FirstFit, &nothing),
        "first-fit (the first with room): 100 of 160 MiB stay free on its 2 GPUs, joined by NVLink"
    );
    assert_eq!(
        sentence(&one, &pod(&[(1, 30)]), PolicyKind::Tight, &nothing),
        "tight (waste the least memory): it wastes nothing; 20 of 80 MiB stay free on its GPU"
    );
}

#[test]
fn tight_names_what_it_spoils() {
    let mut node = node(&[80, 80], &[]);
    node.cpu_free_milli = 8_000;
    let request = Request {
        cpu_milli: 8_000,
        ..pod(&[(1, 60)])
    };
    let mix = [Class::of(&request, Vec::new(), 10)];
    let tight = Tight::learn(&mix, std::iter::once((&node, 1)));
    assert_eq!(
        sentence(&node, &request, PolicyKind::Tight, &tight),
        "tight (waste the least memory): it wastes 25 MiB (22 in pieces of little use, 3 as \
         the node was empty); 20 of 80 MiB stay free on its GPU"
    );
}
