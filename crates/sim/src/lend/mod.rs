//! Memory that pods hold and do not use: what lending it brings, and what it costs those who have a right to it.
//! The same pods with the same programs, once where each asks for the most that it may ever use, once where it asks
//! for what its use advises and borrows the rest, and once where cards are promised several times over.

mod report;
mod usage;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::fmt;
use std::ops::RangeInclusive;

use anyhow::{Result, bail};
use gpustow_pack::PolicyKind;

use crate::churn::{Lifetimes, MEAN_MS, MEASURED, MINUTE, Source, WARM};
use crate::hosts::{Host, Job};
use crate::progress::Progress;
use crate::protocol::Workload;
use crate::random::Random;
use crate::replay::{Placed, Placer as _};
use crate::stowed::{Settings, Stowed};

pub use report::{LendSummary, lend_table};
use usage::Program;
pub use usage::Recorded;

/// Milliseconds until a pod that is called has given back: one sample of the agent and the grace of a signal.
const GIVES_BACK_AFTER: u64 = 11_000;
/// Milliseconds from a change to the call: one sample of the agent and one look of the extender.
const LOOKS_EVERY: u64 = 2_000;
/// Milliseconds of a day.
const DAY: f64 = 86_400_000.0;

/// What pods ask for, and what becomes of what they do not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each pod asks for the most that it may use. Nothing is lent.
    Asked,
    /// Each asks for a part of it, and may use the rest while that is free; it is reclaimed.
    Lent,
    /// Each asks for the most, and cards are taken for larger than they are. Who comes first allocates.
    Scaled,
}

impl Way {
    /// Every way.
    pub const ALL: [Self; 3] = [Self::Asked, Self::Lent, Self::Scaled];

    /// The name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Lent => "lent",
            Self::Scaled => "scaled",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What comes at which rate.
#[derive(Clone, Debug)]
pub struct LendPlan {
    /// Hosts and the pods that are drawn from, whose size is the most that they may use.
    pub workload: Workload,
    /// So many of the hosts, drawn by seed; all if there are fewer.
    pub hosts: usize,
    /// The most that pods may use, times how long they run, relative to the cards there are.
    pub load: f64,
    /// How long pods run.
    pub lifetimes: Lifetimes,
    /// What pods of a part of a card use, and ask for where they borrow.
    pub recorded: Recorded,
    /// What agents keep free of each card, in percent.
    pub headroom: u64,
}

/// What one run showed over the time measured.
#[derive(Clone, Debug, Default)]
pub struct LendRun {
    /// Mean number of pods with GPUs that run, by card.
    pub pods: f64,
    /// Mean of what programs use, in percent of the cards' memory.
    pub used: f64,
    /// Time in which the programs on a card want more than it has, in percent.
    pub over: f64,
    /// Minutes that each pod with a GPU waited (so far, at the end), ascending.
    pub waits: Vec<f64>,
    /// Pods reclaimed, a day that a pod of a part of a card runs.
    pub called: f64,
    /// Allocations refused for want of memory, likewise.
    pub failed: f64,
    /// The part of them with which the pod would still have used no more than it asked for.
    pub failed_below: f64,
}

/// One pod's life.
struct Life {
    job: Job,
    /// Of a pod that takes parts of cards.
    program: Option<Program>,
    came: u64,
    runs_for: u64,
    placed: Option<Placed>,
    /// On each of its cards.
    uses: u64,
    wants: u64,
    called: bool,
}

/// What happens to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ends,
    Wants,
    GivesBack,
}

