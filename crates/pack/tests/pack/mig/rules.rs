//! The rule that chooses slices compared with others, on instances that come at random and stay for a while.

use super::*;

/// Chooses a card and slices among the free ones.
type Rule<'a> = &'a dyn Fn(&Geometry, &[u8], Mib) -> Option<(usize, u8)>;

fn choices(geometry: &Geometry, cards: &[u8], mib: Mib) -> Vec<(usize, u8)> {
    let profile = geometry.profile(mib).unwrap();
    let on = |(card, taken): (usize, &u8)| {
        let may = masks(profile).into_iter();
        let may = may.filter(move |mask| mask & taken == 0);
        may.map(move |mask| (card, mask)).collect::<Vec<_>>()
    };
    cards.iter().enumerate().flat_map(on).collect()
}

fn ours(geometry: &Geometry, cards: &[u8], mib: Mib) -> Option<(usize, u8)> {
    let card = |taken: &u8| Card {
        slices: Some(Slices {
            geometry: *geometry,
            blocked: 0,
            taken: *taken,
        }),
        ..pool(geometry)
    };
    let node = NodeGpus {
        cards: cards.iter().map(card).map(seen).collect(),
        ..NodeGpus::default()
    };
    let placement = fit(&node, &isolated(mib), &Binpack).ok()?.placement;
    Some((placement.cards[0][0], placement.piece?.mask()))
}

fn first_fit(geometry: &Geometry, cards: &[u8], mib: Mib) -> Option<(usize, u8)> {
    choices(geometry, cards, mib).into_iter().next()
}

/// At how many of its ends a piece touches taken slices, or the card's end.
fn touches(taken: u8, mask: u8) -> u32 {
    let all = u32::from(taken) << 1 | 1 | 1 << 9;
    let piece = u32::from(mask) << 1;
    u32::from(piece << 1 & all & !piece > 0) + u32::from(piece >> 1 & all & !piece > 0)
}

fn edge_greedy(geometry: &Geometry, cards: &[u8], mib: Mib) -> Option<(usize, u8)> {
    let all = choices(geometry, cards, mib).into_iter();
    all.rev()
        .max_by_key(|&(card, mask)| touches(cards[card], mask))
}

fn largest_region(taken: u8) -> u32 {
    (0..8_u32)
        .map(|start| (!taken >> start).trailing_ones())
        .max()
        .unwrap_or(0)
}

/// HAMi's issue 2831: keep the largest region, then stay at edges; the first card that does.
fn hami(geometry: &Geometry, cards: &[u8], mib: Mib) -> Option<(usize, u8)> {
    let all = choices(geometry, cards, mib);
    let first = all.first()?.0;
    let of_card = all.into_iter().filter(|(card, _)| *card == first);
    of_card.rev().max_by_key(|&(card, mask)| {
        let taken = cards[card];
        (largest_region(taken | mask), touches(taken, mask))
    })
}

/// As ours, but a set of further instances counts for more the more often its sizes come.
fn by_demand(
    rows: &[Row],
    weights: &[u32],
) -> impl Fn(&Geometry, &[u8], Mib) -> Option<(usize, u8)> {
    let used = of_sizes(&profiles(rows));
    let mut sets: Vec<BTreeSet<[i32; 6]>> = vec![BTreeSet::new(); 256];
    for taken in (0..=u8::MAX).rev() {
        let mut own = BTreeSet::from([[0; 6]]);
        for (number, profile) in used.iter().enumerate() {
            for mask in masks(*profile).iter().filter(|mask| *mask & taken == 0) {
                for mut set in sets[usize::from(taken | mask)].clone() {
                    set[number] += 1;
                    own.insert(set);
                }
            }
        }
        sets[usize::from(taken)] = own;
    }
    let mean = f64::from(weights.iter().sum::<u32>()) / weights.len() as f64;
    let often = |set: &[i32; 6]| -> f64 {
        let each = weights.iter().zip(set);
        each.map(|(weight, count)| (f64::from(*weight) / mean).powi(*count))
            .product()
    };
    let worth = |sets: &BTreeSet<_>| sets.iter().map(often).sum::<f64>();
    let table: Vec<f64> = sets.iter().map(worth).collect();
    move |geometry, cards, mib| {
        let lost = |&(card, mask): &(usize, u8)| {
            let taken = cards[card];
            let of = |mask: u8| table[usize::from(mask)];
            (of(taken) - of(taken | mask), taken.count_zeros())
        };
        let all = choices(geometry, cards, mib).into_iter();
        all.min_by(|a, b| lost(a).partial_cmp(&lost(b)).unwrap())
    }
}

/// How many instances a rule places; the instances come at random and stay for a while.
fn arrivals(rows: &[Row], rule: Rule<'_>, cards: usize, weights: &[u32], load: u32) -> u32 {
    let geometry = geometry(rows);
    let sizes = sizes(rows);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u32| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % below
    };
    let mut taken = vec![0_u8; cards];
    let mut live: Vec<(u32, usize, u8)> = Vec::new();
    let mut placed = 0;
    for now in 0..3_000 {
        live.retain(|&(ends, card, mask)| {
            if ends <= now {
                taken[card] &= !mask;
            }
            ends > now
        });
        let mut drawn = random(weights.iter().sum());
        let size = weights.iter().position(|weight| {
            let is_it = drawn < *weight;
            drawn = drawn.saturating_sub(*weight);
            is_it
        });
        let stays = 1 + random(2 * load * cards as u32);
        if let Some((card, mask)) = rule(&geometry, &taken, sizes[size.unwrap()]) {
            taken[card] |= mask;
            live.push((now + stays, card, mask));
            placed += 1;
        }
    }
    placed
}

#[test]
fn on_random_arrivals_it_places_more_than_others_and_than_one_who_knows_which_sizes_come() {
    let mut sums = [0; 5];
    for rows in [H100, A100, A30] {
        let sizes = sizes(rows).len();
        for weights in [
            [1, 1, 1, 1],
            [8, 4, 2, 1],
            [1, 2, 4, 1],
            [6, 1, 1, 0],
            [5, 3, 2, 0],
        ] {
            let weights = &weights[..sizes];
            let by_demand = by_demand(rows, weights);
            let rules: [Rule<'_>; 5] = [&ours, &by_demand, &first_fit, &edge_greedy, &hami];
            for cards in [1, 4, 12] {
                for load in [2, 4] {
                    for (rule, sum) in rules.iter().zip(&mut sums) {
                        *sum += arrivals(rows, *rule, cards, weights, load);
                    }
                }
            }
        }
    }
    assert!(sums[1..].iter().all(|other| sums[0] >= *other), "{sums:?}");
}
