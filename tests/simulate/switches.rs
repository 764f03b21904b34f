//! What the administrator has turned on in a world, what kube-scheduler and pods are like there, and what goes wrong.

use gpustow_api::act::Act;
use gpustow_api::names;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The profile beside gpustow's where there are two of them that ask the extender.
const OTHER: &str = "other-scheduler";
pub(crate) const QUEUES: [&str; 3] = ["--line=off", "--line=auto", "--line=always"];
/// Nodes that no pod fits on, where kube-scheduler shows only some: more than it ever leaves out.
const CROWD: usize = 104;

#[derive(Debug)]
pub(crate) struct Switches {
    /// What its Kubernetes does with nominations: see [`crate::scheduler::Scheduler`].
    pub(crate) clears: bool,
    /// The profiles of each kube-scheduler of a replica, and the one that some pods name.
    pub(crate) profiles: &'static [&'static [&'static str]],
    pub(crate) other: Option<&'static str>,
    /// New pods may be queued.
    pub(crate) queue: &'static str,
    /// Borrowed memory is reclaimed.
    pub(crate) reclaim: bool,
    /// What is done to have pods give it back.
    pub(crate) act: Act,
    /// Room is reserved for pods that have waited long.
    pub(crate) reserve: bool,
    /// Others are preempted for pods that wait for fragmented memory.
    pub(crate) preempt: bool,
    /// Others move for such pods.
    pub(crate) defragment: bool,
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
            act: if evicts || slow {
                Act::Evict
            } else {
                Act::Event
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
        }
        .named()
    }

    /// Some pods name the second profile, where there is one.
    fn named(mut self) -> Self {
        let profiles = self.profiles.iter().flat_map(|it| it.iter());
        self.other = profiles.copied().find(|it| *it == OTHER);
        self
    }

    /// The extender's flags.
    pub(crate) fn flags(&self) -> Vec<String> {
        let mut flags = vec![self.queue.to_owned()];
        if self.reclaim {
            flags.extend(["--call-back".to_owned(), format!("--act={}", self.act)]);
        }
        let others = [
            (self.preempt, "--preempt-scattered"),
            (self.reserve, "--keep=30"),
            (self.reserve, "--keep-for=60"),
            (self.defragment, "--move=100"),
        ];
        let others = others.into_iter().filter(|(is_on, _)| *is_on);
        flags.extend(others.map(|(_, flag)| flag.to_owned()));
        flags
    }
}
