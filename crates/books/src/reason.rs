//! Why a node is refused.

use gpustow_pack::Refusal;

/// Why a node is refused. The texts are constant; see [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Nothing fits there.
    Fit(Refusal),
    /// No agent reports GPUs for it.
    NoReport,
    /// Its agent has been silent for too long.
    Stale,
    /// The room is kept for a pod that preempts there.
    Nominated,
    /// What comes free is kept for a pod that has waited longer.
    Reserved,
    /// Others use the room beyond their requests, and were asked to give it back.
    Reclaimed,
    /// An earlier bind of this pod has an unknown outcome that is being looked up.
    BindUnderWay,
    /// The pod has been deleted, and kube-scheduler does not know yet.
    Gone,
    /// The call had spent its steps before it came to this node: the pod will be asked for again.
    NotYet,
    /// An earlier extender's Binding of this pod may still arrive.
    Unfenced,
    /// The room is first offered to pods in the queue before this one.
    Queued,
    /// It would fit if an administrator had not cordoned GPUs there.
    Cordoned,
    /// It would fit if GPUs there were not left to ResourceClaims.
    Claimed,
    /// Too few of its group fit with it (`Shortfall`).
    Gang,
}

impl Reason {
    /// Would the pod fit if there were more room?
    pub fn is_cured_by_room(&self) -> bool {
        matches!(
            self,
            Self::Fit(Refusal::NoRoom | Refusal::Neighbours)
                | Self::Reclaimed
                | Self::Nominated
                | Self::Reserved
        )
    }

    /// Every reason.
    pub fn all() -> impl Iterator<Item = Self> {
        let own = [
            Self::NoReport,
            Self::Stale,
            Self::Nominated,
            Self::Reserved,
            Self::Reclaimed,
            Self::BindUnderWay,
            Self::Gone,
            Self::NotYet,
            Self::Unfenced,
            Self::Queued,
            Self::Cordoned,
            Self::Claimed,
            Self::Gang,
        ];
        Refusal::ALL.into_iter().map(Self::Fit).chain(own)
    }