struct World {
    way: Way,
    hosts: Vec<Host>,
    /// Units of each card, as it is, and what is used of it.
    sizes: Vec<u64>,
    used: Vec<Vec<u64>>,
    /// What the programs on each card want of it, and on how many that is more than there is.
    wanted: Vec<Vec<u64>>,
    over: u64,
    stowed: Stowed,
    lives: Vec<Life>,
    waiting: BTreeSet<usize>,
    events: BinaryHeap<Reverse<(u64, usize, Event)>>,
    since: u64,
    now: u64,
    looked: u64,
    run: LendRun,
    /// Pods that run, those of parts of cards among them, and cards' worth of memory in use.
    running: u64,
    sharing: u64,
    in_use: f64,
    shared_ms: f64,
    seed: u64,
    recorded: Recorded,
}

impl World {
    fn pass(&mut self, until: u64) {
        let from = self.now.max(self.since);
        if until > from {
            let time = (until - from) as f64;
            self.run.pods += time * self.running as f64;
            self.run.used += time * self.in_use;
            self.run.over += time * self.over as f64;
            self.shared_ms += time * self.sharing as f64;
        }
        self.now = until;
        self.stowed.at(until);
    }

    fn comes(&mut self, job: &Job, runs_for: u64) -> Result<()> {
        let id = self.lives.len();
        let seed = self.seed.wrapping_mul(1 << 32).wrapping_add(id as u64);
        let shares = job.gpus > 0 && !job.whole();
        let program = shares.then(|| Program::new(seed, job.units, &self.recorded));
        let mut job = self.asks(job, program.as_ref());
        // Pods of one class ask for the same.
        job.class *= self.recorded.count() + 1;
        job.class += program.as_ref().map_or(0, |program| program.which() + 1);
        self.lives.push(Life {
            job,
            program,
            came: self.now,
            runs_for,
            placed: None,
            uses: 0,
            wants: 0,
            called: false,
        });
        if !self.starts(id)? {
            self.waiting.insert(id);
        }
        self.gives_way();
        Ok(())
    }

    fn starts(&mut self, id: usize) -> Result<bool> {
        let job = self.lives[id].job.clone();
        let Some(placed) = self.stowed.place(&self.hosts, &job, id) else {
            return Ok(false);
        };
        let host = self.hosts.get_mut(placed.host);
        if !host.is_some_and(|host| host.take(&job, &placed.cards)) {
            bail!("{}: pod {id} does not fit: {job:?} on {placed:?}", self.way);
        }
        let whole = self.sizes[placed.host];
        let life = &mut self.lives[id];
        life.placed = Some(placed);
        if life.came >= self.since && job.gpus > 0 {
            self.run
                .waits
                .push((self.now - life.came) as f64 / MINUTE as f64);
        }
        self.events
            .push(Reverse((self.now + life.runs_for, id, Event::Ends)));
        self.running += u64::from(job.gpus > 0);
        let wants = match &mut life.program {
            None => whole,
            Some(program) => {
                self.sharing += 1;
                let next = self.now + program.waits();
                self.events.push(Reverse((next, id, Event::Wants)));
                program.level()
            }
        };
        self.allocates(id, wants);
        Ok(true)
    }

    /// The program wants so much of each of its cards from now on, whether it is there or not.
    fn wants(&mut self, id: usize, wants: u64) {
        let life = &mut self.lives[id];
        let Some(placed) = &life.placed else { return };
        let size = self.sizes[placed.host];
        for &card in &placed.cards {
            let wanted = &mut self.wanted[placed.host][card];
            self.over -= u64::from(*wanted > size);
            *wanted = *wanted + wants - life.wants;
            self.over += u64::from(*wanted > size);
        }
        life.wants = wants;
    }

    /// The pod's program wants so much of each of its cards, and gets it if it is there.
    fn allocates(&mut self, id: usize, wants: u64) {
        self.wants(id, wants);
        let life = &self.lives[id];
        let Some(placed) = &life.placed else { return };
        let size = self.sizes[placed.host];
        let more = wants.saturating_sub(life.uses);
        let used = &self.used[placed.host];
        if placed.cards.iter().any(|&card| used[card] + more > size) {
            if self.now >= self.since {
                self.run.failed += 1.0;
                if wants <= life.job.units {
                    self.run.failed_below += 1.0;
                }
            }
            return;
        }
        self.uses(id, wants);
    }

