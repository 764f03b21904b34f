//! `fit` against the oracle, on small nodes where twins, ties and tight fits are common.

use gpustow_pack::{
    Card, Claim, ClaimKind, Class, Mib, ModelId, NodeGpus, PolicyKind, Request, Tight, cost, fit,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::oracle;

fn card() -> impl Strategy<Value = Card> {
    let capacity = prop_oneof![Just(8), Just(12), 1..=16_u64];
    let free = capacity.prop_flat_map(|capacity| {
        (
            Just(capacity),
            prop_oneof![2 => Just(capacity), 3 => 0..=capacity],
        )
    });
    (free, 0..2_u16, prop::bool::weighted(0.8)).prop_map(|((capacity, free), model, usable)| Card {
        capacity: Mib(capacity),
        free: Mib(free),
        model: ModelId(model),
        usable,
    })
}

/// Drawn from a few kinds of card, so that some cannot be told apart.
fn node() -> impl Strategy<Value = NodeGpus> {
    vec(card(), 1..=3).prop_flat_map(|kinds| {
        vec(select(kinds), 1..=5).prop_map(|cards| NodeGpus {
            cards,
            cpu_free_milli: 8_000,
            ram_free: Mib(65_536),
        })
    })
}

fn request() -> impl Strategy<Value = Request> {
    let kind = select(vec![ClaimKind::Main, ClaimKind::Init, ClaimKind::Sidecar]);
    let claim = (kind, 1..=3_u32, 1..=10_u64).prop_map(|(kind, gpus, mib)| Claim {
        kind,
        gpus,
        mib: Mib(mib),
    });
    (vec(claim, 1..=3), prop::bool::weighted(0.25)).prop_map(|(mut claims, exclusive)| {
        claims.sort_by_key(|claim| claim.kind == ClaimKind::Main);
        Request {
            claims,
            exclusive,
            ..Request::default()
        }
    })
}

/// The policy after it has seen some pods on some nodes.
fn tight() -> impl Strategy<Value = Tight> {
    (vec((request(), 1..20_usize), 0..6), vec(node(), 1..4)).prop_map(|(mix, nodes)| {
        let class = |(request, pods): &(Request, usize)| Class::of(request, Vec::new(), *pods);
        Tight::learn(&mix.iter().map(class).collect::<Vec<_>>(), nodes.iter())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// A placement is the best of the legal ones, a refusal means that there is none and says why.
    #[test]
    fn fit_answers_what_trying_everything_answers(
        node in node(), request in request(), kind in select(PolicyKind::ALL.to_vec()),
        tight in tight(),
    ) {
        let policy = kind.with(&tight);
        let choice = fit(&node, &request, policy);
        prop_assert_eq!(&choice, &fit(&node, &request, policy));
        let costs = choice.as_ref().map(|choice| choice.cost).map_err(|refusal| *refusal);
        prop_assert_eq!(costs, cost(&node, &request, policy));
        let placement = choice.map(|choice| choice.placement);
        prop_assert_eq!(placement, oracle::answer(&node, &request, kind, &tight));
    }

    /// Legality does not depend on the policy.
    #[test]
    fn policies_agree_on_what_fits(node in node(), request in request()) {
        let tight = Tight::default();
        let refusals = PolicyKind::ALL.map(|kind| fit(&node, &request, kind.with(&tight)).err());
        prop_assert!(refusals.iter().all(|refusal| *refusal == refusals[0]), "{:?}", refusals);
    }
}
