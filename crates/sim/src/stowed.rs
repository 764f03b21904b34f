//! gpustow's own policies in a replay: the ledger decides, as it does in the extender.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{Gpu, GpuNodeStatus, PodUse};
use gpustow_api::limit::Enforce;
use gpustow_api::{Assignment, NodeFacts, PodFacts};
use gpustow_ledger::{Ask, Config, Ledger, Outcome};
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
    /// What the agents say.
    reports: Vec<GpuNodeStatus>,
    /// Time stands still where nothing depends on it.
    now: Duration,
    /// One request per class of job.
    requests: Vec<Option<Arc<Request>>>,
    containers: Arc<[Box<str>]>,
    no_models: Arc<[Box<str>]>,
    /// Cards of different size: pods that want whole cards are exclusive.
    exclusive: bool,
    /// Pods may use more than they ask for.
    bursts: bool,
    /// Of so many pods in a hundred the owner lets them be moved.
    movable: usize,
}

impl Stowed {
    /// A ledger over these hosts, whose names are in their order; it may move so many percent of the pods.
    #[must_use]
    pub fn new(hosts: &[Host], policy: PolicyKind, keep: Option<Keep>, movable: usize) -> Self {
        let config = Config {
            policy,
            ..Config::default()
        };
        let config = match keep {
            Some(keep) => Config {
                keep: Some(keep.after),
                keep_for: keep.lasts,
                keep_places: keep.places,
                keep_percent: keep.percent,
                ..config
            },
            None => config,
        };
        Self {
            movable,
            ..Self::with(hosts, config)
        }
    }

    /// The same, which calls back what pods use beyond their requests.
    #[must_use]
    pub fn lending(hosts: &[Host], policy: PolicyKind) -> Self {
        Self::with(
            hosts,
            Config {
                policy,
                call_back: true,
                ..Config::default()
            },
        )
    }

