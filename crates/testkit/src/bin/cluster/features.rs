//! Features that are off by default: `--with queue,reclaim`.

use clap::ValueEnum;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Feature {
    /// Queue new pods while others wait.
    Queue,
    /// Evict pods that use memory which another pod requested.
    Reclaim,
    /// Reserve GPUs for a pod that has waited for a minute.
    Reserve,
    /// Evict pods that allow it, to bring free memory together.
    Defragment,
    /// Create placeholders for pods that no present node can take.
    Provision,
}

impl Feature {
    /// The field of the GpustowConfig that turns it on.
    pub(crate) fn field(self) -> &'static str {
        match self {
            Self::Queue => "queue: {mode: Auto}",
            Self::Reclaim => "reclaim: {action: Evict}",
            Self::Reserve => "reserve: {after: 1m}",
            Self::Defragment => "defragment: {evictionsPerHour: 60}",
            Self::Provision => "provision: {max: 3}",
        }
    }

    /// The page that says what to look at.
    fn page(self) -> &'static str {
        match self {
            Self::Queue => "docs/queue.md",
            Self::Reclaim => "docs/reclaim.md",
            Self::Reserve => "docs/reservations.md",
            Self::Defragment => "docs/defragmentation.md",
            Self::Provision => "docs/autoscaling.md",
        }
    }
}

/// What the tour says of them.
pub(crate) fn tour(features: &[Feature]) -> String {
    if features.is_empty() {
        return "To try features that are off by default: make cluster ARGS=\"--with queue,reserve\" (ARGS=--help lists them)".to_owned();
    }
    let lines = features
        .iter()
        .map(|it| format!("  {}  # {}", it.field(), it.page()));
    let lines: Vec<_> = lines.collect();
    format!(
        "Turned on, and the page that says what to look at:\n\n{}\n\n  kubectl describe gpustowconfig gpustow\n      \
         # says of each feature whether it works",
        lines.join("\n")
    )
}
