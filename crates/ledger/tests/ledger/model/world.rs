//! The ledger next to the true state.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::config::Action;
use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::{Config, Ledger, Victims};

use super::disruptions::Disruptions;
use super::event::Event;
use super::evidence::Shown;
use super::gangs::{self, Known};
use super::lending::{self, Lending};
use super::server::{MIG, MPS, NODES, NodeEvent, PodEvent, Server};
use super::switches::Switches;
use super::{over_limits, reservations};
use crate::build::node;

pub(super) struct World {
    pub(super) server: Server,
    pub(super) ledger: Ledger,
    pub(super) now: Duration,
    /// The reports that have reached the ledger.
    pub(super) known: BTreeMap<&'static str, GpuNodeStatus>,
    /// When the list under way was asked for, and its answer.
    pub(super) listing: Option<(u64, Option<Vec<PodFacts>>)>,
    pub(super) chosen: HashMap<Arc<str>, &'static str>,
    /// Reads under way: the UID, the answer, and the ledger's clock when they were sent.
    reads: Vec<(Arc<str>, Option<PodFacts>, u64)>,
    /// Pods that are gone by the watch, or by an answer that they are not there.
    gone: HashSet<Arc<str>>,
    /// Pods that kube-scheduler gave up after it had asked, each with the refusal.
    pub(super) given_up: HashMap<Arc<str>, u64>,
    /// The server was restored, and the list that shows it is not in: the extender does not bind.
    pub(super) restored: bool,
    pub(super) broken: Option<String>,
    pub(super) known_groups: Known,
    pub(super) switches: Switches,
    pub(super) config: Config,
    pub(super) shown: Shown,
    pub(super) disruptions: Disruptions,
    pub(super) lending: Lending,
    /// Pods that were woken or ungated before.
    pub(super) woken: HashSet<Arc<str>>,
    /// Until when room is offered to pods that are not queued.
    pub(super) promised: Duration,
    /// The lowest priority of the ungated pods.
    pub(super) lowest: i32,
    /// Until when room is kept for pods that were ungated.
    pub(super) let_out: HashMap<Arc<str>, Duration>,
}

pub(super) fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

pub(super) fn is_isolated(pod: &PodFacts) -> bool {
    pod.asks.request().is_some_and(|it| it.isolated)
}

pub(super) fn pick<T>(list: &[T], number: usize) -> Option<usize> {
    (!list.is_empty()).then(|| number % list.len())
}

impl World {
    pub(super) fn new(switches: Switches) -> Self {
        let config = Config {
            stale_after: lending::STALE_AFTER,
            reclaim: switches.reclaim,
            queue: switches.queue,
            reclaim_for: lending::CALLED_FOR,
            over_limit_for: over_limits::OVER_FOR,
            reserve_after: switches.reserve.then_some(Duration::ZERO),
            reserve_give_up_after: reservations::kept_for(switches),
            reserve_max: 2,
            reserve_max_percent: 40,
            preempt_fragmented: switches.preempt,
            defragment: switches.defragment,
            empty_nodes: switches.empties,
            least_nodes: switches.window.unwrap_or(Config::default().least_nodes),
            owners_soften: !switches.strict,
            action: match switches.gangs || switches.softens {
                true => Action::Evict,
                false => Config::default().action,
            },
            ..Config::default()
        };
        let mut world = Self {
            server: Server::default(),
            ledger: Ledger::new(config),
            now: Duration::from_secs(1000),
            known: BTreeMap::new(),
            listing: None,
            chosen: HashMap::new(),
            reads: Vec::new(),
            gone: HashSet::new(),
            given_up: HashMap::new(),
            restored: false,
            broken: None,
            known_groups: Known::new(),
            switches,
            config,
            shown: Shown::default(),
            disruptions: Disruptions::default(),
            lending: Lending::default(),
            woken: HashSet::new(),
            promised: Duration::ZERO,
            lowest: i32::MAX,
            let_out: HashMap::new(),
        };
        for (index, name) in NODES[..2].iter().enumerate() {
            world.server.set_node(name, true);
            // With fewer cards it is more often that room is short; memory is fragmented on two.
            let few = switches.reclaim || switches.reserve || index > 0;
            let variant = match switches.disrupts() {
                true => few && index > 0,
                false => few && (switches.reclaim || switches.reserve),
            };
            let mps = if switches.mps && index > 0 { MPS } else { 0 };
            let mig = if switches.mig && index > 0 { MIG } else { 0 };
            let variant = if variant { 3 } else { 0 };
            let report = world.server.variant(name, mps + mig + variant);
            world.server.set_report(name, Some(report));
        }
        world.deliver_nodes();
        world
    }

