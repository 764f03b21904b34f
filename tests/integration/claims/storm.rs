//! Random steps: claims and pods come and go, rules are deleted by hand, the extender dies and the agents report again. At
//! each look, no GPU has given away more than it has. `GPUSTOW_STEPS=10000` for many steps, `GPUSTOW_SEED` for the same ones.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::builders::delete;
use gpustow_testkit::{Case, eventually, held};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, RngExt as _, SeedableRng as _};
use tokio::time::MissedTickBehavior;

use super::{FENCED, GPU, ON, Site, claim, claimed, node, unclaim};
use crate::fault_rig::Replica;

/// Steps, unless the environment sets another number.
const STEPS: u64 = 400;
/// Between two: pods and fences need time to come.
const PACE: Duration = Duration::from_millis(120);
/// Claims and pods at a time, at most. Claims share a GPU for as long as one is there: with more of them pods get none.
const CLAIMS: usize = 4;
const PODS: usize = 6;
const NODES: [(&str, usize); 2] = [("a", 4), ("b", 2)];

fn setting(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}")),
        Err(_) => Ok(default),
    }
}

struct Storm {
    site: Site,
    case: Case,
    replica: Replica,
    random: StdRng,
    claims: Vec<String>,
    pods: Vec<String>,
    made: usize,
    /// Looks at which claims, and at which pods, held something of a GPU; and GPUs that went from one to the other.
    seen: [usize; 2],
    owners: BTreeMap<String, bool>,
    handed: usize,
    deleted: usize,
}

impl Storm {
    fn name(&mut self, kind: &str) -> String {
        self.made += 1;
        format!("{kind}-{}", self.made)
    }

