//! The features that are on in a history, the behaviour of kube-scheduler there, and the events that fit both.

use gpustow_api::Regards;
use gpustow_api::config::Action;

use super::event::{Event, Limit, Neighbours, Random};
use super::server::{MIG, MPS, OTHERS};

/// The switches of one history.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Switches {
    /// New pods may be queued.
    pub(super) queue: bool,
    /// Borrowed memory is reclaimed.
    pub(super) reclaim: bool,
    /// Room is reserved for pods that have waited long.
    pub(super) reserve: bool,
    /// A reservation is waited for much longer than a minute.
    pub(super) reserve_long: bool,
    /// Others are preempted for pods that wait for fragmented memory.
    pub(super) preempt: bool,
    /// Others move for such pods.
    pub(super) defragment: bool,
    /// Nearly empty nodes are emptied, too.
    pub(super) empties: bool,
    /// Some pods request a percentage of their GPUs.
    pub(super) percentages: bool,
    /// Some pods are of a group.
    pub(super) gangs: bool,
    /// Some pods sleep and wake.
    pub(super) sleepers: bool,
    /// Some pods limit the action that the extender may take on them.
    pub(super) softens: bool,
    /// The administrator does not let them.
    pub(super) strict: bool,
    /// Some GPUs have MPS, and some pods request a share of their compute.
    pub(super) mps: bool,
    /// Agents make MIG instances on some GPUs, and some pods get one.
    pub(super) mig: bool,
    /// Some pods state with which others they share GPUs.
    pub(super) neighbours: bool,
    /// Nodes take a few pods only.
    pub(super) few_slots: bool,
    /// Nodes have CPU for a few pods only.
    pub(super) scarce_cpu: bool,
    /// kube-scheduler rejects some nodes for some pods, for reasons that the ledger cannot see.
    pub(super) rejects: bool,
    /// For some pods kube-scheduler regards other pods.
    pub(super) regards: bool,
    /// kube-scheduler shows this many of the nodes whose sum fits, and goes on from there in its next call.
    pub(super) window: Option<usize>,
    /// In the end the others are compared with and without these.
    pub(super) bystander: Option<Bystander>,
}

/// Pods that take nothing from others.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bystander {
    /// Many that no node could hold.
    Hopeless,
    /// Many that may not preempt.
    Never,
    /// Pods that are being deleted never finish.
    Stuck,
    /// Pods whose owners soften the action on them give nothing back.
    Soft,
}

/// The main subject of the events of a history.
enum Theme {
    Queue,
    Reclaim,
    Reserve,
    Disrupt,
    Gangs,
}

impl Switches {
    /// Each feature alone in one history of eight, none in another, any together in the others.
    pub(super) fn draw(random: &mut Random) -> Self {
        let mut switches = Self::default();
        match random.below(8) {
            0 => {}
            1 => switches.queue = true,
            2 => switches.reclaim = true,
            3 => switches.reserve = true,
            4 => switches.preempt = true,
            5 => switches.defragment = true,
            _ => {
                switches.queue = random.below(3) == 0;
                switches.reclaim = random.below(2) == 0;
                switches.reserve = random.below(2) == 0;
                switches.preempt = random.below(2) == 0;
                switches.defragment = random.below(2) == 0;
            }
        }
        switches.reserve_long = switches.reserve && random.below(2) == 0;
        switches.scarce_cpu = random.below(3) == 0;
        switches.rejects = random.below(3) == 0;
        switches.window = match random.below(8) {
            0 => Some(1),
            1 => Some(2),
            _ => None,
        };
        switches.bystander = match random.below(12) {
            0 => Some(Bystander::Hopeless),
            1 => Some(Bystander::Never),
            2 => Some(Bystander::Stuck),
            _ => None,
        };
        switches
    }

