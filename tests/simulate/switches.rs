//! The features that the administrator has turned on in a world, the behaviour of kube-scheduler and pods there, and
//! the faults.

use std::time::Duration;

use gpustow_api::config::{Action, After, GpustowConfigSpec, QueueMode};
use gpustow_api::names;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The profile next to gpustow's, where two profiles ask the extender.
const OTHER: &str = "other-scheduler";
pub(crate) const QUEUES: [QueueMode; 3] = [QueueMode::Off, QueueMode::Auto, QueueMode::Always];
/// Nodes that no pod fits on, where kube-scheduler shows only some: more than it ever leaves out.
const CROWD: usize = 104;

#[derive(Debug)]
pub(crate) struct Switches {
    /// How its Kubernetes treats nominations: see [`crate::scheduler::Scheduler`].
    pub(crate) clears: bool,
    /// The profiles of each kube-scheduler of a replica, and the one that some pods name.
    pub(crate) profiles: &'static [&'static [&'static str]],
    pub(crate) other: Option<&'static str>,
    /// New pods may be queued.
    pub(crate) queue: QueueMode,
    /// Borrowed memory is reclaimed.
    pub(crate) reclaim: bool,
    /// The action that makes pods give it back.
    pub(crate) action: Action,
    /// Room is reserved for pods that have waited long.
    pub(crate) reserve: bool,
    /// Others are preempted for pods that wait for fragmented memory.
    pub(crate) preempt: bool,
    /// Others move for such pods.
    pub(crate) defragment: bool,
    /// Nearly empty nodes are emptied.
    pub(crate) empties: bool,
    /// Of the pods that a disruption budget covers so many may be away.
    pub(crate) budget: Option<usize>,
    /// kube-scheduler rejects some nodes for some pods, for reasons that the ledger cannot see.
    pub(crate) rejects: bool,
    /// Some pods never finish terminating.
    pub(crate) hangs: bool,
    /// So many nodes more there are, of which kube-scheduler shows only some.
    pub(crate) crowd: usize,
    /// The extenders' watches are behind, each on its own.
    pub(crate) lags: bool,
    /// The extenders' requests take long and their watches do not; nothing else goes wrong on their way.
    pub(crate) slow: bool,
    /// When all is well, nothing but pods uses cards any more.
    pub(crate) strangers_leave: bool,
    /// The API server serves PodGroups, and some pods are of one.
    pub(crate) gangs: bool,
    /// An autoscaler adds nodes, and the extender creates placeholders.
    pub(crate) provision: bool,
    /// Some pods start alone on their GPUs.
    pub(crate) starts: bool,
    /// Kubernetes is 1.38, whose kube-scheduler asks for victims where only the extender refuses a node.
    pub(crate) is_1_38: bool,
}

impl Switches {
    /// Nothing that disrupts in one world of five, everything in another, and any of it together in the others.
    pub(crate) fn draw(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(!seed);
        let (nothing, all) = match random.random_range(0..5) {
            0 => (true, false),
            1 => (false, true),
            _ => (false, false),
        };
        let mut on = |odds| all || !nothing && random.random_bool(odds);
        let (reclaim, preempt) = (on(0.6), on(0.6));
        let (reserve, defragment, evicts) = (on(0.4), on(0.4), on(0.5));
        let lags = random.random_bool(0.3);
        let slow = !lags && random.random_bool(0.25);
        Self {
            clears: random.random_bool(0.5),
            profiles: match random.random_range(0..3) {
                0 => &[&[names::SCHEDULER]],
                1 => &[&[names::SCHEDULER, OTHER]],
                _ => &[&[names::SCHEDULER], &[OTHER]],
            },
            other: None,
            queue: QUEUES[random.random_range(usize::from(all)..QUEUES.len())],
            reclaim,
            action: if evicts || slow {
                Action::Evict
            } else {
                Action::Event
            },
            reserve,
            preempt,
            defragment,
            budget: random.random_bool(0.5).then(|| random.random_range(0..3)),
            rejects: random.random_bool(0.3),
            hangs: random.random_bool(0.3),
            crowd: if random.random_bool(0.1) { CROWD } else { 0 },
            lags,
            slow,
            strangers_leave: random.random_bool(0.5),
            gangs: random.random_bool(0.3),
            provision: random.random_bool(0.25),
            empties: defragment && random.random_bool(0.7),
            starts: random.random_bool(0.3),
            is_1_38: random.random_bool(0.5),
        }
        .named()
    }

    /// Nothing is on, and nothing goes wrong.
    pub(crate) fn quiet() -> Self {
        Self {
            clears: false,
            profiles: &[&[names::SCHEDULER]],
            other: None,
            queue: QueueMode::Off,
            reclaim: false,
            action: Action::Event,
            reserve: false,
            preempt: false,
            defragment: false,
            empties: false,
            budget: None,
            rejects: false,
            hangs: false,
            crowd: 0,
            lags: false,
            slow: false,
            strangers_leave: false,
            gangs: false,
            provision: false,
            starts: false,
            is_1_38: false,
        }
    }

    /// Some pods name the second profile, where there is one.
    fn named(mut self) -> Self {
        let profiles = self.profiles.iter().flat_map(|it| it.iter());
        self.other = profiles.copied().find(|it| *it == OTHER);
        // No agent reports those nodes, so that they seem to be new.
        self.provision &= self.crowd == 0;
        self
    }

    /// The administrator's settings.
    pub(crate) fn spec(&self) -> GpustowConfigSpec {
        let mut spec = GpustowConfigSpec::default();
        spec.queue.mode = self.queue;
        if self.reclaim {
            spec.reclaim.action = self.action;
        }
        spec.preempt.fragmented = self.preempt;
        if self.reserve {
            spec.reserve.after = After(Some(Duration::from_secs(30)));
            spec.reserve.give_up_after = Duration::from_secs(60).into();
        }
        if self.starts {
            // Shorter than the wait of a probe.
            spec.scheduling.start_timeout = Duration::from_secs(10).into();
        }
        spec.provision.max = if self.provision { 2 } else { 0 };
        spec.defragment.evictions_per_hour = if self.defragment { 100 } else { 0 };
        spec.defragment.empty_nodes = self.empties;
        spec
    }
}
