//! The settings that an operator may change.

use std::time::Duration;

use gpustow_api::config::Action;
use gpustow_api::gpunode::STALE_AFTER;
use gpustow_api::intree::LEAST_NODES;
use gpustow_pack::PolicyKind;

use crate::books::Settings;

/// The settings that an operator may change.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The policy for pods that name none.
    pub policy: PolicyKind,
    /// A GpuNode that has not changed for longer refuses gpu-mem pods.
    pub stale_after: Duration,
    /// How long a reservation waits for its bind.
    pub reservation_ttl: Duration,
    /// How long a reservation waits for its bind if the pod has volumes or resource claims. kube-scheduler may take
    /// long to prepare these before it binds.
    pub slow_reservation_ttl: Duration,
    /// A pod that starts holds up others for so long at most.
    pub start_timeout: Duration,
    /// A woken pod that has not asked after this long has woken without result. It is woken again for the
    /// same room after twice as long, then after twice that, up to five minutes.
    pub wake_again_after: Duration,
    /// How long a nominated pod that was refused keeps its room after its nomination is cleared.
    pub claim_ttl: Duration,
    /// Call memory back that pods use beyond their requests when it keeps a pod off whose request fits by the
    /// books.
    pub reclaim: bool,
    /// How long a pod waits, since it was created, before memory is reclaimed for it.
    pub reclaim_after: Duration,
    /// The strongest action that makes a pod give memory back.
    pub action: Action,
    /// Owners may choose a weaker action for their pods.
    pub owners_soften: bool,
    /// How long memory that is reclaimed is waited for, beyond the time that its users have to end.
    pub reclaim_for: Duration,
    /// How long a pod may use more of a card than its limit before it is to give that back.
    pub over_limit_for: Duration,
    /// Pods with our scheduling gate wait in the queue; otherwise they are ungated.
    pub queue: bool,
    /// How long room is kept for a pod that was ungated, until its filter call.
    pub ungate_for: Duration,
    /// Reserve GPUs for a pod that has existed for so long and waits.
    pub reserve_after: Option<Duration>,
    /// Where no pod finishes for so long, other GPUs are tried.
    pub reserve_give_up_after: Duration,
    /// Reservations at a time, at most.
    pub reserve_max: usize,
    /// GPUs that may be reserved, in percent of the cluster's; one reservation may be more.
    pub reserve_max_percent: usize,
    /// Preempt others for pods that free memory is too fragmented for.
    pub preempt_fragmented: bool,
    /// How long a pod waits, since it was created, before others are preempted for it.
    pub preempt_after: Duration,
    /// Evict pods that may be moved, for pods that wait for fragmented memory.
    pub defragment: bool,
    /// With `defragment`: empty a nearly empty node, so that an autoscaler can remove it.
    pub empty_nodes: bool,
    /// Pods that may leave a node for that at once, at most.
    pub empty_at_once: usize,
    /// How many placeholders there are at a time at most.
    pub provision: usize,
    /// Pods get only GPUs that were opened for them (`Ledger::open`): the others are left to ResourceClaims.
    pub fence: bool,
    /// kube-scheduler looks for so many nodes at least: fewer candidates are all that passed its own filters.
    pub least_nodes: usize,
    /// Hundredths of its compute that pods may hold together of a GPU with MPS.
    pub compute: u16,
    /// Steps that one call may spend on searches for pods of several containers or cards.
    pub search_steps: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            stale_after: STALE_AFTER,
            reservation_ttl: Duration::from_secs(30),
            start_timeout: Duration::from_secs(300),
            slow_reservation_ttl: Duration::from_secs(660),
            wake_again_after: Duration::from_secs(2),
            claim_ttl: Duration::from_secs(5),
            reclaim: false,
            reclaim_after: Duration::ZERO,
            action: Action::Event,
            owners_soften: true,
            reclaim_for: Duration::from_secs(60),
            over_limit_for: Duration::from_secs(60),
            queue: false,
            ungate_for: Duration::from_secs(10),
            reserve_after: None,
            reserve_give_up_after: Duration::from_secs(4 * 3600),
            reserve_max: 4,
            reserve_max_percent: 10,
            preempt_fragmented: false,
            preempt_after: Duration::ZERO,
            defragment: false,
            empty_nodes: false,
            empty_at_once: usize::MAX,
            provision: 0,
            fence: false,
            least_nodes: LEAST_NODES,
            compute: 100,
            search_steps: 100_000,
        }
    }
}

impl Config {
    /// The settings on which nodes' views depend.
    pub fn of_views(&self) -> Settings {
        Settings::new(self.reclaim, self.compute, self.fence)
    }
}
