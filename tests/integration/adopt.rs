//! Requests that pods make of other GPU sharers, translated when the pods are created.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gpustow_admission::{Act, Admitted, Ask, Cluster, admit};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::quantity::whole;
use gpustow_api::{BadRequest, names};
use gpustow_testkit::eventually;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::adopt_rig::{adopting, annotation, namespace, of};
use crate::install::try_create;
use crate::policies::refusal;
use crate::support::SOON;

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

/// The plugin's verdict on a pod in a namespace with these labels.
fn said(asked: &Pod, labels: &Value) -> Result<Result<Admitted, BadRequest>> {
    let namespace = ObjectMeta {
        labels: serde_json::from_value(labels.clone())?,
        ..ObjectMeta::default()
    };
    let pod = serde_json::to_value(asked)?;
    let cluster = Cluster {
        resource: names::GPU_MEM,
        spec: &GpustowConfigSpec::default(),
        queue_from: &[],
    };
    let ask = Ask {
        pod: &pod,
        act: Act::Create,
        user: "",
    };
    Ok(admit(ask, cluster, &namespace, None))
}

/// The plugin's translation equals the webhook's: limits, annotations and variables.
fn foretold(asked: &Pod, made: &Pod, labels: &Value) -> Result<()> {
    let said: Pod = serde_json::from_value(said(asked, labels)??.pod)?;
    // Requests get their defaults from limits before the webhook is called.
    let limits = |pod: &Pod| -> Vec<_> {
        let all = containers(pod).into_iter();
        all.map(|it| it.resources.and_then(|it| it.limits))
            .map(|it| {
                it.map(|it| {
                    it.into_iter()
                        .map(|(key, it)| (key, whole(&it)))
                        .collect::<Vec<_>>()
                })
            })
            .collect()
    };
    assert_eq!(limits(&said), limits(made));
    assert_eq!(said.metadata.annotations, made.metadata.annotations);
    let env = |pod: &Pod| -> Vec<_> {
        let env = containers(pod).into_iter().flat_map(|it| it.env);
        let env = env.flatten().filter(|it| it.name.starts_with("ALIYUN"));
        env.collect()
    };
    assert_eq!(env(&said), env(made));
    Ok(())
}

fn containers(pod: &Pod) -> Vec<Container> {
    let spec = pod.spec.clone();
    spec.map(|spec| spec.containers).unwrap_or_default()
}

fn mib(amount: &str) -> BTreeMap<String, String> {
    [(names::GPU_MEM.to_owned(), amount.to_owned())].into()
}

