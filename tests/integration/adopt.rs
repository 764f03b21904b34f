//! Requests that pods make of other GPU sharers, translated when the pods are created.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, eventually, wait_bound};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::fault_rig::Replica;
use crate::install::{heard, installed, try_create};
use crate::policies::{pod, refusal};
use crate::support::{SOON, assignment, repository};

/// The control plane with the policies that translate, in force.
async fn adopting() -> Result<&'static ControlPlane> {
    static ADOPTING: OnceCell<()> = OnceCell::const_new();
    let cluster = installed().await?;
    ADOPTING
        .get_or_try_init(async || {
            let policies = match cluster.minor() {
                34 | 35 => "manifests/overlays/adopt-v1beta1",
                _ => "manifests/adopt",
            };
            let path = repository(policies);
            let path = path.to_str().context("path of the repository")?;
            let flags = heard(policies, &["--server-side", "--warnings-as-errors"]);
            let args = [&["apply", "-k", path], &flags[..]].concat();
            cluster.kubectl(&args).await?;
            let client = cluster.admin()?;
            let probes = [
                ("gpushare", json!({names::GPUSHARE_MEM: "1"})),
                ("hami", json!({"nvidia.com/gpumem": "1"})),
                ("volcano", json!({"volcano.sh/vgpu-number": "1"})),
                ("whole", json!({names::NVIDIA_GPU: "1"})),
            ];
            for (source, limits) in probes {
                let name = format!("probe-{source}");
                namespace(&client, &name, json!({names::ADOPT_LABEL: source})).await?;
                let probe = of(&name, json!({}), &[("main", limits)])?;
                eventually(SOON, "the policies translate", async || {
                    let made = try_create(&client, &probe).await?;
                    ensure!(annotation(&made, names::ADOPTED).is_some(), "{source}");
                    Ok(())
                })
                .await?;
            }
            anyhow::Ok(())
        })
        .await?;
    Ok(cluster)
}

async fn namespace(client: &Client, name: &str, labels: Value) -> Result<()> {
    let namespace = json!({"metadata": {"name": name, "labels": labels}});
    let namespace: Namespace = serde_json::from_value(namespace)?;
    let all = Api::<Namespace>::all(client.clone());
    all.create(&PostParams::default(), &namespace).await?;
    Ok(())
}

/// A pod of containers with these limits.
fn of(namespace: &str, annotations: Value, containers: &[(&str, Value)]) -> Result<Pod> {
    let containers: Vec<_> = containers
        .iter()
        .map(|(name, limits)| json!({"name": name, "resources": {"limits": limits}}))
        .collect();
    let mut pod = pod(annotations, json!({"containers": containers}))?;
    pod.metadata.namespace = Some(namespace.to_owned());
    Ok(pod)
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata
        .annotations
        .as_ref()?
        .get(key)
        .map(String::as_str)
}

/// Limits of each container, of which its requests are an exact copy.
fn limits(pod: &Pod) -> Result<Vec<BTreeMap<String, String>>> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let each = containers.map(|container| {
        let resources = container.resources.clone().unwrap_or_default();
        ensure!(resources.limits == resources.requests, "{resources:?}");
        let limits = resources.limits.unwrap_or_default();
        Ok(limits.into_iter().map(|(key, it)| (key, it.0)).collect())
    });
    each.collect()
}

fn mib(amount: &str) -> BTreeMap<String, String> {
    [(names::GPU_MEM.to_owned(), amount.to_owned())].into()
}