    pub(super) fn step(&mut self, event: &Event) -> Result<(), String> {
        self.handle(event)?;
        self.check_books()?;
        self.check_reclaims()?;
        self.note_asked();
        self.check_shortages()?;
        self.check_over_limits()?;
        self.check_reservations()?;
        self.check_disruptions()?;
        self.check_evidence()?;
        self.broken.take().map_or(Ok(()), Err)
    }

    fn handle(&mut self, event: &Event) -> Result<(), String> {
        match *event {
            Event::Create { .. } => self.create(event),
            Event::DeliverPods { count } => self.deliver_pods(count),
            Event::DeliverNodes => self.deliver_nodes(),
            Event::Group { .. } => self.turn_group(event),
            Event::DeliverGroups => self.deliver_groups(),
            Event::ListBegins => {
                self.listing.get_or_insert((self.ledger.copies(), None));
            }
            Event::ListIsTaken => self.take_list(),
            Event::ListArrives => self.list_arrives(),
            Event::Land { post } => {
                if let Some(post) = pick(&self.server.posts, post) {
                    self.server.land(post);
                }
            }
            Event::EndBind { post } => {
                if let Some(post) = pick(&self.server.posts, post) {
                    self.end_bind(post);
                }
            }
            Event::Wake { limit } => {
                self.wake(limit)?;
            }
            Event::Advance { seconds } => self.now += Duration::from_secs(seconds),
            Event::NodeVanishes { node } => self.server.set_node(NODES[node % 3], false),
            Event::NodeAppears { node } => self.server.set_node(NODES[node % 3], true),
            Event::Report { node, variant } => {
                let name = NODES[node % 3];
                let report = self.server.variant(name, variant);
                self.server.set_report(name, Some(report));
            }
            Event::ReportVanishes { node } => self.server.set_report(NODES[node % 3], None),
            Event::Use {
                node,
                card,
                pod,
                mib,
            } => self.uses(NODES[node % 3], card, pod, mib),
            Event::Reclaim => return self.reclaim(),
            Event::Sleep { pod } => self.sleep(pod),
            Event::KeepReservations => return self.keep_reservations(),
            Event::GivesBack { pod } => self.gives_back(pod),
            Event::Evict { pod } => self.evict(pod),
            Event::Disrupt { seconds } => {
                self.now += Duration::from_secs(seconds);
                return self.disrupt();
            }
            Event::Displace { pod } => return self.displace(pod),
            Event::Replace { pod } => self.replace(pod),
            Event::Protect { pod } => {
                if let Some(pod) = pick(&self.server.pods, pod) {
                    self.server.protect(pod);
                }
            }
            Event::AgentRestarts { node } => self.agent_restarts(NODES[node % 3]),
            Event::Restart => self.restart(),
            Event::Save => self.server.save(),
            Event::Restore => {
                self.server.restore();
                self.deliver_nodes();
                self.listing = Some((self.ledger.copies(), None));
                self.reads.clear();
                self.gone.clear();
                self.given_up.clear();
                self.lending.forget_told();
                self.restored = true;
            }
            Event::Bar { node } => {
                let name = NODES[node % 3];
                if !self.server.barred.remove(name) {
                    self.server.barred.insert(name);
                }
            }
            Event::Answer { read } => {
                if let Some(read) = pick(&self.reads, read) {
                    return self.answer(read);
                }
            }
            Event::Filter { .. }
            | Event::BeginBind { .. }
            | Event::FilterAndBind { .. }
            | Event::Cycle { .. }
                if self.restored => {}
            Event::Cycle { group, binds } => return self.cycle(&gangs::group(group), binds),
            Event::Ask { pod }
            | Event::Edit { pod }
            | Event::Filter { pod, .. }
            | Event::BeginBind { pod, .. }
            | Event::FilterAndBind { pod }
            | Event::Preempt { pod, .. }
            | Event::Touch { pod }
            | Event::Unschedulable { pod }
            | Event::Ungate { pod }
            | Event::Nominate { pod, .. }
            | Event::Terminate { pod }
            | Event::Finish { pod }
            | Event::Vanish { pod }
            | Event::BindByHand { pod, .. } => {
                if let Some(index) = pick(&self.server.pods, pod) {
                    return self.handle_pod(event, index);
                }
            }
        }
        Ok(())
    }

