//! Pods that leave their amount to the history of their workload.

use anyhow::Result;
use gpustow_api::workload::{Against, Amounts, ContainerHistory};
use gpustow_api::{GpuWorkload, GpuWorkloadSpec, names};
use serde_json::{Value, json};

use crate::{Site, amount, asks, note, pod};

pub(crate) fn site(quantile: &str, default: Option<&str>) -> Site {
    let mut site = Site::labelled(&[(names::AUTO_LABEL, quantile)]);
    let notes = default.map(|it| [(names::AUTO_DEFAULT.to_owned(), it.to_owned())].into());
    site.namespace.annotations = notes;
    let advice = Amounts {
        request_mib: 3500,
        p95_mib: 3000,
        p99_mib: 4000,
        limit_mib: 5000,
        enough: true,
        against: Vec::new(),
    };
    let container = ContainerHistory {
        name: "a".to_owned(),
        image: "cuda".to_owned(),
        advice,
        ..ContainerHistory::default()
    };
    let spec = GpuWorkloadSpec {
        containers: vec![container],
        ..GpuWorkloadSpec::default()
    };
    site.history = Some(GpuWorkload::new("pod-p", spec));
    site
}

fn leaves(more: Value) -> Value {
    let mut notes = more;
    notes[names::GPU_MEM] = json!("auto");
    pod(notes, json!([{ "name": "a", "image": "cuda" }]))
}

#[test]
fn pod_gets_what_its_history_advises_else_the_default_of_the_namespace() -> Result<()> {
    let none = |site: Site| Site {
        history: None,
        ..site
    };
    for (site, notes, mib, from, limit) in [
        (
            site("p95", None),
            json!({}),
            "3000",
            "auto-p95",
            Some("5000"),
        ),
        (
            site("p99", Some("512")),
            json!({}),
            "4000",
            "auto-p99",
            Some("5000"),
        ),
        (
            site("p95", None),
            json!({ names::GPU_COUNT: "2" }),
            "6000",
            "auto-p95",
            Some("10000"),
        ),
        (
            site("p95", None),
            json!({ names::MEM_LIMIT: "max" }),
            "3000",
            "auto-p95",
            None,
        ),
        (
            site("advised", None),
            json!({}),
            "3500",
            "auto-advised",
            Some("5000"),
        ),
        (
            none(site("p95", Some("512"))),
            json!({}),
            "512",
            "auto-default",
            None,
        ),
    ] {
        let made = site.create(&leaves(notes))?.pod;
        assert_eq!(amount(&made, 0), Some(mib));
        assert_eq!(note(&made, names::GPU_MEM), Some(from));
        assert_eq!(note(&made, "gpu-mem-limit.gpustow.dev/a"), limit);
    }
    // A pod that states its amount keeps it.
    let said = pod(json!({ names::GPU_MEM: "auto" }), json!([asks("a", "7")]));
    assert_eq!(amount(&site("p95", None).create(&said)?.pod, 0), Some("7"));
    Ok(())
}

#[test]
fn pod_without_an_amount_is_refused_with_what_to_write() -> Result<()> {
    let none = |site: Site| Site {
        history: None,
        ..site
    };
    for (site, expected) in [
        (
            site("p50", None),
            "label it gpustow.dev/auto: advised, or write an amount",
        ),
        (
            none(site("p95", None)),
            "write the MiB of each GPU into its annotation gpustow.dev/auto-default",
        ),
        (
            none(site("p95", Some("8Gi"))),
            "gpustow.dev/auto-default is no number of MiB",
        ),
    ] {
        let said = site.refusal(&leaves(json!({})))?;
        assert!(
            said.starts_with("metadata.annotations[gpustow.dev/gpu-mem]: "),
            "{said}"
        );
        assert!(said.contains(expected), "{said}");
    }
    Ok(())
}

/// A namespace with the default 512, and this workload's histories: image, size of the GPU, amount, enough, against.
fn histories(all: &[(&str, u64, u64, bool, &[Against])]) -> Site {
    let mut site = site("advised", Some("512"));
    let containers = all.iter().map(|(image, gpu, mib, enough, against)| {
        let mut container = ContainerHistory {
            name: "a".to_owned(),
            image: (*image).to_owned(),
            gpu_mib: *gpu,
            ..ContainerHistory::default()
        };
        container.advice.request_mib = *mib;
        container.advice.limit_mib = *mib;
        container.advice.enough = *enough;
        container.advice.against = against.to_vec();
        container
    });
    let spec = GpuWorkloadSpec {
        containers: containers.collect(),
        ..GpuWorkloadSpec::default()
    };
    site.history = Some(GpuWorkload::new("pod-p", spec));
    site
}

#[test]
fn pod_gets_no_amount_that_advise_would_not_put_into_a_patch() -> Result<()> {
    for (all, mib, from) in [
        (
            &[("cuda", 80_000, 9000, true, &[][..])][..],
            "9000",
            "auto-advised",
        ),
        (&[("cuda", 80_000, 9000, false, &[])], "512", "auto-default"),
        (
            &[("cuda", 80_000, 9000, true, &[Against::TakesEverything])],
            "512",
            "auto-default",
        ),
        (
            &[("cuda", 80_000, 9000, true, &[Against::Mps])],
            "512",
            "auto-default",
        ),
        (
            &[("cuda", 20_000, 9000, true, &[Against::Mig])],
            "512",
            "auto-default",
        ),
        // On GPUs of two sizes it must run on both.
        (
            &[
                ("cuda", 80_000, 30_000, true, &[]),
                ("cuda", 48_000, 20_000, true, &[]),
            ],
            "30000",
            "auto-advised",
        ),
        (
            &[
                ("cuda", 80_000, 30_000, true, &[]),
                ("cuda", 48_000, 20_000, false, &[]),
            ],
            "30000",
            "auto-advised",
        ),
        (
            &[
                ("cuda", 80_000, 30_000, true, &[]),
                ("cuda", 48_000, 44_000, true, &[Against::TakesEverything]),
            ],
            "512",
            "auto-default",
        ),
        // A new image begins with the earlier image's amount, or with its own if that is more.
        (
            &[("old", 80_000, 9000, true, &[])],
            "9000",
            "auto-earlier-image",
        ),
        (
            &[
                ("old", 80_000, 9000, true, &[]),
                ("cuda", 80_000, 11_000, false, &[]),
            ],
            "11000",
            "auto-earlier-image",
        ),
        (
            &[
                ("old", 80_000, 9000, true, &[]),
                ("cuda", 80_000, 8000, true, &[]),
            ],
            "8000",
            "auto-advised",
        ),
        (
            &[("old", 80_000, 9000, true, &[Against::TakesEverything])],
            "512",
            "auto-default",
        ),
    ] {
        let made = histories(all).create(&leaves(json!({})))?.pod;
        assert_eq!(
            (amount(&made, 0), note(&made, names::GPU_MEM)),
            (Some(mib), Some(from)),
            "{all:?}"
        );
    }
    Ok(())
}