#[tokio::test]
async fn gpushare_requests_become_mib_and_programs_find_the_old_units() -> Result<()> {
    let client = adopting().await?.admin()?;
    namespace(&client, "gib", json!({names::ADOPT_LABEL: "gpushare"})).await?;
    let in_mib = json!({names::ADOPT_LABEL: "gpushare", names::ADOPT_UNIT_LABEL: "MiB"});
    namespace(&client, "mib", in_mib.clone()).await?;
    let in_gib = json!({names::ADOPT_LABEL: "gpushare"});
    for (namespace, labels, amounts) in [
        ("gib", in_gib, ["3072", "2048"]),
        ("mib", in_mib, ["3", "2"]),
    ] {
        let containers = [
            (
                "main",
                json!({names::GPUSHARE_MEM: "3", "aliyun.com/gpu-count": "1"}),
            ),
            ("side", json!({names::GPUSHARE_MEM: "2", "cpu": "1"})),
            ("none", json!({"cpu": "1"})),
        ];
        let asked = of(namespace, json!({}), &containers)?;
        let made = try_create(&client, &asked).await?;
        foretold(&asked, &made, &labels)?;
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
    let label = |sharer: &str| json!({names::ADOPT_LABEL: sharer});
    let sized = |sharer: &str| json!({names::ADOPT_LABEL: sharer, names::ADOPT_MIB_LABEL: "40960"});
    for (name, sharer) in [
        ("large", "whole"),
        ("sized", "hami"),
        ("sized-volcano", "volcano"),
    ] {
        namespace(&client, name, sized(sharer)).await?;
    }
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
            hami(json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"})),
            "512",
            None,
            false,
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
        (
            (
                "sized",
                json!({"nvidia.com/gpu": "2", "nvidia.com/gpumem-percentage": "30"}),
            ),
            "24576",
            two,
            false,
            "hami",
        ),
        (
            ("sized", json!({"nvidia.com/gpumem-percentage": "1"})),
            "409",
            None,
            false,
            "hami",
        ),
        (
            ("sized", json!({"nvidia.com/gpumem-percentage": "100"})),
            "40960",
            None,
            true,
            "hami",
        ),
        (
            hami(json!({"nvidia.com/gpumem": "7", "nvidia.com/gpumem-percentage": "50"})),
            "7",
            None,
            false,
            "hami",
        ),
        (
            (
                "sized-volcano",
                json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory-percentage": "50"}),
            ),
            "20480",
            None,
            false,
            "volcano",
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
        let labels = match namespace {
            "large" => sized("whole"),
            "sized" => sized("hami"),
            "sized-volcano" => sized("volcano"),
            other => label(other.trim_start_matches("probe-")),
        };
        foretold(&asked, &made, &labels).context(request.to_string())?;
        assert_eq!(limits(&made)?, [mib(amount)], "{request}");
        let percentages = [
            "nvidia.com/gpumem-percentage",
            "volcano.sh/vgpu-memory-percentage",
        ];
        let percentage = percentages.iter().find_map(|key| request[*key].as_str());
        let percentage =
            percentage.filter(|_| !exclusive && request["nvidia.com/gpumem"].is_null());
        let part = format!("{}main", names::GPU_MEM_PERCENTAGE_OF);
        assert_eq!(annotation(&made, &part), percentage, "{request}");
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
async fn annotations_of_hami_that_choose_gpus_become_those_of_gpustow() -> Result<()> {
    let client = adopting().await?.admin()?;
    let rows = [
        (
            "nvidia.com/use-gputype",
            "A100, V100",
            names::GPU_MODELS,
            "*A100*,*V100*",
        ),
        (
            "nvidia.com/use-gputype",
            "NVIDIA-NVIDIA A40",
            names::GPU_MODELS,
            "*NVIDIA A40*",
        ),
        (
            "nvidia.com/nouse-gputype",
            "T4",
            names::NOT_GPU_MODELS,
            "*T4*",
        ),
        (
            "nvidia.com/use-gpuuuid",
            "GPU-a,GPU-b",
            names::GPU_UUIDS,
            "GPU-a,GPU-b",
        ),
        (
            "nvidia.com/nouse-gpuuuid",
            "GPU-c,",
            names::NOT_GPU_UUIDS,
            "GPU-c",
        ),
    ];
    let memory = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9"});
    let vgpu = json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "9"});
    for (theirs, value, ours, expected) in rows {
        for (sharer, request) in [("hami", &memory), ("volcano", &vgpu)] {
            let namespace = format!("probe-{sharer}");
            let notes = json!({theirs: value});
            let asked = of(&namespace, notes, &[("main", request.clone())])?;
            let made = try_create(&client, &asked).await.context(value)?;
            assert_eq!(annotation(&made, ours), Some(expected));
            foretold(&asked, &made, &json!({names::ADOPT_LABEL: sharer}))?;
        }
    }
    // A choice in gpustow's own words stays, and an empty list chooses nothing.
    let notes = json!({"nvidia.com/use-gputype": "A100", names::GPU_MODELS: "*H100*",
        "nvidia.com/use-gpuuuid": " ,"});
    let asked = of("probe-hami", notes, &[("main", memory)])?;
    let made = try_create(&client, &asked).await?;
    assert_eq!(annotation(&made, names::GPU_MODELS), Some("*H100*"));
    assert_eq!(annotation(&made, names::GPU_UUIDS), None);
    foretold(&asked, &made, &json!({names::ADOPT_LABEL: "hami"}))
}

#[tokio::test]
async fn requests_that_cannot_be_translated_are_refused_and_others_pass() -> Result<()> {
    let client = adopting().await?.admin()?;
    namespace(&client, "unknown", json!({names::ADOPT_LABEL: "nvshare"})).await?;
    let memory = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9"});
    let whole = json!({"nvidia.com/gpu": "1"});
    let volcano = json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "9"});
    let grouped = json!({"scheduling.k8s.io/group-name": "job"});
    let gpushare = json!({names::GPUSHARE_MEM: "3"});
    let hami = "gpustow cannot translate a request of HAMi for whole GPUs in one container";
    let too_much = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "101"});
    let percent =
        json!({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory-percentage": "500"});
    let volcanos = "gpustow cannot translate a request of Volcano";
    let rows = [
        of("probe-hami", json!({}), &[("a", memory), ("b", whole.clone())]).map(|pod| (pod, hami)),
        of("probe-volcano", grouped, &[("a", volcano.clone())])
            .map(|pod| (pod, volcanos)),
        of("probe-volcano", json!({}), &[("a", percent)]).map(|pod| (pod, volcanos)),
        of("probe-hami", json!({}), &[("a", too_much)]).map(|pod| (pod, hami)),
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
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let sharer = match namespace {
            "unknown" => "nvshare",
            probe => probe.trim_start_matches("probe-"),
        };
        let foreseen = said(&pod, &json!({names::ADOPT_LABEL: sharer}))?;
        let foreseen = foreseen.err().context("admitted")?.to_string();
        assert!(message.ends_with(&foreseen), "{message} but {foreseen}");
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
async fn limit_range_of_the_old_resource_is_named_as_the_cause() -> Result<()> {
    let cluster = adopting().await?;
    let client = cluster.admin()?;
    let labels = json!({ names::ADOPT_LABEL: "whole" });
    namespace(&client, "ranged", labels).await?;
    let range = json!({ "apiVersion": "v1", "kind": "LimitRange",
        "metadata": { "name": "gpus", "namespace": "ranged" },
        "spec": { "limits": [{ "type": "Container", "max": { names::NVIDIA_GPU: "1" } }] } });
    cluster.apply(&range.to_string()).await?;
    let pod = of(
        "ranged",
        json!({}),
        &[("main", json!({ names::NVIDIA_GPU: "1" }))],
    )?;
    eventually(SOON, "the LimitRange is in force", async || {
        let made = try_create(&client, &pod).await;
        let Err(kube::Error::Api(status)) = made else {
            anyhow::bail!("{}", serde_json::to_string(&made.ok())?);
        };
        let texts = ["a LimitRange of the namespace", "remove nvidia.com/gpu"];
        ensure!(
            texts.iter().all(|it| status.message.contains(it)),
            "{status:?}"
        );
        Ok(())
    })
    .await?;
    Ok(())
}