    fn uses(&mut self, id: usize, uses: u64) {
        let life = &mut self.lives[id];
        let Some(placed) = &life.placed else { return };
        let size = self.sizes[placed.host] as f64;
        for &card in &placed.cards {
            let used = &mut self.used[placed.host][card];
            *used = *used + uses - life.uses;
            self.in_use += (uses as f64 - life.uses as f64) / size;
        }
        life.uses = uses;
        if self.way == Way::Lent {
            self.stowed.uses(id, placed, uses);
        }
    }

    /// Whom the ledger calls has to give back soon.
    fn gives_way(&mut self) {
        if self.way != Way::Lent || self.now < self.looked + LOOKS_EVERY {
            return;
        }
        self.looked = self.now;
        for id in self.stowed.called() {
            if !std::mem::replace(&mut self.lives[id].called, true) {
                let due = self.now + GIVES_BACK_AFTER;
                self.events.push(Reverse((due, id, Event::GivesBack)));
            }
        }
    }

    fn happens(&mut self, id: usize, event: Event) -> Result<()> {
        let Some(placed) = self.lives[id].placed.clone() else {
            return Ok(());
        };
        match event {
            Event::Wants => {
                let life = &mut self.lives[id];
                let Some(program) = &mut life.program else {
                    return Ok(());
                };
                let wants = program.wants();
                let next = self.now + program.waits();
                self.events.push(Reverse((next, id, Event::Wants)));
                self.allocates(id, wants);
            }
            Event::GivesBack => {
                let life = &mut self.lives[id];
                life.called = false;
                let level = life.program.as_ref().map_or(life.uses, Program::level);
                if life.uses > life.job.units {
                    if self.now >= self.since {
                        self.run.called += 1.0;
                    }
                    self.wants(id, level);
                    self.uses(id, level);
                }
            }
            Event::Ends => {
                self.wants(id, 0);
                self.uses(id, 0);
                let life = &mut self.lives[id];
                self.running -= u64::from(life.job.gpus > 0);
                self.sharing -= u64::from(life.program.is_some());
                life.placed = None;
                let job = life.job.clone();
                self.hosts[placed.host].give_back(&job, &placed.cards);
                self.stowed.left(id, &job, &placed);
            }
        }
        self.tries(placed.host)?;
        self.gives_way();
        Ok(())
    }

    /// What was measured, as means and rates.
    fn ends(mut self, end: u64, cards: usize) -> LendRun {
        for id in self.waiting {
            let life = &self.lives[id];
            if life.came >= self.since && life.job.gpus > 0 {
                self.run
                    .waits
                    .push((end - life.came) as f64 / MINUTE as f64);
            }
        }
        let mut run = self.run;
        run.waits.sort_by(f64::total_cmp);
        let time = (end - self.since) as f64;
        run.pods /= time * cards as f64;
        run.used *= 100.0 / (time * cards as f64);
        run.over *= 100.0 / (time * cards as f64);
        let days = self.shared_ms / DAY;
        for sum in [&mut run.called, &mut run.failed, &mut run.failed_below] {
            *sum /= days.max(f64::MIN_POSITIVE);
        }
        run
    }

    /// What a pod of the list asks for. Those of whole cards ask for whole ones on every way.
    fn asks(&self, job: &Job, program: Option<&Program>) -> Job {
        let units = match (self.way, program) {
            (Way::Lent, Some(program)) => program.request(),
            (Way::Scaled, None) if job.whole() => scaled(job.units, self.recorded.request()),
            _ => job.units,
        };
        Job {
            units,
            ..job.clone()
        }
    }

    /// Those that wait are tried again, in their order, where something has changed.
    fn tries(&mut self, host: usize) -> Result<()> {
        for id in self.waiting.clone() {
            if self.hosts[host].fits(&self.lives[id].job) && self.starts(id)? {
                self.waiting.remove(&id);
            }
        }
        Ok(())
    }
}

