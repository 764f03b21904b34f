//! The worth of a piece of a card, by the prices of a cutting-stock problem. Cards are the stock, and the sizes that
//! pods request are the orders.

/// A card is divided into so many units; sizes are rounded to the nearest.
pub(super) const UNITS: usize = 1000;
/// At most this number of sizes take part: the sizes with the most demand.
const MAX_SIZES: usize = 48;
/// Pivots after which the prices are taken as they are.
const MAX_PIVOTS: usize = 300;
const EPSILON: f64 = 1e-9;

/// The worth of every piece from 0 to [`UNITS`], in cards: the price of the best filling of the piece. At these prices
/// no filling of a whole card pays more than one card. `orders` are sizes in units and how often they are asked for.
pub(super) fn worth(mut orders: Vec<(usize, f64)>) -> Vec<f64> {
    orders.retain(|&(size, demand)| (1..=UNITS).contains(&size) && demand > 0.0);
    orders.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    orders.truncate(MAX_SIZES);
    let sizes: Vec<usize> = orders.iter().map(|&(size, _)| size).collect();
    let prices = prices(&sizes, orders.iter().map(|&(_, demand)| demand).collect());
    let (mut worth, _) = knapsack(&sizes, &prices);
    let whole = worth[UNITS];
    if whole > 0.0 {
        worth.iter_mut().for_each(|worth| *worth /= whole);
    }
    worth[UNITS] = 1.0;
    worth
}

/// Dual prices of the cutting-stock problem, by column generation.
fn prices(sizes: &[usize], demand: Vec<f64>) -> Vec<f64> {
    let rows = sizes.len();
    let mut inverse = vec![vec![0.0; rows]; rows];
    let mut cards = demand;
    for (row, &size) in sizes.iter().enumerate() {
        let pieces = (UNITS / size) as f64;
        inverse[row][row] = 1.0 / pieces;
        cards[row] /= pieces;
    }
    let mut prices = Vec::new();
    for _ in 0..MAX_PIVOTS {
        prices = (0..rows)
            .map(|at| inverse.iter().map(|row| row[at]).sum())
            .collect();
        let (worth, last) = knapsack(sizes, &prices);
        if worth[UNITS] <= 1.0 + EPSILON {
            break;
        }
        let mut pattern = vec![0.0; rows];
        let mut left = UNITS;
        while let Some(row) = last[left] {
            pattern[row] += 1.0;
            left -= sizes[row];
        }
        let dot = |row: &Vec<f64>| row.iter().zip(&pattern).map(|(a, b)| a * b).sum();
        let entering: Vec<f64> = inverse.iter().map(dot).collect();
        let ratio = |row: &usize| cards[*row] / entering[*row];
        let leaving = (0..rows)
            .filter(|&row| entering[row] > EPSILON)
            .min_by(|a, b| ratio(a).total_cmp(&ratio(b)));
        let Some(leaving) = leaving else { break };
        let pivot = inverse[leaving]
            .iter()
            .map(|at| at / entering[leaving])
            .collect::<Vec<_>>();
        let amount = ratio(&leaving);
        for row in (0..rows).filter(|&row| row != leaving) {
            for (at, pivot) in inverse[row].iter_mut().zip(&pivot) {
                *at -= entering[row] * pivot;
            }
            cards[row] -= entering[row] * amount;
        }
        inverse[leaving] = pivot;
        cards[leaving] = amount;
    }
    prices
}

/// For every room from 0 to [`UNITS`] the best pay, and the size cut last for it (none: a unit is
/// left over).
fn knapsack(sizes: &[usize], prices: &[f64]) -> (Vec<f64>, Vec<Option<usize>>) {
    let mut worth = vec![0.0; UNITS + 1];
    let mut last = vec![None; UNITS + 1];
    for room in 1..=UNITS {
        worth[room] = worth[room - 1];
        last[room] = last[room - 1];
        let mut from = None;
        for (row, &size) in sizes.iter().enumerate() {
            if size <= room && worth[room - size] + prices[row] > worth[room] + EPSILON {
                worth[room] = worth[room - size] + prices[row];
                from = Some(row);
            }
        }
        if from.is_some() {
            last[room] = from;
        }
    }
    (worth, last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_piece_is_worth_what_can_be_put_into_it() {
        let worth = |orders: &[(usize, f64)]| worth(orders.to_vec());
        let halves = worth(&[(500, 3.0)]);
        assert_eq!(
            [halves[499], halves[500], halves[999], halves[1000]],
            [0.0, 0.5, 0.5, 1.0]
        );
        // Two of 340 fill a card as well as anything does: the third that would not fit is lost.
        assert!((worth(&[(340, 1.0)])[340] - 0.5).abs() < EPSILON);
        // A 300 lies next to each 700, and pods ask for 300s often enough to fill cards of their own.
        let mixed = worth(&[(700, 1.0), (300, 9.0)]);
        assert!((mixed[300] - 1.0 / 3.0).abs() < EPSILON, "{}", mixed[300]);
        assert!((mixed[700] - 2.0 / 3.0).abs() < EPSILON, "{}", mixed[700]);
        assert_eq!(worth(&[])[999], 0.0);
    }

    proptest! {
        /// No filling of a card pays more than a card, and no other such prices would pay more
        /// for all orders; prices by size alone are such prices.
        #[test]
        fn prices_are_a_dual_optimum(
            orders in prop::collection::vec((1..=UNITS, 1..100_u32), 1..20),
        ) {
            let sizes: Vec<usize> = orders.iter().map(|&(size, _)| size).collect();
            let demand: Vec<f64> = orders.iter().map(|&(_, demand)| f64::from(demand)).collect();
            let prices = prices(&sizes, demand.clone());
            let (worth, _) = knapsack(&sizes, &prices);
            prop_assert!(worth[UNITS] <= 1.0 + 1e-6, "{}", worth[UNITS]);
            let pay: f64 = prices.iter().zip(&demand).map(|(price, demand)| price * demand).sum();
            let by_size: f64 =
                sizes.iter().zip(&demand).map(|(&size, demand)| size as f64 * demand).sum();
            prop_assert!(pay * UNITS as f64 >= by_size * (1.0 - 1e-6), "{pay} {by_size}");
        }
    }
}
