//! From which request on new pods are queued. A pod that requests less than every pod that waits takes nothing from them,
//! and is not queued.

use std::cmp::Reverse;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Entries at most. The admission policy looks at each of them for each new pod.
const MOST: usize = 16;

/// New pods are queued if their priority is no higher, and they request as much memory per GPU and as many GPUs, or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueFrom {
    /// The highest priority of pods that are queued.
    pub priority: i32,
    /// The least MiB per GPU of pods that are queued.
    pub mib_per_gpu: u64,
    /// The fewest GPUs per container of pods that are queued.
    pub gpus: u32,
}

impl QueueFrom {
    /// Every pod is queued.
    pub const ALL: Self = Self {
        priority: i32::MAX,
        mib_per_gpu: 0,
        gpus: 0,
    };

    /// Is a pod with this priority and this size queued? The size is the MiB of each GPU, and the number of GPUs. An
    /// unknown size counts as the largest.
    #[must_use]
    pub fn queues(&self, priority: i32, size: Option<(u64, u64)>) -> bool {
        let is_as_large = |(mib, gpus)| self.mib_per_gpu <= mib && u64::from(self.gpus) <= gpus;
        self.priority >= priority && size.is_none_or(is_as_large)
    }

    /// Is every pod queued that the other entry queues?
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let size = (other.mib_per_gpu, other.gpus.into());
        self.queues(other.priority, Some(size))
    }

    /// The fewest entries that queue the same pods. If they are more than 16, the entries of the lowest priorities
    /// become one, which may queue more pods.
    #[must_use]
    pub fn fewest(mut all: Vec<Self>) -> Vec<Self> {
        all.sort_unstable_by_key(|it| (Reverse(it.priority), it.mib_per_gpu, it.gpus));
        let mut kept: Vec<Self> = Vec::new();
        for it in all {
            if !kept.iter().any(|kept| kept.covers(&it)) {
                kept.push(it);
            }
        }
        for low in kept.split_off(kept.len().min(MOST)) {
            if let Some(last) = kept.last_mut() {
                last.mib_per_gpu = last.mib_per_gpu.min(low.mib_per_gpu);
                last.gpus = last.gpus.min(low.gpus);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry() -> impl Strategy<Value = QueueFrom> {
        (-2..3, 0u64..4, 0u32..4).prop_map(|(priority, mib_per_gpu, gpus)| QueueFrom {
            priority,
            mib_per_gpu,
            gpus,
        })
    }

    fn queued(all: &[QueueFrom], priority: i32, size: Option<(u64, u64)>) -> bool {
        all.iter().any(|it| it.queues(priority, size))
    }

    proptest! {
        #[test]
        fn fewest_entries_queue_the_same_pods(all in prop::collection::vec(entry(), 0..40)) {
            let fewest = QueueFrom::fewest(all.clone());
            prop_assert!(fewest.len() <= MOST);
            for priority in -3..4 {
                let sizes = (0..5).flat_map(|mib| (0..5).map(move |gpus| Some((mib, gpus))));
                for size in sizes.chain([None]) {
                    let (before, after) = (queued(&all, priority, size), queued(&fewest, priority, size));
                    prop_assert!(before == after || after && fewest.len() == MOST, "{priority} {size:?}");
                }
            }
            for (index, one) in fewest.iter().enumerate() {
                let covers = fewest[..index].iter().any(|other| other.covers(one));
                prop_assert!(!covers || fewest.len() == MOST, "{one:?} is needless");
            }
        }
    }

    #[test]
    fn seventeenth_entry_joins_the_sixteenth() {
        let entry = |at: u64| QueueFrom {
            priority: -(i32::try_from(at).unwrap_or_default()),
            mib_per_gpu: 100 - at,
            gpus: 1,
        };
        let fewest = QueueFrom::fewest((0..17).map(entry).collect());
        assert_eq!(fewest.len(), MOST);
        assert_eq!(
            fewest[15],
            QueueFrom {
                mib_per_gpu: 84,
                ..entry(15)
            }
        );
    }

    #[test]
    fn all_pods_are_queued_from_nothing_on() {
        for size in [None, Some((0, 0)), Some((1, 1))] {
            assert!(QueueFrom::ALL.queues(i32::MAX, size));
        }
    }
}
