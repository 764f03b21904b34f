//! A cluster in use: pods come, wait if they must, run, and go. A pod that fits nowhere waits. It is tried again in the
//! order of arrival whenever a pod ends, as kube-scheduler does with pods of equal priority. The module does not know
//! policies.

mod lifetimes;
mod report;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::ops::RangeInclusive;

use anyhow::{Result, bail};

use crate::baselines::Choice;
use crate::hosts::{Host, Job};
use crate::progress::Progress;
use crate::protocol::Workload;
use crate::random::Random;
use crate::replay::{Placed, Placer, kind};
use crate::stowed::{Keep, Settings};

pub use lifetimes::Lifetimes;
use lifetimes::MEAN_MS;
pub use report::{ChurnSummary, Waits, churn_table, sizes_table, unused_table};

/// Mean run times that go by before anything is measured, and that are measured.
const WARM: u64 = 2;
const MEASURED: u64 = 6;
/// Milliseconds after which that begins and ends.
const SINCE: u64 = WARM * MEAN_MS;
const END: u64 = (WARM + MEASURED) * MEAN_MS;
/// When the pods that come change, if they do.
const CHANGE: u64 = SINCE + (END - SINCE) / 2;
/// Milliseconds between two looks at the places that are kept.
const LOOK: u64 = 10_000;
/// Milliseconds of a minute.
const MINUTE: u64 = 60_000;
/// Classes of waiting pods for which one look each minute thinks of moving others.
const CLASSES: usize = 4;

/// The pods that come, and their rate.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Hosts and the pods that are drawn from.
    pub workload: Workload,
    /// Pods that are there from the start, stay, and hold this part of the cards; if any.
    pub standing: Option<(Vec<Job>, f64)>,
    /// The pods for random draws in the second half of the measured time, if they change.
    pub then: Option<Vec<Job>>,
    /// So many of the hosts, drawn by seed; all if there are fewer.
    pub hosts: usize,
    /// GPUs asked for, times how long, relative to those there are.
    pub load: f64,
    /// How long pods run.
    pub lifetimes: Lifetimes,
    /// Places are kept for pods that wait, by gpustow's own policies.
    pub keep: Option<Keep>,
    /// Pods are moved for others, by gpustow's own policies.
    pub moving: Option<Moving>,
    /// Where a pod has ended, this number of the pods that wait longest and fit there are placed together, the largest
    /// first. They are not placed each in its turn.
    pub together: Option<usize>,
}

/// How many pods may be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moving {
    /// Of all pods, in percent.
    pub evictable: usize,
    /// In an hour, at most.
    pub per_hour: usize,
    /// All pods of nearly empty nodes are moved, too.
    pub empties: bool,
}

/// The results of one run over the time measured. Percentages are of the cluster's cards.
#[derive(Clone, Debug, Default)]
pub struct ChurnRun {
    /// Mean of the cards that pods hold, each card counted as one.
    pub allocated: f64,
    /// Mean of the cards that waiting pods ask for.
    pub waiting: f64,
    /// Mean of the free cards, up to the number that waiting pods ask for.
    pub wasted: f64,
    /// Demand that did not start at once, in percent of the demand that came.
    pub delayed: f64,
    /// Minutes that each pod with a GPU waited (so far, at the end), ascending, by [`kind`].
    pub waits: BTreeMap<&'static str, Vec<f64>>,
    /// Pods moved, in an hour.
    pub moves: f64,
    /// Mean of the cards of nodes without any pod.
    pub unused: f64,
    /// Hours of cards of such nodes.
    pub unused_hours: f64,
}

/// One pod's life.
struct Life {
    job: Job,
    came: u64,
    runs_for: u64,
    placed: Option<Placed>,
}

/// A cluster at work.
struct World<'a> {
    plan: &'a Plan,
    hosts: Vec<Host>,
    /// How many pods each holds.
    pods: Vec<usize>,
    placer: Box<dyn Placer>,
    choice: Choice,
    lives: Vec<Life>,
    waiting: BTreeSet<usize>,
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    /// Thousandths of cards held, and asked for by pods that wait.
    held: u64,
    wanted: u64,
    run: ChurnRun,
    now: u64,
    cards: u64,
    /// When pods were moved in the last hour.
    moved: VecDeque<u64>,
}

/// Thousandths of cards that a job takes there.
fn share(host: &Host, job: &Job) -> u64 {
    job.gpus as u64 * host.charge(job) * 1000 / host.card.max(1)
}

