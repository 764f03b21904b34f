//! Pods that are created when all is well and come before all others. Each is placed in time, despite trouble.
//! kube-scheduler shows other nodes, the API server refuses writes for a while, its etcd is restored, or hopeless pods
//! wait too.

use std::time::Duration;

use anyhow::{Result, ensure};
use gpustow_api::names;
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::check::{self, CARD, Card, hangs, starving};
use crate::net::{Mode, Odds, locked};
use crate::preempt::priority;
use crate::scheduler::uid;
use crate::server::Kind;
use crate::world::{Replica, World, key};

pub(crate) const PRIORITY: i64 = 3000;
/// MiB of a pod that fits where anything does.
const SMALL: u64 = 1_000;
/// A pod that fits is bound within this time.
const PLACED: Duration = Duration::from_secs(20);
/// As above, for a pod that a new leader could not fence at first.
const REFENCED: Duration = Duration::from_secs(100);
/// As above, for a pod for which others finish.
const HELPED: Duration = Duration::from_secs(150);
/// After so long an extender that is asked alone leads again.
const RETAKEN: Duration = Duration::from_secs(70);
/// For so long no status is written.
const MUTE: Duration = Duration::from_secs(90);
/// Pods that no node could hold, next to a pod that can be helped: more than any feature looks at.
const HOPELESS: u64 = 20;
const STEP: Duration = Duration::from_secs(1);

impl World {
    pub(crate) async fn probe(&mut self) -> Result<()> {
        // Until lately both were asked, and one takes the Lease back once a minute at most.
        let began = Instant::now();
        while !self.is_settled() && began.elapsed() < RETAKEN {
            self.pass(STEP).await?;
        }
        // The replica that is asked has taken over, though a list that it sent in the last trouble may be late.
        // A pod that waits may come first, before the probe is seen. One that hangs then never leaves.
        let hangs = |pod: &crate::server::Copy| hangs(pod) && !pod["spec"]["nodeName"].is_string();
        let any_hangs = locked(&self.server).all(Kind::Pod).any(hangs);
        if self.has_room(SMALL) && !any_hangs {
            let name = self.probe_with(SMALL, 1, PRIORITY);
            self.bound_within(&name, REFENCED, "it fits").await?;
        }
        if self.on.crowd > 0 {
            self.probe_windows().await?;
        }
        if self.on.empties && self.random.random_bool(0.5) {
            return self.probe_emptied().await;
        }
        match self.random.random_range(0..3) {
            0 => self.probe_mute().await,
            1 => self.probe_restored().await,
            _ => self.probe_preemption().await,
        }
    }

    /// Creates a pod that comes before all others.
    fn probe_with(&mut self, mib: u64, gpus: u64, priority: i64) -> String {
        let asks = json!({ names::GPU_MEM: (mib * gpus).to_string() });
        let mut pod = json!({
            "metadata": { "annotations": { names::GPU_COUNT: gpus.to_string() } },
            "spec": {
                "schedulerName": names::SCHEDULER, "priority": priority, "schedulingGates": [],
                "containers": [{ "name": "main", "image": "i", "resources": { "limits": asks, "requests": asks } }],
            },
            "status": { "phase": "Pending" },
        });
        if self.is_queued(&pod) {
            pod["spec"]["schedulingGates"] = json!([{ "name": names::GATE }]);
        }
        self.make(&mut pod)
    }

