//! A world out of a seed: nodes and their agents, users, two replicas of kube-scheduler with our extender, and faults.
//! Then follows quiet, in which everything must come right.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use clap::Parser as _;
use gpustow::{Args, Extender};
use gpustow_api::config;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tower::ServiceExt as _;

use crate::autoscaler::{self, Autoscaler};
use crate::check::{self, gated_by_others, starving};
use crate::crowd::Crowd;
use crate::machine::Machine;
use crate::net::{Link, Mode, NAMESPACE, Odds, Shared, locked};
use crate::scheduler::{Beside, Scheduler};
use crate::server::{Key, Kind, Server};
use crate::story::Story;
use crate::switches::{QUEUES, Switches};

/// Between two looks when nothing happens any more.
const STEP: Duration = Duration::from_secs(3);
/// When strangers leave after the last trouble, in half of the worlds.
const QUIET: Duration = Duration::from_secs(60);
/// A call that was begun before the last trouble has been answered after this, and a standby has taken over that had
/// waited then for the leader to ungate a pod.
const ANSWERED: Duration = Duration::from_secs(30);
/// How many seconds things go wrong.
const TROUBLE: std::ops::Range<u64> = 60..300;
/// A pod that fits is bound so long after the last trouble: messages that are 90 seconds late have arrived, and who
/// was relieved may take over again. Sooner than kube-scheduler looks at everything once more by itself.
const PATIENCE: Duration = Duration::from_secs(200);
/// A replica: its way to the API server and its schedulers.
pub(crate) struct Replica {
    pub(crate) link: Arc<Link>,
    pub(crate) schedulers: Vec<Arc<Scheduler>>,
    /// The extender's other door.
    pub(crate) health: Router,
}

impl Replica {
    pub(crate) fn leads(&self) -> bool {
        self.schedulers.iter().any(|it| *it.leads.borrow())
    }

    pub(crate) fn lead(&self, leads: bool) {
        for scheduler in &self.schedulers {
            scheduler.leads.send_replace(leads);
        }
    }
}

/// The extender's metrics.
pub(crate) async fn metrics(health: &Router) -> Result<String> {
    let request = Request::get("/metrics").body(Body::empty())?;
    let answer = health.clone().oneshot(request).await?;
    let body = to_bytes(answer.into_body(), usize::MAX).await?;
    Ok(String::from_utf8(body.to_vec())?)
}

pub(crate) struct World {
    pub(crate) server: Shared,
    pub(crate) random: StdRng,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) on: Switches,
    /// The controllers of pods that may be moved, by their UIDs: as they make a pod.
    pub(crate) owners: BTreeMap<String, Value>,
    /// The PodGroups that controllers make, from when on.
    pub(crate) gangs: Vec<(Instant, Value)>,
    /// The version with all nodes in it.
    pub(crate) built: u64,
    pub(crate) machines: Vec<Machine>,
    pub(crate) crowd: Crowd,
    pub(crate) autoscaler: Autoscaler,
    pub(crate) pods: usize,
    pub(crate) began: Instant,
    pub(crate) story: Story,
}

pub(crate) fn key(kind: Kind, name: &str) -> Key {
    let namespace = match kind {
        Kind::Pod | Kind::PodGroup => NAMESPACE,
        _ => "",
    };
    (kind, namespace.to_owned(), name.to_owned())
}

impl World {
    /// One without nodes and extenders.
    pub(crate) fn new(seed: u64, on: Switches, story: Story) -> Result<Self> {
        let world = Self {
            server: Arc::new(Mutex::new(Server::new(story.clone()))),
            random: StdRng::seed_from_u64(seed),
            replicas: Vec::new(),
            on,
            built: 0,
            owners: BTreeMap::new(),
            gangs: Vec::new(),
            machines: Vec::new(),
            crowd: Crowd::default(),
            autoscaler: Autoscaler::default(),
            pods: 0,
            began: Instant::now(),
            story,
        };
        world.tell(format!("with {:?}", world.on));
        locked(&world.server).budget = world.on.budget;
        locked(&world.server).has_pod_groups = world.on.gangs;
        locked(&world.server).is_1_38 = world.on.is_1_38;
        world.configure()?;
        Ok(world)
    }

