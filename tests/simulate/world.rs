//! A world out of a seed: nodes and their agents, users, two replicas of kube-scheduler with our extender, and
//! what befalls them; then quiet, in which everything must come right.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow::{Args, Extender};
use gpustow_api::names;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::check::starving;
use crate::net::{Link, Mode, Odds, Shared, locked};
use crate::scheduler::Scheduler;
use crate::server::{Key, Kind, Server};
use crate::story::Story;

const NAMESPACE: &str = "team";
/// Between two reports of an agent.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// How many seconds things go wrong.
const TROUBLE: std::ops::Range<u64> = 60..300;
/// A pod that fits is bound so long after the last trouble: messages that are 90 seconds late have arrived, and who
/// was relieved may take over again. Sooner than kube-scheduler looks at everything once more by itself.
const PATIENCE: Duration = Duration::from_secs(200);
/// kube-scheduler's Lease.
const LEASE: Duration = Duration::from_secs(15);
const CARD: u64 = 80_000;

/// A replica: its way to the API server and its scheduler.
struct Replica {
    link: Arc<Link>,
    scheduler: Arc<Scheduler>,
}

pub(crate) struct World {
    server: Shared,
    random: StdRng,
    replicas: Vec<Replica>,
    nodes: usize,
    pods: usize,
    /// Until when each node's agent says nothing.
    silent: Vec<Instant>,
    began: Instant,
    story: Story,
}

fn key(kind: Kind, name: &str) -> Key {
    let namespace = match kind {
        Kind::Pod => NAMESPACE,
        _ => "",
    };
    (kind, namespace.to_owned(), name.to_owned())
}

impl World {
    /// Lives through the seed.
    pub(crate) async fn run(seed: u64, story: Story) -> Result<()> {
        let mut world = Self {
            server: Arc::new(Mutex::new(Server::new(story.clone()))),
            random: StdRng::seed_from_u64(seed),
            replicas: Vec::new(),
            nodes: 0,
            pods: 0,
            silent: Vec::new(),
            began: Instant::now(),
            story,
        };
        world.build()?;
        let mut beat = Instant::now();
        let trouble = Duration::from_secs(world.random.random_range(TROUBLE));
        while world.began.elapsed() < trouble {
            if beat.elapsed() >= HEARTBEAT / 4 {
                beat = Instant::now();
                world.heartbeat();
            }
            world.act()?;
            world.check()?;
            let pause = world.random.random_range(0..3000);
            sleep(Duration::from_millis(pause)).await;
        }
        world.calm().await;
        let calm = Instant::now();
        loop {
            world.heartbeat();
            sleep(HEARTBEAT / 4).await;
            world.check()?;
            let starving = starving(&locked(&world.server));
            if starving.is_empty() {
                return Ok(());
            }
            ensure!(
                calm.elapsed() < PATIENCE,
                "{} s after the last trouble {}",
                PATIENCE.as_secs(),
                starving.join("; ")
            );
        }
    }

    fn tell(&self, text: impl Into<String>) {
        self.story.tell(text);
    }

    fn check(&self) -> Result<()> {
        let wrong = locked(&self.server).wrong.join("; ");
        ensure!(wrong.is_empty(), "{wrong}");
        Ok(())
    }

    fn build(&mut self) -> Result<()> {
        self.nodes = self.random.random_range(1..=4);
        for node in 0..self.nodes {
            let cards = self.random.random_range(1..=4_u64);
            let name = format!("n{node}");
            let gpus = (0..cards).map(|card| {
                json!({
                    "uuid": format!("GPU-{node}-{card}"), "index": card, "model": "Simulated",
                    "totalMiB": CARD, "reservedMiB": 0, "healthy": true, "pods": [], "strangersMiB": 0,
                })
            });
            let status = json!({
                "heartbeat": "1", "headroomMiB": 0, "conditions": [], "gpus": gpus.collect::<Vec<_>>(),
                "summary": { "gpus": cards, "healthy": cards, "models": "Simulated", "capacityMiB": 0, "usedMiB": 0 },
            });
            let sum = json!({ "cpu": "64", "memory": "1Ti", "pods": "1000", names::GPU_MEM: (cards * CARD).to_string() });
            let object = json!({
                "metadata": { "name": name }, "spec": {},
                "status": { "capacity": sum, "allocatable": sum, "conditions": [{ "type": "Ready", "status": "True" }] },
            });
            let mut server = locked(&self.server);
            let made = server.create(Kind::Node, "", object);
            made.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
            let report = json!({ "metadata": { "name": name }, "spec": {}, "status": status });
            let made = server.create(Kind::GpuNode, "", report);
            made.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
        }
        self.silent = vec![Instant::now(); self.nodes];
        for replica in 0..2 {
            let replica = self.replica(replica)?;
            self.replicas.push(replica);
        }
        *locked(&self.replicas[0].scheduler.leads) = true;
        Ok(())
    }

