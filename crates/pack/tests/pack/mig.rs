//! Instances on demand: the table against every way to cut a card.

mod rules;

use std::collections::BTreeSet;

use gpustow_pack::mig::{Geometry, Piece, Profile, Slices, mask};
use gpustow_pack::policy::{Binpack, FirstFit};
use gpustow_pack::{
    Card, Claim, ClaimKind, Compute, Lending, Mib, ModelId, NodeGpus, PolicyKind, Refusal, Request,
    Starts, Tight, fit,
};
use proptest::prelude::*;

/// Slices, compute slices, MiB, first slices.
type Row = (u8, u8, u32, &'static [u8]);

/// As drivers list them, `+me` left out.
const H100: &[Row] = &[
    (1, 1, 9_856, &[0, 1, 2, 3, 4, 5, 6]),
    (2, 1, 19_968, &[0, 2, 4, 6]),
    (2, 2, 19_968, &[0, 2, 4]),
    (4, 3, 40_192, &[0, 4]),
    (4, 4, 40_192, &[0]),
    (8, 7, 80_896, &[0]),
];
const A100: &[Row] = &[
    (1, 1, 4_864, &[0, 1, 2, 3, 4, 5, 6]),
    (2, 2, 9_856, &[0, 2, 4]),
    (4, 3, 19_968, &[0, 4]),
    (4, 4, 19_968, &[0]),
    (8, 7, 40_192, &[0]),
];
const A30: &[Row] = &[
    (1, 1, 5_836, &[0, 1, 2, 3]),
    (2, 2, 11_875, &[0, 2]),
    (4, 4, 23_970, &[0]),
];

fn profiles(rows: &[Row]) -> Vec<Profile> {
    let row = |&(slices, compute, mib, starts): &Row| Profile {
        slices,
        compute,
        mib,
        starts: starts.iter().fold(0, |bits, start| bits | 1 << start),
    };
    rows.iter().map(row).collect()
}

fn geometry(rows: &[Row]) -> Geometry {
    Geometry::new(profiles(rows)).unwrap()
}

fn empty(geometry: Geometry) -> Slices {
    Slices {
        geometry,
        blocked: 0,
        taken: 0,
    }
}

/// The request sizes of the pods, smallest first.
fn sizes(rows: &[Row]) -> Vec<Mib> {
    let sizes: BTreeSet<u32> = rows.iter().map(|row| row.2).collect();
    sizes.into_iter().map(|mib| Mib(mib.into())).collect()
}

fn masks(profile: Profile) -> Vec<u8> {
    let starts = (0..8).filter(|start| profile.starts >> start & 1 == 1);
    let fit = starts.filter(|start| start + u32::from(profile.slices) <= 8);
    fit.map(|start| mask(start, profile.slices.into()))
        .collect()
}

/// Every set of instances that fits in addition to `taken`, found by trying all of them one after the other.
fn every_set(of_size: &[Profile], taken: u8, set: &mut Vec<u8>, found: &mut BTreeSet<Vec<u8>>) {
    let mut sorted = set.clone();
    sorted.sort_unstable();
    found.insert(sorted);
    for profile in of_size {
        for mask in masks(*profile) {
            if taken & mask == 0 {
                set.push(profile.slices);
                every_set(of_size, taken | mask, set, found);
                set.pop();
            }
        }
    }
}

/// Of each size the profile that is used.
fn of_sizes(profiles: &[Profile]) -> Vec<Profile> {
    let mut all = profiles.to_vec();
    all.sort_unstable();
    all.dedup_by_key(|profile| profile.slices);
    all
}

#[test]
fn the_table_counts_every_set_that_fits_beside_every_mask() {
    for rows in [H100, A100, A30] {
        let futures = geometry(rows).futures();
        let used = of_sizes(&profiles(rows));
        for taken in 0..=u8::MAX {
            // Trying all orders of all sets takes long; an empty card has the most, and they are checked by its halves.
            if taken.count_zeros() > 6 {
                continue;
            }
            let mut found = BTreeSet::new();
            every_set(&used, taken, &mut Vec::new(), &mut found);
            assert_eq!(
                futures[usize::from(taken)],
                found.len() as u32,
                "{taken:08b}"
            );
        }
    }
}

proptest! {
    #[test]
    fn an_instance_goes_where_most_sets_still_fit(
        rows in prop::collection::vec((1..=4_u8, 1..=7_u8, 1..6_u32, any::<u8>()), 1..7),
        taken in any::<u8>(),
        blocked in any::<u8>(),
        asked in 1..6_u64,
    ) {
        let profiles: Vec<_> = rows
            .into_iter()
            .map(|(slices, compute, mib, starts)| Profile { slices, compute, mib, starts })
            .collect();
        let taken = taken | 0b1100;
        let Some(geometry) = Geometry::new(profiles.clone()) else {
            prop_assert!(profiles.iter().all(|profile| masks(*profile).is_empty()));
            return Ok(());
        };
        let usable: Vec<_> = profiles.iter().copied().filter(|it| !masks(*it).is_empty()).collect();
        let used = of_sizes(&usable);
        let slices = Slices { geometry, blocked, taken };
        let left = |mask: u8| {
            let mut found = BTreeSet::new();
            every_set(&used, taken | blocked | mask, &mut Vec::new(), &mut found);
            found.len()
        };
        let wanted = used.iter().find(|profile| u64::from(profile.mib) >= asked);
        let may = wanted.map(|it| masks(*it)).unwrap_or_default();
        let may: Vec<u8> = may.into_iter().filter(|mask| mask & (taken | blocked) == 0).collect();
        let best = may.iter().map(|mask| left(*mask)).max();
        let piece = slices.place(Mib(asked));
        prop_assert_eq!(piece.map(|piece| left(piece.mask())), best);
        if let Some(Piece { profile, lost, start }) = piece {
            // The same memory, and no profile that may start there has more compute.
            let wanted = wanted.unwrap();
            let same = |it: &&Profile| (it.slices, it.mib) == (wanted.slices, wanted.mib);
            let there = usable.iter().filter(same).filter(|it| it.starts >> start & 1 == 1);
            prop_assert_eq!(there.clone().map(|it| it.compute).max(), Some(profile.compute));
            prop_assert!(there.clone().any(|it| *it == profile));
            prop_assert_eq!(lost as usize, left(0) - best.unwrap_or(0));
        }
    }
}

/// Can all of these lie on one card at once?
fn fit_at_all(geometry: &Geometry, asked: &[Mib]) -> bool {
    let mut states = BTreeSet::from([0]);
    for mib in asked {
        let profile = geometry.profile(*mib).unwrap();
        let next = states.iter().flat_map(|taken: &u8| {
            let may = masks(profile).into_iter();
            may.filter(move |mask| mask & taken == 0)
                .map(move |mask| mask | taken)
        });
        states = next.collect();
    }
    !states.is_empty()
}

/// How many of these the rule places, one after the other.
fn placed(geometry: Geometry, asked: &[Mib]) -> usize {
    let mut slices = empty(geometry);
    let mut count = 0;
    for mib in asked {
        if let Some(piece) = slices.place(*mib) {
            slices.taken |= piece.mask();
            count += 1;
        }
    }
    count
}

/// Calls `each` with every sequence of these sizes of up to `most`.
fn every_sequence(
    sizes: &[Mib],
    most: usize,
    so_far: &mut Vec<Mib>,
    each: &mut impl FnMut(&[Mib]),
) {
    each(so_far);
    if so_far.len() < most {
        for mib in sizes {
            so_far.push(*mib);
            every_sequence(sizes, most, so_far, each);
            so_far.pop();
        }
    }
}

#[test]
fn largest_first_up_to_eight_requests_are_placed_whenever_they_fit_at_all() {
    for rows in [H100, A100, A30] {
        let geometry = geometry(rows);
        let mut tried = 0;
        every_sequence(&sizes(rows), 8, &mut Vec::new(), &mut |asked| {
            if asked.is_sorted_by(|a, b| a >= b) && fit_at_all(&geometry, asked) {
                assert_eq!(placed(geometry, asked), asked.len(), "{asked:?}");
                tried += 1;
            }
        });
        assert!(tried >= 10, "{tried}");
    }
}

#[test]
fn in_whatever_order_up_to_seven_requests_come_few_that_would_fit_do_not() {
    // No rule can place all of them: where two small ones go decides which larger ones can follow.
    for (rows, missed) in [(H100, 2), (A100, 3), (A30, 0)] {
        let geometry = geometry(rows);
        let (mut tried, mut not) = (0, 0);
        every_sequence(&sizes(rows), 7, &mut Vec::new(), &mut |asked| {
            if fit_at_all(&geometry, asked) {
                tried += 1;
                not += usize::from(placed(geometry, asked) < asked.len());
            }
        });
        assert!(not <= missed && tried > 12, "{not} of {tried}");
    }
}

/// Of instances that fill a card, the most compute that the same starts and sizes could have.
fn most_compute(profiles: &[Profile], pieces: &[Piece]) -> u32 {
    let most = |piece: &Piece| {
        let same = profiles.iter().filter(|it| it.mib == piece.profile.mib);
        let there = same.filter(|it| it.starts >> piece.start & 1 == 1);
        there.map(|it| u32::from(it.compute)).max().unwrap_or(0)
    };
    pieces.iter().map(most).sum()
}

#[test]
fn no_compute_slice_idles_while_all_memory_is_given_and_none_is_given_twice() {
    for (rows, slices) in [(H100, 7), (A100, 7), (A30, 4)] {
        let (geometry, profiles) = (geometry(rows), profiles(rows));
        let mut full = 0;
        every_sequence(&sizes(rows), 7, &mut Vec::new(), &mut |asked| {
            let mut card = empty(geometry);
            let mut pieces = Vec::new();
            for mib in asked {
                let Some(piece) = card.place(*mib) else {
                    // Memory is missing, and never compute: no profile of that size could start.
                    let wanted = geometry.profile(*mib).unwrap();
                    assert!(masks(wanted).iter().all(|mask| mask & card.taken != 0));
                    continue;
                };
                card.taken |= piece.mask();
                pieces.push(piece);
            }
            let compute = pieces
                .iter()
                .map(|it| u32::from(it.profile.compute))
                .sum::<u32>();
            assert!(compute <= slices, "{asked:?}: {pieces:?}");
            assert_eq!(compute, most_compute(&profiles, &pieces), "{asked:?}");
            if card.taken == geometry.all() {
                assert_eq!(compute, slices, "{asked:?}: {pieces:?}");
                full += 1;
            }
        });
        assert!(full > 10, "{full}");
    }
}

fn isolated(mib: Mib) -> Request {
    Request {
        isolated: true,
        ..plain(mib)
    }
}

fn plain(mib: Mib) -> Request {
    Request {
        claims: vec![Claim::new(ClaimKind::Main, 1, mib)],
        ..Request::default()
    }
}

fn pool(geometry: &Geometry) -> Card {
    seen(Card {
        capacity: Mib::ZERO,
        free: Mib::ZERO,
        model: ModelId(0),
        usable: true,
        limit: Mib::ZERO,
        lending: Lending::default(),
        compute: Compute::default(),
        slices: Some(empty(*geometry)),
        starts: Starts::None,
    })
}

/// The card with the memory that its slices have.
fn seen(card: Card) -> Card {
    let slices = card.slices.unwrap();
    Card {
        capacity: slices.capacity(),
        free: slices.free(),
        ..card
    }
}

#[test]
fn pods_with_and_without_isolation_never_share_a_card() {
    let pool = pool(&geometry(H100));
    let whole = Card {
        capacity: Mib(81_000),
        free: Mib(81_000),
        slices: None,
        ..pool
    };
    let node = |cards: &[Card]| NodeGpus {
        cards: cards.to_vec(),
        ..NodeGpus::default()
    };
    let both = node(&[whole, pool]);
    let card = |request: &Request| {
        let choice = fit(&both, request, &FirstFit);
        choice.map(|choice| choice.placement.charges)
    };
    assert_eq!(card(&plain(Mib(100))), Ok(vec![(0, Mib(100))]));
    // The smallest profile that holds it is charged by its slices.
    assert_eq!(card(&isolated(Mib(9_000))), Ok(vec![(1, Mib(10_112))]));
    assert_eq!(card(&isolated(Mib(9_857))), Ok(vec![(1, Mib(20_224))]));
    assert_eq!(card(&isolated(Mib(80_897))), Err(Refusal::NoMig));

    let refused = |card: Card, request: &Request| fit(&node(&[card]), request, &Binpack).err();
    assert_eq!(refused(whole, &isolated(Mib(1))), Some(Refusal::NoMig));
    assert_eq!(refused(pool, &plain(Mib(1))), Some(Refusal::OnlyMig));
    assert_eq!(refused(pool, &plain(Mib(90_000))), Some(Refusal::TooLarge));
    let mut full = pool;
    full.slices.as_mut().unwrap().taken = 0b0111_0111;
    let full = seen(full);
    assert_eq!(full.free, Mib(20_224));
    assert_eq!(
        refused(full, &isolated(Mib(10_000))),
        Some(Refusal::NoSlices)
    );
    let broken = Card {
        usable: false,
        ..pool
    };
    assert_eq!(refused(broken, &isolated(Mib(1))), Some(Refusal::Unhealthy));
    let blocked = Slices {
        blocked: 0xff,
        ..pool.slices.unwrap()
    };
    let blocked = seen(Card {
        slices: Some(blocked),
        ..pool
    });
    assert_eq!(blocked.capacity, Mib::ZERO);
    assert_eq!(refused(blocked, &isolated(Mib(1))), Some(Refusal::NoMig));
}

#[test]
fn each_policy_keeps_the_halves_whole_that_it_can() {
    let tight = Tight::default();
    for policy in PolicyKind::ALL {
        let mut node = NodeGpus {
            cards: vec![pool(&geometry(H100)); 2],
            ..NodeGpus::default()
        };
        let mut starts = Vec::new();
        for mib in [9_000, 9_000, 40_000, 40_000, 40_000] {
            let request = isolated(Mib(mib));
            let choice = fit(&node, &request, policy.with(&tight)).unwrap();
            let piece = choice.placement.piece.unwrap();
            starts.push((choice.placement.cards[0][0], piece.start));
            node.take(&request, &choice.placement.charges);
        }
        let taken: u32 = node
            .cards
            .iter()
            .map(|card| u32::from(card.slices.unwrap().taken).count_ones())
            .sum();
        assert_eq!(taken, 14, "{policy}: {starts:?}");
    }
}
