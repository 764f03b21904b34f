//! Advice from histories whose use is known.

use gpustow_advice::{
    Advice, BUCKETS, Caution, Checkpoint, DAY, HOURS, History, Peaks, When, advise, advise_at,
};
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
            sustained: vec![i16::MAX, i16::MIN, 5],
            peaks: vec![-7; 5 * HOURS],
            usual: vec![352; 30],
        },
        Checkpoint {
            buckets: [(3, 1)].into(),
            last: i64::MIN,
            sustained: vec![351; HOURS],
            ..Checkpoint::default()
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
fn advice_names_what_speaks_against_it() {
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
    // Most of the GPU, all the time, in one of the two sizes that it runs on.
    assert_eq!(
        advise(&flat(41_000, 2), Mib(46_068)).map(|it| it.cautions),
        Some(vec![Caution::TakesEverything])
    );
}

/// 10 GiB, and 40 GiB for so many minutes from this minute of each day on, if `on` holds for the day.
fn peaking(begin: u64, lasts: u64, days: u64, on: impl Fn(u64) -> bool) -> History {
    history((0..days * 1440).map(|minute| {
        let of_day = minute % 1440;
        match (begin..begin + lasts).contains(&of_day) && on(minute / 1440) {
            true => 40_960,
            false => 10_240,
        }
    }))
}

fn advised(history: &History) -> Advice {
    let none = Advice {
        request: Mib::ZERO,
        limit: Mib::ZERO,
        samples: 0,
        spans: 0,
        cautions: Vec::new(),
    };
    advise(history, GPU).unwrap_or(none)
}

#[test]
fn advice_is_the_same_at_every_hour_of_a_day_with_a_peak() {
    for lasts in [1, 3, 5, 8, 11, 12, 13, 15, 20, 30, 45, 60, 90, 240] {
        for begin in [0, 7, 25, 31, 55, 540, 1200] {
            let mut history = peaking(begin, lasts, 4, |_| true);
            let (mut least, mut most) = (u64::MAX, 0);
            for minute in 4 * 1440..6 * 1440 {
                let peaks = (begin..begin + lasts).contains(&(minute % 1440));
                history.add(Mib(if peaks { 40_960 } else { 10_240 }), 60 * minute as i64);
                if minute % 20 == 0 {
                    let request = advised(&history).request.0;
                    (least, most) = (least.min(request), most.max(request));
                }
            }
            assert!(
                most * 10 <= least * 11,
                "{lasts} from {begin}: {least} {most}"
            );
            assert_eq!(most >= 40_000, lasts >= 12, "{lasts}");
        }
    }
}

#[test]
fn advice_moves_by_less_than_a_tenth_over_a_day_of_bursts_that_repeats() {
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..30 {
        let mut day = Vec::new();
        while day.len() < 1440 {
            let burst = random.u64(8_000..40_000).max(random.u64(8_000..20_000));
            day.extend(vec![burst; random.usize(1..12)]);
            day.extend(vec![random.u64(6_000..9_000); random.usize(1..90)]);
        }
        let mut history = History::default();
        let (mut least, mut most) = (u64::MAX, 0);
        for minute in 0..8 * 1440 {
            history.add(Mib(day[minute % 1440]), 60 * minute as i64);
            if minute >= 6 * 1440 && minute % 30 == 0 {
                let request = advised(&history).request.0;
                (least, most) = (least.min(request), most.max(request));
            }
        }
        assert!(most * 10 < least * 11, "{least} {most}");
    }
}

#[test]
fn caution_names_the_pattern_that_the_advised_amount_does_not_cover() {
    let said = |advice: Option<Advice>| -> Vec<String> {
        let cautions = advice.unwrap().cautions;
        cautions.iter().map(ToString::to_string).collect()
    };
    // 1970 begins on a Thursday.
    let daily = peaking(540, 60, 5, |_| true);
    assert!(advised(&daily).request >= Mib(40_960));
    assert!(said(advise(&daily, GPU)).is_empty());
    for (history, expected) in [
        (
            daily,
            "uses up to 40 GiB for about an hour each day at 09:00 UTC: the request does not cover that",
        ),
        (
            peaking(540, 90, 9, |_| true),
            "uses up to 40 GiB for about 2 hours each day at 09:00 UTC: the request does not cover that",
        ),
        (
            peaking(1425, 30, 5, |_| true),
            "uses up to 40 GiB for about an hour each day at 23:00 UTC: the request does not cover that",
        ),
        (
            peaking(600, 60, 9, |day| day % 7 == 1),
            "uses up to 40 GiB for about an hour each Friday at 10:00 UTC: the request does not cover that",
        ),
        (
            peaking(600, 60, 6, |day| day == 2),
            "uses up to 40 GiB for about an hour on Saturday at 10:00 UTC: the request does not cover that",
        ),
        (
            peaking(0, 5, 6, |day| day == 0),
            "uses up to 40 GiB in its first hour, as at a start: the request does not cover that",
        ),
    ] {
        assert_eq!(said(advise_at(&history, GPU, 500)), [expected]);
    }
    // A short peak is reported for the usual amount, too.
    let short = peaking(540, 5, 5, |_| true);
    assert_eq!(
        said(advise(&short, GPU)),
        ["uses up to 40 GiB for minutes each day at 09:00 UTC: the request does not cover that"]
    );
    let bursts = history((0..4 * 1440).map(|it| if it % 150 == 0 { 40_960 } else { 10_240 }));
    let Some(Caution::Peaks(Peaks { when, .. })) = advised(&bursts).cautions.pop() else {
        panic!("no caution");
    };
    assert_eq!(when, When::Hours(39, 96));
}

#[test]
fn weekly_peak_is_covered_until_the_next() {
    let mut history = peaking(600, 60, 3, |day| day == 1);
    for minute in 3 * 1440..8 * 1440 {
        history.add(Mib(10_240), 60 * minute);
        if minute % 60 == 0 {
            assert!(advised(&history).request >= Mib(40_960), "{minute}");
        }
    }
}

#[test]
fn limit_and_request_follow_use_down_within_eight_days() {
    let mut history = flat(40_000, 3);
    for minute in 0..8 * 1440 + 120 {
        history.add(Mib(10_000), 60 * (3 * 1440 + minute));
    }
    let advice = advised(&history);
    assert!(advice.request <= Mib(10_304), "{advice:?}");
    assert!(advice.limit <= Mib(10_800), "{advice:?}");
}

#[test]
fn growth_of_a_day_is_added_while_it_lasts() {
    let more = |minute: u64| 10_000 + minute * 1000 / 1440;
    let history = history((0..6 * 1440).map(more));
    let advice = advised(&history);
    assert!(advice.request >= Mib(more(7 * 1440) - 300), "{advice:?}");
    assert!(advice.request <= Mib(more(7 * 1440) + 1000), "{advice:?}");
    assert!(
        advice
            .cautions
            .iter()
            .any(|it| matches!(it, Caution::Grows(by) if (800..1300).contains(&by.0)))
    );
}

#[test]
fn quiet_night_is_no_history_and_a_nightly_job_is_one_after_two_days() {
    assert!(!advised(&history([9_000; 12 * 60])).is_enough());
    assert!(advised(&history([9_000; 18 * 60])).is_enough());
    let mut nightly = History::default();
    for (day, enough) in [(0, false), (1, false), (2, true)] {
        for minute in 0..40 {
            nightly.add(Mib(9_000), DAY as i64 * day + 60 * minute);
        }
        assert_eq!(advised(&nightly).is_enough(), enough);
        assert!(advised(&nightly).request >= Mib(9_000));
    }
}

#[test]
fn checkpoint_without_hours_is_read_and_waits_for_a_day() {
    let stored = Checkpoint {
        sustained: Vec::new(),
        peaks: Vec::new(),
        usual: Vec::new(),
        ..peaking(540, 60, 5, |_| true).checkpoint()
    };
    let mut history = History::of(&stored);
    let advice = advised(&history);
    assert!(
        advice.request >= Mib(40_000) && advice.limit >= Mib(43_000),
        "{advice:?}"
    );
    history.add(Mib(10_240), stored.last + 60);
    assert_eq!(history.peak(), Mib(40_960));
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
