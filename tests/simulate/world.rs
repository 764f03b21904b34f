//! A world out of a seed: nodes and their agents, users, two replicas of kube-scheduler with our extender, and
//! what befalls them; then quiet, in which everything must come right.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use clap::Parser as _;
use gpustow::{Args, Extender};
use gpustow_api::config::{self, Action, After, GpustowConfigSpec, QueueMode};
use gpustow_api::names;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tower::ServiceExt as _;

use crate::check::{self, gated_by_others, starving};
use crate::machine::Machine;
use crate::net::{Link, Mode, NAMESPACE, Odds, Shared, locked};
use crate::scheduler::{Beside, Scheduler};
use crate::server::{Key, Kind, Server};
use crate::story::Story;

/// Between two looks when nothing happens any more.
const STEP: Duration = Duration::from_secs(3);
/// When strangers leave after the last trouble, in half of the worlds.
const QUIET: Duration = Duration::from_secs(60);
/// How many seconds things go wrong.
const TROUBLE: std::ops::Range<u64> = 60..300;
/// A pod that fits is bound so long after the last trouble: messages that are 90 seconds late have arrived, and who
/// was relieved may take over again. Sooner than kube-scheduler looks at everything once more by itself.
const PATIENCE: Duration = Duration::from_secs(200);
/// The profile beside gpustow's where there are two of them that ask the extender.
const OTHER: &str = "other-scheduler";
const QUEUES: [QueueMode; 3] = [QueueMode::Off, QueueMode::Auto, QueueMode::Always];
/// kube-scheduler's Lease.
const LEASE: Duration = Duration::from_secs(15);

/// A replica: its way to the API server and its schedulers.
struct Replica {
    link: Arc<Link>,
    schedulers: Vec<Arc<Scheduler>>,
    /// The extender's other door.
    health: Router,
}

impl Replica {
    fn lead(&self, leads: bool) {
        for scheduler in &self.schedulers {
            scheduler.leads.send_replace(leads);
        }
    }
}

/// What the extender says of itself.
async fn metrics(health: &Router) -> Result<String> {
    let request = Request::get("/metrics").body(Body::empty())?;
    let answer = health.clone().oneshot(request).await?;
    let body = to_bytes(answer.into_body(), usize::MAX).await?;
    Ok(String::from_utf8(body.to_vec())?)
}

