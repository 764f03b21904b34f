//! `fit` against the oracle, on small nodes where twins, ties and tight fits are common.

use gpustow_pack::{
    Card, Claim, ClaimKind, Mib, ModelId, NodeGpus, Policy, PolicyKind, Request, fit,
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// A placement is the best of the legal ones, a refusal means that there is none and says why.
    #[test]
    fn fit_answers_what_trying_everything_answers(
        node in node(), request in request(), policy in select(PolicyKind::ALL.to_vec()),
    ) {
        let choice = fit(&node, &request, &policy);
        prop_assert_eq!(&choice, &fit(&node, &request, &policy));
        if let Ok(choice) = &choice {
            prop_assert_eq!(choice.cost, policy.cost(&node, &choice.placement.charges));
        }
        let placement = choice.map(|choice| choice.placement);
        prop_assert_eq!(placement, oracle::answer(&node, &request, policy));
    }

    /// Legality does not depend on the policy.
    #[test]
    fn policies_agree_on_what_fits(node in node(), request in request()) {
        let refusals = PolicyKind::ALL.map(|policy| fit(&node, &request, &policy).err());
        prop_assert!(refusals.iter().all(|refusal| *refusal == refusals[0]), "{:?}", refusals);
    }
}