    /// Turns on the traits that pods state of themselves: by a generator of its own, so that all other histories stay
    /// as they were.
    pub(super) fn draw_words(&mut self, random: &mut Random) {
        self.percentages = random.below(8) == 0;
        self.sleepers = self.reclaim && random.below(4) == 0;
        self.gangs = random.below(5) == 0;
        // The oracle of gangs knows nothing of MPS.
        self.mps = random.below(8) == 0 && !self.gangs;
        self.empties = self.defragment && random.below(2) == 0;
        self.softens = self.reclaim && random.below(4) == 0;
        self.strict = self.softens && random.below(3) == 0;
        if self.softens && random.below(3) == 0 {
            self.bystander = Some(Bystander::Soft);
        }
        // The oracle of gangs knows nothing of slices.
        self.mig = random.below(8) == 0 && !self.gangs && !self.mps;
        self.regards = random.below(3) == 0;
    }

    /// Turns on further conditions for a pod on a node: by a generator of its own, for the same reason. The oracle of
    /// gangs does not know them.
    pub(super) fn draw_rules(&mut self, random: &mut Random) {
        self.neighbours = random.below(4) == 0 && !self.gangs;
        self.few_slots = random.below(5) == 0 && !self.gangs;
    }

    /// Does something make pods finish for others?
    pub(super) fn disrupts(self) -> bool {
        self.preempt || self.defragment
    }

    /// Events that lead to a pod which waits for room that a feature could give it.
    pub(super) fn prelude(self, random: &mut Random) -> Vec<Event> {
        match (self.reclaim, self.disrupts()) {
            (true, true) if random.below(2) == 0 => self.fragmented(random),
            (true, _) => self.borrowing(random),
            (false, true) => self.fragmented(random),
            (false, false) => Vec::new(),
        }
    }

    /// One event of a feature that is on.
    pub(super) fn event(self, random: &mut Random) -> Event {
        if self.sleepers && random.below(8) == 0 {
            let pod = random.index();
            return Event::Sleep { pod };
        }
        let themes = [
            (self.queue, Theme::Queue),
            (self.reclaim, Theme::Reclaim),
            (self.reserve, Theme::Reserve),
            (self.disrupts(), Theme::Disrupt),
            (self.gangs, Theme::Gangs),
        ];
        let on = themes.into_iter().filter(|(is_on, _)| *is_on);
        let mut on: Vec<Theme> = on.map(|(_, theme)| theme).collect();
        let mut event = if on.is_empty() {
            Event::random(random)
        } else {
            let index = random.below(on.len() as u64);
            match on.swap_remove(usize::try_from(index).unwrap_or(0)) {
                Theme::Queue => Event::of_queue(random),
                Theme::Reclaim => Event::of_use(random),
                Theme::Reserve => Event::of_reservations(random),
                Theme::Disrupt => Event::of_disruptions(random),
                Theme::Gangs => Event::of_gangs(random),
            }
        };
        self.adapt(&mut event, random);
        event
    }

    /// Gives a new pod the traits that only some histories have.
    fn adapt(self, event: &mut Event, random: &mut Random) {
        if let Event::Report { variant, .. } = event
            && self.mps
            && random.below(2) == 0
        {
            *variant += MPS;
        }
        if let Event::Report { variant, .. } = event
            && self.mig
            && random.below(4) > 0
        {
            *variant += MIG + OTHERS * random.below(8);
        }
        let Event::Create { pod, queued, .. } = event else {
            return;
        };
        if self.queue {
            *queued = random.below(3) > 0;
        }
        if self.scarce_cpu {
            pod.cpu_milli = [0, 1000, 2000, 3000][random.index() % 4];
        }
        if self.rejects {
            pod.rejects = [0, 0, 1, 2, 3, 4, 6, 7][random.index()];
        }
        if self.regards {
            use Regards::{AllPods, NoPod, PodsOfNode};
            pod.regards = [NoPod, PodsOfNode, PodsOfNode, AllPods][random.index() % 4];
        }
        if self.percentages {
            pod.percentage = [0, 0, 0, 0, 25, 50, 75, 100][random.index()];
        }
        if self.mps {
            pod.compute = [0, 0, 0, 20, 50, 60, 60, 100][random.index()];
        }
        if self.mig {
            pod.isolated = random.below(2) == 0;
        }
        if self.neighbours {
            use Neighbours::{Apart, Together};
            let all = [
                None,
                None,
                Some(Together(0)),
                Some(Apart(0)),
                Some(Apart(0)),
                Some(Apart(1)),
            ];
            pod.neighbours = all[usize::try_from(random.below(6)).unwrap_or(0)];
        }
        if self.sleepers {
            pod.asleep = [None, None, Some(true), Some(false)][random.index() % 4];
        }
        if self.softens {
            pod.action = [None, None, Some(Action::Off), Some(Action::Event)][random.index() % 4];
        }
        if self.disrupts() {
            pod.never = random.below(8) == 0;
            pod.evictable = self.defragment && random.below(2) == 0;
        }
        self.join(event, random);
    }