pub(crate) struct World {
    pub(crate) server: Shared,
    pub(crate) random: StdRng,
    replicas: Vec<Replica>,
    /// What its Kubernetes does with nominations: see [`Scheduler`].
    clears: bool,
    /// The profiles of each kube-scheduler of a replica, and the one that some pods name.
    profiles: &'static [&'static [&'static str]],
    pub(crate) other: Option<&'static str>,
    /// What the extender is allowed to do.
    calls_back: bool,
    preempts: bool,
    keeps: bool,
    pub(crate) moves: bool,
    action: Action,
    queue: QueueMode,
    /// The controllers of pods that may be moved, by their UIDs: as they make a pod.
    pub(crate) owners: BTreeMap<String, Value>,
    /// The version with all nodes in it.
    built: u64,
    machines: Vec<Machine>,
    pub(crate) pods: usize,
    began: Instant,
    pub(crate) story: Story,
}

pub(crate) fn key(kind: Kind, name: &str) -> Key {
    let namespace = match kind {
        Kind::Pod => NAMESPACE,
        _ => "",
    };
    (kind, namespace.to_owned(), name.to_owned())
}

impl World {
    /// Lives through the seed.
    pub(crate) async fn run(seed: u64, story: Story) -> Result<()> {
        // In one of four worlds nothing is done but what is always done, so that it is done more often.
        let plain = seed % 4 == 3;
        let mut world = Self {
            server: Arc::new(Mutex::new(Server::new(story.clone()))),
            random: StdRng::seed_from_u64(seed),
            replicas: Vec::new(),
            clears: seed.is_multiple_of(2),
            profiles: match seed / 4 % 3 {
                0 => &[&[names::SCHEDULER]],
                1 => &[&[names::SCHEDULER, OTHER]],
                _ => &[&[names::SCHEDULER], &[OTHER]],
            },
            other: (!(seed / 4).is_multiple_of(3)).then_some(OTHER),
            calls_back: !plain && !seed.is_multiple_of(3),
            preempts: !plain && !(seed / 5).is_multiple_of(3),
            keeps: !plain && (seed / 8).is_multiple_of(2),
            moves: !plain && (seed / 16).is_multiple_of(2),
            action: match (seed / 3).is_multiple_of(2) {
                true => Action::Event,
                false => Action::Evict,
            },
            queue: QUEUES[usize::try_from(seed / 2 % 3).unwrap_or(0)],
            built: 0,
            owners: BTreeMap::new(),
            machines: Vec::new(),
            pods: 0,
            began: Instant::now(),
            story,
        };
        if (seed / 7).is_multiple_of(2) {
            locked(&world.server).budget = Some(usize::try_from(seed % 3)?);
        }
        world.configure()?;
        world.build()?;
        let trouble = Duration::from_secs(world.random.random_range(TROUBLE));
        while world.began.elapsed() < trouble {
            world.live(false)?;
            world.act()?;
            world.check()?;
            let pause = world.random.random_range(0..3000);
            sleep(Duration::from_millis(pause)).await;
        }
        world.calm().await;
        let calm = Instant::now();
        let mut strangers = (seed / 9).is_multiple_of(2);
        loop {
            // Nothing happens any more of which kube-scheduler hears: who has room then is to be woken.
            if strangers && calm.elapsed() > QUIET {
                strangers = false;
                world.tell("no stranger uses anything any more");
                world.machines.iter_mut().for_each(Machine::leave);
            }
            world.live(true)?;
            world.give_up_groups();
            sleep(STEP).await;
            world.check()?;
            let mut wrong = starving(&locked(&world.server), world.keeps || world.moves);
            for (number, replica) in world.replicas.iter().enumerate() {
                let metrics = metrics(&replica.health).await?;
                let books = check::books(&locked(&world.server), &metrics);
                wrong.extend(books.map(|text| format!("replica {number} {text}")));
            }
            if wrong.is_empty() && !strangers {
                return Ok(());
            }
            ensure!(
                calm.elapsed() < PATIENCE,
                "{} s after the last trouble {}",
                PATIENCE.as_secs(),
                wrong.join("; ")
            );
        }
    }

    pub(crate) fn tell(&self, text: impl Into<String>) {
        self.story.tell(text);
    }

    fn check(&self) -> Result<()> {
        let wrong = locked(&self.server).wrong.join("; ");
        ensure!(wrong.is_empty(), "{wrong}");
        Ok(())
    }

    fn build(&mut self) -> Result<()> {
        for number in 0..self.random.random_range(1..=4) {
            let sum = json!({ "cpu": "64", "memory": "1Ti", "pods": "1000" });
            let object = json!({
                "metadata": { "name": format!("n{number}") }, "spec": {},
                "status": { "capacity": sum, "allocatable": sum, "conditions": [{ "type": "Ready", "status": "True" }] },
            });
            let made = locked(&self.server).create(Kind::Node, "", object);
            made.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
            let (cards, seed) = (self.random.random_range(1..=4), self.random.random());
            let machine = Machine::new(&self.server, number, cards, seed)?;
            *locked(&machine.link.odds) = self.odds();
            self.machines.push(machine);
        }
        self.built = locked(&self.server).version();
        for replica in 0..2 {
            let replica = self.replica(replica)?;
            self.replicas.push(replica);
        }
        self.replicas[0].lead(true);
        Ok(())
    }

    /// Starts one.
    fn replica(&mut self, number: usize) -> Result<Replica> {
        let (beside, health) = self.extender(number)?;
        let link = beside.link.clone();
        let mut schedulers = Vec::new();
        for profiles in self.profiles {
            let (beside, seed) = (beside.clone(), self.random.random());
            let (server, story) = (&self.server, &self.story);
            let scheduler = Scheduler::new(server, beside, self.clears, profiles, story, seed);
            tokio::spawn(scheduler.clone().run());
            schedulers.push(scheduler);
        }
        Ok(Replica {
            link,
            schedulers,
            health,
        })
    }