/// What a card is taken for.
fn scaled(card: u64, request: f64) -> u64 {
    (card as f64 / request).round() as u64
}

/// Runs the plan with the seed; `None` if it was stopped on the way.
///
/// # Errors
/// If the books do not agree, or no pod of the list fits the hosts.
pub fn lend(
    plan: &LendPlan,
    way: Way,
    seed: u64,
    progress: &mut Progress,
) -> Result<Option<LendRun>> {
    let mut random = Random::new(seed);
    let mut hosts = plan.workload.hosts.clone();
    random.shuffle(&mut hosts);
    hosts.truncate(plan.hosts.max(1));
    let cards: usize = hosts.iter().map(|host| host.left.len()).sum();
    let sizes = hosts.iter().map(|host| host.card).collect();
    let none: Vec<Vec<u64>> = hosts.iter().map(|host| vec![0; host.left.len()]).collect();
    let source = Source::new(&plan.workload.jobs, &hosts, plan.load, 1000 * cards as u64)?;
    if way == Way::Scaled {
        for host in &mut hosts {
            host.card = scaled(host.card, plan.recorded.request());
            host.left.fill(host.card);
        }
    }
    let (since, end) = (WARM * MEAN_MS, (WARM + MEASURED) * MEAN_MS);
    let mut world = World {
        way,
        stowed: match way {
            Way::Lent => Stowed::lending(&hosts, PolicyKind::default(), plan.headroom),
            Way::Asked | Way::Scaled => {
                Stowed::new(&hosts, PolicyKind::default(), Settings::default())
            }
        },
        hosts,
        sizes,
        used: none.clone(),
        wanted: none,
        over: 0,
        lives: Vec::new(),
        waiting: BTreeSet::new(),
        events: BinaryHeap::new(),
        since,
        now: 0,
        looked: 0,
        run: LendRun::default(),
        running: 0,
        sharing: 0,
        in_use: 0.0,
        shared_ms: 0.0,
        seed,
        recorded: plan.recorded.clone(),
    };
    let comes = |world: &mut World, random: &mut Random, runs_for: u64| {
        let job = source.draw(random);
        world.comes(&job, runs_for)
    };
    // What is there at the start is what a cluster of this load would hold, part of its life spent.
    let mut demand = 0;
    while (demand as f64) < plan.load * 1000.0 * cards as f64 {
        let runs_for = plan.lifetimes.rest(&mut random);
        comes(&mut world, &mut random, runs_for)?;
        demand += world.lives.last().map_or(0, |life| life.job.demand());
    }
    let mut next = source.next(&mut random);
    while world.now < end {
        let what = || format!("load {}, {way}, seed {seed}", plan.load);
        if !progress.goes_on(what, world.now as f64 / end as f64) {
            return Ok(None);
        }
        let event = world.events.peek().map(|Reverse(event)| *event);
        match event.filter(|(at, ..)| *at <= next.min(end)) {
            Some((at, id, event)) => {
                world.events.pop();
                world.pass(at);
                world.happens(id, event)?;
            }
            None => {
                world.pass(next.min(end));
                if world.now < end {
                    let runs_for = plan.lifetimes.whole(&mut random);
                    comes(&mut world, &mut random, runs_for)?;
                    next = world.now + source.next(&mut random);
                }
            }
        }
    }
    progress.done();
    Ok(Some(world.ends(end, cards)))
}

/// Runs the plan with all seeds, or with those that Ctrl-C lets.
///
/// # Errors
/// As [`lend`].
pub fn lend_all(
    plan: &LendPlan,
    way: Way,
    seeds: RangeInclusive<u64>,
    progress: &mut Progress,
) -> Result<Vec<LendRun>> {
    let runs = seeds.map(|seed| lend(plan, way, seed, progress).transpose());
    runs.map_while(|run| run).collect()
}
