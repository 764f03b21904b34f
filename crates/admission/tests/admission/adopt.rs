//! Requests of other GPU sharers.

use anyhow::{Context as _, Result};
use gpustow_api::names;
use serde_json::{Value, json};

use crate::{Site, amount, asks, env, note, of, pod};

fn site(sharer: &str, more: &[(&str, &str)]) -> Site {
    Site::labelled(&[&[(names::ADOPT_LABEL, sharer)], more].concat())
}

/// Sharer and further labels, limits, MiB, GPUs, whether whole, and the text of the annotation.
#[expect(clippy::type_complexity, reason = "a table")]
fn translated() -> Vec<(
    Site,
    Value,
    &'static str,
    Option<&'static str>,
    bool,
    &'static str,
)> {
    let sized = |sharer: &str| site(sharer, &[(names::ADOPT_MIB_LABEL, "40960")]);
    let unit = |sharer: &str, unit: &str| site(sharer, &[(names::ADOPT_UNIT_LABEL, unit)]);
    let hami = || site("hami", &[]);
    let default = site("hami", &[(names::ADOPT_DEFAULT_LABEL, "16000")]);
    let two = Some("2");
    vec![
        (
            site("gpushare", &[]),
            json!({ names::GPUSHARE_MEM: "3", "aliyun.com/gpu-count": "1" }),
            "3072",
            None,
            false,
            "gpushare",
        ),
        (
            unit("gpushare", "MiB"),
            json!({ names::GPUSHARE_MEM: "3" }),
            "3",
            None,
            false,
            "gpushare",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpumem": "3001" }),
            "3001",
            None,
            false,
            "hami",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpu": "2", "nvidia.com/gpumem": "3001" }),
            "6002",
            two,
            false,
            "hami",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpu": "2" }),
            "2048",
            two,
            true,
            "hami",
        ),
        (
            default,
            json!({ "nvidia.com/gpu": "2" }),
            "32000",
            two,
            false,
            "hami",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "100", "nvidia.com/priority": "1" }),
            "1024",
            None,
            true,
            "hami",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50" }),
            "512",
            None,
            false,
            "hami",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "9", "nvidia.com/gpucores": "30" }),
            "9",
            None,
            false,
            "hami, without nvidia.com/gpucores",
        ),
        (
            hami(),
            json!({ "nvidia.com/gpumem": "7", "nvidia.com/gpumem-percentage": "50" }),
            "7",
            None,
            false,
            "hami",
        ),
        (
            sized("hami"),
            json!({ "nvidia.com/gpu": "2", "nvidia.com/gpumem-percentage": "30" }),
            "24576",
            two,
            false,
            "hami",
        ),
        (
            sized("hami"),
            json!({ "nvidia.com/gpumem-percentage": "1" }),
            "409",
            None,
            false,
            "hami",
        ),
        (
            sized("hami"),
            json!({ "nvidia.com/gpumem-percentage": "100" }),
            "40960",
            None,
            true,
            "hami",
        ),
        (
            site("volcano", &[]),
            json!({ "volcano.sh/vgpu-number": "2", "volcano.sh/vgpu-memory": "3001" }),
            "6002",
            two,
            false,
            "volcano",
        ),
        (
            unit("volcano", "10MiB"),
            json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000" }),
            "30000",
            None,
            false,
            "volcano",
        ),
        (
            site("volcano", &[]),
            json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "50" }),
            "1024",
            None,
            true,
            "volcano, without volcano.sh/vgpu-cores",
        ),
        (
            sized("volcano"),
            json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory-percentage": "50" }),
            "20480",
            None,
            false,
            "volcano",
        ),
        (
            site("whole", &[]),
            json!({ names::NVIDIA_GPU: "1" }),
            "1024",
            None,
            true,
            "whole",
        ),
        (
            sized("whole"),
            json!({ names::NVIDIA_GPU: "2" }),
            "81920",
            two,
            true,
            "whole",
        ),
        (
            site("mig", &[]),
            json!({ "nvidia.com/mig-1g.10gb": "1" }),
            "9984",
            None,
            false,
            "mig",
        ),
        (
            site("mig", &[]),
            json!({ "nvidia.com/mig-3g.40gb": "2" }),
            "80896",
            two,
            false,
            "mig",
        ),
        (
            site("mig-instance", &[]),
            json!({ "nvidia.com/mig-2g.20gb": "1" }),
            "20096",
            None,
            false,
            "mig-instance",
        ),
    ]
}

