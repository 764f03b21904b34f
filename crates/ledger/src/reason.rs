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
    Kept,
    /// Others use the room beyond their requests, and were asked to give it back.
    CalledBack,
    /// An earlier bind of this pod has an unknown outcome that is being looked up.
    BindUnderWay,
    /// The pod has been deleted, and kube-scheduler does not know yet.
    Gone,
    /// The call had spent its steps before it came to this node: the pod will be asked for again.
    NotYet,
    /// An earlier extender's Binding of this pod may still arrive.
    Unfenced,
    /// The room is first offered to pods in line before this one.
    InLine,
    /// It would fit if an administrator had not cordoned GPUs there.
    Cordoned,
    /// Too few of its group fit with it ([`crate::Shortfall`]).
    Gang,
}

impl Reason {
    /// Every reason.
    pub fn all() -> impl Iterator<Item = Self> {
        let own = [
            Self::NoReport,
            Self::Stale,
            Self::Nominated,
            Self::Kept,
            Self::CalledBack,
            Self::BindUnderWay,
            Self::Gone,
            Self::NotYet,
            Self::Unfenced,
            Self::InLine,
            Self::Cordoned,
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
            Self::Kept => "free GPU memory is reserved for a pod that has waited longer",
            Self::CalledBack => "GPU memory used above requests is being reclaimed",
            Self::BindUnderWay => "an earlier bind of this pod is still being looked up",
            Self::Gone => "the pod has been deleted",
            Self::NotYet => "not evaluated yet: search in progress",
            Self::Unfenced => {
                "a previous extender may still bind this pod, and its status cannot be written: see \
                 its Events"
            }
            Self::InLine => "pods ahead in the queue go first",
            Self::Cordoned => "the GPUs that it fits on are cordoned",
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
            Self::Fit(Refusal::NoLimit) => "no_limit",
            Self::Fit(Refusal::Neighbours) => "gpu_affinity",
            Self::Fit(Refusal::Unhealthy) => "unhealthy",
            Self::Fit(Refusal::NoWholeCard) => "no_whole_gpu",
            Self::Fit(Refusal::NoRoom) => "no_room",
            Self::Fit(Refusal::TooComplex) => "too_complex",
            Self::NoReport => "no_report",
            Self::Stale => "stale",
            Self::Nominated => "nominated",
            Self::Kept => "reserved",
            Self::CalledBack => "reclaimed",
            Self::BindUnderWay => "bind_under_way",
            Self::Gone => "gone",
            Self::NotYet => "not_yet",
            Self::Unfenced => "unfenced",
            Self::InLine => "queued",
            Self::Cordoned => "gpu_cordoned",
            Self::Gang => "group",
        }
    }
}
