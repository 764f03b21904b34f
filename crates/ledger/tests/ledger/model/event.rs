//! The possible events, and how to draw one.

use gpustow_api::Regards;
use gpustow_api::config::Action;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

/// A small generator: speed matters here, not quality.
pub(crate) struct Random(SmallRng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SmallRng::seed_from_u64(seed))
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end)
    }

    pub(super) fn index(&mut self) -> usize {
        self.below(8) as usize
    }
}

/// The memory that a pod may use of a card.
#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    /// Its request.
    Same,
    /// So much more.
    More(u64),
    /// All of it.
    Whole,
    /// Whatever it takes: no agent looks.
    Unwatched,
}

impl Limit {
    fn random(random: &mut Random) -> Self {
        match random.below(6) {
            0..3 => Self::Same,
            3 => Self::More(1 + random.below(4)),
            4 => Self::Whole,
            _ => Self::Unwatched,
        }
    }
}

/// The pods of a group and GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Neighbours {
    /// They share their GPUs.
    Together(u8),
    /// They share no GPU.
    Apart(u8),
}

/// The traits of a new pod apart from its request, in some histories.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    pub(super) cpu_milli: u64,
    /// kube-scheduler rejects the nodes of these bits for the pod, and does not report it.
    pub(super) rejects: u8,
    /// kube-scheduler regards pods of the same node for it, or pods of all nodes.
    pub(super) regards: Regards,
    /// Its preemption policy is Never.
    pub(super) never: bool,
    /// Its owner lets it be moved.
    pub(super) evictable: bool,
    /// It requests this part of its GPUs, if that is more than its amount.
    pub(super) percentage: u8,
    /// It states whether it sleeps.
    pub(super) asleep: Option<bool>,
    /// It is of this group.
    pub(super) group: Option<usize>,
    /// It requests so much of the compute of its GPUs.
    pub(super) compute: u8,
    /// It gets a MIG instance of its own.
    pub(super) isolated: bool,
    /// Which pods it shares its GPUs with, or with which it shares none.
    pub(super) neighbours: Option<Neighbours>,
    /// The most severe action that its owner allows to make it give memory back.
    pub(super) action: Option<Action>,
}

