//! Pods that come and go at the times of their trace: how many start on a card on which another pod starts, and how long pods
//! wait for a turn if they start alone.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyhow::{Result, ensure};
use gpustow_pack::PolicyKind;

use crate::protocol::Workload;
use crate::replay::{Placed, Placer};
use crate::stowed::Stowed;
use crate::trace::TracePod;

/// The result of [`collisions`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Collisions {
    /// Pods that share a card, and were placed.
    pub pods: usize,
    /// Pods that started while another did on the same card.
    pub collide: usize,
    /// Seconds that they waited together.
    pub waited: u64,
    /// Cards in use, on average over the pods that come.
    pub cards: f64,
}

/// The events of a pod, in their order within one second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ends,
    Started,
    Comes,
}

/// Plays `pods` at their own times with the policy `tight`; each starts for so many seconds, alone or not.
///
/// # Errors
/// If the list lacks times.
pub fn collisions(
    workload: &mut Workload,
    mut pods: Vec<TracePod>,
    lasts: u64,
    alone: bool,
) -> Result<Collisions> {
    // The order in which jobs are read.
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    let lived: Vec<_> = pods.iter().filter_map(|pod| pod.lived).collect();
    ensure!(
        lived.len() == pods.len(),
        "the pod list has no creation_time and deletion_time for each pod"
    );
    let (jobs, mut hosts) = (workload.read(pods), workload.hosts.clone());
    let mut placer = Stowed::starting(&hosts, PolicyKind::Tight, alone);
    let come = lived.iter().enumerate();
    let come = come.map(|(id, (from, _))| Reverse((*from, Event::Comes, id)));
    let mut events: BinaryHeap<_> = come.collect();
    let mut placed: Vec<Option<(Placed, u64)>> = vec![None; jobs.len()];
    let (mut waiting, mut found) = (VecDeque::new(), Collisions::default());
    let mut came = 0.0;
    while let Some(Reverse((now, event, id))) = events.pop() {
        placer.at(now * 1000);
        match event {
            Event::Started => placer.started(id),
            Event::Ends => {
                waiting.retain(|it| *it != id);
                if let Some((at, _)) = placed[id].take() {
                    hosts[at.host].give_back(&jobs[id], &at.cards);
                    placer.left(id, &jobs[id], &at);
                }
            }
            Event::Comes => {
                waiting.push_back(id);
                events.push(Reverse((lived[id].1, Event::Ends, id)));
                let cards = hosts
                    .iter()
                    .flat_map(|it| it.left.iter().map(|left| *left < it.card));
                found.cards += cards.filter(|used| *used).count() as f64;
                came += 1.0;
            }
        }
        for id in std::mem::take(&mut waiting) {
            let job = &jobs[id];
            let Some(at) = placer.place(&hosts, job, id) else {
                waiting.push_back(id);
                continue;
            };
            ensure!(
                hosts[at.host].take(job, &at.cards),
                "a placement is not legal"
            );
            let shares = job.gpus == 1 && !job.whole();
            let starts = |other: &(Placed, u64)| {
                other.0.host == at.host
                    && other.0.cards.iter().any(|card| at.cards.contains(card))
                    && now < other.1 + lasts
            };
            found.pods += usize::from(shares);
            found.collide += usize::from(shares && placed.iter().flatten().any(starts));
            found.waited += now - lived[id].0;
            placed[id] = Some((at, now));
            events.push(Reverse((now + lasts, Event::Started, id)));
        }
    }
    found.cards /= f64::max(came, 1.0);
    Ok(found)
}