impl<'a> World<'a> {
    /// An empty cluster.
    fn new(plan: &'a Plan, choice: Choice, seed: u64, hosts: Vec<Host>) -> Self {
        let known = [&plan.workload.jobs[..], plan.then.as_deref().unwrap_or(&[])].concat();
        let settings = Settings {
            keep: plan.keep,
            evictable: plan.moving.map_or(0, |moving| moving.evictable),
            empties: plan.moving.is_some_and(|moving| moving.empties),
        };
        let cards: u64 = hosts.iter().map(|host| host.left.len() as u64).sum();
        Self {
            plan,
            placer: choice.placer(&hosts, &known, seed, settings),
            pods: vec![0; hosts.len()],
            hosts,
            choice,
            lives: Vec::new(),
            waiting: BTreeSet::new(),
            ends: BinaryHeap::new(),
            held: 0,
            wanted: 0,
            run: ChurnRun::default(),
            now: 0,
            cards: 1000 * cards,
            moved: VecDeque::new(),
        }
    }

    /// Starts the first pods: pods that stay, and the pods of a cluster with this load, with part of their life spent.
    fn fill(&mut self, source: &Source<'_>, random: &mut Random) -> Result<()> {
        let plan = self.plan;
        if let Some((jobs, part)) = &plan.standing {
            let stays = Source::new(jobs, *part, self)?;
            self.begin_with(&stays, *part, random, |_| 2 * END)?;
        }
        self.begin_with(source, plan.load, random, |random| {
            plan.lifetimes.rest(random)
        })
    }

    /// Pods come at once until they demand this part of the cards.
    fn begin_with(
        &mut self,
        source: &Source<'_>,
        part: f64,
        random: &mut Random,
        runs_for: impl Fn(&mut Random) -> u64,
    ) -> Result<()> {
        let mut demand = 0;
        while (demand as f64) < part * self.cards as f64 {
            let job = source.draw(random);
            demand += job.demand();
            self.come(job, runs_for(random))?;
        }
        Ok(())
    }

    /// Counts the time that has passed since the last event, and keeps places for pods that have waited a long time.
    fn pass(&mut self, until: u64) -> Result<()> {
        let from = self.now.max(SINCE);
        if until > from {
            let time = (until - from) as f64;
            let free = self.cards.saturating_sub(self.held);
            self.run.allocated += time * self.held as f64;
            self.run.waiting += time * self.wanted as f64;
            self.run.wasted += time * free.min(self.wanted) as f64;
            let hosts = self.hosts.iter().zip(&self.pods);
            let unused = hosts.filter(|(_, pods)| **pods == 0);
            let unused: usize = unused.map(|(host, _)| host.left.len()).sum();
            self.run.unused += time * 1000.0 * unused as f64;
        }
        for _ in self.now / MINUTE..until / MINUTE {
            self.placer.tick();
        }
        if self.plan.moving.is_some_and(|moving| moving.empties) {
            self.placer.at(until);
        }
        let due = self.now / LOOK < until / LOOK;
        let moves = self.now / MINUTE < until / MINUTE;
        self.now = until;
        if self.plan.keep.is_some() && due && self.placer.keep(until) {
            for at in 0..self.hosts.len() {
                self.offer(at)?;
            }
        }
        if let Some(moving) = self.plan.moving.filter(|_| moves) {
            self.make_room(moving)?;
            if moving.empties {
                self.empty_nodes(moving)?;
            }
        }
        Ok(())
    }

    /// Moves all pods off a nearly empty node. Every node without a pod is removed, and another comes when it is needed.
    fn empty_nodes(&mut self, moving: Moving) -> Result<()> {
        let most = moving.per_hour.saturating_sub(self.moved.len());
        let moves = self.placer.empties(most);
        let admits = |(id, to): &(usize, Placed)| self.hosts[to.host].admits(&self.lives[*id].job);
        if moves.iter().all(admits) {
            for (moved, to) in moves {
                self.go_to(moved, to)?;
            }
        }
        for at in (0..self.hosts.len()).filter(|at| self.pods[*at] == 0) {
            self.placer.replaced(at);
        }
        Ok(())
    }

