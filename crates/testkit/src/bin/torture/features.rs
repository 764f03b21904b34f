//! What the extenders do beside scheduling, drawn by the seed, and what a run needs for it.

use anyhow::Result;
use gpustow_testkit::ControlPlane;

/// A feature's arguments, and the folder of `manifests` with its right.
const FEATURES: [(&[&str], &str); 5] = [
    (&["--line=auto"], "line"),
    (&["--call-back", "--act=evict"], "evict"),
    (&["--preempt-scattered"], "preempt-scattered"),
    (&["--keep=10", "--keep-marks"], "keep"),
    (&["--move=60"], "move"),
];

/// Does a run change to the earlier version and back? That one knows no feature.
pub(crate) fn changes_version(seed: u64) -> bool {
    dice(seed).bool()
}

/// The extender's arguments: each feature is on in three of four runs.
pub(crate) fn draw(seed: u64) -> Vec<String> {
    let mut dice = dice(seed);
    let drawn = FEATURES.iter().filter(|_| dice.u8(..4) > 0);
    let args = drawn.flat_map(|(args, _)| args.iter());
    args.map(ToString::to_string).collect()
}

fn dice(seed: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed ^ 0x6665_6174)
}

/// Gives the extenders every right that a feature needs.
pub(crate) async fn allow(cluster: &ControlPlane) -> Result<()> {
    for (_, right) in FEATURES {
        let file = format!("manifests/{right}/rbac.yaml");
        cluster.kubectl(&["apply", "-f", &file]).await?;
    }
    Ok(())
}