    /// Lives through the seed.
    pub(crate) async fn run(seed: u64, story: Story) -> Result<()> {
        let mut world = Self::new(seed, Switches::draw(seed), story)?;
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
        let mut strangers = world.on.strangers_leave;
        let mut settled = false;
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
            // Earlier requests to the other replica have been answered.
            let leads = world.is_settled() || calm.elapsed() < ANSWERED;
            ensure!(leads || !settled, "a replica takes over that is not asked");
            settled |= world.is_settled() && calm.elapsed() >= ANSWERED;
            let mut wrong = starving(
                &locked(&world.server),
                world.on.reserve || world.on.defragment,
            );
            wrong.extend(world.wrong_books().await?);
            wrong.extend(world.wrong_placeholders());
            if wrong.is_empty() && !strangers {
                return world.probe().await;
            }
            ensure!(
                calm.elapsed() < PATIENCE,
                "{} s after the last trouble {}",
                PATIENCE.as_secs(),
                wrong.join("; ")
            );
        }
    }

    /// Contradictions between the replicas' books and the API server.
    pub(crate) async fn wrong_books(&self) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (number, replica) in self.replicas.iter().enumerate() {
            let metrics = metrics(&replica.health).await?;
            let books = check::books(&locked(&self.server), &metrics);
            wrong.extend(books.map(|text| format!("replica {number} {text}")));
        }
        Ok(wrong)
    }

    pub(crate) fn tell(&self, text: impl Into<String>) {
        self.story.tell(text);
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong = locked(&self.server).wrong.join("; ");
        ensure!(wrong.is_empty(), "{wrong}");
        Ok(())
    }

    fn build(&mut self) -> Result<()> {
        for number in 0..self.random.random_range(1..=4) {
            let cards = self.random.random_range(1..=4);
            self.add_machine(number, cards)?;
            let odds = self.odds();
            self.machines[number].link.set_odds(odds);
        }
        self.crowd = Crowd::build(&self.server, self.on.crowd)?;
        self.staff()
    }

    pub(crate) fn add_machine(&mut self, number: usize, cards: usize) -> Result<()> {
        let object = autoscaler::node(&format!("n{number}"), cards);
        let made = locked(&self.server).create(Kind::Node, "", object);
        made.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
        let seed = self.random.random();
        let machine = Machine::new(&self.server, number, cards, seed)?;
        self.machines.push(machine);
        Ok(())
    }

    /// Starts two replicas.
    pub(crate) fn staff(&mut self) -> Result<()> {
        self.built = locked(&self.server).version();
        for replica in 0..2 {
            let replica = self.replica(replica)?;
            self.replicas.push(replica);
        }
        self.replicas[0].lead(true);
        Ok(())
    }

    /// Starts one.
    pub(crate) fn replica(&mut self, number: usize) -> Result<Replica> {
        let (beside, health) = self.extender(number)?;
        let link = beside.link.clone();
        let mut schedulers = Vec::new();
        for profiles in self.on.profiles {
            let (beside, seed) = (beside.clone(), self.random.random());
            let (server, story) = (&self.server, &self.story);
            let scheduler = Scheduler::new(server, beside, self.on.clears, profiles, story, seed);
            tokio::spawn(scheduler.clone().run());
            schedulers.push(scheduler);
        }
        Ok(Replica {
            link,
            schedulers,
            health,
        })
    }

    /// Writes the administrator's settings.
    fn configure(&self) -> Result<()> {
        let object = json!({ "metadata": { "name": config::NAME }, "spec": self.on.spec() });
        let key = key(Kind::GpustowConfig, config::NAME);
        let written = locked(&self.server).apply(key, object, false);
        written.map(drop).map_err(|refused| anyhow!("{refused:?}"))
    }

    pub(crate) fn extender(&mut self, number: usize) -> Result<(Beside, Router)> {
        let link = Link::new(&self.server, self.random.random());
        link.set_odds(self.odds_of_extender());
        *locked(&link.lags) = self.lags();
        // The administrator may change it while extenders run.
        if self.random.random_bool(0.1) {
            self.on.queue = QUEUES[self.random.random_range(0..QUEUES.len())];
            self.configure()?;
        }
        let identity = format!("--identity=replica-{number}");
        let flags = ["gpustow", "--metrics-per-gpu", &identity];
        let args = Args::try_parse_from(flags).context("flags")?;
        let extender = Extender::new(args, link.client())?;
        extender.start();
        let health = extender.health();
        Ok((Beside::new(link, extender.scheduler()), health))
    }

    pub(crate) fn live(&mut self, calm: bool) -> Result<()> {
        self.control();
        self.scale(calm)?;
        self.crowd.live(&self.server);
        let mut all = self.machines.iter_mut();
        all.try_for_each(|machine| machine.live(calm))
    }

    pub(crate) fn machine(&mut self) -> &mut Machine {
        let index = self.random.random_range(0..self.machines.len());
        &mut self.machines[index]
    }

    /// All is well from now on, and the schedulers of one replica lead.
    async fn calm(&mut self) {
        // No client hears of another leader after this.
        sleep(Duration::from_secs(100)).await;
        self.tell("all is well from now on");
        let leader = self.random.random_range(0..self.replicas.len());
        for (number, replica) in self.replicas.iter().enumerate() {
            replica.link.set_odds(Odds::default());
            locked(&replica.link.lags).clear();
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
            machine.link.set_odds(Odds::default());
            machine.link.set(Mode::Up);
            machine.lose(false);
        }
    }
}
