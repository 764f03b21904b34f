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

    /// Its page.
    fn page(self) -> &'static str {
        match self {
            Self::Queue => "docs/queue.md",
            Self::Reclaim => "docs/reclaim.md",
            Self::Reserve => "docs/reservations.md",
            Self::Defragment => "docs/defragmentation.md",
            Self::Provision => "docs/autoscaling.md",
        }
    }

    /// Commands that show the feature, and their results. `EXAMPLES` is the folder of the examples.
    fn steps(self) -> &'static [(&'static str, &'static str)] {
        const FILL: (&str, &str) = (
            "kubectl scale deployment triton --replicas=200; sleep 40",
            "more than fit",
        );
        match self {
            Self::Queue => &[
                FILL,
                (
                    "kubectl scale deployment triton --replicas=203; sleep 3; kubectl get pods | grep SchedulingGated",
                    "while pods wait, new ones are queued; kubectl gpustow why POD shows the position",
                ),
            ],
            Self::Reclaim => &[
                FILL,
                (
                    "kubectl get events --field-selector reason=GpuPodDisrupted",
                    "a pod that uses 115 % of its request is evicted for one that waits",
                ),
            ],
            Self::Reserve => &[
                FILL,
                (
                    "sleep 60; kubectl get events --field-selector reason=GpuMemoryReserved",
                    "GPUs are reserved for pods that have waited a minute, until the named pods finish",
                ),
            ],
            Self::Defragment => &[
                (
                    r#"kubectl patch deployment triton -p '{"spec":{"template":{"metadata":{"annotations":{"gpustow.dev/evictable":"true"}}}}}'"#,
                    "its pods may be evicted",
                ),
                (
                    "kubectl scale deployment triton --replicas=120; sleep 30; kubectl scale deployment triton --replicas=70; sleep 10",
                    "leaves free memory on many GPUs, and few empty ones",
                ),
                (
                    r#"for job in one two three; do sed "s/train-whole-gpu/$job/" EXAMPLES/exclusive-job.yaml | kubectl apply -f -; done; sleep 30"#,
                    "each needs an empty GPU",
                ),
                (
                    "kubectl get events --field-selector reason=GpuPodDisrupted",
                    "who was evicted for them; kubectl get pods shows all of them running",
                ),
            ],
            Self::Provision => &[
                (
                    "kubectl scale deployment triton --replicas=112; sleep 40",
                    "free memory suffices in sum, in pieces that are too small for the last pods",
                ),
                (
                    "kubectl get pods -A -l gpustow.dev/placeholder",
                    "for these an autoscaler would add nodes",
                ),
            ],
        }
    }
}

/// The tour once the examples are applied: of these features, or of the parts that work without any.
pub(crate) fn tour(features: &[Feature], examples: &str) -> String {
    let lines = |steps: &[(&str, &str)]| -> String {
        let lines = steps.iter().map(|(command, what)| {
            let command = command.replace("EXAMPLES", examples);
            format!("  {command}\n      # {what}\n")
        });
        lines.collect()
    };
    if features.is_empty() {
        let hint = "To try features that are off by default: make cluster ARGS=\"--with queue,reserve\" (ARGS=--help lists them)";
        return format!("{}\n{hint}", lines(&ALWAYS));
    }
    let parts = features.iter().map(|it| {
        format!(
            "\n{}, see {}:\n\n{}",
            it.field(),
            it.page(),
            lines(it.steps())
        )
    });
    let parts: String = parts.collect();
    let status = (
        "kubectl describe gpustowconfig gpustow",
        "shows of each feature whether it works",
    );
    format!("{parts}\n{}", lines(&[status]))
}

/// Commands that work without any feature.
const ALWAYS: [(&str, &str); 3] = [
    (
        "kubectl scale deployment triton --replicas=200; sleep 30; kubectl gpustow why deploy/triton",
        "more than fit: the missing memory of the next one, on which GPU, and which pods must finish first",
    ),
    (
        "kubectl gpustow check",
        "pods above their request, 3 GiB on gpu-node-0 that belong to no pod; after five minutes, idle pods",
    ),
    ("kubectl gpustow ui", "all of it live in a browser"),
];
