//! Advice from histories whose use is known.

use gpustow_advice::{BUCKETS, Caution, Checkpoint, DAY, History, advise, advise_at};
use gpustow_pack::Mib;

const GPU: Mib = Mib(81_920);

/// A history of these amounts, a minute each.
fn history(amounts: impl IntoIterator<Item = u64>) -> History {
    let mut history = History::default();
    for (minute, amount) in (0..).zip(amounts) {
        history.add(Mib(amount), 60 * minute);
    }
    history
}

/// The same amount every minute for so many days.
fn flat(amount: u64, days: u64) -> History {
    history((0..days * 1440).map(|_| amount))
}

#[test]
fn quantiles_are_at_most_a_fortieth_above_the_exact_ones() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let top = random.u64(100..300_000);
        let mut amounts: Vec<u64> = (0..60).map(|_| random.u64(64..=top.max(65))).collect();
        let mut found = History::default();
        // At one moment, so that none counts less than another.
        amounts.iter().for_each(|amount| found.add(Mib(*amount), 0));
        amounts.sort_unstable();
        for permille in [500, 900, 950, 990, 1000] {
            let rank = (60 * permille as usize).div_ceil(1000).max(1);
            let exact = amounts[rank - 1];
            let Some(Mib(found)) = found.quantile(permille) else {
                panic!("no quantile");
            };
            assert!(found >= exact, "{permille}: {found} < {exact}");
            assert!(
                found as f64 <= exact as f64 * 1.026 + 1.0,
                "{permille}: {found} > {exact}"
            );
        }
    }
}

#[test]
fn a_quantile_is_never_above_the_largest_sample() {
    for amount in [0, 1, 63, 64, 65, 8_191, 1_000_000_000] {
        assert_eq!(
            flat(amount, 1)
                .quantile(1000)
                .map(|it| it.0 <= amount.max(64)),
            Some(true)
        );
    }
    assert_eq!(flat(1_000, 1).quantile(950), Some(Mib(1_000)));
}

#[test]
fn yesterdays_use_counts_half() {
    let mut history = flat(10_000, 1);
    for minute in 0..1440 {
        history.add(Mib(20_000), DAY as i64 * 2 + 60 * minute);
    }
    // Two of the three days' weight is the new one's: a quarter and a bit is the old one's.
    let quantile = |permille| history.quantile(permille);
    assert!(quantile(150).is_some_and(|it| it < Mib(10_300)));
    assert!(quantile(350).is_some_and(|it| it > Mib(19_000)));
}

#[test]
fn years_of_samples_stay_finite_and_small() {
    let mut history = History::default();
    for hour in 0..20 * 365 * 24 {
        history.add(Mib(1_000 + hour as u64 % 7), 3600 * hour);
    }
    assert!(history.quantile(950).is_some_and(|it| it <= Mib(1_006)));
    let stored = history.checkpoint();
    assert!(stored.buckets.len() <= BUCKETS);
    let text = serde_json::to_string(&stored).unwrap_or_default();
    assert!(text.len() < 4_096, "{}", text.len());
}

#[test]
fn a_stored_history_advises_the_same_and_goes_on_the_same() {
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..50 {
        let (low, high) = (random.u64(64..20_000), random.u64(20_000..80_000));
        let mut one = history((0..3000).map(|_| random.u64(low..high)));
        let text = serde_json::to_string(&one.checkpoint()).unwrap_or_default();
        let stored: Checkpoint = match serde_json::from_str(&text) {
            Ok(stored) => stored,
            Err(error) => panic!("{error}: {text}"),
        };
        let mut other = History::of(&stored);
        assert_eq!(advise(&one, GPU), advise(&other, GPU));
        for minute in 0..1440 {
            let amount = Mib(random.u64(low..high));
            one.add(amount, 60 * (3000 + minute));
            other.add(amount, 60 * (3000 + minute));
        }
        let close = |a: Option<Mib>, b: Option<Mib>| match (a, b) {
            (Some(Mib(a)), Some(Mib(b))) => a.abs_diff(b) * 20 <= a,
            _ => false,
        };
        assert!(close(one.quantile(950), other.quantile(950)));
    }
}

#[test]
fn a_damaged_checkpoint_is_no_panic() {
    for stored in [
        Checkpoint::default(),
        Checkpoint {
            buckets: [(u16::MAX, 5)].into(),
            ..Checkpoint::default()
        },
        Checkpoint {
            buckets: [(3, 0)].into(),
            total: u64::MAX,
            ..Checkpoint::default()
        },
        Checkpoint {
            buckets: [(3, u32::MAX), (4, u32::MAX)].into(),
            total: u64::MAX,
            first: i64::MAX,
            last: i64::MIN,
            samples: u64::MAX - 1,
            peak_mib: u64::MAX,
        },
    ] {
        let mut history = History::of(&stored);
        history.add(Mib(500), i64::MAX);
        history.add(Mib(500), i64::MIN);
        let advice = advise_at(&history, GPU, 2000);
        assert!(
            advice.is_none_or(|it| it.request <= GPU && it.limit <= GPU),
            "{stored:?}"
        );
    }
}

#[test]
fn advice_says_what_speaks_against_it() {
    let cautions = |history: &History| advise(history, GPU).map(|it| it.cautions);
    assert_eq!(cautions(&History::default()), None);
    assert_eq!(cautions(&flat(9_000, 1)), Some(vec![]));
    assert_eq!(
        cautions(&history([9_000; 30])),
        Some(vec![Caution::LittleHistory])
    );
    assert_eq!(
        cautions(&flat(75_000, 2)),
        Some(vec![Caution::TakesEverything])
    );
    let starts = (0..2880).map(|minute| if minute < 3 { 40_000 } else { 9_000 });
    assert_eq!(cautions(&history(starts)), Some(vec![Caution::StartPeak]));
}

#[test]
fn the_limit_covers_every_minute_that_was_seen() {
    let mut random = fastrand::Rng::with_seed(11);
    for _ in 0..100 {
        let history = history((0..1500).map(|_| random.u64(0..78_000)));
        let advice = advise(&history, GPU);
        assert!(advice.is_some_and(|it| it.limit >= history.peak() && it.limit >= it.request));
    }
}
