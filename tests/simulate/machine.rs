//! A simulated node: its cards, the processes that use them, its kubelet, and the real agent, which reports to the API
//! server.

mod servers;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use gpustow_agent::Work;
use gpustow_agent::devices::{Card, Memory, Process, Reading};
use gpustow_agent::sampler::Sampler;
use gpustow_api::{Assignment, names};
use gpustow_simworld::repeat;
use k8s_openapi::jiff::SignedDuration;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::check::{CARD, ended, hangs};
use crate::net::{Link, NAMESPACE, Shared, locked};
use crate::scheduler::{name, uid};
use crate::server::{Copy, Kind};

pub(crate) use servers::server;

const MIB: u64 = 1 << 20;

/// A process of a pod, or an unmanaged one, on one card.
struct Running {
    /// The pod's UID; none for a stranger.
    pod: Option<String>,
    card: usize,
    pid: u32,
    mib: u64,
    /// Its limit, and its request.
    most: u64,
    asked: u64,
}

pub(crate) struct Machine {
    pub(crate) name: String,
    server: Shared,
    random: StdRng,
    /// Whether each card is there.
    cards: Vec<bool>,
    running: Vec<Running>,
    /// Pods that the kubelet has started, by UID.
    started: BTreeMap<String, ()>,
    pids: u32,
    /// The servers that are not Ready.
    servers: Vec<servers::Server>,
    /// Starts that failed.
    pub(crate) failed: usize,
    proc: TempDir,
    pub(crate) link: Arc<Link>,
    sampler: Arc<Sampler>,
    agent: JoinHandle<()>,
}

impl Machine {
    /// A machine with so many cards.
    pub(crate) fn new(server: &Shared, number: usize, cards: usize, seed: u64) -> Result<Self> {
        let name = format!("n{number}");
        // In memory where the system has such a place: a world makes and reads small files by the thousand.
        let memory = Path::new("/dev/shm");
        let proc = match memory.is_dir() {
            true => TempDir::new_in(memory),
            false => TempDir::new(),
        };
        let proc = proc.context("/proc of a machine")?;
        let (link, sampler, agent) = agent(server, &name, proc.path(), seed)?;
        Ok(Self {
            name,
            server: server.clone(),
            random: StdRng::seed_from_u64(seed),
            cards: vec![true; cards],
            running: Vec::new(),
            started: BTreeMap::new(),
            pids: 100,
            servers: Vec::new(),
            failed: 0,
            proc,
            link,
            sampler,
            agent,
        })
    }

    fn uuid(&self, card: usize) -> String {
        format!("GPU-{}-{card}", self.name)
    }