    /// Makes a new pod one of a group, in some histories. The oracle of gangs knows plain requests alone; other
    /// obstacles on a node are equal for all pods of a group.
    fn join(self, event: &mut Event, random: &mut Random) {
        if !self.gangs || random.below(2) == 0 {
            return;
        }
        if let Event::Create {
            pod,
            exclusive,
            limited,
            limit,
            ..
        } = event
        {
            let group = random.index();
            (*exclusive, *limited, *limit) = (false, false, Limit::Same);
            (pod.group, pod.percentage) = (Some(group), 0);
            pod.rejects = u8::from(self.rejects && group % 2 == 1);
            if self.regards && group.is_multiple_of(2) {
                pod.regards = Regards::PodsOfNode;
            }
        }
    }

    /// Pods that hold a part of each card, and another one that asks for more than is left on any.
    fn fragmented(self, random: &mut Random) -> Vec<Event> {
        let mut events = Vec::new();
        let held = 2 + random.index() % 3;
        for pod in 0..held {
            let mut create = Event::create(4 + random.below(4), random.below(2) as i32);
            self.adapt(&mut create, random);
            self.burden(&mut create, random.below(2));
            events.extend([create, Event::DeliverPods { count: 8 }]);
            events.extend(Event::bound(pod));
        }
        let mut create = Event::create(5 + random.below(6), 1 + random.below(2) as i32);
        self.adapt(&mut create, random);
        self.burden(&mut create, 2 + random.below(2));
        events.extend([
            create,
            Event::DeliverPods { count: 8 },
            Event::Filter {
                pod: held,
                without: 7,
                cooperative: false,
            },
            Event::Unschedulable { pod: held },
            Event::DeliverPods { count: 8 },
            Event::Disrupt { seconds: 0 },
            Event::Disrupt {
                seconds: 1 + 5 * random.below(2),
            },
        ]);
        if random.below(2) == 0 {
            // Before they finish, another pod comes for the other free memory.
            let mut create = Event::create(1 + random.below(3), random.below(2) as i32);
            self.adapt(&mut create, random);
            self.burden(&mut create, 1 + random.below(3));
            let before = [Event::Displace { pod: 0 }, Event::DeliverPods { count: 8 }];
            let comes = [
                create,
                Event::DeliverPods { count: 8 },
                Event::FilterAndBind { pod: held + 1 },
            ];
            if random.below(2) == 0 {
                events.extend(before.into_iter().chain(comes));
            } else {
                events.extend(comes.into_iter().chain(before));
            }
        }
        events
    }

    /// Where CPU is scarce the pod requests these cores.
    fn burden(self, event: &mut Event, cores: u64) {
        if let Event::Create { pod, .. } = event
            && self.scarce_cpu
        {
            pod.cpu_milli = 1000 * cores;
        }
    }

    /// Pods that use more than they asked for, and another one that asks.
    fn borrowing(self, random: &mut Random) -> Vec<Event> {
        let mut events = Event::borrowing(random);
        for event in &mut events {
            self.adapt(event, random);
            if let Event::Create { queued, .. } = event {
                *queued = false;
            }
        }
        events
    }
}