    fn handle_pod(&mut self, event: &Event, index: usize) -> Result<(), String> {
        let pod = self.server.pods[index].clone();
        let unbound = pod.node.is_none();
        match *event {
            Event::Ask { .. } => {
                let asked = self.ledger.copies();
                self.reads.push((pod.uid.clone(), Some(pod), asked));
            }
            // The oracle of gangs knows plain requests alone.
            Event::Edit { .. } if pod.group.is_some() || is_isolated(&pod) => {}
            Event::Edit { .. } if !pod.asks.request().is_some_and(|it| it.is_relative()) => {
                self.server.write(index, |pod| {
                    pod.asks.change(|it| it.exclusive = !it.exclusive);
                });
            }
            Event::Filter { .. } | Event::FilterAndBind { .. } if pod.group.is_some() => {
                let binds = matches!(event, Event::FilterAndBind { .. });
                return pod.group.map_or(Ok(()), |group| self.cycle(&group, binds));
            }
            Event::Filter {
                without,
                cooperative,
                ..
            } if !pod.gated && !pod.queued => {
                let keep = |&(index, _): &(usize, &&str)| index != without;
                let nodes = NODES.iter().enumerate().filter(keep);
                let nodes: Vec<&'static str> = nodes.map(|(_, name)| *name).collect();
                return self.filter(&pod, &nodes, cooperative);
            }
            Event::BeginBind { elsewhere, .. } => {
                let chosen = self.chosen.get(&pod.uid).copied();
                let elsewhere = elsewhere.map(|node| NODES[node % 3]);
                let elsewhere = elsewhere.filter(|name| self.admits(&pod, name));
                if let Some(name) = elsewhere.or(chosen) {
                    let _ = self.begin_bind(&pod.uid, name)?;
                }
            }
            Event::FilterAndBind { .. }
                if unbound && !pod.gated && !pod.queued && !pod.deleting =>
            {
                self.chosen.remove(&pod.uid);
                self.filter(&pod, &NODES, false)?;
                // Filter gets the newest copy, bind gets the copy that the watch has shown.
                let same = |known: Arc<PodFacts>| known.asks == pod.asks;
                let settled =
                    !self.ledger.is_binding(&pod.uid) && self.ledger.pod(&pod.uid).is_none_or(same);
                if let Some(name) = self.chosen.get(&pod.uid).copied() {
                    let refused = self.begin_bind(&pod.uid, name)?;
                    require(refused.is_none() || !settled, || {
                        format!("filter chose {name} for {}, bind says {refused:?}", pod.uid)
                    })?;
                }
            }
            Event::Preempt { node, .. } => {
                let name = NODES[node % 3];
                let preempt = |victims: &[Arc<str>]| {
                    let mut budget = self.ledger.budget();
                    self.ledger
                        .preempt(&pod, name, victims, &mut budget, self.now)
                };
                if let Some(victims) = preempt(&[]) {
                    require(preempt(&victims.uids) == Some(Victims::default()), || {
                        format!("{victims:?} do not suffice on {name}")
                    })?;
                    let evictable = self.ledger.evictable(name, pod.priority);
                    let lower = |uid: &Arc<str>| evictable.iter().any(|pod| pod.uid == *uid);
                    require(victims.uids.iter().all(lower), || {
                        format!("{victims:?} are not all evictable")
                    })?;
                }
            }
            Event::Touch { .. } => self.server.write(index, |_| {}),
            Event::Unschedulable { .. } if unbound => {
                let refusal = self.server.number() + 1;
                self.server.write(index, |pod| {
                    (pod.waiting, pod.refusal) = (true, refusal);
                });
                self.given_up.insert(pod.uid, refusal);
            }
            Event::Ungate { .. } if pod.queued && !pod.gated => {
                self.server.write(index, |pod| pod.queued = false);
            }
            Event::Ungate { .. } => self.server.write(index, |pod| pod.gated = false),
            Event::Nominate { node, .. } if unbound && !pod.queued => {
                let nominated = NODES.get(node % 4).map(|name| (*name).into());
                self.server.write(index, |pod| pod.nominated = nominated);
            }
            Event::Terminate { .. } if unbound => self.server.remove(index),
            Event::Terminate { .. } => self.server.write(index, |pod| pod.deleting = true),
            Event::Finish { .. } if !unbound => {
                self.server.write(index, |pod| pod.released = true);
            }
            Event::Vanish { .. } => self.server.remove(index),
            Event::BindByHand { node, broken, .. } if unbound => {
                self.server.bind_by_hand(index, NODES[node % 3], broken);
            }
            _ => {}
        }
        Ok(())
    }