    /// Starts one.
    fn replica(&mut self, number: usize) -> Result<Replica> {
        let link = Link::new(&self.server, self.random.random());
        *locked(&link.odds) = Odds {
            refused: self.random.random_range(0..300),
            broken: self.random.random_range(0..300),
            late: self.random.random_range(0..200),
            unwatched: self.random.random_range(0..300),
        };
        let identity = format!("--identity=replica-{number}");
        let args = Args::try_parse_from(["gpustow", &identity]).context("flags")?;
        let extender = Extender::new(args, link.client())?;
        extender.start();
        let seed = self.random.random();
        let scheduler = Scheduler::new(&self.server, &link, extender.scheduler(), seed);
        tokio::spawn(scheduler.clone().run());
        Ok(Replica { link, scheduler })
    }

    /// Each agent that speaks reports.
    fn heartbeat(&mut self) {
        for node in 0..self.nodes {
            if self.silent[node] <= Instant::now() {
                let beat = self.began.elapsed().as_millis().to_string();
                self.report(node, |status| status["heartbeat"] = json!(beat));
            }
        }
    }

    fn report(&self, node: usize, change: impl FnOnce(&mut Value)) {
        let key = key(Kind::GpuNode, &format!("n{node}"));
        let mut server = locked(&self.server);
        if let Ok(now) = server.get(&key) {
            let mut object = Value::clone(&now);
            change(&mut object["status"]);
            // Nobody else writes it.
            let _ = server.replace(key, object);
        }
    }

    /// One of the pods, by its name, and whether it is bound.
    fn any_pod(&mut self, bound: bool) -> Option<String> {
        let server = locked(&self.server);
        let all = server.all(Kind::Pod);
        let all = all.filter(|pod| pod["spec"]["nodeName"].is_string() == bound);
        let names: Vec<&str> = all
            .filter_map(|pod| pod["metadata"]["name"].as_str())
            .collect();
        let index = self.random.random_range(0..names.len().max(1));
        names.get(index).map(|name| (*name).to_owned())
    }

    /// Something happens.
    fn act(&mut self) -> Result<()> {
        match self.random.random_range(0..100) {
            0..45 => self.create(),
            45..60 => self.end(true),
            60..64 => self.end(false),
            64..70 => self.annotate(),
            70..76 => self.strangers(),
            76..80 => self.illness(),
            80..83 => self.silence(),
            83..90 => self.lead(),
            90..95 => self.disturb(),
            95..98 => self.kill()?,
            _ => {
                let mut server = locked(&self.server);
                server.compacted = server.version();
                drop(server);
                self.tell("the API server forgets its history");
            }
        }
        Ok(())
    }

    fn create(&mut self) {
        self.pods += 1;
        let name = format!("p{}", self.pods);
        let gpus = [1, 1, 1, 1, 2, 2, 4][self.random.random_range(0..7)];
        let mib = [5_000, 10_000, 20_000, 40_000, 60_000, 80_000][self.random.random_range(0..6)];
        let mut pod = json!({
            "metadata": { "name": name, "annotations": { names::GPU_COUNT: gpus.to_string() } },
            "spec": {
                "schedulerName": names::SCHEDULER,
                "containers": [{ "name": "main", "image": "i", "resources": {
                    "limits": { names::GPU_MEM: (mib * gpus).to_string() },
                    "requests": { names::GPU_MEM: (mib * gpus).to_string() },
                } }],
            },
            "status": { "phase": "Pending" },
        });
        if mib == CARD {
            pod["metadata"]["annotations"][names::EXCLUSIVE] = json!("true");
        }
        self.tell(format!("{name} is created: {gpus} x {mib} MiB"));
        // No other has its name.
        let _ = locked(&self.server).create(Kind::Pod, NAMESPACE, pod);
    }

    fn end(&mut self, bound: bool) {
        let Some(name) = self.any_pod(bound) else {
            return;
        };
        let key = key(Kind::Pod, &name);
        if bound && self.random.random_bool(0.5) {
            self.tell(format!("{name} succeeds"));
            let done = json!({ "status": { "phase": "Succeeded" } });
            let _ = locked(&self.server).patch(key, &done, false, true);
        } else {
            self.tell(format!("{name} is deleted"));
            let server = self.server.clone();
            let grace = Duration::from_millis(self.random.random_range(0..20_000));
            let _ = locked(&server).delete(key.clone(), false);
            tokio::spawn(async move {
                sleep(grace).await;
                let _ = locked(&server).delete(key, true);
            });
        }
    }

