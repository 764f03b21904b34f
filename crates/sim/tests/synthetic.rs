//! Exact results on a small workload that is the same everywhere.

use anyhow::Result;
use gpustow_sim::baselines::Choice;
use gpustow_sim::protocol::{Mode, Workload};
use gpustow_sim::random::Random;
use gpustow_sim::replay::{Run, replay};
use gpustow_sim::trace::{TraceNode, TracePod};

/// 48 nodes of three kinds and 700 pods: shares of six sizes, whole cards, some of several, some
/// bound to a model, some without GPUs.
fn workload(mode: Mode) -> Result<Workload> {
    let mut random = Random::new(7);
    let kinds = [("G2", 8, 96_000), ("T4", 2, 64_000), ("V100M32", 4, 48_000)];
    let nodes = (0..48).map(|index| {
        let (model, gpus, cpu_milli) = kinds[index % 3];
        TraceNode {
            name: format!("node-{index:02}"),
            cpu_milli,
            ram_mib: 400_000,
            gpus,
            model: model.to_owned(),
        }
    });
    let pods = (0..700).map(|index| {
        let (gpus, gpu_milli) = match random.below(20) {
            0..2 => (0, 0),
            2..8 => (1, [110, 230, 320, 470, 650, 810][random.below(6)]),
            8..19 => (1, 1000),
            _ => ([2, 4, 8][random.below(3)], 1000),
        };
        let bound = gpus == 1 && random.below(10) == 0;
        TracePod {
            name: format!("pod-{index:03}"),
            cpu_milli: [2000, 6000, 12_000][random.below(3)] * gpus.max(1) as u64,
            ram_mib: 8192,
            gpus,
            gpu_milli,
            models: if bound {
                vec!["T4".to_owned()]
            } else {
                Vec::new()
            },
        }
    });
    Workload::new(nodes.collect(), pods.collect(), mode)
}

fn results(mode: Mode) -> Result<Vec<(&'static str, u64)>> {
    let workload = workload(mode)?;
    let unplaced = |run: Run| run.unplaced.values().map(|(_, milli)| milli).sum();
    Choice::all()
        .map(|choice| Ok((choice.name(), unplaced(replay(&workload, choice, 42)?))))
        .collect()
}

fn is_best(name: &str, results: &[(&str, u64)]) -> bool {
    results
        .iter()
        .min_by_key(|(_, unplaced)| unplaced)
        .is_some_and(|(best, _)| *best == name)
}

/// Thousandths of cards that each policy turns away. A change of policy changes these numbers, and
/// its author says why.
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
        ("tight", 69_220),
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
        ("tight", 55_350),
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
        let run = |seed| replay(&workload, choice, seed).map(|run| run.allocated);
        assert_eq!(run(42)?, run(42)?, "{choice}");
        assert_ne!(run(42)?, run(43)?, "{choice}");
    }
    Ok(())
}
