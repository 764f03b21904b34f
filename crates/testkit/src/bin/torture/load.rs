//! Pods that come and go, agents' heartbeats, and the findings of an independent look.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gpustow_api::gpunode::PodUse;
use gpustow_api::{Assignment, names};
use gpustow_testkit::builders::{GpuNodeBuilder, PodBuilder};
use gpustow_testkit::{Binds, Case, at_once, check_cluster, eventually, node_of};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, PostParams};
use tokio::time::{MissedTickBehavior, interval};

use crate::Args;

/// Cards of a node and their size in MiB.
pub(crate) const CARDS: [u64; 2] = [16_384; 2];
/// The requests of a pod on each card, drawn at random.
const REQUESTS: [u64; 6] = [2_048, 4_096, 6_144, 8_192, 12_288, 16_384];
/// The memory that a pod uses beyond its request, if it may.
const BORROWED: u64 = 1_024;
/// An agent reports so often.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// Between two independent looks at all cards.
const LOOK: Duration = Duration::from_secs(5);
/// Requests at once.
const WIDTH: usize = 16;
/// For all that fit to be bound after the last fault.
const SETTLED: Duration = Duration::from_secs(180);

/// The events so far.
#[derive(Default)]
pub(crate) struct Story {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    binds: Vec<Instant>,
    created: usize,
    looks: usize,
    wrong: Vec<String>,
}

impl Story {
    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Pods created and bound so far, and looks taken.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        self.with(|inner| (inner.created, inner.binds.len(), inner.looks))
    }

    /// The findings of the looks.
    pub(crate) fn wrong(&self) -> Vec<String> {
        self.with(|inner| inner.wrong.clone())
    }

    /// The longest time without a bind that has part in the time between these two, and how long after it the next bind
    /// was; none if there was no more.
    pub(crate) fn pauses(&self, from: Instant, to: Instant) -> (Duration, Option<Duration>) {
        self.with(|inner| {
            let before = inner
                .binds
                .partition_point(|at| *at < from)
                .saturating_sub(1);
            let after = inner.binds.partition_point(|at| *at <= to);
            let next = inner.binds.get(after);
            let upto = (after + 1).min(inner.binds.len());
            let part = inner.binds.get(before..upto).unwrap_or_default();
            let pauses = part.windows(2).map(|pair| pair[1].duration_since(pair[0]));
            let longest = pauses.max().unwrap_or_default();
            (longest, next.map(|next| next.duration_since(to)))
        })
    }
}

/// Notes when pods are bound.
pub(crate) async fn watch(mut binds: Binds, story: Arc<Story>) {
    let mut bound = HashSet::new();
    while let Ok((pod, _)) = binds.next("").await {
        if bound.insert(pod) {
            story.with(|inner| inner.binds.push(Instant::now()));
        }
    }
}

/// Creates pods and gangs and deletes them after a while, for as long as it is polled. `has_pod_groups`: the API server
/// serves PodGroups; otherwise labels name the gangs.
pub(crate) async fn traffic(case: Case, story: Arc<Story>, args: Args, has_pod_groups: bool) {
    let mut dice = fastrand::Rng::with_seed(args.seed);
    // A gang goes as a whole.
    let mut alive: HashMap<String, Instant> = HashMap::new();
    let mut pace = interval(Duration::from_secs_f64(1.0 / args.rate));
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0_usize.. {
        pace.tick().await;
        let now = Instant::now();
        let over = alive.iter().filter(|(_, until)| **until < now);
        let over: Vec<_> = over.map(|(name, _)| name.clone()).take(4).collect();
        for name in over {
            let at_once = DeleteParams::default().grace_period(0);
            match case.pods().delete(&name, &at_once).await {
                Err(kube::Error::Api(error)) if error.code != 404 => {}
                Err(error) if !matches!(error, kube::Error::Api(_)) => {}
                _ => drop(alive.remove(&name)),
            }
        }
        if alive.len() >= args.pods {
            continue;
        }
        let until = Instant::now() + Duration::from_secs(dice.u64(20..240));
        let gang = dice.u8(..12) == 0;
        let created = match gang {
            true => create_gang(&case, &format!("g{number}"), &mut dice, has_pod_groups).await,
            false => {
                let pod = single(&case, &format!("p{number}"), &mut dice);
                let created = case.pods().create(&PostParams::default(), &pod).await;
                created.map(|pod| pod.name_any()).into_iter().collect()
            }
        };
        story.with(|inner| inner.created += created.len());
        alive.extend(created.into_iter().map(|name| (name, until)));
    }
}

fn single(case: &Case, name: &str, dice: &mut fastrand::Rng) -> Pod {
    let cards = if dice.u8(..8) == 0 { CARDS.len() } else { 1 };
    let pod = case
        .pod(name)
        .gpu_mem(request(dice) * cards as u64)
        .annotation(names::GPU_COUNT, &cards.to_string());
    of_some_kind(pod, dice)
}

fn request(dice: &mut fastrand::Rng) -> u64 {
    let mib = REQUESTS.get(dice.usize(..REQUESTS.len())).copied();
    mib.unwrap_or(2_048)
}