    /// The answer to a read arrives: one that was sent before a pod was gone does not bring it back.
    fn answer(&mut self, read: usize) -> Result<(), String> {
        let (uid, answer, asked) = self.reads.swap_remove(read);
        match answer {
            Some(pod) => self.ledger.read_back(pod, asked, self.now),
            None => self.ledger.delete_pod(&uid),
        }
        let is_back = self.gone.contains(&uid) && self.ledger.pod(&uid).is_some();
        require(!is_back, || format!("a late read brings {uid} back"))
    }

    pub(super) fn deliver_pods(&mut self, count: usize) {
        if self.listing.is_some() {
            return;
        }
        let count = count.min(self.server.pod_watch.len());
        for event in self.server.pod_watch.drain(..count) {
            match event {
                PodEvent::Apply(pod) => {
                    let (uid, refusal) = (pod.uid.clone(), pod.refusal);
                    self.ledger.apply_pod(*pod);
                    let gave_up = self.given_up.get(&uid) == Some(&refusal);
                    let holds = self.ledger.reserved_because(&uid).is_some();
                    if gave_up && holds && !self.ledger.is_binding(&uid) {
                        self.broken = Some(format!("{uid} was given up and holds its room"));
                    }
                }
                PodEvent::Delete(uid) => {
                    self.ledger.delete_pod(&uid);
                    self.gone.insert(uid);
                }
            }
        }
    }

    pub(super) fn deliver_nodes(&mut self) {
        for event in std::mem::take(&mut self.server.node_watch) {
            match event {
                NodeEvent::Node(name, true) => self.ledger.apply_node(self.node(name)),
                NodeEvent::Node(name, false) => self.ledger.delete_node(name),
                NodeEvent::Report(name, Some(report)) => {
                    self.ledger.apply_gpunode(name, report.clone(), self.now);
                    if self.known.insert(name, report.clone()) != Some(report) {
                        self.heard(name);
                    }
                }
                NodeEvent::Report(name, None) => {
                    self.ledger.delete_gpunode(name);
                    self.known.remove(name);
                    self.lending.forget(name);
                }
            }
        }
    }

    pub(super) fn take_list(&mut self) {
        if let Some((_, list @ None)) = &mut self.listing {
            *list = Some(self.server.pods.clone());
            self.server.pod_watch.clear();
        }
    }

    pub(super) fn list_arrives(&mut self) {
        if let Some((began, Some(list))) = &self.listing {
            let list = list.iter().cloned().map(Arc::new).collect();
            self.ledger.reset_pods(list, *began);
            self.listing = None;
            self.restored = false;
        }
    }

    fn restart(&mut self) {
        for index in 0..self.server.pods.len() {
            if self.server.pods[index].node.is_none() {
                self.server.write(index, |_| {});
            }
        }
        self.server
            .posts
            .iter_mut()
            .for_each(|post| post.awaited = false);
        self.server.pod_watch.clear();
        self.server.node_watch.clear();
        self.server.group_watch.clear();
        self.known_groups = self.server.groups.clone();
        self.listing = None;
        self.restored = false;
        self.reads.clear();
        self.gone.clear();
        self.given_up.clear();
        self.known = self.server.reports.clone();
        self.lending = Lending::default();
        self.ledger = self.rebuilt();
        for name in NODES {
            if self.known.contains_key(name) {
                self.heard(name);
            }
        }
    }

    /// A ledger that has only seen lists.
    pub(super) fn rebuilt(&self) -> Ledger {
        self.rebuilt_with(self.config, &self.server.pods)
    }

    /// As [`World::rebuilt`], of these pods.
    pub(super) fn rebuilt_with(&self, config: Config, pods: &[PodFacts]) -> Ledger {
        let mut ledger = Ledger::new(config);
        ledger.reset_pod_groups(self.server.groups.values().cloned().collect());
        let listed = pods.iter().rev().cloned().map(Arc::new);
        ledger.reset_pods(listed.collect(), 0);
        let reports = self.server.reports.iter().rev();
        let reports = reports.map(|(name, report)| ((*name).to_owned(), report.clone()));
        ledger.reset_gpunodes(reports.collect(), self.now);
        let there = self.server.nodes.iter().filter(|(_, there)| **there);
        ledger.reset_nodes(there.map(|(name, _)| self.node(name)).collect());
        ledger
    }

    /// The CPU of each node.
    pub(super) fn cpu(&self) -> u64 {
        match self.switches.scarce_cpu {
            true => 4_000,
            false => 64_000,
        }
    }

    /// How many pods each node takes.
    pub(super) fn slots(&self) -> Option<u64> {
        self.switches.few_slots.then_some(3)
    }

    fn node(&self, name: &str) -> NodeFacts {
        NodeFacts {
            cpu_milli: self.cpu(),
            pods: self.slots(),
            ..node(name)
        }
    }
}