    /// Lets so much time pass.
    async fn pass(&mut self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.live(true)?;
            sleep(STEP).await;
            self.check()?;
        }
        Ok(())
    }

    fn pod(&self, name: &str) -> Value {
        let pod = locked(&self.server).get(&key(Kind::Pod, name));
        pod.map(|pod| Value::clone(&pod)).unwrap_or_default()
    }

    fn is_bound(&self, name: &str) -> bool {
        self.pod(name)["spec"]["nodeName"].is_string()
    }

    async fn bound_within(&mut self, name: &str, time: Duration, what: &str) -> Result<()> {
        let began = Instant::now();
        while !self.is_bound(name) {
            let took = began.elapsed();
            ensure!(
                took < time,
                "{name} is not bound {} s after {what}",
                time.as_secs()
            );
            self.pass(STEP).await?;
        }
        Ok(())
    }

    /// The cards of each machine.
    fn cards(&self) -> Vec<(String, Vec<(String, Card)>)> {
        let server = locked(&self.server);
        let cards = |node: &str| check::cards(&server, node).into_iter().collect();
        let all = self.machines.iter();
        all.map(|it| (it.name.clone(), cards(&it.name))).collect()
    }

    /// Which replica leads, and since when.
    fn term(&self) -> Option<Value> {
        let server = locked(&self.server);
        let mut leases = server.all(Kind::Lease);
        leases.next().map(|lease| lease["spec"].clone())
    }

    /// Has a node room on which no other pod is assumed to be?
    fn has_room(&self, mib: u64) -> bool {
        let cards = self.cards();
        let open = |node: &str| locked(&self.server).assumed_on(node).next().is_none();
        let cards = cards.iter().filter(|(node, _)| open(node));
        let mut cards = cards.flat_map(|(_, cards)| cards);
        cards.any(|(_, card)| card.healthy && card.free() >= mib)
    }

    /// Does the replica whose kube-scheduler leads hold the Lease?
    pub(crate) fn is_settled(&self) -> bool {
        let leader = self.replicas.iter().position(Replica::leads);
        let holder = self.term().map(|term| term["holderIdentity"].clone());
        holder
            .zip(leader)
            .is_some_and(|(holder, leader)| holder == format!("replica-{leader}"))
    }

    /// A pod fits on a node that kube-scheduler does not show at first: it is placed there, and no other is evicted for it.
    async fn probe_windows(&mut self) -> Result<()> {
        for _ in 0..3 {
            if !self.has_room(SMALL) {
                break;
            }
            let name = self.probe_with(SMALL, 1, PRIORITY);
            self.bound_within(&name, PLACED, "it fits, shown or not")
                .await?;
            let uid = uid(&self.pod(&name));
            let done = locked(&self.server).disruptions.are_for(&uid);
            ensure!(!done, "others were disrupted for {name}, which fits");
        }
        Ok(())
    }

    /// Room appears that kube-scheduler does not see, while the leader's wake-ups fail.
    async fn probe_mute(&mut self) -> Result<()> {
        if !self.has_room(SMALL) {
            return Ok(());
        }
        self.tell("others use all cards");
        self.machines.iter_mut().try_for_each(|it| it.fill(CARD))?;
        let began = Instant::now();
        while self.has_room(SMALL) {
            ensure!(
                began.elapsed() < PLACED,
                "no agent says that others use its cards"
            );
            self.pass(STEP).await?;
        }
        let name = self.probe_with(SMALL, 1, PRIORITY);
        self.pass(PLACED / 2).await?;
        self.tell("the extenders write no status");
        for replica in &self.replicas {
            replica.link.set_odds(Odds {
                mute: true,
                ..Odds::default()
            });
        }
        self.machines.iter_mut().for_each(|it| it.leave());
        let term = self.term();
        self.pass(MUTE).await?;
        for replica in &self.replicas {
            replica.link.set_odds(Odds::default());
        }
        if !self.has_room(SMALL) {
            return Ok(());
        }
        // A replica that took over meanwhile could not fence the pod, and tries that again after up to a minute.
        let within = if self.term() == term {
            PLACED
        } else {
            REFENCED
        };
        self.bound_within(&name, within, "wake-ups are written again")
            .await
    }

    /// etcd is restored and versions are used again. The leading extender is not restarted, and finds a pod unbound
    /// that it knows as bound. Its ledger keeps nothing of the lost state.
    async fn probe_restored(&mut self) -> Result<()> {
        let mut names = Vec::new();
        for _ in 0..2 {
            // A pod that waits may have taken the rest meanwhile.
            if !self.has_room(SMALL) {
                return Ok(());
            }
            let name = self.probe_with(SMALL, 1, PRIORITY);
            self.bound_within(&name, PLACED, "it fits").await?;
            names.push(name);
        }
        let Some(version) = locked(&self.server).before_bind(&names[0]) else {
            return Ok(());
        };
        // Memory that others gained since then would be given away twice before any program could know.
        let others = locked(&self.server).changed_since(version);
        if others.iter().any(|name| !names.contains(name)) {
            return Ok(());
        }
        let leader = self.replicas.iter().position(|it| it.leads()).unwrap_or(0);
        self.replicas[leader].lead(false);
        sleep(STEP).await;
        self.tell(format!(
            "etcd is restored to version {version}, and replica {leader} stays"
        ));
        locked(&self.server).restore(version, false);
        for number in 0..self.replicas.len() {
            if number != leader {
                self.replicas[number].link.set(Mode::Dead);
                self.replicas[number] = self.replica(number)?;
                self.replicas[number].link.set_odds(Odds::default());
                locked(&self.replicas[number].link.lags).clear();
            }
        }
        for machine in &mut self.machines {
            machine.restart()?;
        }
        self.replicas[leader].lead(true);
        self.bound_within(&names[0], PLACED, "etcd was restored")
            .await?;
        let began = Instant::now();
        loop {
            let wrong = self.wrong_books().await?;
            if wrong.is_empty() {
                return Ok(());
            }
            let (took, wrong) = (began.elapsed(), wrong.join("; "));
            ensure!(took < PLACED, "after etcd was restored {wrong}");
            self.pass(STEP).await?;
        }
    }

    /// Others can finish for a pod, and do, though pods that no node could hold stand before it and others never
    /// finish terminating.
    async fn probe_preemption(&mut self) -> Result<()> {
        let Some(mib) = self.fragmented().filter(|_| self.on.preempt) else {
            return Ok(());
        };
        for number in 0..HOPELESS {
            self.probe_with(SMALL + number, 64, PRIORITY + 1);
        }
        let name = self.probe_with(mib, 1, PRIORITY);
        self.bound_within(&name, HELPED, "others could finish for it")
            .await
    }

    /// MiB that no card has, and that one has when those are gone that may finish, on a node whose sum suffices.
    fn fragmented(&self) -> Option<u64> {
        let nodes = self.cards();
        let server = locked(&self.server);
        let mut all = server.all(Kind::Pod).filter(|pod| !check::ended(pod));
        let bound = |pod: &Value| pod["spec"]["nodeName"].is_string();
        let leaves = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_string();
        // Which of them would hang the ledger cannot know. One that waits may be bound first.
        if all.any(|pod| hangs(pod) && !leaves(pod) || bound(pod) && priority(pod) >= PRIORITY)
            || !starving(&server, false).is_empty()
        {
            return None;
        }
        let most = nodes.iter().flat_map(|(_, cards)| cards);
        let most = most
            .filter(|(_, card)| card.healthy)
            .map(|(_, card)| card.free())
            .max()?;
        nodes.iter().find_map(|(node, cards)| {
            let stays = |pod: &Value| leaves(pod);
            let after = check::cards_with(&server, &server, node, stays, |_| true);
            let left: u64 = cards
                .iter()
                .map(|(_, card)| card.size.saturating_sub(card.held))
                .sum();
            let most_after = after
                .values()
                .filter(|card| card.healthy)
                .map(Card::free)
                .max()?;
            let mib = most + SMALL;
            (mib <= left && mib <= most_after).then_some(mib)
        })
    }
}