#[tokio::test]
async fn gpushare_requests_become_mib_and_programs_find_the_old_units() -> Result<()> {
    let client = adopting().await?.admin()?;
    namespace(&client, "gib", json!({names::ADOPT_LABEL: "gpushare"})).await?;
    let in_mib = json!({names::ADOPT_LABEL: "gpushare", names::ADOPT_UNIT_LABEL: "MiB"});
    namespace(&client, "mib", in_mib).await?;
    for (namespace, amounts) in [("gib", ["3072", "2048"]), ("mib", ["3", "2"])] {
        let containers = [
            (
                "main",
                json!({names::GPUSHARE_MEM: "3", "aliyun.com/gpu-count": "1"}),
            ),
            ("side", json!({names::GPUSHARE_MEM: "2", "cpu": "1"})),
            ("none", json!({"cpu": "1"})),
        ];
        let made = try_create(&client, &of(namespace, json!({}), &containers)?).await?;
        let cpu = [("cpu".to_owned(), "1".to_owned())];
        let mut side = mib(amounts[1]);
        side.extend(cpu.clone());
        assert_eq!(limits(&made)?, [mib(amounts[0]), side, cpu.into()]);
        assert_eq!(annotation(&made, names::ADOPTED), Some("gpushare"));
        let spec = made.spec.context("spec")?;
        assert_eq!(spec.scheduler_name.as_deref(), Some(names::SCHEDULER));
        let variables = |index: usize| {
            let env = spec.containers[index].env.iter().flatten();
            let theirs = env.filter(|it| it.name.starts_with("ALIYUN"));
            let pairs = theirs.map(|it| (it.name.clone(), it.value.clone().unwrap_or_default()));
            pairs.collect::<BTreeMap<_, _>>()
        };
        for (index, own) in [(0, "3"), (1, "2")] {
            let expected = [
                ("ALIYUN_COM_GPU_MEM_CONTAINER".to_owned(), own.to_owned()),
                ("ALIYUN_COM_GPU_MEM_POD".to_owned(), "5".to_owned()),
            ];
            assert_eq!(variables(index), expected.into());
        }
        assert!(variables(2).is_empty());
    }
    Ok(())
}

#[tokio::test]
async fn requests_of_hami_volcano_and_whole_gpus_keep_their_number_of_gpus() -> Result<()> {
    let client = adopting().await?.admin()?;
    let large = json!({names::ADOPT_LABEL: "whole", names::ADOPT_MIB_LABEL: "40960"});
    namespace(&client, "large", large).await?;
    let hami = |limits: Value| ("probe-hami", limits);
    let volcano = |limits: Value| ("probe-volcano", limits);
    let two = Some("2");
    let rows = [
        (
            hami(json!({"nvidia.com/gpumem": "3001"})),
            "3001",
            None,
            false,
            "hami",
        ),
        (
            hami(json!({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3001"})),
            "6002",
            two,
            false,
            "hami",
        ),
        (
            hami(json!({"nvidia.com/gpu": "2"})),
            "2048",
            two,
            true,
            "hami",
        ),
        (
            hami(
                json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "100", "nvidia.com/priority": "1"}),
            ),
            "1024",
            None,
            true,
            "hami",
        ),
        (
            hami(
                json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9", "nvidia.com/gpucores": "30"}),
            ),
            "9",
            None,
            false,
            "hami, without nvidia.com/gpucores",
        ),
        (
            volcano(json!({"volcano.sh/vgpu-number": "2", "volcano.sh/vgpu-memory": "3001"})),
            "6002",
            two,
            false,
            "volcano",
        ),
        (
            volcano(json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "50"})),
            "1024",
            None,
            true,
            "volcano, without volcano.sh/vgpu-cores",
        ),
        (
            ("probe-whole", json!({names::NVIDIA_GPU: "1"})),
            "1024",
            None,
            true,
            "whole",
        ),
        (
            ("large", json!({names::NVIDIA_GPU: "2"})),
            "81920",
            two,
            true,
            "whole",
        ),
    ];
    for ((namespace, request), amount, gpus, exclusive, adopted) in rows {
        let asked = of(
            namespace,
            json!({"team": "a"}),
            &[("main", request.clone())],
        )?;
        let made = try_create(&client, &asked)
            .await
            .context(request.to_string())?;
        assert_eq!(limits(&made)?, [mib(amount)], "{request}");
        let count = format!("{}main", names::GPU_COUNT_OF);
        assert_eq!(annotation(&made, &count), gpus, "{request}");
        assert_eq!(
            annotation(&made, names::EXCLUSIVE).is_some(),
            exclusive,
            "{request}"
        );
        assert_eq!(
            annotation(&made, names::ADOPTED),
            Some(adopted),
            "{request}"
        );
        assert_eq!(annotation(&made, "team"), Some("a"), "{request}");
    }
    Ok(())
}