    /// Moves pods for the pods that have waited longest. A moved pod continues its run.
    fn make_room(&mut self, moving: Moving) -> Result<()> {
        let is_past = |at: &u64| at + 60 * MINUTE <= self.now;
        while self.moved.front().is_some_and(is_past) {
            self.moved.pop_front();
        }
        let mut tried = BTreeSet::new();
        for id in self.waiting.iter().copied().collect::<Vec<_>>() {
            let job = self.lives[id].job.clone();
            if tried.len() == CLASSES || self.moved.len() >= moving.per_hour {
                break;
            }
            if job.gpus == 0 || !tried.insert(job.class) {
                continue;
            }
            let moves = self.placer.moves(id, &job);
            let admits =
                |(id, to): &(usize, Placed)| self.hosts[to.host].admits(&self.lives[*id].job);
            let too_many = self.moved.len() + moves.len() > moving.per_hour;
            if moves.is_empty() || too_many || !moves.iter().all(admits) {
                continue;
            }
            for (moved, to) in moves {
                self.go_to(moved, to)?;
            }
            if self.begin(id)? {
                for at in 0..self.hosts.len() {
                    self.offer(at)?;
                }
            }
        }
        Ok(())
    }

    /// Moves a pod that runs.
    fn go_to(&mut self, id: usize, to: Placed) -> Result<()> {
        let job = self.lives[id].job.clone();
        let Some(from) = self.lives[id].placed.replace(to.clone()) else {
            bail!("pod {id} is moved, and was nowhere");
        };
        if !self.hosts[to.host].take(&job, &to.cards) {
            bail!("pod {id} is moved to where it does not fit: {job:?} on {to:?}");
        }
        self.hosts[from.host].give_back(&job, &from.cards);
        self.pods[to.host] += 1;
        self.pods[from.host] -= 1;
        self.held += share(&self.hosts[to.host], &job);
        self.held -= share(&self.hosts[from.host], &job);
        self.placer.moved(&self.hosts, id, &job, &to);
        self.moved.push_back(self.now);
        if self.now >= SINCE {
            self.run.moves += 1.0;
        }
        Ok(())
    }

    /// Tries to start a pod.
    fn start(&mut self, id: usize) -> Result<bool> {
        let Life { job, runs_for, .. } = &self.lives[id];
        let Some(placed) = self.placer.place(&self.hosts, job, id) else {
            return Ok(false);
        };
        let host = self.hosts.get_mut(placed.host);
        if !host.is_some_and(|host| host.take(job, &placed.cards)) {
            let choice = self.choice;
            bail!("{choice} put pod {id} where it does not fit: {job:?} on {placed:?}");
        }
        self.pods[placed.host] += 1;
        self.held += share(&self.hosts[placed.host], job);
        self.ends.push(Reverse((self.now + runs_for, id)));
        self.lives[id].placed = Some(placed);
        Ok(true)
    }

    fn come(&mut self, job: Job, runs_for: u64) -> Result<()> {
        let id = self.lives.len();
        let (demand, kind) = (job.demand(), kind(&job));
        self.lives.push(Life {
            job,
            came: self.now,
            runs_for,
            placed: None,
        });
        if self.start(id)? {
            self.waited(id, kind, 0);
        } else {
            self.wanted += demand;
            self.waiting.insert(id);
            if self.now >= SINCE {
                self.run.delayed += demand as f64;
            }
        }
        Ok(())
    }

    fn go(&mut self, id: usize) -> Result<()> {
        let Life { job, placed, .. } = &self.lives[id];
        let Some(placed) = placed else { return Ok(()) };
        let at = placed.host;
        self.hosts[at].give_back(job, &placed.cards);
        self.pods[at] -= 1;
        self.held -= share(&self.hosts[at], job);
        self.placer.left(id, job, placed);
        // Nothing that waits fitted anywhere: room has appeared on this host alone.
        self.offer(at)
    }

    /// Starts the waiting pods that fit on a host.
    fn offer(&mut self, at: usize) -> Result<()> {
        let hopeful = |id: &usize| self.hosts[at].fits(&self.lives[*id].job);
        let mut hopeful: Vec<usize> = self.waiting.iter().copied().filter(hopeful).collect();
        if let Some(count) = self.plan.together {
            let first = count.min(hopeful.len());
            hopeful[..first].sort_by_key(|id| Reverse(self.lives[*id].job.demand()));
        }
        for id in hopeful {
            if self.hosts[at].fits(&self.lives[id].job) {
                self.begin(id)?;
            }
        }
        Ok(())
    }

    /// Tries to start a pod that waits.
    fn begin(&mut self, id: usize) -> Result<bool> {
        let starts = self.start(id)?;
        if starts {
            self.waiting.remove(&id);
            let job = &self.lives[id].job;
            self.wanted -= job.demand();
            self.waited(id, kind(job), self.now - self.lives[id].came);
        }
        Ok(starts)
    }

