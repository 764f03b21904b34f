//! Requests of other GPU sharers become the same by the extender's webhook and by the policies.

use std::collections::BTreeSet;

use anyhow::{Result, bail, ensure};
use gpustow_api::names;
use gpustow_testkit::eventually;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::adopt_rig::{adopt, namespace, of};
use crate::install::try_create;
use crate::support::SOON;
use crate::webhook::policies_and_webhook;

/// Namespaces with the labels of each.
fn namespaces() -> Vec<(&'static str, Value)> {
    let of = |sharer: &str| json!({ names::ADOPT_LABEL: sharer });
    let with = |sharer: &str, key: &str, value: &str| {
        let mut labels = of(sharer);
        labels[key] = json!(value);
        labels
    };
    vec![
        ("gib", of("gpushare")),
        ("mib", with("gpushare", names::ADOPT_UNIT_LABEL, "MiB")),
        ("hami", of("hami")),
        ("sized", with("hami", names::ADOPT_MIB_LABEL, "40960")),
        ("volcano", of("volcano")),
        ("whole", with("whole", names::ADOPT_MIB_LABEL, "40960")),
        ("unknown", of("nvshare")),
        ("none", json!({})),
    ]
}

/// Pods of every sharer, good and bad.
struct Pods(StdRng);

impl Pods {
    fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.0.random_range(0..of.len())]
    }

    fn limits(&mut self, namespace: &str) -> Value {
        let keys = [
            (names::GPUSHARE_MEM, &["3", "0", "2k"][..]),
            ("nvidia.com/gpu", &["1", "2", "0"]),
            ("nvidia.com/gpumem", &["3001", "0"]),
            ("nvidia.com/gpumem-percentage", &["30", "100", "101", "1"]),
            ("nvidia.com/gpucores", &["30"]),
            ("volcano.sh/vgpu-number", &["1", "3"]),
            ("volcano.sh/vgpu-memory", &["2000"]),
            ("volcano.sh/vgpu-memory-percentage", &["50", "0"]),
            (names::GPU_MEM, &["4096"]),
            ("cpu", &["1"]),
        ];
        // Of one sharer more often than of several.
        let own = match namespace {
            "gib" | "mib" => "aliyun",
            "hami" | "sized" => "nvidia",
            "volcano" => "volcano",
            "whole" => "nvidia.com/gpu=",
            _ => "",
        };
        let mut limits = json!({});
        for (key, values) in keys {
            let is_own = format!("{key}=").starts_with(own);
            let share = if is_own { 0.5 } else { 0.02 };
            if self.0.random_bool(share) {
                limits[key] = json!(self.one(values));
            }
        }
        limits
    }

    fn next(&mut self, namespace: &str) -> Result<Pod> {
        let mut notes = json!({});
        for (key, value) in [
            ("nvidia.com/use-gputype", "A100, NVIDIA-NVIDIA H100"),
            ("nvidia.com/nouse-gputype", "T4"),
            ("nvidia.com/use-gpuuuid", "GPU-a,GPU-b,"),
            (names::GPU_UUIDS, "GPU-c"),
            ("scheduling.k8s.io/group-name", "job"),
            ("team", "a"),
        ] {
            if self.0.random_bool(0.15) {
                notes[key] = json!(value);
            }
        }
        let count = self.0.random_range(1..=3);
        let containers: Vec<_> = (0..count)
            .map(|index| (["a", "b", "c"][index], self.limits(namespace)))
            .collect();
        let mut pod = of(namespace, notes, &containers)?;
        let scheduler = ["default-scheduler", "hami-scheduler", "volcano"];
        let scheduler = self.one(&scheduler).to_owned();
        if let Some(spec) = &mut pod.spec {
            spec.scheduler_name = Some(scheduler);
            if self.0.random_bool(0.3) && spec.containers.len() > 1 {
                spec.init_containers = Some(vec![spec.containers.remove(0)]);
            }
            for container in &mut spec.containers {
                let env = json!([{ "name": "ALIYUN_COM_GPU_MEM_POD", "value": "own" }]);
                if self.0.random_bool(0.2) {
                    container.env = serde_json::from_value(env)?;
                }
            }
        }
        Ok(pod)
    }
}

/// What comes of the pod: which of several policies gives a variable first is open.
async fn created(client: &Client, pod: &Pod) -> Result<Result<Value, String>> {
    let mut made = match try_create(client, pod).await {
        Ok(made) => made,
        Err(kube::Error::Api(status)) => return Ok(Err(status.message)),
        Err(error) => return Err(error.into()),
    };
    let meta = &mut made.metadata;
    (meta.uid, meta.creation_timestamp, meta.managed_fields) = (None, None, None);
    let spec = made.spec.iter_mut();
    let all = spec.flat_map(|spec| {
        let init = spec.init_containers.iter_mut().flatten();
        init.chain(&mut spec.containers)
    });
    for env in all.filter_map(|container| container.env.as_mut()) {
        env.sort_by(|one, other| one.name.cmp(&other.name));
    }
    Ok(Ok(serde_json::to_value(made)?))
}

#[tokio::test]
async fn requests_become_the_same_by_webhook_and_by_policy() -> Result<()> {
    let (policies, webhook) = policies_and_webhook().await?;
    adopt(&policies, false).await?;
    adopt(&webhook, true).await?;
    let clients = (policies.admin()?, webhook.admin()?);
    for (name, labels) in namespaces() {
        for client in [&clients.0, &clients.1] {
            namespace(client, name, labels.clone()).await?;
        }
    }
    let mut pods = Pods(StdRng::seed_from_u64(38));
    let (mut adopted, mut refused) = (BTreeSet::new(), 0);
    for (name, labels) in namespaces() {
        for client in [&clients.0, &clients.1] {
            eventually(SOON, "the namespace is known", async || {
                let one = json!({ names::GPUSHARE_MEM: "1" });
                let made = created(client, &of(name, json!({}), &[("main", one)])?).await?;
                let is_left =
                    made.is_ok_and(|it| it["metadata"]["annotations"][names::ADOPTED].is_null());
                ensure!(is_left == (labels == json!({})));
                Ok(())
            })
            .await?;
        }
        for _ in 0..60 {
            let pod = pods.next(name)?;
            let both = tokio::try_join!(created(&clients.0, &pod), created(&clients.1, &pod))?;
            let text = serde_json::to_string(&pod)?;
            match both {
                (Ok(by_policy), Ok(by_webhook)) => {
                    ensure!(
                        by_policy == by_webhook,
                        "{text}: {by_policy:#} {by_webhook:#}"
                    );
                    let note = by_policy["metadata"]["annotations"][names::ADOPTED].as_str();
                    adopted.extend(note.map(str::to_owned));
                }
                // Of several reasons, which is named first is open.
                (Err(_), Err(_)) => refused += 1,
                (by_policy, by_webhook) => bail!("{text}: {by_policy:#?} {by_webhook:#?}"),
            }
        }
    }
    ensure!(adopted.len() >= 5 && refused > 30, "{adopted:?}, {refused}");
    Ok(())
}
