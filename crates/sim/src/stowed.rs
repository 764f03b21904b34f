//! gpustow's own policies in a replay: the ledger decides, as it does in the extender.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
use gpustow_api::{Asks, Assignment, NodeFacts, PodFacts};
use gpustow_ledger::{Ask, Config, Ended, Ledger, Move, Outcome, TURNS};
use gpustow_pack::{Claim, ClaimKind, Mib, PolicyKind, Request};

use crate::hosts::{Host, Job, Models};
use crate::replay::{Placed, Placer};

/// When places are kept for pods that wait, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// For pods that have waited for so long.
    pub after: Duration,
    /// Given up after so long.
    pub lasts: Duration,
    /// So many at a time.
    pub places: usize,
    /// Of so many of all cards, in percent.
    pub percent: usize,
}

/// A ledger that thinks it has a cluster.
#[derive(Debug)]
pub struct Stowed {
    ledger: Ledger,
    names: Vec<Arc<str>>,
    nodes: Vec<NodeFacts>,
    /// Time stands still where nothing depends on it.
    now: Duration,
    /// One request per class of job.
    requests: Vec<Option<Arc<Request>>>,
    containers: Arc<[Box<str>]>,
    no_models: Arc<[Box<str>]>,
    /// Cards of different size: pods that want whole cards are exclusive.
    exclusive: bool,
    /// Of so many pods in a hundred the owner lets them be moved.
    evictable: usize,
    /// Pods start alone on their cards.
    alone: bool,
}

/// The settings of gpustow's own policies, in addition to the hosts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Places are kept for pods that wait.
    pub keep: Option<Keep>,
    /// Of so many pods in a hundred the owner lets them be moved.
    pub evictable: usize,
    /// Nearly empty nodes are emptied.
    pub empties: bool,
}

impl Stowed {
    /// A ledger over these hosts, whose names are in their order.
    #[must_use]
    pub fn new(hosts: &[Host], policy: PolicyKind, settings: Settings) -> Self {
        let config = Config {
            policy,
            defragment: settings.empties,
            empty_nodes: settings.empties,
            ..Config::default()
        };
        let config = match settings.keep {
            Some(keep) => Config {
                reserve_after: Some(keep.after),
                reserve_give_up_after: keep.lasts,
                reserve_max: keep.places,
                reserve_max_percent: keep.percent,
                ..config
            },
            None => config,
        };
        Self {
            evictable: settings.evictable,
            ..Self::with(hosts, config)
        }
    }

    fn with(hosts: &[Host], config: Config) -> Self {
        let mut ledger = Ledger::new(Config {
            stale_after: Duration::MAX,
            ..config
        });
        let names: Vec<Arc<str>> = (0..hosts.len())
            .map(|at| format!("{at:05}").into())
            .collect();
        let mut nodes = Vec::new();
        for (name, host) in names.iter().zip(hosts) {
            let facts = NodeFacts {
                name: name.clone(),
                cpu_milli: host.cpu,
                ram: Mib(host.ram).into(),
                ..NodeFacts::default()
            };
            ledger.apply_node(facts.clone());
            nodes.push(facts);
            let gpu = |index: usize| Gpu {
                uuid: format!("{name}-{index}"),
                model: model_name(host.model.trailing_zeros()),
                total_mib: host.card,
                healthy: true,
                ..Gpu::default()
            };
            let gpus = (0..host.left.len()).map(gpu).collect();
            let status = GpuNodeStatus {
                gpus,
                ..GpuNodeStatus::default()
            };
            ledger.apply_gpunode(name, status, Duration::ZERO);
        }
        Self {
            ledger,
            names,
            nodes,
            now: Duration::ZERO,
            requests: Vec::new(),
            containers: Arc::from([Box::from("main")]),
            no_models: Arc::from([]),
            exclusive: hosts.iter().any(|host| host.card != hosts[0].card),
            evictable: 0,
            alone: false,
        }
    }

    /// Pods start alone on their cards if so, and until [`Stowed::started`].
    #[must_use]
    pub fn starting(hosts: &[Host], policy: PolicyKind, alone: bool) -> Self {
        Self {
            alone,
            ..Self::new(hosts, policy, Settings::default())
        }
    }

    /// The pod has started.
    pub fn started(&mut self, id: usize) {
        if let Some(pod) = self.ledger.pod(&id.to_string()) {
            self.ledger.apply_pod(PodFacts {
                starting_since: None,
                ..PodFacts::clone(&pod)
            });
        }
    }

    fn request(&mut self, job: &Job) -> Arc<Request> {
        if self.requests.len() <= job.class {
            self.requests.resize(job.class + 1, None);
        }
        let exclusive = self.exclusive && job.whole();
        let request = || {
            let claim = Claim::new(
                ClaimKind::Main,
                u32::try_from(job.gpus).unwrap_or(u32::MAX),
                Mib(job.units),
            );
            Arc::new(Request {
                claims: if job.gpus > 0 {
                    vec![claim]
                } else {
                    Vec::new()
                },
                exclusive,
                bursts: false,
                compute: 0,
                isolated: false,
                alone: self.alone,
                rules: None,
                policy: None,
                cpu_milli: job.cpu,
                ram: Mib(job.ram).into(),
            })
        };
        self.requests[job.class].get_or_insert_with(request).clone()
    }

    fn models(&self, job: &Job) -> Arc<[Box<str>]> {
        if job.models == Models::MAX {
            return self.no_models.clone();
        }
        let bits = (0..Models::BITS).filter(|bit| job.models >> bit & 1 == 1);
        bits.map(|bit| model_name(bit).into()).collect()
    }