    /// The text for users.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Fit(refusal) => refusal.text(),
            Self::NoReport => "no GPU report from a gpustow agent",
            Self::Stale => "the GPU report is stale: the gpustow agent does not report",
            Self::Nominated => "free GPU memory is reserved for a pod that preempts here",
            Self::Reserved => "free GPU memory is reserved for a pod that has waited longer",
            Self::Reclaimed => "GPU memory used above requests is being reclaimed",
            Self::BindUnderWay => "an earlier bind of this pod is still being looked up",
            Self::Gone => "the pod has been deleted",
            Self::NotYet => "not evaluated yet: search in progress",
            Self::Unfenced => {
                "a previous extender may still bind this pod, and its status cannot be written: see \
                 its Events"
            }
            Self::Queued => "pods ahead in the queue go first",
            Self::Cordoned => "the GPUs that it fits on are cordoned",
            Self::Claimed => "the GPUs that it fits on are left to ResourceClaims",
            Self::Gang => "too few pods of its group fit at the same time",
        }
    }

    /// The value of metric and log labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Fit(Refusal::TooFewCards) => "too_few_gpus",
            Self::Fit(Refusal::TooLarge) => "too_large",
            Self::Fit(Refusal::Unselected) => "not_selected",
            Self::Fit(Refusal::NoMps) => "no_mps",
            Self::Fit(Refusal::OnlyMps) => "only_mps",
            Self::Fit(Refusal::NoMig) => "no_mig",
            Self::Fit(Refusal::OnlyMig) => "only_mig",
            Self::Fit(Refusal::NoLimit) => "no_limit",
            Self::Fit(Refusal::Starting) => "starting",
            Self::Fit(Refusal::Neighbours) => "gpu_affinity",
            Self::Fit(Refusal::Unhealthy) => "unhealthy",
            Self::Fit(Refusal::NoWholeCard) => "no_whole_gpu",
            Self::Fit(Refusal::NoRoom) => "no_room",
            Self::Fit(Refusal::NoCompute) => "no_compute",
            Self::Fit(Refusal::NoSlices) => "no_mig_slices",
            Self::Fit(Refusal::TooComplex) => "too_complex",
            Self::NoReport => "no_report",
            Self::Stale => "stale",
            Self::Nominated => "nominated",
            Self::Reserved => "reserved",
            Self::Reclaimed => "reclaimed",
            Self::BindUnderWay => "bind_under_way",
            Self::Gone => "gone",
            Self::NotYet => "not_yet",
            Self::Unfenced => "unfenced",
            Self::Queued => "queued",
            Self::Cordoned => "gpu_cordoned",
            Self::Claimed => "gpu_claimed",
            Self::Gang => "group",
        }
    }

    /// For the reference: the meaning, an action that helps, and the page below docs that has more.
    #[must_use]
    pub fn explanation(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Fit(Refusal::TooFewCards) => (
                "No node has that many GPUs of that kind.",
                "Lower the annotation `gpu-count`.",
                "requests.md#several-gpus",
            ),
            Self::Fit(Refusal::TooLarge) => (
                "The pod would not fit on the empty node either.",
                "Request less, or split it over more GPUs.",
                "requests.md",
            ),
            Self::Fit(Refusal::Unselected) => (
                "The pod's annotations exclude the GPUs that have room.",
                "Change the annotation `gpu-models` or `gpu-uuids` of the pod.",
                "choose-gpus.md",
            ),
            Self::Fit(Refusal::NoMps) => (
                "The pod has the annotation `compute-percent`, and no GPU that is large enough runs MPS.",
                "Run agents with `--mps` on some nodes, or remove the annotation.",
                "compute-share.md",
            ),
            Self::Fit(Refusal::OnlyMps) => (
                "The GPUs that are large enough are for pods with the annotation `compute-percent`.",
                "Nothing, if other nodes take the pod. Else add the annotation.",
                "compute-share.md",
            ),
            Self::Fit(Refusal::NoMig) => (
                "The pod has the annotation `isolation`, and no GPU makes MIG instances as large.",
                "Run agents with `--make-instances` on some nodes, request less, or remove the annotation.",
                "compute-share.md#mig-instances",
            ),
            Self::Fit(Refusal::OnlyMig) => (
                "The GPUs that are large enough are for pods with the annotation `isolation`.",
                "Nothing, if other nodes take the pod. Else add the annotation.",
                "compute-share.md#mig-instances",
            ),
            Self::Fit(Refusal::NoLimit) => (
                "The driver must enforce the pod's limit, and cannot on these GPUs.",
                "`kubectl gpustow why POD` names the cause. Let nodes limit memory, or write `enforce: watch`.",
                "limits.md",
            ),
            Self::Fit(Refusal::Unhealthy) => (
                "The pod would fit if these GPUs could take pods.",
                "See the GPU's reason in the Events of the node.",
                "troubleshooting.md#a-node-gets-no-gpu-memory-pods",
            ),
            Self::Fit(Refusal::Starting) => (
                "The pod or one there has the annotation `start: alone`, and a pod has not finished its start.",
                "Wait. `kubectl gpustow why POD` names the pods that start, and since when.",
                "starts.md",
            ),
            Self::Fit(Refusal::Neighbours) => (
                "The annotation `gpu-affinity` or `gpu-anti-affinity` of the pod or a neighbour prevents it.",
                "Wait for the neighbours, or change the annotation.",
                "choose-gpus.md",
            ),
            Self::Fit(Refusal::NoWholeCard) => (
                "The pod is exclusive, and too few GPUs are empty.",
                "Wait, or drain a GPU.",
                "requests.md",
            ),
            Self::Fit(Refusal::NoRoom) => (
                "The sum may be enough, but no single GPU has enough free memory.",
                "Wait, or request less.",
                "defragmentation.md",
            ),
            Self::Fit(Refusal::NoCompute) => (
                "GPUs with enough free memory have too little compute that no pod holds.",
                "Wait, lower `compute-percent`, or raise `scheduling.maxComputePercent`.",
                "compute-share.md",
            ),
            Self::Fit(Refusal::NoSlices) => (
                "The free memory slices do not lie where the pod's MIG instance could start.",
                "Wait, or request less.",
                "compute-share.md#mig-instances",
            ),
            Self::Fit(Refusal::TooComplex) => (
                "The search ended without an answer.",
                "Give the pod fewer containers with GPU memory, or fewer GPUs.",
                "requests.md",
            ),
            Self::NoReport => (
                "The `GpuNode` of the node is missing.",
                "See whether the agent runs there.",
                "troubleshooting.md#a-node-gets-no-gpu-memory-pods",
            ),
            Self::Stale => (
                "The report has not changed for three minutes.",
                "Look at the agent's log.",
                "troubleshooting.md#a-node-gets-no-gpu-memory-pods",
            ),
            Self::Nominated => (
                "A pod of higher priority is about to run there.",
                "Wait.",
                "preemption.md",
            ),
            Self::Reserved => (
                "A pod that waited longer has a reservation there.",
                "Wait, or give the pod a higher priority.",
                "reservations.md",
            ),
            Self::Reclaimed => (
                "Other pods use more than they requested there, and the extender reclaims it.",
                "Wait. `kubectl describe pod` names the pods. If the memory does not become free, the extender tries other GPUs.",
                "reclaim.md",
            ),
            Self::BindUnderWay => (
                "The API server did not answer a bind.",
                "Wait. The extender reads the pod to resolve it.",
                "reference/messages.md#events-of-pods",
            ),
            Self::Gone => (
                "kube-scheduler asked before it saw the deletion.",
                "Nothing.",
                "troubleshooting.md",
            ),
            Self::NotYet => (
                "One call searches only some of the nodes for a pod of many containers or GPUs.",
                "Nothing. The extender wakes the pod until every node has been looked at.",
                "benchmarks.md",
            ),
            Self::Unfenced => (
                "A new leader cannot fence this pod yet, and memory is withheld for it.",
                "The Event `GpuFenceFailed` names the cause.",
                "reference/messages.md#events-of-pods",
            ),
            Self::Queued => (
                "The queue offers the memory to other pods first.",
                "Wait. `kubectl gpustow why POD` shows the position.",
                "queue.md",
            ),
            Self::Cordoned => (
                "The node's annotation `cordoned-gpus` lists them, because a GPU needs service.",
                "Wait, or take them off the list.",
                "production.md#service-one-gpu",
            ),
            Self::Claimed => (
                "ResourceClaims hold these GPUs or wait for them, or their fence has just been built.",
                "Wait for the claims to end, or for the fence: it takes some seconds.",
                "claims.md",
            ),
            Self::Gang => (
                "The gang waits. kube-scheduler's Event reads `group NAME: 2 of 3 fit`.",
                "Wait, or lower `minCount`.",
                "gangs.md",
            ),
        }
    }
}