    /// The figures, once the time is over.
    fn finish(mut self) -> ChurnRun {
        for id in std::mem::take(&mut self.waiting) {
            let (kind, waited) = (kind(&self.lives[id].job), END - self.lives[id].came);
            self.waited(id, kind, waited);
        }
        let lives = self.lives.iter().filter(|life| life.came >= SINCE);
        let came: u64 = lives.map(|life| life.job.demand()).sum();
        let mut run = self.run;
        let scale = 100.0 / (self.cards as f64 * (END - SINCE) as f64);
        run.unused_hours = run.unused / 1000.0 / (60.0 * MINUTE as f64);
        for sum in [
            &mut run.allocated,
            &mut run.waiting,
            &mut run.wasted,
            &mut run.unused,
        ] {
            *sum *= scale;
        }
        for waits in run.waits.values_mut() {
            waits.sort_by(f64::total_cmp);
        }
        run.moves *= 60.0 * MINUTE as f64 / (END - SINCE) as f64;
        run.delayed = 100.0 * run.delayed / came.max(1) as f64;
        run
    }

    fn waited(&mut self, id: usize, kind: &'static str, time: u64) {
        let life = &self.lives[id];
        if life.came >= SINCE && life.job.gpus > 0 {
            let minutes = time as f64 / MINUTE as f64;
            self.run.waits.entry(kind).or_default().push(minutes);
        }
    }
}

/// The jobs for random draws, and the mean time between two pods.
struct Source<'a> {
    jobs: Vec<&'a Job>,
    gap: f64,
}

impl<'a> Source<'a> {
    /// Pods that ask for this part of an empty cluster.
    fn new(jobs: &'a [Job], load: f64, world: &World<'_>) -> Result<Self> {
        // A job that does not fit the empty cluster would wait for ever, under every policy.
        let possible = |job: &&Job| world.hosts.iter().any(|host| host.fits(job));
        let jobs: Vec<&Job> = jobs.iter().filter(possible).collect();
        let demand: u64 = jobs.iter().map(|job| job.demand()).sum();
        if demand == 0 {
            bail!("no pod of the list asks for GPUs that these nodes have");
        }
        let mean = demand as f64 / jobs.len() as f64;
        let gap = mean * MEAN_MS as f64 / (load * world.cards as f64);
        Ok(Self { jobs, gap })
    }

    fn draw(&self, random: &mut Random) -> Job {
        self.jobs[random.below(self.jobs.len())].clone()
    }

    /// Milliseconds until the next pod comes.
    fn next(&self, random: &mut Random) -> u64 {
        (self.gap * random.exponential()).round().max(1.0) as u64
    }
}

/// Runs the plan with the seed; `None` if it was stopped on the way.
///
/// # Errors
/// If the policy breaks the books, or no pod of the list fits the hosts.
pub fn churn(
    plan: &Plan,
    choice: Choice,
    seed: u64,
    progress: &mut Progress,
) -> Result<Option<ChurnRun>> {
    let mut random = Random::new(seed);
    let mut hosts = plan.workload.hosts.clone();
    random.shuffle(&mut hosts);
    hosts.truncate(plan.hosts.max(1));
    let mut world = World::new(plan, choice, seed, hosts);
    let source = |jobs| Source::new(jobs, plan.load, &world);
    let first = source(&plan.workload.jobs)?;
    let second = plan.then.as_deref().map(source).transpose()?;
    let second = second.as_ref().unwrap_or(&first);
    world.fill(&first, &mut random)?;
    let mut next = 0;
    while world.now < END {
        let what = || format!("load {}, {choice}, seed {seed}", plan.load);
        if !progress.goes_on(what, world.now as f64 / END as f64) {
            return Ok(None);
        }
        if world
            .ends
            .peek()
            .is_some_and(|Reverse((at, _))| *at <= next.min(END))
        {
            if let Some(Reverse((at, id))) = world.ends.pop() {
                world.pass(at)?;
                world.go(id)?;
            }
            continue;
        }
        world.pass(next.min(END))?;
        let source = if world.now < CHANGE { &first } else { second };
        if world.now < END && next > 0 {
            let job = source.draw(&mut random);
            world.come(job, plan.lifetimes.whole(&mut random))?;
        }
        next = world.now + source.next(&mut random);
    }
    progress.done();
    Ok(Some(world.finish()))
}

/// Runs the plan with all seeds, or with the seeds before Ctrl-C.
///
/// # Errors
/// As [`churn`].
pub fn churn_all(
    plan: &Plan,
    choice: Choice,
    seeds: RangeInclusive<u64>,
    progress: &mut Progress,
) -> Result<Vec<ChurnRun>> {
    let runs = seeds.map(|seed| churn(plan, choice, seed, progress).transpose());
    runs.map_while(|run| run).collect()
}