    async fn step(&mut self) -> Result<()> {
        match self.random.random_range(0..100) {
            0..25 if self.claims.len() < CLAIMS => {
                let name = self.name("claim");
                let whole = self.random.random_bool(0.2);
                let mib = self.random.random_range(500..GPU);
                claim(&self.case, &name, (!whole).then_some(mib)).await?;
                self.claims.push(name);
            }
            0..47 if !self.claims.is_empty() => {
                let which = self.random.random_range(0..self.claims.len());
                unclaim(&self.case, &self.claims.swap_remove(which)).await?;
            }
            47..72 if self.pods.len() < PODS => {
                let name = self.name("pod");
                // Even, for two GPUs.
                let mib = 2 * self.random.random_range(250..GPU / 2);
                let pod = self.case.pod(&name).gpu_mem(mib);
                let pod = match self.random.random_range(0..10) {
                    0 => pod.annotation(gpustow_api::names::EXCLUSIVE, "true"),
                    1 => pod.annotation(gpustow_api::names::GPU_COUNT, "2"),
                    _ => pod,
                };
                pod.create(&self.case.client).await?;
                self.pods.push(name);
            }
            47..94 if !self.pods.is_empty() => {
                let which = self.random.random_range(0..self.pods.len());
                let pod = self.case.pods().get(&self.pods.swap_remove(which)).await?;
                delete(&self.case.client, &pod, 0).await?;
            }
            94..96 => {
                let (name, gpus) = *NODES.choose(&mut self.random).context("no node")?;
                self.case
                    .node(name, &vec![GPU; gpus])
                    .report(&self.case.client)
                    .await?;
            }
            96..97 => self.replica.restart().await?,
            97.. => {
                let rules = self.site.fence().await?;
                if let Some(rule) = rules.choose(&mut self.random) {
                    let all = self.site.rules()?;
                    match all.delete(&rule.name, &DeleteParams::default()).await {
                        // Its GPU has just been released.
                        Err(kube::Error::Api(status)) if status.code == 404 => {}
                        deleted => drop(deleted?),
                    }
                    self.deleted += 1;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Pods and claims together fit on each GPU. Pods held an amount all the time if they held it before and after the
    /// list of claims.
    async fn look(&mut self) -> Result<()> {
        let case = &self.case;
        let before = held(&case.client, &case.namespace).await?;
        let claims = claimed(case).await?;
        let after = held(&case.client, &case.namespace).await?;
        for uuid in claims.keys().chain(after.keys()) {
            let mib = |of: &BTreeMap<String, u64>| of.get(uuid).copied().unwrap_or(0);
            let pods = mib(&before).min(mib(&after));
            let sum = pods + mib(&claims);
            ensure!(
                sum <= GPU,
                "{uuid}: pods hold {pods} MiB, claims {} MiB",
                mib(&claims)
            );
            let [by_claims, by_pods] = [mib(&claims) > 0, pods > 0];
            self.seen[0] += usize::from(by_claims);
            self.seen[1] += usize::from(by_pods);
            if by_claims != by_pods {
                let old = self.owners.insert(uuid.clone(), by_claims);
                self.handed += usize::from(old.is_some_and(|old| old != by_claims));
            }
        }
        Ok(())
    }

    /// Once nothing else comes, claims and then pods get every GPU.
    async fn calm(&mut self) -> Result<()> {
        for name in std::mem::take(&mut self.claims) {
            unclaim(&self.case, &name).await?;
        }
        for name in std::mem::take(&mut self.pods) {
            let pod = self.case.pods().get(&name).await?;
            delete(&self.case.client, &pod, 0).await?;
        }
        let gpus: usize = NODES.iter().map(|(_, gpus)| gpus).sum();
        for kind in ["claim", "pod"] {
            let mut made = Vec::new();
            for _ in 0..gpus {
                let name = self.name(kind);
                match kind {
                    "claim" => drop(claim(&self.case, &name, None).await?),
                    _ => drop(
                        self.case
                            .pod(&name)
                            .gpu_mem(GPU)
                            .create(&self.case.client)
                            .await?,
                    ),
                }
                made.push(name);
            }
            let pods = self.case.pods();
            eventually(2 * FENCED, "all of them have a GPU", async || {
                let all = pods.list(&ListParams::default()).await?.items;
                let is_bound =
                    |pod: &&Pod| pod.spec.as_ref().is_some_and(|it| it.node_name.is_some());
                let bound = all.iter().filter(is_bound);
                ensure!(bound.count() == gpus, "of {gpus} {kind}s {:?}", all.len());
                Ok(())
            })
            .await?;
            self.look().await?;
            for name in made {
                match kind {
                    "claim" => unclaim(&self.case, &name).await?,
                    _ => delete(&self.case.client, &pods.get(&name).await?, 0).await?,
                }
            }
        }
        Ok(())
    }
}

#[tokio::test]
async fn claims_and_pods_never_hold_more_of_a_gpu_than_it_has() -> Result<()> {
    let seed = setting("GPUSTOW_SEED", u64::from(rand::rng().next_u32()))?;
    let steps = setting("GPUSTOW_STEPS", STEPS)?;
    let site = Site::start().await?;
    let case = Case::new(&site.cluster, "storm").await?;
    for (name, gpus) in NODES {
        node(&case, name, gpus).await?;
    }
    let replica = Replica::start(&site.cluster, "storm", &[ON]).await?;
    let _scheduler = replica.scheduler(&site.cluster).await?;
    let mut storm = Storm {
        site,
        case,
        replica,
        random: StdRng::seed_from_u64(seed),
        claims: Vec::new(),
        pods: Vec::new(),
        made: 0,
        seen: [0, 0],
        owners: Default::default(),
        handed: 0,
        deleted: 0,
    };
    let mut pace = tokio::time::interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for step in 0..steps {
        pace.tick().await;
        let at = || format!("step {step} of seed {seed}");
        storm.step().await.with_context(at)?;
        storm.look().await.with_context(at)?;
    }
    let said = format!(
        "{steps} steps of seed {seed}: GPUs held by claims {}, by pods {}; {} went from one to the other; {} rules deleted by hand",
        storm.seen[0], storm.seen[1], storm.handed, storm.deleted
    );
    println!("{said}");
    ensure!(
        storm.seen.iter().all(|seen| *seen > 0) && storm.handed > 0,
        "{said}"
    );
    storm.calm().await.with_context(|| format!("seed {seed}"))?;
    Ok(())
}