    /// Its agent restarts.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.agent.abort();
        let seed = self.random.random();
        (self.link, self.sampler, self.agent) =
            agent(&self.server, &self.name, self.proc.path(), seed)?;
        Ok(())
    }

    /// Time passes: the kubelet does its work, programs take and leave memory unless all is calm, and the agent
    /// gets a sample.
    pub(crate) fn live(&mut self, calm: bool) -> Result<()> {
        let here: Vec<Copy> = {
            let server = locked(&self.server);
            let all = server.all(Kind::Pod);
            let here = all.filter(|pod| pod["spec"]["nodeName"] == *self.name && !ended(pod));
            here.cloned().collect()
        };
        self.running.retain(|process| {
            let lives = |pod: &String| here.iter().any(|it| uid(it) == *pod);
            let stays = process.pod.as_ref().is_none_or(lives);
            if !stays {
                // Its directory may never have been written.
                let _ = std::fs::remove_dir_all(self.proc.path().join(process.pid.to_string()));
            }
            stays
        });
        self.started
            .retain(|pod, ()| here.iter().any(|it| uid(it) == *pod));
        for pod in &here {
            let ends = pod["metadata"]["deletionTimestamp"].is_string() && !hangs(pod);
            if ends && self.random.random_bool(0.3) {
                locked(&self.server).end((Kind::Pod, NAMESPACE.to_owned(), name(pod)));
            } else if !self.started.contains_key(&uid(pod)) && self.random.random_bool(0.5) {
                self.started.insert(uid(pod), ());
                self.start(pod)?;
            }
        }
        for index in 0..self.running.len() {
            if !calm && self.random.random_bool(0.1) {
                let it = &self.running[index];
                let others = self.running.iter().filter(|other| other.card == it.card);
                let taken = others.map(|other| other.mib).sum::<u64>() - it.mib;
                let most = it.most.min(CARD.saturating_sub(taken));
                let all = self.random.random_bool(0.5);
                let some = self.random.random_range(0..=most);
                self.running[index].mib = if all { most } else { some };
            }
            let it = &self.running[index];
            if let Some(pod) = it.pod.clone().filter(|_| it.mib > it.asked) {
                let mut server = locked(&self.server);
                if server.over.insert(pod.clone(), Instant::now()).is_none() {
                    let (mib, node, card) = (it.mib, &self.name, it.card);
                    server
                        .story
                        .tell(format!("{pod} uses {mib} MiB of card {card} of {node}"));
                }
            }
        }
        self.serve();
        if self.random.random_bool(0.5) {
            self.allocate();
        }
        self.sampler.put(Ok(self.reading()), Duration::ZERO);
        Ok(())
    }

    fn start(&mut self, pod: &Value) -> Result<()> {
        let key = (Kind::Pod, NAMESPACE.to_owned(), name(pod));
        let id = format!("containerd://{:064x}", self.pids);
        let status = json!({ "metadata": { "uid": uid(pod) }, "status": {
            "phase": "Running", "startTime": repeat::time(SignedDuration::ZERO),
            "containerStatuses": [{
                "name": "main", "containerID": id, "image": "i", "imageID": "i", "ready": true, "restartCount": 0,
            }],
        } });
        // It may have gone.
        let _ = locked(&self.server).patch(key, &status, false, true);
        let text = pod["metadata"]["annotations"][names::ASSIGNMENT].as_str();
        let assignment = Assignment::decode(text.unwrap_or_default());
        let charges = assignment.map(|it| it.charges).unwrap_or_default();
        let limit = &pod["metadata"]["annotations"][names::MEM_LIMIT];
        let limit: Option<u64> = limit.as_str().and_then(|text| text.parse().ok());
        let gpus = charges.len().max(1) as u64;
        for (uuid, mib) in charges {
            let card = (0..self.cards.len()).find(|card| self.uuid(*card) == *uuid);
            if let Some(card) = card {
                let cgroup = format!(
                    "0::/kubepods/pod{}/{}",
                    uid(pod),
                    id.replace("containerd://", "")
                );
                self.run(Some(uid(pod)), card, 0, &cgroup)?;
                if let Some(process) = self.running.last_mut() {
                    process.asked = mib.0;
                    process.most = limit.map_or(mib.0, |limit| limit / gpus);
                }
            }
        }
        self.begin_server(pod, &id);
        Ok(())
    }

    fn run(&mut self, pod: Option<String>, card: usize, mib: u64, cgroup: &str) -> Result<()> {
        self.pids += 1;
        let dir = self.proc.path().join(self.pids.to_string());
        std::fs::create_dir(&dir)?;
        let stat = format!("{} (a) S {}1 0", self.pids, "0 ".repeat(18));
        std::fs::write(dir.join("stat"), stat)?;
        std::fs::write(dir.join("cgroup"), cgroup)?;
        self.running.push(Running {
            pod,
            card,
            pid: self.pids,
            mib,
            most: mib,
            asked: mib,
        });
        Ok(())
    }

    /// The kubelet makes the node's capacity allocatable to pods.
    fn allocate(&self) {
        let mut server = locked(&self.server);
        let key = (Kind::Node, String::new(), self.name.clone());
        if let Ok(node) = server.get(&key) {
            let capacity = &node["status"]["capacity"];
            let patch = json!({ "status": { "allocatable": capacity } });
            // No client deletes nodes.
            let _ = server.patch(key, &patch, false, true);
        }
    }

    /// The reading that NVML would give.
    fn reading(&self) -> Reading {
        let there = (0..self.cards.len()).filter(|card| self.cards[*card]);
        let cards = there.map(|card| {
            let on = || self.running.iter().filter(move |it| it.card == card);
            let processes = on().map(|it| Process {
                pid: it.pid,
                used: Some(it.mib * MIB),
                ..Process::default()
            });
            let used: u64 = on().map(|it| it.mib).sum();
            Card {
                uuid: self.uuid(card),
                index: u32::try_from(card).unwrap_or_default(),
                model: "Simulated".to_owned(),
                memory: Some(Memory {
                    total: CARD * MIB,
                    reserved: 0,
                    used: used.min(CARD) * MIB,
                }),
                processes: Some(processes.collect()),
                ..Card::default()
            }
        });
        Reading {
            cards: cards.collect(),
            ..Reading::default()
        }
    }

    /// Unmanaged processes use this amount of one of its cards, in place of their earlier usage.
    pub(crate) fn strangers(&mut self, mib: u64) -> Result<()> {
        let card = self.random.random_range(0..self.cards.len());
        self.running
            .retain(|it| it.pod.is_some() || it.card != card);
        self.run(None, card, mib, "0::/system.slice/x.service")
    }

    /// Others use so much of each of its cards.
    pub(crate) fn fill(&mut self, mib: u64) -> Result<()> {
        self.leave();
        (0..self.cards.len())
            .try_for_each(|card| self.run(None, card, mib, "0::/system.slice/x.service"))
    }

    /// Only pods use its cards from now on.
    pub(crate) fn leave(&mut self) {
        self.running.retain(|it| it.pod.is_some());
    }

    /// One of its cards is gone, or all lost cards are back.
    pub(crate) fn lose(&mut self, gone: bool) {
        let card = self.random.random_range(0..self.cards.len());
        match gone {
            true => self.cards[card] = false,
            false => self.cards.fill(true),
        }
    }
}

fn agent(
    server: &Shared,
    node: &str,
    proc: &Path,
    seed: u64,
) -> Result<(Arc<Link>, Arc<Sampler>, JoinHandle<()>)> {
    let link = Link::new(server, seed);
    let args = [
        "gpustow-agent",
        "--node-name",
        node,
        "--pod-resources=/nowhere",
        "--cgroup=/nowhere",
    ];
    let mut args = gpustow_agent::Args::try_parse_from(args).context("the agent's flags")?;
    args.proc = proc.to_owned();
    let sampler = Arc::new(Sampler::default());
    let work = Work::new(args, link.client(), node)?;
    let samples = sampler.clone();
    let agent = tokio::spawn(async move { work.run(&samples).await });
    Ok((link, sampler, agent))
}