    /// Writes what the administrator has decided.
    fn configure(&self) -> Result<()> {
        let mut spec = GpustowConfigSpec::default();
        spec.queue.mode = self.queue;
        if self.calls_back {
            spec.reclaim.action = self.action;
        }
        spec.preempt.fragmented = self.preempts;
        if self.keeps {
            spec.reserve.after = After(Some(Duration::from_secs(30)));
            spec.reserve.give_up_after = Duration::from_secs(60).into();
        }
        spec.defragment.evictions_per_hour = if self.moves { 100 } else { 0 };
        let object = json!({ "metadata": { "name": config::NAME }, "spec": spec });
        let key = key(Kind::GpustowConfig, config::NAME);
        let written = locked(&self.server).apply(key, object, false);
        written.map(drop).map_err(|refused| anyhow!("{refused:?}"))
    }

    fn extender(&mut self, number: usize) -> Result<(Beside, Router)> {
        let link = Link::new(&self.server, self.random.random());
        *locked(&link.odds) = self.odds();
        let identity = format!("--identity=replica-{number}");
        // The administrator may change it while extenders run.
        if self.random.random_bool(0.1) {
            self.queue = QUEUES[self.random.random_range(0..QUEUES.len())];
            self.configure()?;
        }
        let flags = ["gpustow", "--metrics-per-gpu", &identity];
        let args = Args::try_parse_from(flags).context("flags")?;
        let extender = Extender::new(args, link.client())?;
        extender.start();
        let health = extender.health();
        let extender = extender.scheduler();
        Ok((Beside { link, extender }, health))
    }

    fn odds(&mut self) -> Odds {
        Odds {
            refused: self.random.random_range(0..300),
            broken: self.random.random_range(0..300),
            late: self.random.random_range(0..200),
            unwatched: self.random.random_range(0..300),
        }
    }

    fn live(&mut self, calm: bool) -> Result<()> {
        self.control();
        let mut all = self.machines.iter_mut();
        all.try_for_each(|machine| machine.live(calm))
    }

    fn machine(&mut self) -> &mut Machine {
        let index = self.random.random_range(0..self.machines.len());
        &mut self.machines[index]
    }

    /// Something happens.
    fn act(&mut self) -> Result<()> {
        match self.random.random_range(0..100) {
            0..45 => self.create(),
            45..60 => self.end(true),
            60..64 => self.end(false),
            64..67 => self.annotate(),
            67..70 => self.ungate(),
            70..76 => self.strangers()?,
            76..80 => self.lose(),
            80..83 => self.silence()?,
            83..90 => self.lead(),
            90..95 => self.disturb(),
            95..97 => self.kill()?,
            97 if self.random.random_bool(0.2) => self.restore()?,
            97 => self.ungate(),
            _ => {
                let mut server = locked(&self.server);
                server.compacted = server.version();
                drop(server);
                self.tell("the API server forgets its history");
            }
        }
        Ok(())
    }

    fn strangers(&mut self) -> Result<()> {
        let mib = [0, 0, 3_000, 30_000][self.random.random_range(0..4)];
        let machine = self.machine();
        let text = format!("strangers use {mib} MiB of a card of {}", machine.name);
        machine.strangers(mib)?;
        self.tell(text);
        Ok(())
    }

    fn lose(&mut self) {
        let gone = self.random.random_bool(0.3);
        let machine = self.machine();
        machine.lose(gone);
        let text = match gone {
            true => format!("a card of {} is gone", machine.name),
            false => format!("{} has all its cards", machine.name),
        };
        self.tell(text);
    }

    /// An agent is cut off, frozen, or started anew.
    fn silence(&mut self) -> Result<()> {
        let seconds = self.random.random_range(10..400);
        let mode = [Mode::Held, Mode::Cut, Mode::Up][self.random.random_range(0..3)];
        let odds = self.odds();
        let machine = self.machine();
        let name = machine.name.clone();
        if mode == Mode::Up {
            machine.restart()?;
            *locked(&machine.link.odds) = odds;
            self.tell(format!("the agent of {name} starts anew"));
            return Ok(());
        }
        let link = machine.link.clone();
        self.tell(format!("the agent of {name} is {mode:?} for {seconds} s"));
        link.set(mode);
        tokio::spawn(async move {
            sleep(Duration::from_secs(seconds)).await;
            link.set(Mode::Up);
        });
        Ok(())
    }

    /// Another replica's scheduler leads; the one before need not know it yet.
    fn lead(&mut self) {
        for kind in 0..self.profiles.len() {
            let next = self.random.random_range(0..self.replicas.len());
            let both = self.random.random_bool(0.3);
            self.tell(format!(
                "replica {next} leads{}{}",
                if both { " too" } else { "" },
                if kind > 0 { " in the other's pods" } else { "" },
            ));
            for (number, replica) in self.replicas.iter().enumerate() {
                let leads = &replica.schedulers[kind].leads;
                leads.send_modify(|leads| *leads = number == next || both && *leads);
            }
        }
    }

