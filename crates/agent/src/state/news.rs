//! Changes of a report that do not wait for the next heartbeat.

use gpustow_api::gpunode::{Gpu, GpuNodeStatus, PodUse};
use gpustow_pack::Mib;

use super::State;
use crate::pods::NodePods;

impl State {
    /// True if `new` has a change for which a scheduler should not wait until the next heartbeat.
    #[must_use]
    pub fn is_news(&self, old: &GpuNodeStatus, new: &GpuNodeStatus, pods: &NodePods) -> bool {
        let taken = |gpu: &Gpu| {
            let all = pods.sleeps_on(&gpu.uuid);
            let excess = gpu.pods.iter().map(|share| {
                let pod = pods.get(&share.uid).filter(|_| !all);
                let assigned = pod.map(|pod| pod.assigned(&gpu.uuid)).unwrap_or_default();
                Mib(share.used_mib).minus(assigned)
            });
            excess.chain([Mib(gpu.unmanaged_mib)]).sum::<Mib>()
        };
        let same_users = |old: &Gpu, new: &Gpu| {
            let key = |share: &PodUse| (share.uid.clone(), share.settled_at.is_some());
            old.pods.iter().map(key).eq(new.pods.iter().map(key))
        };
        let same_card = |old: &Gpu, new: &Gpu| {
            let key = |gpu: &Gpu| {
                (
                    gpu.uuid.clone(),
                    gpu.index,
                    gpu.total_mib,
                    gpu.reserved_mib,
                    gpu.healthy,
                    gpu.reason.clone(),
                    gpu.memory_limit.clone(),
                    gpu.mps,
                    gpu.mig.clone(),
                    gpu.claims.clone(),
                )
            };
            key(old) == key(new)
                && same_users(old, new)
                && taken(old).0.abs_diff(taken(new).0) < self.settings.threshold.0
        };
        let key = |status: &GpuNodeStatus| {
            (
                status.driver.clone(),
                status.headroom_mib,
                status.conditions.clone(),
            )
        };
        key(old) != key(new)
            || old.gpus.len() != new.gpus.len()
            || !old
                .gpus
                .iter()
                .zip(&new.gpus)
                .all(|(old, new)| same_card(old, new))
    }
}