/// Creates a gang of two to four equal pods. Returns the names of the pods that the API server accepted.
async fn create_gang(
    case: &Case,
    name: &str,
    dice: &mut fastrand::Rng,
    has_pod_groups: bool,
) -> Vec<String> {
    let (count, mib) = (dice.usize(2..=4), request(dice));
    let policy = serde_json::json!({ "schedulingPolicy": { "gang": { "minCount": count } } });
    if has_pod_groups && case.pod_group(name, policy).await.is_err() {
        return Vec::new();
    }
    let mut created = Vec::new();
    for index in 0..count {
        let pod = case.pod(&format!("{name}-{index}")).gpu_mem(mib);
        let pod = pod.label(names::POD_GROUP_LABELS[0], name);
        let pod = match has_pod_groups {
            true => case.member(name, pod).await,
            false => pod.create(&case.client).await,
        };
        created.extend(pod.map(|pod| pod.name_any()));
    }
    created
}

/// Some pods have a high priority, some may be moved, and some use more than they request.
fn of_some_kind(pod: PodBuilder, dice: &mut fastrand::Rng) -> Pod {
    let mut pod = pod;
    if dice.u8(..6) == 0 {
        pod = pod.priority_class("system-cluster-critical");
    }
    if dice.u8(..4) == 0 {
        pod = pod.annotation(names::MEM_LIMIT, "max");
    }
    let evictable = dice.u8(..4) == 0;
    if evictable {
        pod = pod.annotation(names::EVICTABLE, "true");
    }
    let mut pod = pod.build();
    pod.metadata.owner_references = evictable.then(|| {
        vec![OwnerReference {
            api_version: "apps/v1".to_owned(),
            kind: "ReplicaSet".to_owned(),
            name: "torture".to_owned(),
            uid: "torture".to_owned(),
            controller: Some(true),
            ..OwnerReference::default()
        }]
    });
    pod
}

/// The memory that the pods on each card use, by the card's UUID: their request, and for some of them more where the
/// card has it.
async fn uses(case: &Case) -> Result<HashMap<String, Vec<PodUse>>> {
    let mut uses: HashMap<String, Vec<PodUse>> = HashMap::new();
    let mut left: HashMap<String, u64> = HashMap::new();
    let pods = case.pods().list(&ListParams::default()).await?.items;
    let held = pods.iter().filter_map(|pod| {
        let text = pod.annotations().get(names::ASSIGNMENT)?;
        Some((pod, Assignment::decode(text).ok()?))
    });
    let held: Vec<_> = held.collect();
    for (uuid, mib) in held.iter().flat_map(|(_, held)| &held.charges) {
        let left = left.entry(uuid.to_string()).or_insert(CARDS[0]);
        *left = left.saturating_sub(mib.0);
    }
    for (pod, held) in &held {
        let borrows = pod.annotations().contains_key(names::MEM_LIMIT);
        for (uuid, mib) in &held.charges {
            let left = left.entry(uuid.to_string()).or_default();
            let more = if borrows { BORROWED.min(*left) } else { 0 };
            *left -= more;
            uses.entry(uuid.to_string()).or_default().push(PodUse {
                uid: pod.uid().unwrap_or_default(),
                used_mib: mib.0 + more,
                ..PodUse::default()
            });
        }
    }
    Ok(uses)
}

/// Repeats every agent's report.
pub(crate) async fn heartbeats(case: Case, nodes: Arc<Vec<GpuNodeBuilder>>) {
    let each = HEARTBEAT.div_f64(nodes.len().max(1) as f64);
    let mut pace = interval(each);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let uses = uses(&case).await.unwrap_or_default();
        for node in nodes.iter() {
            pace.tick().await;
            let node = node.clone().with_status(|status| {
                for gpu in &mut status.gpus {
                    gpu.pods = uses.get(&gpu.uuid).cloned().unwrap_or_default();
                }
            });
            // An agent whose report fails repeats it in its turn.
            let _ = node.report(&case.client).await;
        }
    }
}

/// Looks at every card, for as long as it is polled.
pub(crate) async fn looks(case: Case, story: Arc<Story>) {
    let mut pace = interval(LOOK);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        pace.tick().await;
        match check_cluster(&case.client, None).await {
            Ok(()) => story.with(|inner| inner.looks += 1),
            // The API server does not answer: no look.
            Err(error) if error.is::<kube::Error>() => {}
            Err(error) => story.with(|inner| inner.wrong.push(format!("{error:#}"))),
        }
    }
}

/// Makes room, and waits until every pod that is left is bound. Gangs make the room first: one that lost a pod to a fault
/// or a disruption would wait for ever.
pub(crate) async fn settle(case: &Case) -> Result<()> {
    let pods = case.pods().list(&ListParams::default()).await?.items;
    let is_bound = |pod: &Pod| node_of(pod).is_some();
    let (gangs, singles): (Vec<_>, Vec<_>) = pods
        .iter()
        .partition(|pod| pod.labels().contains_key(names::POD_GROUP_LABELS[0]));
    let half = singles.into_iter().filter(|pod| is_bound(pod)).step_by(2);
    let gone: Vec<_> = gangs.into_iter().chain(half).collect();
    at_once(WIDTH, gone, async |pod| {
        let now = DeleteParams::default().grace_period(0);
        match case.pods().delete(&pod.name_any(), &now).await {
            Err(kube::Error::Api(error)) if error.code == 404 => Ok(()),
            done => Ok(done.map(drop)?),
        }
    })
    .await?;
    eventually(SETTLED, "every pod is bound", async || {
        let pods = case.pods().list(&ListParams::default()).await?.items;
        let waiting: Vec<_> = pods.iter().filter(|pod| !is_bound(pod)).collect();
        let names: Vec<_> = waiting.iter().take(5).map(|pod| pod.name_any()).collect();
        ensure!(waiting.is_empty(), "{} wait: {names:?}", waiting.len());
        Ok(())
    })
    .await?;
    check_cluster(&case.client, None).await
}
