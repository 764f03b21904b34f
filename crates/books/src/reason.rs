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
    /// Memory that becomes free is reserved for a pod that has waited longer.
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

    /// Would the pod fit if some pods were gone?
    pub fn is_cured_by_evictions(&self) -> bool {
        use Refusal::{NoCompute, NoSlices, NoWholeCard};
        self.is_cured_by_room() || matches!(self, Self::Fit(NoWholeCard | NoCompute | NoSlices))
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

    /// For the reference: the meaning.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Fit(Refusal::TooFewCards) => "No node has that many GPUs of that kind.",
            Self::Fit(Refusal::TooLarge) => "The pod would not fit on the empty node either.",
            Self::Fit(Refusal::Unselected) => {
                "The pod's annotations exclude the GPUs that have room."
            }
            Self::Fit(Refusal::NoMps) => {
                "The pod has the annotation `compute-percent`, and no GPU that is large enough runs MPS."
            }
            Self::Fit(Refusal::OnlyMps) => {
                "The GPUs that are large enough are for pods with the annotation `compute-percent`."
            }
            Self::Fit(Refusal::NoMig) => {
                "The pod has the annotation `isolation`, and no GPU makes MIG instances as large."
            }
            Self::Fit(Refusal::OnlyMig) => {
                "The GPUs that are large enough are for pods with the annotation `isolation`."
            }
            Self::Fit(Refusal::NoLimit) => {
                "The driver must enforce the pod's limit, and cannot on these GPUs."
            }
            Self::Fit(Refusal::Unhealthy) => "The pod would fit if these GPUs could take pods.",
            Self::Fit(Refusal::Starting) => {
                "The pod or one there has the annotation `start: alone`, and a pod has not finished its start."
            }
            Self::Fit(Refusal::Neighbours) => {
                "The annotation `gpu-affinity` or `gpu-anti-affinity` of the pod or a neighbour prevents it."
            }
            Self::Fit(Refusal::NoWholeCard) => "The pod is exclusive, and too few GPUs are empty.",
            Self::Fit(Refusal::NoRoom) => {
                "The sum may be enough, but no single GPU has enough free memory."
            }
            Self::Fit(Refusal::NoCompute) => {
                "GPUs with enough free memory have too little compute that no pod holds."
            }
            Self::Fit(Refusal::NoSlices) => {
                "The free memory slices do not lie where the pod's MIG instance could start."
            }
            Self::Fit(Refusal::TooComplex) => "The search ended without an answer.",
            Self::NoReport => "The `GpuNode` of the node is missing.",
            Self::Stale => "The report has not changed for three minutes.",
            Self::Nominated => "A pod of higher priority is about to run there.",
            Self::Reserved => "A pod that waited longer has a reservation there.",
            Self::Reclaimed => {
                "Other pods use more than they requested there, and the extender reclaims it."
            }
            Self::BindUnderWay => "The API server did not answer a bind.",
            Self::Gone => "kube-scheduler asked before it saw the deletion.",
            Self::NotYet => {
                "One call searches only some of the nodes for a pod of many containers or GPUs."
            }
            Self::Unfenced => {
                "A new leader cannot fence this pod yet, and memory is withheld for it."
            }
            Self::Queued => "The queue offers the memory to other pods first.",
            Self::Cordoned => {
                "The node's annotation `cordoned-gpus` lists them, because a GPU needs service."
            }
            Self::Claimed => {
                "ResourceClaims hold these GPUs or wait for them, or their fence has just been built."
            }
            Self::Gang => "The gang waits. kube-scheduler's Event reads `group NAME: 2 of 3 fit`.",
        }
    }

    /// For the reference: an action that helps.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Self::Fit(Refusal::TooFewCards) => "Lower the annotation `gpu-count`.",
            Self::Fit(Refusal::TooLarge) => "Request less, or split it over more GPUs.",
            Self::Fit(Refusal::Unselected) => {
                "Change the annotation `gpu-models` or `gpu-uuids` of the pod."
            }
            Self::Fit(Refusal::NoMps) => {
                "Run agents with `--mps` on some nodes, or remove the annotation."
            }
            Self::Fit(Refusal::OnlyMps | Refusal::OnlyMig) => {
                "Nothing, if other nodes take the pod. Else add the annotation."
            }
            Self::Fit(Refusal::NoMig) => {
                "Run agents with `--make-instances` on some nodes, request less, or remove the annotation."
            }
            Self::Fit(Refusal::NoLimit) => {
                "`kubectl gpustow why POD` names the cause. Let nodes limit memory, or write `enforce: watch`."
            }
            Self::Fit(Refusal::Unhealthy) => "See the GPU's reason in the Events of the node.",
            Self::Fit(Refusal::Starting) => {
                "Wait. `kubectl gpustow why POD` names the pods that start, and since when."
            }
            Self::Fit(Refusal::Neighbours) => "Wait for the neighbours, or change the annotation.",
            Self::Fit(Refusal::NoWholeCard) => "Wait, or drain a GPU.",
            Self::Fit(Refusal::NoRoom | Refusal::NoSlices) => "Wait, or request less.",
            Self::Fit(Refusal::NoCompute) => {
                "Wait, lower `compute-percent`, or raise `scheduling.maxComputePercent`."
            }
            Self::Fit(Refusal::TooComplex) => {
                "Give the pod fewer containers with GPU memory, or fewer GPUs."
            }
            Self::NoReport => "See whether the agent runs there.",
            Self::Stale => "Look at the agent's log.",
            Self::Nominated => "Wait.",
            Self::Reserved => "Wait, or give the pod a higher priority.",
            Self::Reclaimed => {
                "Wait. `kubectl describe pod` names the pods. If the memory does not become free, the extender tries other GPUs."
            }
            Self::BindUnderWay => "Wait. The extender reads the pod to resolve it.",
            Self::Gone => "Nothing.",
            Self::NotYet => {
                "Nothing. The extender wakes the pod until every node has been looked at."
            }
            Self::Unfenced => "The Event `GpuFenceFailed` names the cause.",
            Self::Queued => "Wait. `kubectl gpustow why POD` shows the position.",
            Self::Cordoned => "Wait, or take them off the list.",
            Self::Claimed => "Wait for the claims to end, or for the fence: it takes some seconds.",
            Self::Gang => "Wait, or lower `minCount`.",
        }
    }

    /// For the reference: the page below docs that has more.
    #[must_use]
    pub fn page(self) -> &'static str {
        match self {
            Self::Fit(Refusal::TooFewCards) => "requests.md#several-gpus",
            Self::Fit(Refusal::TooLarge | Refusal::NoWholeCard | Refusal::TooComplex) => {
                "requests.md"
            }
            Self::Fit(Refusal::Unselected | Refusal::Neighbours) => "choose-gpus.md",
            Self::Fit(Refusal::NoMps | Refusal::OnlyMps | Refusal::NoCompute) => "compute-share.md",
            Self::Fit(Refusal::NoMig | Refusal::OnlyMig | Refusal::NoSlices) => {
                "compute-share.md#mig-instances"
            }
            Self::Fit(Refusal::NoLimit) => "limits.md",
            Self::Fit(Refusal::Unhealthy) | Self::NoReport | Self::Stale => {
                "troubleshooting.md#a-node-gets-no-gpu-memory-pods"
            }
            Self::Fit(Refusal::Starting) => "starts.md",
            Self::Fit(Refusal::NoRoom) => "defragmentation.md",
            Self::Nominated => "preemption.md",
            Self::Reserved => "reservations.md",
            Self::Reclaimed => "reclaim.md",
            Self::BindUnderWay | Self::Unfenced => "reference/messages.md#events-of-pods",
            Self::Gone => "troubleshooting.md",
            Self::NotYet => "benchmarks.md",
            Self::Queued => "queue.md",
            Self::Cordoned => "production.md#service-one-gpu",
            Self::Claimed => "claims.md",
            Self::Gang => "gangs.md",
        }
    }
}
