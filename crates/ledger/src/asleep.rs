//! Pods that sleep: while a pod reports that it sleeps, others may borrow all memory that it does not use. Pressure on
//! a GPU leaves sleeping pods out. A pod that needs its memory again gets news when its whole request is free, before
//! it allocates.
//!
//! A stale report never leads to news. Free memory is announced to one pod, not to two. Pods that already got the news
//! come first, even if no watch has shown it on them yet.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Memory, PodFacts};
use gpustow_books::Budget;
use gpustow_means::Sight;
use gpustow_pack::Mib;

use crate::Ledger;

/// The news for a pod about the memory that it requested.
#[derive(Clone, Debug)]
pub struct News {
    /// The pod.
    pub pod: Arc<PodFacts>,
    /// Whether it has it.
    pub memory: Memory,
    /// The missing memory of each GPU, by UUID.
    pub missing: Vec<(Arc<str>, Mib)>,
}

impl Ledger {
    /// The news that pods which report their sleep did not get yet about their requested memory. `told` is true for
    /// pods that got the news of free memory, whether their copies show it or not. If the pods are too many for one
    /// look, the next look goes on.
    #[must_use]
    pub fn memory_news(&mut self, told: impl Fn(&str) -> bool, now: Duration) -> Vec<News> {
        if !self.parts.config.reclaim {
            return Vec::new();
        }
        let (sight, mut budget) = (self.sight(now), Budget::of_look());
        let (mut news, mut last) = (Vec::new(), None);
        for pod in self.parts.books.sleepers(self.news_after.as_ref()) {
            if budget.is_spent() {
                break;
            }
            budget.charge(1);
            last = Some(&pod.uid);
            if !pod.deleting {
                news.extend(news_for(&sight, pod, &told, &mut budget));
            }
        }
        let after = last.filter(|_| budget.is_spent()).cloned();
        self.parts.count_spent(budget.spent());
        self.news_after = after;
        news
    }
}

fn news_for(
    sight: &Sight<'_>,
    pod: &Arc<PodFacts>,
    told: &impl Fn(&str) -> bool,
    budget: &mut Budget,
) -> Option<News> {
    let sleep = pod.sleep?;
    let name = pod.node.as_ref().filter(|_| !pod.released)?;
    let (memory, missing) = match (sleep.asleep, sleep.told) {
        (true, _) => (Memory::Asleep, Vec::new()),
        // The news of free memory holds until the pod sleeps again.
        (false, Some(Memory::Free)) => return None,
        (false, _) if told(&pod.uid) => return None,
        (false, _) => {
            let missing = missing_for(sight, pod, name, told, budget)?;
            match missing.is_empty() {
                true => (Memory::Free, missing),
                false => (Memory::Reclaiming, missing),
            }
        }
    };
    (sleep.told != Some(memory)).then(|| News {
        pod: pod.clone(),
        memory,
        missing,
    })
}

/// The memory that is missing on the pod's GPUs for its whole request, if that is known now.
fn missing_for(
    sight: &Sight<'_>,
    pod: &PodFacts,
    name: &Arc<str>,
    told: &impl Fn(&str) -> bool,
    budget: &mut Budget,
) -> Option<Vec<(Arc<str>, Mib)>> {
    sight.check(name).ok()?;
    let node = sight.books.node(name)?;
    let turn = |pod: &PodFacts| {
        let shows = pod.sleep.and_then(|sleep| sleep.told) == Some(Memory::Free);
        (
            !shows && !told(&pod.uid),
            Reverse(pod.priority),
            pod.uid.clone(),
        )
    };
    let assignment = pod.assignment.as_ref()?.as_ref().ok()?;
    let mut missing = Vec::new();
    for (uuid, _) in &assignment.charges {
        let gpu = node.gpus().iter().find(|gpu| *gpu.uuid == **uuid)?;
        if !gpu.healthy || gpu.missing {
            return None;
        }
        budget.charge(node.bound().len());
        let (free, below) = sight.below_request(name, node, gpu);
        let before = |other: &PodFacts| other.wants_all() && turn(other) <= turn(pod);
        let asked = below.iter().filter(|(_, other)| before(other));
        let wanted: Mib = asked.map(|(left, _)| *left).sum();
        // One that has all of it already lacks nothing.
        let grows = below.iter().any(|(_, other)| other.uid == pod.uid);
        if grows && wanted > free {
            missing.push((uuid.clone(), wanted.minus(free)));
        }
    }
    Some(missing)
}
