//! Which processes end because the extender demands that their pod give GPU memory back. No I/O.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_pack::Mib;
use gpustow_serve::rate::Window;
use k8s_openapi::jiff::Timestamp;

use crate::cgroup::Owner;
use crate::clock::Now;
use crate::devices::{Card, Reading};
use crate::pods::{NodePod, NodePods};
use crate::processes::Who;
use crate::state::State;

/// A demand that the extender has not withdrawn or repeated for so long is not acted on.
const TOO_OLD: Duration = Duration::from_secs(600);
/// A demand that was met is met again after so long if the pod is over its request then: a program may have begun its
/// next process before the first was gone.
const AGAIN: Duration = Duration::from_secs(60);
/// For so long an ended process counts for the node's rate.
const MINUTE: Duration = Duration::from_secs(60);

/// A process that is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its pod's UID.
    pub uid: Arc<str>,
    /// The name of its pod's cgroup, and its container's id.
    pub owner: Owner,
    /// Its id on the host.
    pub pid: u32,
    /// When it started, in the kernel's ticks.
    pub started: u64,
    /// The text of the Event: the process, its use, and the pod for which it ends.
    pub note: String,
}

impl Target {
    /// The text of its pod's Event where the system does not let the agent end it.
    #[must_use]
    pub fn not_ended(&self, error: &std::io::Error) -> String {
        format!(
            "The agent lacks the permission to kill process {}, which uses memory above the request: {error}. Give the agent \
             CAP_KILL (manifests/overlays/kill-processes)",
            self.pid
        )
    }
}

/// The demands that were met, and the processes that were ended.
#[derive(Debug)]
pub struct GiveBack {
    /// The most processes that end in a minute.
    rate: usize,
    /// By UID: the demand that was met, and the agent's age when it last was.
    met: HashMap<Arc<str>, (Timestamp, Duration)>,
    /// The processes that were ended.
    ended: Window,
}

impl GiveBack {
    /// At most `rate` processes a minute.
    #[must_use]
    pub fn new(rate: usize) -> Self {
        Self {
            rate,
            met: HashMap::new(),
            ended: Window::new(MINUTE),
        }
    }

    /// The processes that are to end by this reading, which `state` has just taken in. If a pod with a demand exceeds
    /// its request on a card, its largest processes end until it is within the request. `who` also returns the start
    /// time of a process.
    pub fn decide(
        &mut self,
        reading: &Reading,
        state: &State,
        pods: &NodePods,
        mut who: impl FnMut(u32) -> (Who, Option<u64>),
        now: Now,
    ) -> Vec<Target> {
        self.met.retain(|uid, _| pods.get(uid).is_some());
        let mut asked: Vec<&NodePod> = pods.iter().filter(|pod| !pod.facts.released).collect();
        asked.sort_by_key(|pod| pod.facts.uid.clone());
        let mut all = Vec::new();
        for pod in asked {
            let Some(demand) = &pod.demand else { continue };
            let uid = &pod.facts.uid;
            let is_met = self.met.get(uid).is_some_and(|(since, at)| {
                *since == demand.since && now.age.saturating_sub(*at) < AGAIN
            });
            if is_met || now.since(demand.since) > TOO_OLD {
                continue;
            }
            let mut targets = Vec::new();
            let mut named = BTreeSet::new();
            for card in &reading.cards {
                let mut of_card = over(card, state, pod, &mut who);
                of_card.retain(|target| named.insert(target.pid));
                targets.extend(of_card);
            }
            // All of a demand at once, or later.
            let room = self.ended.left(self.rate, now.age);
            if targets.is_empty() || room == 0 || room < targets.len() && room < self.rate {
                continue;
            }
            targets.truncate(room);
            targets.iter().for_each(|_| self.ended.note((), now.age));
            self.met.insert(uid.clone(), (demand.since, now.age));
            all.extend(targets);
        }
        all
    }
}

/// The pod's processes to end on a card; none unless all that uses the card is known.
fn over(
    card: &Card,
    state: &State,
    pod: &NodePod,
    who: &mut impl FnMut(u32) -> (Who, Option<u64>),
) -> Vec<Target> {
    let (uid, uuid) = (&pod.facts.uid, &card.uuid);
    let assigned = pod.assigned(uuid);
    let seen = state.cards().find(|seen| seen.gpu.uuid == *uuid);
    let used = seen.map_or(0, |seen| seen.used.pod(uid));
    let mut over = used.saturating_sub(assigned.bytes());
    let (Some(processes), None) = (&card.processes, &card.failure) else {
        return Vec::new();
    };
    if over == 0 || assigned == Mib::ZERO {
        return Vec::new();
    }
    let mut own = Vec::new();
    for process in processes {
        match (who(process.pid), process.used) {
            ((Who::Gone, _), _) | (_, None) => return Vec::new(),
            ((Who::Pod(owner), Some(started)), Some(bytes))
                if *owner.pod == *pod.cgroup && !process.mps && bytes > 0 =>
            {
                let id = owner.container.as_deref().unwrap_or_default();
                let mut runs = pod.containers.iter().filter(|it| it.running);
                if let Some(container) = runs.find(|it| *it.id == *id) {
                    own.push((bytes, process.pid, started, owner, container.name.clone()));
                }
            }
            _ => {}
        }
    }
    own.sort_by_key(|(bytes, pid, ..)| (Reverse(*bytes), *pid));
    let mib = |bytes: u64| Mib(bytes.div_ceil(1 << 20));
    let message = pod.demand.as_ref().map(|demand| demand.message.as_str());
    let mut targets = Vec::new();
    for (bytes, pid, started, owner, container) in own {
        if over == 0 {
            break;
        }
        over = over.saturating_sub(bytes);
        let note = format!(
            "Ended process {pid} of container {container}, which used {} of GPU {uuid}: the pod used {} there, requested \
             {assigned} and can use {} if no other pod needs it. {}",
            mib(bytes),
            mib(used),
            pod.allowed(uuid),
            message.unwrap_or_default()
        );
        targets.push(Target {
            uid: uid.clone(),
            owner,
            pid,
            started,
            note: note.trim_end().chars().take(1000).collect(),
        });
    }
    targets
}