#[test]
fn request_of_each_sharer_keeps_its_memory_and_its_gpus() -> Result<()> {
    for (site, limits, mib, gpus, whole, adopted) in translated() {
        let asked = pod(json!({ "team": "a" }), json!([of("main", limits.clone())]));
        let made = site.create(&asked).with_context(|| limits.to_string())?;
        let pod = &made.pod;
        assert_eq!(amount(pod, 0), Some(mib), "{limits}");
        let left = pod["spec"]["containers"][0]["resources"]["limits"].as_object();
        assert_eq!(left.map(serde_json::Map::len), Some(1), "{limits}");
        assert_eq!(note(pod, "gpu-count.gpustow.dev/main"), gpus, "{limits}");
        assert_eq!(note(pod, names::EXCLUSIVE).is_some(), whole, "{limits}");
        assert_eq!(note(pod, names::ADOPTED), Some(adopted), "{limits}");
        let isolation = (adopted == "mig-instance").then_some("mig");
        assert_eq!(note(pod, names::ISOLATION), isolation, "{limits}");
        assert_eq!(note(pod, "team"), Some("a"));
        assert_eq!(
            made.warnings.len(),
            usize::from(adopted.contains("without")),
            "{limits}"
        );
        assert_eq!(pod["spec"]["schedulerName"], names::SCHEDULER);
    }
    Ok(())
}

#[test]
fn programs_of_gpushare_find_its_variables_in_the_old_unit() -> Result<()> {
    let containers = json!([
        of("a", json!({ names::GPUSHARE_MEM: "3" })),
        of("b", json!({ names::GPUSHARE_MEM: "2" }))
    ]);
    let made = site("gpushare", &[])
        .create(&pod(json!({}), containers))?
        .pod;
    for (index, own) in [(0, "3"), (1, "2")] {
        let all = env(&made["spec"]["containers"][index]);
        assert!(
            all.contains(&format!("ALIYUN_COM_GPU_MEM_CONTAINER={own}")),
            "{all:?}"
        );
        assert!(
            all.contains(&"ALIYUN_COM_GPU_MEM_POD=5".to_owned()),
            "{all:?}"
        );
    }
    Ok(())
}

#[test]
fn annotation_of_hami_that_chooses_gpus_becomes_that_of_gpustow() -> Result<()> {
    for (theirs, value, ours, expected) in [
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
    ] {
        let limits = json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "9" });
        let made =
            site("hami", &[]).create(&pod(json!({ theirs: value }), json!([of("a", limits)])))?;
        assert_eq!(note(&made.pod, ours), Some(expected));
        assert_eq!(made.warnings, Vec::<String>::new());
    }
    Ok(())
}