    fn pod(&mut self, id: usize, job: &Job) -> PodFacts {
        let uid: Arc<str> = id.to_string().into();
        let created = match self.ledger.pod(&uid) {
            Some(known) => known.created,
            None => seconds(self.now),
        };
        PodFacts {
            created,
            started: seconds(self.now),
            asks: Asks::of(self.request(job)),
            containers: if job.gpus > 0 {
                self.containers.clone()
            } else {
                Arc::from([])
            },
            models: self.models(job),
            // The pods are drawn at random: their numbers do not depend on their requests.
            evictable: (id % 100 < self.evictable).then(|| self.names[0].clone()),
            ..PodFacts::new("replay", &format!("{id:08}"), &uid)
        }
    }
}

impl Stowed {
    /// The ledger's choice among these nodes.
    fn ask(&mut self, pod: &PodFacts, nodes: impl Iterator<Item = usize>) -> Option<usize> {
        let candidates: Vec<&str> = nodes.map(|at| &*self.names[at]).collect();
        let verdict = self.ledger.filter(&Ask::of(pod), &candidates, self.now);
        verdict.nodes.first()?.parse().ok()
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn model_name(index: u32) -> String {
    format!("model-{index}")
}

impl Placer for Stowed {
    fn place(&mut self, hosts: &[Host], job: &Job, id: usize) -> Option<Placed> {
        let pod = self.pod(id, job);
        self.ledger.apply_pod(pod.clone());
        // The ledger would refuse the others one by one; most are full most of the time.
        let able = (0..hosts.len()).filter(|at| hosts[*at].fits(job));
        let placed = self.ask(&pod, able)?;
        let node = self.names.get(placed)?.clone();
        let assignment = self.ledger.begin_bind(&pod, &node, self.now).ok()?;
        let cards = assignment
            .charges
            .iter()
            .filter_map(|(uuid, _)| index_of(uuid))
            .collect();
        self.ledger.end_bind(&pod, Outcome::Bound, self.now);
        Some(Placed {
            host: placed,
            cards,
        })
    }

    fn left(&mut self, id: usize, _job: &Job, _placed: &Placed) {
        self.ledger.delete_pod(&id.to_string());
    }

    fn beside(&mut self, id: usize, job: &Job, host: usize) {
        let bound = PodFacts {
            node: Some(self.names[host].clone()),
            ..self.pod(id, job)
        };
        self.ledger.apply_pod(bound);
    }

    fn tick(&mut self) {
        self.ledger.learn();
    }

    fn keep(&mut self, now: u64) -> bool {
        self.at(now);
        let given_up = |ledger: &Ledger| -> u64 {
            let all = Ended::GIVEN_UP.into_iter();
            all.map(|how| ledger.given_up(how)).sum()
        };
        let before = given_up(&self.ledger);
        self.look(0);
        given_up(&self.ledger) != before
    }

    fn moves(&mut self, id: usize, job: &Job) -> Vec<(usize, Placed)> {
        let pod = Arc::new(self.pod(id, job));
        let plan = self.ledger.moves_for(&pod, self.now);
        let moves = plan.into_iter().flat_map(|plan| plan.moves);
        moves.filter_map(|it| goes_to(&it)).collect()
    }

    fn at(&mut self, now: u64) {
        self.now = Duration::from_millis(now);
    }

    fn empties(&mut self, most: usize) -> Vec<(usize, Placed)> {
        if self.ledger.waiting() > 0 || self.ledger.emptying(self.now).is_some() {
            return Vec::new();
        }
        self.look(most);
        let emptying = self.ledger.emptying(self.now);
        let moves = emptying.into_iter().flat_map(|it| it.moves);
        moves.filter_map(|it| goes_to(&it)).collect()
    }

    fn replaced(&mut self, host: usize) {
        self.ledger.delete_node(&self.names[host]);
        self.ledger.apply_node(self.nodes[host].clone());
    }

    fn moved(&mut self, hosts: &[Host], id: usize, job: &Job, placed: &Placed) {
        let mib = Mib(hosts[placed.host].charge(job));
        let uuids: Vec<Arc<str>> = placed
            .cards
            .iter()
            .map(|card| format!("{}-{card}", self.names[placed.host]).into())
            .collect();
        let assignment = Assignment {
            charges: uuids.iter().map(|uuid| (uuid.clone(), mib)).collect(),
            containers: vec![("main".into(), uuids)],
            exclusive: None,
            compute: 0,
            instance: None,
        };
        let pod = PodFacts {
            node: Some(self.names[placed.host].clone()),
            assignment: Some(Ok(Arc::new(assignment))),
            ..self.pod(id, job)
        };
        self.ledger.delete_pod(&pod.uid);
        self.ledger.apply_pod(pod);
    }
}

impl Stowed {
    fn look(&mut self, most: usize) {
        self.ledger.tell_time(seconds(self.now));
        for means in TURNS {
            self.ledger.look(means, most, self.now);
        }
    }
}

/// Which pod moves, and where.
fn goes_to(it: &Move) -> Option<(usize, Placed)> {
    let cards = it.cards.iter().map(|(uuid, _)| index_of(uuid));
    let placed = Placed {
        host: it.node.parse().ok()?,
        cards: cards.collect::<Option<_>>()?,
    };
    Some((it.pod.uid.parse().ok()?, placed))
}

/// The index of a card in its host: the part of its UUID after the last dash.
fn index_of(uuid: &str) -> Option<usize> {
    uuid.rsplit('-').next()?.parse().ok()
}
