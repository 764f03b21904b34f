//! `fit` against the oracle, on small nodes where twins, ties and tight fits are common.

use gpustow_pack::{
    Card, Claim, ClaimKind, Class, Compute, Lending, Link, Links, Mib, ModelId, NodeGpus,
    PolicyKind, Request, Rules, Starts, Tight, Traits, cost, fit, fit_among,
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
    let limit = prop_oneof![2 => Just(0), 3 => 4..=16_u64];
    let usable = prop::bool::weighted(0.8);
    let lending = prop_oneof![2 => Just((0, 0)), 1 => (0..3_u8, 0..3_u8)];
    let compute = prop_oneof![
        2 => Just((0, 0)),
        2 => select(vec![(100, 100), (100, 40), (150, 60), (100, 0)]),
    ];
    let starts =
        prop_oneof![3 => Just(Starts::None), 1 => Just(Starts::Beside), 1 => Just(Starts::Alone)];
    (free, 0..2_u16, usable, limit, lending, compute, starts).prop_map(
        |((capacity, free), model, usable, limit, (used, lent), compute, starts)| Card {
            capacity: Mib(capacity),
            free: Mib(free),
            model: ModelId(model),
            usable,
            limit: Mib(limit),
            lending: Lending { used, lent },
            compute: Compute {
                capacity: compute.0,
                free: compute.1,
            },
            slices: None,
            starts,
        },
    )
}

/// A node with cards of a few kinds, so that some cards are indistinguishable.
fn node() -> impl Strategy<Value = NodeGpus> {
    vec(card(), 1..=3).prop_flat_map(|kinds| {
        vec(select(kinds), 1..=5).prop_map(|cards| NodeGpus {
            cards,
            cpu_free_milli: 8_000,
            ram_free: Mib(65_536).into(),
            links: None,
        })
    })
}

/// As [`node`], with up to seven cards of two kinds and links between them, of which some are unknown.
fn linked() -> impl Strategy<Value = NodeGpus> {
    let link = select(vec![
        None,
        Some(Link::NvLink(4)),
        Some(Link::NvLink(12)),
        Some(Link::PcieSwitch),
        Some(Link::PcieSwitches),
        Some(Link::HostBridge),
        Some(Link::NumaNode),
        Some(Link::System),
    ]);
    let cards = vec(card(), 1..=2).prop_flat_map(|kinds| vec(select(kinds), 1..=7));
    (cards, vec(link, 49)).prop_map(|(cards, links)| NodeGpus {
        links: Links::new(cards.len(), |one, other| {
            links[one.min(other) * 7 + one.max(other)]
        }),
        cards,
        cpu_free_milli: 8_000,
        ram_free: Mib(65_536).into(),
    })
}

fn request() -> impl Strategy<Value = Request> {
    let kind = select(vec![ClaimKind::Main, ClaimKind::Init, ClaimKind::Sidecar]);
    let percentage = prop_oneof![3 => Just(0), 1 => select(vec![10, 25, 33, 50, 100])];
    let claim =
        (kind, 1..=3_u32, 1..=10_u64, percentage).prop_map(|(kind, gpus, mib, percentage)| Claim {
            percentage,
            ..Claim::new(kind, gpus, Mib(mib))
        });
    let limits = prop_oneof![3 => Just(Vec::new()), 2 => vec(0..=12_u64, 3)];
    (
        vec(claim, 1..=3),
        (prop::bool::weighted(0.25), prop::bool::weighted(0.3)),
        limits,
        any::<bool>(),
        prop_oneof![1 => Just(0), 1 => select(vec![30, 40, 50, 100])],
    )
        .prop_map(
            |(mut claims, (exclusive, alone), limits, bursts, compute)| {
                claims.sort_by_key(|claim| claim.kind == ClaimKind::Main);
                for (claim, limit) in claims.iter_mut().zip(limits) {
                    claim.driver_limit = Mib(limit);
                }
                Request {
                    claims,
                    exclusive,
                    alone,
                    bursts,
                    compute,
                    ..Request::default()
                }
            },
        )
}

/// The policy after it has seen some pods on some nodes.
fn tight() -> impl Strategy<Value = Tight> {
    (vec((request(), 1..20_usize), 0..6), vec(node(), 1..4)).prop_map(|(mix, nodes)| {
        let class = |(request, pods): &(Request, usize)| Class::of(request, Vec::new(), *pods);
        Tight::learn(
            &mix.iter().map(class).collect::<Vec<_>>(),
            nodes.iter().map(|node| (node, 1)),
        )
    })
}

