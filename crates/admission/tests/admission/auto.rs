//! Pods that leave their amount to the history of their workload.

use anyhow::Result;
use gpustow_api::workload::{Amounts, ContainerHistory};
use gpustow_api::{GpuWorkload, GpuWorkloadSpec, names};
use serde_json::{Value, json};

use crate::{Site, amount, asks, note, pod};

pub(crate) fn site(quantile: &str, default: Option<&str>) -> Site {
    let mut site = Site::labelled(&[(names::AUTO_LABEL, quantile)]);
    let notes = default.map(|it| [(names::AUTO_DEFAULT.to_owned(), it.to_owned())].into());
    site.namespace.annotations = notes;
    let advice = Amounts {
        p95_mib: 3000,
        p99_mib: 4000,
        limit_mib: 5000,
        enough: true,
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
    // A pod that says its amount keeps it.
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
            "label it gpustow.dev/auto: p95 or p99, or write an amount",
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
