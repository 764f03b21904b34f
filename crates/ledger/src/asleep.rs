//! Pods that sleep: while they say so, others may borrow all that they do not use (pressure on a GPU leaves them out).
//! Once one needs its memory again, it is to be told when all that it requested is free, before it allocates.
//!
//! Nothing is told by a stale report. What is free is told to one pod, not to two: those that were told come first, also
//! those of which no watch has shown it yet.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Memory, PodFacts};
use gpustow_books::Budget;
use gpustow_means::Sight;
use gpustow_pack::Mib;

use crate::Ledger;

/// What a pod is to be told of the memory that it requested.
#[derive(Clone, Debug)]
pub struct News {
    /// The pod.
    pub pod: Arc<PodFacts>,
    /// Whether it has it.
    pub memory: Memory,
    /// What is missing of each GPU, by UUID.
    pub missing: Vec<(Arc<str>, Mib)>,
}

impl Ledger {
    /// What pods that say whether they sleep were not told yet of the memory that they requested. `told` are those that were
    /// told that it is free, whether their copies show it or not. Of very many pods the next look goes on.
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
        // What it was told once holds until it sleeps again.
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

/// What is missing of the pod's GPUs for it to have all that it requested, if that can be told now.
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