#[test]
fn request_that_is_not_translated_is_refused_by_name() -> Result<()> {
    let whole = || of("b", json!({ "nvidia.com/gpu": "1" }));
    let memory = || {
        of(
            "a",
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "9" }),
        )
    };
    let vgpu = json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "9" });
    let one = |limits: Value| pod(json!({}), json!([of("a", limits)]));
    let grouped = pod(
        json!({ "scheduling.k8s.io/group-name": "job" }),
        json!([of("a", vgpu.clone())]),
    );
    let hami = "gpustow cannot translate a request of HAMi for whole GPUs in one container";
    let mut counted = one(json!({ names::GPUSHARE_MEM: "8" }));
    counted["metadata"]["labels"] = json!({ "aliyun.com/gpu-count": "2" });
    let both = json!({ "nvidia.com/gpu": "1", names::GPU_MEM: "40960" });
    for (sharer, asked, expected) in [
        ("hami", pod(json!({}), json!([memory(), whole()])), hami),
        (
            "hami",
            one(json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "101" })),
            hami,
        ),
        (
            "volcano",
            grouped,
            "gpustow cannot translate a request of Volcano",
        ),
        (
            "volcano",
            one(
                json!({ "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory-percentage": "500" }),
            ),
            "request of Volcano",
        ),
        (
            "gpushare",
            one(vgpu.clone()),
            "gpustow translates no such request in a namespace with the label gpustow.dev/adopt: gpushare",
        ),
        (
            "hami",
            one(json!({ "nvidia.com/vgpu": "2", "nvidia.com/gpumem": "9" })),
            "limits[nvidia.com/vgpu]: gpustow translates no such",
        ),
        (
            "volcano",
            one(json!({ "volcano.sh/vgpu-mem": "9" })),
            "write volcano.sh/vgpu-memory or gpustow.dev/gpu-mem",
        ),
        (
            "gpushare",
            counted,
            "metadata.labels[aliyun.com/gpu-count]: gpustow does not read the label",
        ),
        (
            "whole",
            one(both.clone()),
            "limits[nvidia.com/gpu]: a container asks either for this or for gpustow.dev/gpu-mem",
        ),
        ("hami", one(both), "a container asks either for this or"),
        (
            "gpushare",
            one(json!({ names::GPUSHARE_MEM: "1500m" })),
            "\"1500m\" is not a whole number",
        ),
        (
            "mig",
            one(json!({ "nvidia.com/mig-1g.11gb": "1" })),
            "limits[nvidia.com/mig-1g.11gb]: gpustow knows the MiB of these MIG profiles: 1g.5gb, 1g.6gb",
        ),
        (
            "mig",
            one(json!({ "nvidia.com/mig-1g.5gb": "1", "nvidia.com/mig-2g.10gb": "1" })),
            "a container asks either for this or for nvidia.com/mig-2g.10gb",
        ),
        (
            "mig-instance",
            one(json!({ "nvidia.com/mig-1g.5gb": "2" })),
            "instance",
        ),
        (
            "nvshare",
            one(vgpu),
            "nvshare is no sharer whose requests gpustow translates",
        ),
    ] {
        let said = site(sharer, &[]).refusal(&asked)?;
        assert!(said.contains(expected), "{said}\nexpected {expected}");
    }
    let said = site("volcano", &[(names::ADOPT_UNIT_LABEL, "10")])
        .refusal(&one(json!({ "volcano.sh/vgpu-number": "1" })))?;
    assert!(
        said.contains("write MiB, GiB, or a number of MiB as 10MiB"),
        "{said}"
    );
    Ok(())
}

#[test]
fn what_is_no_request_for_a_gpu_passes_and_what_is_unknown_is_warned_of() -> Result<()> {
    let nics = json!({ "nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1" });
    let made = site("whole", &[]).create(&pod(json!({}), json!([of("a", nics)])))?;
    assert_eq!(made.warnings, Vec::<String>::new());
    assert_eq!(
        made.pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mlnxnics"],
        "1"
    );
    let strange = json!({ "nvidia.com/gpumem": "9", "nvidia.com/strange": "1" });
    let notes = json!({ "hami.io/gpu-scheduler-policy": "spread" });
    let said = site("hami", &[])
        .create(&pod(notes, json!([of("a", strange)])))?
        .warnings;
    assert!(
        said.iter().any(
            |it| it.contains("limits[nvidia.com/strange]: gpustow does not know this resource")
        ),
        "{said:?}"
    );
    assert!(
        said.iter()
            .any(|it| it.contains("hami.io/gpu-scheduler-policy]: gpustow does not follow it")),
        "{said:?}"
    );
    // NVIDIA's own plugin still serves namespaces of gpushare, and other namespaces notice nothing.
    for site in [site("gpushare", &[]), Site::default()] {
        let asked = pod(
            json!({}),
            json!([of("a", json!({ "nvidia.com/gpu": "1" }))]),
        );
        let made = site.create(&asked)?;
        assert_eq!((made.pod, made.warnings), (asked, Vec::new()));
    }
    site("hami", &[]).create(&pod(json!({}), json!([asks("a", "1")])))?;
    Ok(())
}