    fn with(hosts: &[Host], config: Config) -> Self {
        let mut ledger = Ledger::new(Config {
            stale_after: Duration::MAX,
            ..config
        });
        let names: Vec<Arc<str>> = (0..hosts.len())
            .map(|at| format!("{at:05}").into())
            .collect();
        let mut reports = Vec::new();
        for (name, host) in names.iter().zip(hosts) {
            ledger.apply_node(NodeFacts {
                name: name.clone(),
                cpu_milli: host.cpu,
                ram: Mib(host.ram),
                ..NodeFacts::default()
            });
            let gpu = |index: usize| Gpu {
                uuid: index.to_string(),
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
            ledger.apply_gpunode(name, status.clone(), Duration::ZERO);
            reports.push(status);
        }
        Self {
            ledger,
            names,
            reports,
            now: Duration::ZERO,
            requests: Vec::new(),
            containers: Arc::from([Box::from("main")]),
            no_models: Arc::from([]),
            exclusive: hosts.iter().any(|host| host.card != hosts[0].card),
            bursts: config.call_back,
            movable: 0,
        }
    }

    /// So many milliseconds have gone by since the beginning.
    pub fn at(&mut self, now: u64) {
        self.now = Duration::from_millis(now);
    }

    /// The pod `id`, which was placed, uses so much of each of its cards now.
    pub fn uses(&mut self, id: usize, placed: &Placed, uses: u64) {
        let Some(report) = self.reports.get_mut(placed.host) else {
            return;
        };
        let uid = id.to_string();
        for &card in &placed.cards {
            let Some(gpu) = report.gpus.get_mut(card) else {
                continue;
            };
            gpu.pods.retain(|pod| pod.uid != uid);
            if uses > 0 {
                gpu.pods.push(PodUse {
                    uid: uid.clone(),
                    used_mib: uses,
                    ..PodUse::default()
                });
            }
        }
        let name = &self.names[placed.host];
        self.ledger.apply_gpunode(name, report.clone(), self.now);
    }

    /// The pods that are asked to give back what they use beyond their requests.
    pub fn called(&mut self) -> Vec<usize> {
        self.ledger.call_back(self.now);
        let calls = self.ledger.call_backs(self.now);
        let short = self.ledger.shortages(self.now);
        let short = short.iter().flat_map(|short| &short.victims);
        let victims = calls.iter().flat_map(|call| &call.victims).chain(short);
        victims.filter_map(|it| it.pod.uid.parse().ok()).collect()
    }

    fn request(&mut self, job: &Job) -> Arc<Request> {
        if self.requests.len() <= job.class {
            self.requests.resize(job.class + 1, None);
        }
        let exclusive = self.exclusive && job.whole();
        let request = || {
            let claim = Claim {
                kind: ClaimKind::Main,
                gpus: u32::try_from(job.gpus).unwrap_or(u32::MAX),
                mib: Mib(job.units),
            };
            Arc::new(Request {
                claims: if job.gpus > 0 {
                    vec![claim]
                } else {
                    Vec::new()
                },
                exclusive,
                bursts: self.bursts,
                policy: None,
                limits: Vec::new(),
                cpu_milli: job.cpu,
                ram: Mib(job.ram),
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
            uid,
            namespace: "replay".into(),
            name: format!("{id:08}").into(),
            resource_version: "1".into(),
            created,
            started: i64::MAX,
            node: None,
            scheduler: "gpustow-scheduler".into(),
            priority: 0,
            nominated: None,
            own_nomination: false,
            request: Ok(self.request(job)),
            containers: if job.gpus > 0 {
                self.containers.clone()
            } else {
                Arc::from([])
            },
            models: self.models(job),
            constraints: Arc::default(),
            group: None,
            labels: Arc::default(),
            assignment: None,
            epoch: None,
            deleting: false,
            gated: false,
            in_line: false,
            preempts: true,
            released: false,
            waiting: false,
            grace: 0,
            asked_back: None,
            preempted: false,
            // Which pods come is drawn: their numbers say nothing of what they ask for.
            movable: (id % 100 < self.movable).then(|| self.names[0].clone()),
            act: None,
            limits: Arc::from([]),
            enforce: Enforce::default(),
            kept_on: None,
            refusal: 0,
        }
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
        let names = self.names.iter().zip(hosts);
        // The ledger would refuse the others one by one; most are full most of the time.
        let candidates: Vec<&str> = names
            .filter(|(_, host)| host.fits(job))
            .map(|(name, _)| &**name)
            .collect();
        let verdict = self.ledger.filter(&Ask::of(&pod), &candidates, self.now);
        let node = *verdict.nodes.first()?;
        let assignment = self.ledger.begin_bind(&pod, node, self.now).ok()?;
        let cards = assignment
            .charges
            .iter()
            .filter_map(|(uuid, _)| uuid.parse().ok())
            .collect();
        let host = node.parse().ok()?;
        self.ledger.end_bind(&pod, Outcome::Bound, self.now);
        Some(Placed { host, cards })
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
        self.ledger.keep_places(self.now, seconds(self.now))
    }

    fn moves(&mut self, id: usize, job: &Job) -> Vec<(usize, Placed)> {
        let pod = Arc::new(self.pod(id, job));
        let plan = self.ledger.moves_for(&pod, self.now);
        let to = |node: &str, cards: &[(Box<str>, Mib)]| {
            let cards = cards.iter().map(|(uuid, _)| uuid.parse().ok());
            let (host, cards) = (node.parse().ok()?, cards.collect::<Option<_>>()?);
            Some(Placed { host, cards })
        };
        let moves = plan.into_iter().flat_map(|plan| plan.moves);
        let moves =
            moves.filter_map(|it| Some((it.pod.uid.parse().ok()?, to(&it.node, &it.cards)?)));
        moves.collect()
    }

    fn moved(&mut self, hosts: &[Host], id: usize, job: &Job, placed: &Placed) {
        let mib = Mib(hosts[placed.host].charge(job));
        let uuids: Vec<Box<str>> = placed
            .cards
            .iter()
            .map(|it| it.to_string().into())
            .collect();
        let assignment = Assignment {
            charges: uuids.iter().map(|uuid| (uuid.clone(), mib)).collect(),
            containers: vec![("main".into(), uuids)],
            exclusive: None,
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