/// The rules of pods: few models, cards and groups, so that they meet.
fn rules() -> impl Strategy<Value = Rules> {
    let models = || vec(select(vec!["a", "b", "a*", "*"]), 0..=2);
    let uuids = || vec(select(vec!["0", "1", "2"]), 0..=2);
    let group = || select(vec![None, None, Some("x"), Some("y")]);
    let text = |list: Vec<&str>| list.into_iter().map(Box::from).collect();
    (
        (models(), vec(select(vec!["b", "ab"]), 0..=1)),
        (uuids(), vec(select(vec!["0", "3"]), 0..=1)),
        (group(), group()),
    )
        .prop_map(move |(models, uuids, groups)| Rules {
            models: text(models.0),
            not_models: text(models.1),
            uuids: text(uuids.0),
            not_uuids: text(uuids.1),
            affinity: groups.0.map(Into::into),
            anti_affinity: groups.1.map(Into::into),
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// A placement is the best of the legal ones. A refusal means that there is none, and gives the reason.
    #[test]
    fn fit_answers_what_trying_everything_answers(
        node in node(), request in request(), kind in select(PolicyKind::ALL.to_vec()),
        tight in tight(),
    ) {
        let policy = kind.with(&tight);
        let choice = fit(&node, &request, policy);
        prop_assert_eq!(&choice, &fit(&node, &request, policy));
        let costs = choice.as_ref().map(|choice| choice.cost).map_err(|refusal| *refusal);
        prop_assert_eq!(costs, cost(&node, &request, policy, &mut 0));
        let placement = choice.map(|choice| choice.placement);
        prop_assert_eq!(placement, oracle::answer(&node, &request, kind, &tight));
    }

    /// The same among the cards that a pod's rules leave it.
    #[test]
    fn rules_leave_the_best_of_the_cards_that_they_allow(
        node in node(), request in request(), kind in select(PolicyKind::ALL.to_vec()),
        tight in tight(), rules in rules(), others in vec(vec(rules(), 0..=2), 5),
        models in vec(select(vec!["a", "b", "ab"]), 5),
    ) {
        let request = Request { rules: (!rules.is_empty()).then(|| rules.into()), ..request };
        let uuids = ["0", "1", "2", "3", "4"];
        let of = |index: usize| Traits {
            uuid: uuids[index],
            model: models[index],
            holders: others[index].iter().collect(),
        };
        let traits: Vec<Traits<'_>> = (0..node.cards.len()).map(of).collect();
        let found = fit_among(&node, &traits, &request, kind.with(&tight), &mut 0);
        let found = found.map(|choice| choice.placement);
        prop_assert_eq!(found, oracle::answer_among(&node, &traits, &request, kind, &tight));
    }

    /// As above, where links between the cards are known; the refusals do not depend on them.
    #[test]
    fn the_closest_cards_are_those_of_trying_everything(
        node in linked(), request in request(), kind in select(PolicyKind::ALL.to_vec()),
        tight in tight(),
    ) {
        let policy = kind.with(&tight);
        let choice = fit(&node, &request, policy);
        let costs = choice.as_ref().map(|choice| choice.cost).map_err(|refusal| *refusal);
        prop_assert_eq!(costs, cost(&node, &request, policy, &mut 0));
        if let Ok(choice) = &choice && node.links.is_some() && kind != PolicyKind::FirstFit {
            let (worst, sum) = oracle::apart(&node, &choice.placement);
            prop_assert_eq!(choice.cost.apart, worst << 24 | sum);
        }
        let blind = NodeGpus { links: None, ..node.clone() };
        let without = fit(&blind, &request, policy).map(|choice| choice.cost.policy);
        prop_assert_eq!(choice.as_ref().map(|choice| choice.cost.policy), without.as_ref().copied());
        let placement = choice.map(|choice| choice.placement);
        prop_assert_eq!(placement, oracle::answer(&node, &request, kind, &tight));
    }

    /// Lent memory decides between places that the policy finds equally good, and on nothing else.
    #[test]
    fn what_is_lent_breaks_ties_alone(
        node in node(), request in request(), kind in select(PolicyKind::ALL.to_vec()),
        tight in tight(),
    ) {
        let policy = kind.with(&tight);
        let told = |node: &NodeGpus| {
            fit(node, &request, policy).map(|it| (it.cost.cards, it.cost.policy))
        };
        let mut blind = node.clone();
        for card in &mut blind.cards {
            card.lending = Lending::default();
        }
        prop_assert_eq!(told(&node), told(&blind));
    }

    /// Legality does not depend on the policy.
    #[test]
    fn policies_agree_on_what_fits(node in node(), request in request()) {
        let tight = Tight::default();
        let refusals = PolicyKind::ALL.map(|kind| fit(&node, &request, kind.with(&tight)).err());
        prop_assert!(refusals.iter().all(|refusal| *refusal == refusals[0]), "{:?}", refusals);
    }
}