    fn annotate(&mut self) {
        if let Some(name) = self.any_pod(false) {
            self.tell(format!("{name} is annotated"));
            let note = self.random.random_range(0..1000).to_string();
            let patch = json!({ "metadata": { "annotations": { "example.com/note": note } } });
            let _ = locked(&self.server).patch(key(Kind::Pod, &name), &patch, false, false);
        }
    }

    fn card(&mut self, change: impl FnOnce(&mut Value)) {
        let node = self.random.random_range(0..self.nodes);
        let pick = self.random.random_range(0..1000_usize);
        if self.silent[node] > Instant::now() {
            return;
        }
        self.report(node, |status| {
            if let Some(gpus) = status["gpus"].as_array_mut() {
                let count = gpus.len().max(1);
                if let Some(gpu) = gpus.get_mut(pick % count) {
                    change(gpu);
                }
            }
        });
    }

    fn strangers(&mut self) {
        let mib = [0, 0, 3_000, 30_000][self.random.random_range(0..4)];
        self.tell(format!("strangers use {mib} MiB of a card"));
        self.card(|gpu| gpu["strangersMiB"] = json!(mib));
    }

    fn illness(&mut self) {
        let healthy = self.random.random_bool(0.5);
        self.tell(format!(
            "a card is {}",
            if healthy { "well" } else { "ill" }
        ));
        self.card(|gpu| {
            gpu["healthy"] = json!(healthy);
            gpu["reason"] = if healthy {
                Value::Null
            } else {
                json!("XID 79")
            };
        });
    }

    fn silence(&mut self) {
        let node = self.random.random_range(0..self.nodes);
        let seconds = self.random.random_range(10..400);
        self.tell(format!("the agent of n{node} falls silent for {seconds} s"));
        self.silent[node] = Instant::now() + Duration::from_secs(seconds);
    }

    /// Another scheduler leads; the one before need not know it yet.
    fn lead(&mut self) {
        let next = self.random.random_range(0..self.replicas.len());
        let both = self.random.random_bool(0.3);
        self.tell(format!(
            "replica {next} leads{}",
            if both { " too" } else { "" }
        ));
        for (number, replica) in self.replicas.iter().enumerate() {
            let mut leads = locked(&replica.scheduler.leads);
            *leads = number == next || both && *leads;
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
        let (leader, successor) = (one.scheduler.clone(), other.scheduler.clone());
        let leads = *locked(&leader.leads);
        self.tell(format!("replica {number} is {mode:?} for {lasts:?}"));
        link.set(mode);
        let story = self.story.clone();
        tokio::spawn(async move {
            sleep(lasts.min(LEASE)).await;
            let relieved = leads && lasts > LEASE;
            if relieved {
                story.tell(format!("replica {} leads", 1 - number));
                *locked(&successor.leads) = true;
            }
            sleep(lasts.saturating_sub(LEASE)).await;
            if link.mode() == mode {
                link.set(Mode::Up);
            }
            sleep(hears).await;
            if relieved {
                story.tell(format!("replica {number} hears that it leads no more"));
                *locked(&leader.leads) = false;
            }
        });
    }

    /// One replica is killed and comes back.
    fn kill(&mut self) -> Result<()> {
        let number = self.random.random_range(0..self.replicas.len());
        self.tell(format!("replica {number} is killed"));
        let leads = *locked(&self.replicas[number].scheduler.leads);
        self.replicas[number].link.set(Mode::Dead);
        let replica = self.replica(number)?;
        *locked(&replica.scheduler.leads) = leads;
        self.replicas[number] = replica;
        Ok(())
    }

    /// All is well from now on, and one scheduler leads.
    async fn calm(&mut self) {
        // Nobody hears of another leader after this.
        sleep(Duration::from_secs(100)).await;
        self.tell("all is well from now on");
        let leader = self.random.random_range(0..self.replicas.len());
        for (number, replica) in self.replicas.iter().enumerate() {
            *locked(&replica.link.odds) = Odds::default();
            replica.link.set(Mode::Up);
            *locked(&replica.scheduler.leads) = number == leader;
        }
        self.silent.fill(Instant::now());
        for node in 0..self.nodes {
            self.report(node, |status| {
                for gpu in status["gpus"].as_array_mut().into_iter().flatten() {
                    gpu["healthy"] = json!(true);
                    gpu["reason"] = Value::Null;
                }
            });
        }
    }
}