    /// One replica is frozen or cut off for a while. If it leads and does not renew its Lease, the other leads,
    /// and it hears of that later.
    fn disturb(&mut self) {
        let number = self.random.random_range(0..self.replicas.len());
        let mode = [Mode::Held, Mode::Cut][self.random.random_range(0..2)];
        let lasts = Duration::from_millis(self.random.random_range(100..90_000));
        let hears = Duration::from_millis(self.random.random_range(0..10_000));
        let (one, other) = (&self.replicas[number], &self.replicas[1 - number]);
        let link = one.link.clone();
        if link.mode() != Mode::Up {
            return;
        }
        let pairs = one.schedulers.iter().cloned();
        let pairs = pairs.zip(other.schedulers.iter().cloned());
        let mut relieved: Vec<_> = pairs.filter(|(it, _)| *it.leads.borrow()).collect();
        self.tell(format!("replica {number} is {mode:?} for {lasts:?}"));
        link.set(mode);
        let story = self.story.clone();
        tokio::spawn(async move {
            sleep(lasts.min(LEASE)).await;
            relieved.retain(|_| lasts > LEASE);
            if !relieved.is_empty() {
                story.tell(format!("replica {} leads", 1 - number));
            }
            for (_, successor) in &relieved {
                successor.leads.send_replace(true);
            }
            sleep(lasts.saturating_sub(LEASE)).await;
            if link.mode() == mode {
                link.set(Mode::Up);
            }
            sleep(hears).await;
            if !relieved.is_empty() {
                story.tell(format!("replica {number} hears that it leads no more"));
            }
            for (leader, _) in &relieved {
                leader.leads.send_replace(false);
            }
        });
    }

    /// One replica is killed and comes back.
    fn kill(&mut self) -> Result<()> {
        let number = self.random.random_range(0..self.replicas.len());
        self.replicas[number].link.set(Mode::Dead);
        if self.random.random_bool(0.3) {
            self.tell(format!("the extender of replica {number} is killed alone"));
            let (beside, health) = self.extender(number)?;
            self.replicas[number].health = health;
            self.replicas[number].link = beside.link.clone();
            for scheduler in &self.replicas[number].schedulers {
                scheduler.put_beside(beside.clone());
            }
            return Ok(());
        }
        self.tell(format!("replica {number} is killed"));
        let replica = self.replica(number)?;
        for (before, after) in self.replicas[number]
            .schedulers
            .iter()
            .zip(&replica.schedulers)
        {
            after.leads.send_replace(*before.leads.borrow());
        }
        self.replicas[number] = replica;
        Ok(())
    }

    /// etcd is restored from a backup, and the control plane started anew.
    fn restore(&mut self) -> Result<()> {
        let version = locked(&self.server).version();
        let back = self
            .random
            .random_range(1..200.min(version - self.built).max(2));
        self.tell(format!("etcd is restored to what it was {back} writes ago"));
        locked(&self.server).restore(version.saturating_sub(back));
        for number in 0..self.replicas.len() {
            self.replicas[number].link.set(Mode::Dead);
            self.replicas[number] = self.replica(number)?;
        }
        self.replicas[0].lead(true);
        Ok(())
    }

    /// All is well from now on, and the schedulers of one replica lead.
    async fn calm(&mut self) {
        // Nobody hears of another leader after this.
        sleep(Duration::from_secs(100)).await;
        self.tell("all is well from now on");
        let leader = self.random.random_range(0..self.replicas.len());
        for (number, replica) in self.replicas.iter().enumerate() {
            *locked(&replica.link.odds) = Odds::default();
            replica.link.set(Mode::Up);
            replica.lead(number == leader);
        }
        let held = |world: &Self| {
            locked(&world.server)
                .all(Kind::Pod)
                .any(|pod| gated_by_others(pod))
        };
        while held(self) {
            self.ungate();
        }
        for machine in &mut self.machines {
            *locked(&machine.link.odds) = Odds::default();
            machine.link.set(Mode::Up);
            machine.lose(false);
        }
    }
}