/// One step. Numbers are taken modulo the number of objects, so that a history stays meaningful when events are dropped
/// from it.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A pod comes into being, under a name that may have been used before.
    Create {
        size: u64,
        gpus: u32,
        exclusive: bool,
        limited: bool,
        limit: Limit,
        priority: i32,
        gated: bool,
        queued: bool,
        pod: Traits,
    },
    /// The next `count` events of the pod watch arrive.
    DeliverPods {
        count: usize,
    },
    /// The next events of the node and GpuNode watches arrive.
    DeliverNodes,
    /// A PodGroup is created, or deleted if it is there.
    Group {
        group: usize,
        min_count: usize,
        basic: bool,
        single: bool,
    },
    /// The next events of the watch of PodGroups arrive.
    DeliverGroups,
    /// kube-scheduler asks about all pods of a group that wait.
    Cycle {
        group: usize,
        binds: bool,
    },
    /// The watch breaks: a new list is asked for.
    ListBegins,
    /// The API server answers it.
    ListIsTaken,
    /// The answer arrives.
    ListArrives,
    /// The API server answers a read of our own with the true state at that time.
    Ask {
        pod: usize,
    },
    /// The answer to one of these reads arrives, early or late.
    Answer {
        read: usize,
    },
    /// The state of the API server is saved, or the saved one restored: watches break and all that
    /// is under way to it is lost, but not the replies that it has sent.
    Save,
    Restore,
    /// From here on every Binding to a node is refused, or none.
    Bar {
        node: usize,
    },
    /// The user changes the pod's request.
    Edit {
        pod: usize,
    },
    Filter {
        pod: usize,
        without: usize,
        cooperative: bool,
    },
    /// The scheduler binds to the node that filter named, or to another one.
    BeginBind {
        pod: usize,
        elsewhere: Option<usize>,
    },
    /// Filter and bind in one go: the view is unchanged between them.
    FilterAndBind {
        pod: usize,
    },
    /// The API server handles a Binding.
    Land {
        post: usize,
    },
    /// The caller learns the outcome, from the reply or by reading the pod back.
    EndBind {
        post: usize,
    },
    Preempt {
        pod: usize,
        node: usize,
    },
    Wake {
        limit: usize,
    },
    Advance {
        seconds: u64,
    },
    /// A pod's status changes: a crash loop, a condition.
    Touch {
        pod: usize,
    },
    Unschedulable {
        pod: usize,
    },
    Ungate {
        pod: usize,
    },
    /// kube-scheduler nominates a node for a pod, or clears that.
    Nominate {
        pod: usize,
        node: usize,
    },
    /// Deletion is requested; a bound pod stays until `Vanish`.
    Terminate {
        pod: usize,
    },
    /// It is Succeeded, or every container of it has terminated.
    Finish {
        pod: usize,
    },
    Vanish {
        pod: usize,
    },
    /// Another client binds it, with an unreadable assignment or with none.
    BindByHand {
        pod: usize,
        node: usize,
        broken: bool,
    },
    NodeVanishes {
        node: usize,
    },
    NodeAppears {
        node: usize,
    },
    /// The agent reports the variant-th set of cards, or live use.
    Report {
        node: usize,
        variant: u64,
    },
    ReportVanishes {
        node: usize,
    },
    /// The agent reports that a pod of the node uses so much of a card.
    Use {
        node: usize,
        card: usize,
        pod: usize,
        mib: u64,
    },
    /// The extender handles the reclaims, and records which pods it asked and for which pod.
    Reclaim,
    /// A pod reports that it sleeps, or that it wakes.
    Sleep {
        pod: usize,
    },
    /// The extender looks after the places that it keeps.
    KeepReservations,
    /// A pod that was asked gives back its use beyond its request.
    GivesBack {
        pod: usize,
    },
    /// A pod that was asked is evicted as the extender knows it, if no budget protects it.
    Evict {
        pod: usize,
    },
    /// A disruption budget protects a pod from here on, or does not any more.
    Protect {
        pod: usize,
    },
    /// After these seconds the extender chooses who finishes or moves for others.
    Disrupt {
        seconds: u64,
    },
    /// A pod that was chosen is deleted as the extender knows it.
    Displace {
        pod: usize,
    },
    /// The controller of a pod that is being deleted makes another.
    Replace {
        pod: usize,
    },
    /// The agent of a node comes back and cannot match processes to pods yet, or can again.
    AgentRestarts {
        node: usize,
    },
    /// The extender dies; a successor fences it and reads everything again.
    Restart,
}

impl Event {
    /// A pod of one GPU.
    pub(super) fn create(size: u64, priority: i32) -> Self {
        Self::Create {
            size,
            gpus: 1,
            exclusive: false,
            limited: false,
            limit: Limit::Same,
            priority,
            gated: false,
            queued: false,
            pod: Traits::default(),
        }
    }

    /// This pod, and the Binding of the same number, go all the way.
    pub(super) fn bound(pod: usize) -> [Self; 4] {
        [
            Self::FilterAndBind { pod },
            Self::Land { post: pod },
            Self::EndBind { post: pod },
            Self::DeliverPods { count: 8 },
        ]
    }

    /// Pods are bound, use more than they asked for, and another one asks.
    pub(super) fn borrowing(random: &mut Random) -> Vec<Self> {
        let mut events = Vec::new();
        for pod in 0..2 + random.below(2) as usize {
            let mut create = Self::create(1 + random.below(4), 0);
            if let Self::Create {
                limit, priority, ..
            } = &mut create
            {
                *limit = Limit::random(random);
                *priority = random.below(3) as i32;
            }
            events.extend([create, Self::DeliverPods { count: 8 }]);
            events.extend(Self::bound(pod));
        }
        for _ in 0..3 {
            events.push(Self::Use {
                node: random.below(2) as usize,
                card: random.index(),
                pod: random.index(),
                mib: 5 + random.below(8),
            });
        }
        events.extend([
            Self::DeliverNodes,
            Self::create(3 + random.below(7), random.below(3) as i32),
            Self::DeliverPods { count: 8 },
        ]);
        let last = events.iter().filter(|it| matches!(it, Self::Create { .. }));
        let pod = last.count() - 1;
        events.push(Self::Filter {
            pod,
            without: 7,
            cooperative: false,
        });
        events
    }

