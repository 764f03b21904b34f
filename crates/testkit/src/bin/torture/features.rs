//! The extenders' features apart from scheduling, drawn by the seed.

/// Each feature as a field of the GpustowConfig.
const FEATURES: [&str; 6] = [
    "queue: {mode: Auto}",
    "reclaim: {action: Evict}",
    "preempt: {fragmented: true}",
    "reserve: {after: 10s, markNodes: true}",
    "defragment: {evictionsPerHour: 60, emptyNodes: true}",
    "provision: {max: 3}",
];
/// Turns the feature off that is on by default.
const OFF: &str = "preempt: {fragmented: false}";

/// Does a run change to the earlier version and back? That one knows no feature.
pub(crate) fn changes_version(seed: u64) -> bool {
    dice(seed).bool()
}

/// The configuration: each feature is on in three of four runs.
pub(crate) fn draw(seed: u64) -> Vec<String> {
    let mut dice = dice(seed);
    let drawn = FEATURES.iter().filter(|_| dice.u8(..4) > 0);
    std::iter::once(&OFF)
        .chain(drawn)
        .map(ToString::to_string)
        .collect()
}

fn dice(seed: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed ^ 0x6665_6174)
}
