//! The use of cards by pods: the most in the last half hour, and the start of idle time. For containers, it is the peak
//! since the last report. The agent keeps the use in memory, in coarse steps. No I/O.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{ContainerUse, GpuNodeStatus};
use gpustow_pack::Mib;
use k8s_openapi::jiff::Timestamp;

use crate::clock::Now;
use crate::pods::NodePods;

/// The time over which the agent looks for the most memory that a pod used.
pub const WINDOW: Duration = Duration::from_secs(30 * 60);
/// The agent remembers use in steps of this length.
const STEP: Duration = Duration::from_secs(5 * 60);
/// Memory has settled once it stays constant for this long.
const SETTLED_AFTER: Duration = Duration::from_secs(15);
/// Memory counts as constant while it changes by at most a hundredth of the memory that the pod holds.
const SAME: u64 = 100;

/// A pod on a card.
#[derive(Clone, Debug, Default)]
struct Used {
    /// The most of each step, by the step's number; oldest first.
    steps: VecDeque<(u64, Mib)>,
    idle_since: Option<Timestamp>,
    /// It has used so much, or nearly, since this age of the agent.
    steady: (Mib, Duration),
    settled_at: Option<Timestamp>,
}

/// The memory that all pods of the node used.
#[derive(Debug, Default)]
pub struct History {
    known: BTreeMap<(String, Arc<str>), Used>,
    /// By card, pod and container: the most that it used at once since the last report.
    peaks: BTreeMap<(String, Arc<str>, Arc<str>), Mib>,
}

impl History {
    /// Goes on from the report of an earlier agent, if that is not too old.
    #[must_use]
    pub fn resumed(status: Option<&GpuNodeStatus>, now: Now) -> Self {
        let written = |status: &&GpuNodeStatus| {
            let written = status.heartbeat.as_deref()?.parse().ok()?;
            (now.since(written) < WINDOW).then_some(())
        };
        let mut history = Self::default();
        for gpu in status
            .filter(|status| written(status).is_some())
            .iter()
            .flat_map(|status| &status.gpus)
        {
            for share in &gpu.pods {
                if let Some(mib) = share.high_mib {
                    let key = (gpu.uuid.clone(), Arc::from(&*share.uid));
                    let steps = VecDeque::from([(step(now), Mib(mib))]);
                    let used = Used {
                        steps,
                        ..Used::default()
                    };
                    history.known.insert(key, used);
                }
            }
        }
        history
    }

    /// A pod uses so much of a card now; `idle` if none of its processes does anything there. The most of
    /// the window, and since when it is idle.
    pub fn see(
        &mut self,
        uuid: &str,
        uid: &Arc<str>,
        used: Mib,
        idle: bool,
        now: Now,
    ) -> (Mib, Option<Timestamp>) {
        let key = (uuid.to_owned(), uid.clone());
        let known = self.known.entry(key).or_default();
        let (this, steps) = (step(now), WINDOW.as_secs() / STEP.as_secs());
        known.steps.retain(|(step, _)| *step + steps >= this);
        match known.steps.back_mut() {
            Some((step, most)) if *step == this => *most = used.max(*most),
            _ => known.steps.push_back((this, used)),
        }
        known.idle_since = idle.then(|| known.idle_since.unwrap_or(now.wall));
        let most = known.steps.iter().map(|(_, most)| *most).max();
        (most.unwrap_or(used), known.idle_since)
    }

    /// The time when the memory of a starting pod settled; `used` and `held` are its memory on a card now. Memory
    /// settles once it stays constant for a while. With less than three quarters of `held` in use, a server may still
    /// be compiling.
    pub fn settles(
        &mut self,
        uuid: &str,
        uid: &Arc<str>,
        (used, held): (Mib, Mib),
        now: Now,
    ) -> Option<Timestamp> {
        let known = self.known.get_mut(&(uuid.to_owned(), uid.clone()))?;
        let (before, since) = known.steady;
        if used.0.abs_diff(before.0) > held.0 / SAME {
            known.steady = (used, now.age);
        } else if now.age.saturating_sub(since) >= SETTLED_AFTER && used.0 >= held.0 / 4 * 3 {
            known.settled_at = known.settled_at.or(Some(now.wall));
        }
        if used.0 < held.0 / 2 {
            known.settled_at = None;
        }
        known.settled_at
    }

    /// A container uses so much of a card now. The most since the last report.
    pub fn peak(&mut self, uuid: &str, uid: &Arc<str>, name: &Arc<str>, used: Mib) -> ContainerUse {
        let key = (uuid.to_owned(), uid.clone(), name.clone());
        let peak = self.peaks.entry(key).or_default();
        *peak = used.max(*peak);
        ContainerUse {
            name: name.to_string(),
            peak_mib: peak.0,
        }
    }

    /// A report was written: peaks count from here on.
    pub fn reported(&mut self) {
        self.peaks.clear();
    }

    /// Forgets pods that are gone.
    pub fn keep(&mut self, pods: &NodePods) {
        self.known.retain(|(_, uid), _| pods.get(uid).is_some());
        self.peaks.retain(|(_, uid, _), _| pods.get(uid).is_some());
    }
}

fn step(now: Now) -> u64 {
    now.age.as_secs() / STEP.as_secs()
}