    /// One of a history in which pods use more or less than they asked for.
    pub(super) fn of_use(random: &mut Random) -> Self {
        match random.below(27) {
            0..7 => Self::Use {
                node: random.index(),
                card: random.index(),
                pod: random.index(),
                mib: random.below(13),
            },
            7..11 => Self::Reclaim,
            11 => Self::GivesBack {
                pod: random.index(),
            },
            12 => Self::Advance {
                seconds: [1, 21, 101][random.below(3) as usize],
            },
            13 => Self::DeliverNodes,
            14 => Self::Evict {
                pod: random.index(),
            },
            15 => Self::Protect {
                pod: random.index(),
            },
            16 => Self::AgentRestarts {
                node: random.index(),
            },
            _ => Self::random(random),
        }
    }

    /// One of a history in which pods are queued.
    pub(super) fn of_queue(random: &mut Random) -> Self {
        match random.below(8) {
            0 => Self::Wake { limit: 10 },
            _ => Self::random(random),
        }
    }

    /// One of a history in which room is reserved.
    pub(super) fn of_reservations(random: &mut Random) -> Self {
        match random.below(5) {
            0 => Self::KeepReservations,
            _ => Self::random(random),
        }
    }

    /// One of a history in which pods finish or move for others.
    pub(super) fn of_disruptions(random: &mut Random) -> Self {
        let pod = random.index();
        match random.below(25) {
            24 => Self::Terminate { pod },
            0..4 => Self::Disrupt {
                seconds: [0, 1, 1, 6][random.index() % 4],
            },
            4..6 => Self::Displace { pod },
            6 => Self::Replace { pod },
            7 => Self::Unschedulable { pod },
            8 => Self::Vanish { pod },
            9 => Self::Protect { pod },
            10 => Self::DeliverPods { count: 8 },
            11 => Self::FilterAndBind { pod },
            _ => Self::random(random),
        }
    }

    /// One of a history with gangs.
    pub(super) fn of_gangs(random: &mut Random) -> Self {
        let group = random.index();
        match random.below(16) {
            0..2 => Self::Group {
                group,
                min_count: 1 + random.below(4) as usize,
                basic: random.below(8) == 0,
                single: random.below(2) == 0,
            },
            2..4 => Self::DeliverGroups,
            4..6 => Self::DeliverPods { count: 8 },
            6..9 => Self::Cycle {
                group,
                binds: random.below(2) == 0,
            },
            _ => Self::random(random),
        }
    }

    pub(super) fn random(random: &mut Random) -> Self {
        let (pod, node, post) = (random.index(), random.index(), random.index());
        match random.below(71) {
            0..10 => Self::Create {
                size: 1 + random.below(10),
                gpus: 1 + u32::from(random.below(6) == 0),
                exclusive: random.below(6) == 0,
                limited: random.below(4) == 0,
                limit: Limit::random(random),
                priority: random.below(3) as i32,
                gated: random.below(12) == 0,
                queued: false,
                pod: Traits::default(),
            },
            10..16 => Self::DeliverPods {
                count: 1 + random.index(),
            },
            16..18 => Self::DeliverNodes,
            18 => Self::ListBegins,
            19 => Self::ListIsTaken,
            20 => Self::ListArrives,
            21 => Self::Ask { pod },
            22..29 => Self::Filter {
                pod,
                without: random.index(),
                cooperative: random.below(4) == 0,
            },
            29..34 => Self::BeginBind {
                pod,
                elsewhere: (random.below(4) == 0).then_some(node),
            },
            34..38 => Self::FilterAndBind { pod },
            38..42 => Self::Land { post },
            42..46 => Self::EndBind { post },
            46 => Self::Preempt { pod, node },
            47 => Self::Wake {
                limit: random.index(),
            },
            48 => Self::Advance {
                seconds: [1, 5, 31, 101][random.below(4) as usize],
            },
            49 => Self::Touch { pod },
            50 => Self::Unschedulable { pod },
            51 => Self::Ungate { pod },
            52 => Self::Nominate { pod, node },
            53 => Self::Terminate { pod },
            54 => Self::Finish { pod },
            55 => Self::Vanish { pod },
            56 => Self::BindByHand {
                pod,
                node,
                broken: random.below(2) == 0,
            },
            57 => Self::NodeVanishes { node },
            58 => Self::NodeAppears { node },
            59..62 => Self::Report {
                node,
                variant: random.below(8),
            },
            62 => Self::ReportVanishes { node },
            63 => Self::Restart,
            64 => Self::Save,
            65 => Self::Restore,
            66 => Self::Bar { node },
            67 => Self::Edit { pod },
            68 => Self::Ask { pod },
            _ => Self::Answer {
                read: random.index(),
            },
        }
    }
}
