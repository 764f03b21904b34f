//! The memory of a card that pods use, also beyond their holds, as far as this affects the placement of others.

use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_pack::{Lending, Mib};

use super::{Node, Uid};

const PARTS: u64 = 16;

fn parts(mib: Mib, capacity: Mib) -> u8 {
    let parts = mib.0.saturating_mul(PARTS) / capacity.0.max(1);
    u8::try_from(parts.min(PARTS)).unwrap_or(u8::MAX)
}

/// The lending of a card of this capacity. `held` returns the hold of a pod that counts. A pod is likely to use as much
/// as its recent peak.
pub(super) fn lending(gpu: &Gpu, capacity: Mib, held: impl Fn(&str) -> Option<Mib>) -> Lending {
    let (mut used, mut lent) = (Mib(gpu.unmanaged_mib), Mib::ZERO);
    for pod in &gpu.pods {
        if let Some(held) = held(&pod.uid) {
            let most = Mib(pod.high_mib.unwrap_or(0).max(pod.used_mib));
            used = used + most;
            lent = lent + most.minus(held);
        }
    }
    Lending {
        used: parts(used, capacity),
        lent: parts(lent, capacity),
    }
}

impl Node {
    /// The pods that are bound here and use more of a card than they hold there, with their hold and their use. A pod
    /// without a hold on the card is a stranger to it, and is not a borrower. If the agent could not read all
    /// processes, no pod is a borrower.
    pub fn borrowers<'s>(&'s self, gpu: &'s Gpu) -> impl Iterator<Item = (&'s Uid, Mib, Mib)> {
        let readable = self.status().is_some_and(GpuNodeStatus::is_readable);
        let pods = gpu.pods.iter().filter(move |_| readable);
        pods.filter_map(|used| {
            let (uid, hold) = self.bound().get_key_value(used.uid.as_str())?;
            let (held, used) = (hold.on(&gpu.uuid), Mib(used.used_mib));
            (held > Mib::ZERO && used > held).then_some((uid, held, used))
        })
    }

    /// Could the card be short of the lent memory, whatever is known of the pods there?
    pub(super) fn may_be_short(&self, gpu: &Gpu) -> bool {
        if !gpu.healthy || gpu.missing || self.borrowers(gpu).next().is_none() {
            return false;
        }
        let used = |uid: &str| {
            let its = gpu.pods.iter().filter(|used| *used.uid == *uid);
            its.map(|used| Mib(used.used_mib)).sum::<Mib>()
        };
        let all: Mib = gpu.pods.iter().map(|used| Mib(used.used_mib)).sum();
        let free = gpu.capacity(Mib::ZERO).minus(all + Mib(gpu.unmanaged_mib));
        let headroom = Mib(self.status().map_or(0, |status| status.headroom_mib));
        let mut bound = self.bound().iter();
        free < headroom || bound.any(|(uid, hold)| hold.on(&gpu.uuid).minus(used(uid)) > free)
    }
}