#[tokio::test]
async fn requests_that_cannot_be_translated_are_refused_and_others_pass() -> Result<()> {
    let client = adopting().await?.admin()?;
    namespace(&client, "unknown", json!({names::ADOPT_LABEL: "nvshare"})).await?;
    let half = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"});
    let memory = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9"});
    let whole = json!({"nvidia.com/gpu": "1"});
    let volcano = json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "9"});
    let chosen = json!({"nvidia.com/use-gputype": "A100"});
    let grouped = json!({"scheduling.k8s.io/group-name": "job"});
    let gpushare = json!({names::GPUSHARE_MEM: "3"});
    let hami = "gpustow cannot translate a request of HAMi for a percentage of a GPU";
    let rows = [
        of("probe-hami", json!({}), &[("a", half)]).map(|pod| (pod, hami)),
        of("probe-hami", chosen, &[("a", memory.clone())]).map(|pod| (pod, hami)),
        of("probe-hami", json!({}), &[("a", memory), ("b", whole.clone())]).map(|pod| (pod, hami)),
        of("probe-volcano", grouped, &[("a", volcano.clone())])
            .map(|pod| (pod, "gpustow cannot translate a request of Volcano")),
        of("probe-gpushare", json!({}), &[("a", volcano)]).map(|pod| {
            (pod, "]: gpustow translates no such request in a namespace with the label gpustow.dev/adopt: gpushare")
        }),
        of("unknown", json!({}), &[("a", gpushare.clone())])
            .map(|pod| (pod, "nvshare is no sharer whose requests gpustow translates")),
    ];
    for row in rows {
        let (pod, expected) = row?;
        let message = refusal(&client, &pod).await?;
        assert!(message.contains(expected), "{message}");
    }
    // NVIDIA's own plugin still serves namespaces of gpushare, and other namespaces notice nothing.
    for (namespace, request) in [("probe-gpushare", whole), ("default", gpushare)] {
        let asked = of(namespace, json!({}), &[("a", request.clone())])?;
        let made = try_create(&client, &asked).await?;
        assert_eq!(json!(limits(&made)?), json!([request]));
        assert_eq!(annotation(&made, names::ADOPTED), None);
    }
    Ok(())
}

#[tokio::test]
async fn pod_of_gpushare_is_bound_to_a_gpu_with_room() -> Result<()> {
    let cluster = adopting().await?;
    let replica = Replica::start(cluster, "adopt", &[]).await?;
    let _scheduler = replica.scheduler(cluster).await?;
    let case = Case::new(cluster, "adopt").await?;
    case.node("n", &[2048, 8192]).create(&case.client).await?;
    let labels = json!({"metadata": {"labels": {names::ADOPT_LABEL: "gpushare"}}});
    let patch = kube::api::Patch::Merge(labels);
    Api::<Namespace>::all(case.client.clone())
        .patch(&case.namespace, &Default::default(), &patch)
        .await?;
    let asked = of(
        &case.namespace,
        json!({}),
        &[("main", json!({names::GPUSHARE_MEM: "3"}))],
    )?;
    let pods = Api::<Pod>::namespaced(case.client.clone(), &case.namespace);
    let made = pods.create(&PostParams::default(), &asked).await?;
    let bound = wait_bound(&case.client, &made, SOON).await?;
    let charges = assignment(&bound)?.charges;
    assert_eq!(charges.iter().map(|it| it.1.0).collect::<Vec<_>>(), [3072]);
    replica.settled(&case).await?;
    case.end().await
}
