//! Exact results on a small workload that is the same everywhere.

use anyhow::{Context as _, Result};
use gpustow_pack::PolicyKind;
use gpustow_sim::baselines::Choice;
use gpustow_sim::churn::{Lifetimes, Plan, churn};
use gpustow_sim::progress::Progress;
use gpustow_sim::protocol::{Mode, Workload};
use gpustow_sim::replay::{Run, replay};
use gpustow_sim::synthetic;

fn workload(mode: Mode) -> Result<Workload> {
    Workload::new(synthetic::nodes(synthetic::NODES), synthetic::pods(), mode)
}

/// The run of a seed, which nothing interrupts.
fn replayed(workload: &Workload, choice: Choice, seed: u64) -> Result<Run> {
    replay(workload, choice, seed, &mut Progress::silent())?.context("stopped")
}

fn results(mode: Mode) -> Result<Vec<(&'static str, u64)>> {
    let workload = workload(mode)?;
    let unplaced = |run: Run| run.unplaced.values().map(|(_, milli)| milli).sum();
    Choice::all()
        .map(|choice| Ok((choice.name(), unplaced(replayed(&workload, choice, 42)?))))
        .collect()
}

fn is_best(name: &str, results: &[(&str, u64)]) -> bool {
    results
        .iter()
        .min_by_key(|(_, unplaced)| unplaced)
        .is_some_and(|(best, _)| *best == name)
}

/// Thousandths of cards that each policy turns away. A change of policy changes these numbers, and its author gives the
/// reason.
#[test]
fn every_policy_turns_away_exactly_this() -> Result<()> {
    let expected = [
        ("random", 81_080),
        ("dotprod", 70_910),
        ("clustering", 75_140),
        ("packing", 71_020),
        ("bestfit", 71_800),
        ("fgd", 69_460),
        ("fgd-random-ties", 69_990),
        ("fullest-node", 71_020),
        ("dra", 75_000),
        ("dra-most-allocated", 70_760),
        ("tight", 69_440),
        ("binpack", 71_020),
        ("spread", 98_430),
        ("first-fit", 70_370),
    ];
    assert_eq!(results(Mode::Units)?, expected);
    assert!(is_best("tight", &expected));
    Ok(())
}

#[test]
fn in_mib_every_policy_turns_away_exactly_this() -> Result<()> {
    let expected = [
        ("random", 73_650),
        ("dotprod", 57_500),
        ("clustering", 72_060),
        ("packing", 58_290),
        ("bestfit", 58_300),
        ("fgd", 62_800),
        ("fgd-random-ties", 61_120),
        ("fullest-node", 58_060),
        ("dra", 59_320),
        ("dra-most-allocated", 57_270),
        ("tight", 54_180),
        ("binpack", 66_060),
        ("spread", 85_000),
        ("first-fit", 56_920),
    ];
    assert_eq!(results(Mode::MibPaper)?, expected);
    assert!(is_best("tight", &expected));
    Ok(())
}

#[test]
fn a_run_is_the_same_again() -> Result<()> {
    let workload = workload(Mode::Units)?;
    for choice in Choice::all() {
        let run = |seed| replayed(&workload, choice, seed).map(|run| run.allocated);
        assert_eq!(run(42)?, run(42)?, "{choice}");
        assert_ne!(run(42)?, run(43)?, "{choice}");
    }
    Ok(())
}

/// Thousandths of percent allocated, and of a minute that a pod waits on average, with a load of 95 %
/// and of 105 %.
#[test]
fn with_departures_every_policy_shows_exactly_this() -> Result<()> {
    let mut plan = Plan {
        workload: workload(Mode::Units)?,
        standing: None,
        then: None,
        hosts: synthetic::NODES,
        load: 0.0,
        lifetimes: Lifetimes::Exponential,
        keep: None,
        moving: None,
        together: None,
    };
    let mut results = Vec::new();
    for choice in [
        Choice::BestFit,
        Choice::Fgd,
        Choice::Own(PolicyKind::FirstFit),
        Choice::Own(PolicyKind::Tight),
    ] {
        let mut of = |load| -> Result<_> {
            plan.load = load;
            let run = churn(&plan, choice, 42, &mut Progress::silent())?.context("stopped")?;
            let waits: Vec<f64> = run.waits.into_values().flatten().collect();
            let wait = waits.iter().sum::<f64>() / waits.len() as f64;
            let thousandths = |value: f64| (1000.0 * value).round() as u64;
            Ok((thousandths(run.allocated), thousandths(wait)))
        };
        results.push((choice.name(), of(0.95)?, of(1.05)?));
    }
    let expected = [
        ("bestfit", (87_221, 480), (93_475, 2639)),
        ("fgd", (86_371, 645), (91_484, 2653)),
        ("first-fit", (88_023, 708), (92_100, 2855)),
        ("tight", (88_212, 505), (91_563, 2540)),
    ];
    assert_eq!(results, expected);
    Ok(())
}
