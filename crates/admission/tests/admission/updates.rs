//! Annotations that change once the pod has been created.

use anyhow::Result;
use gpustow_admission::Act;
use gpustow_api::names;
use serde_json::{Value, json};

use crate::{Site, asks, pod};

/// The refusal of a pod whose annotations were `before` and become `after`; empty if none.
fn change(site: &Site, before: Value, after: Value, bound: bool, resizes: bool) -> String {
    let of = |notes: Value| {
        let mut pod = pod(notes, json!([asks("a", "4096")]));
        if bound {
            pod["spec"]["nodeName"] = json!("n");
        }
        pod
    };
    let before = of(before);
    let act = Act::Annotate {
        before: &before,
        resizes,
    };
    let said = site.ask(&of(after), act).err();
    said.map(|it| it.to_string()).unwrap_or_default()
}

#[test]
fn pod_that_waits_may_change_its_mind_within_the_rules() -> Result<()> {
    let site = Site::default();
    let none = || json!({});
    for (before, after, expected) in [
        (none(), json!({ names::GPU_COUNT: "2" }), ""),
        (
            none(),
            json!({ names::GPU_COUNT: "x" }),
            "is not a number of GPUs",
        ),
        (
            none(),
            json!({ "gpustow.dev/gpu-counts": "2" }),
            "there is no such annotation",
        ),
        (
            none(),
            json!({ names::MEM_LIMIT: "8192" }),
            "was written into its containers when it was created",
        ),
        (
            none(),
            json!({ names::ENFORCE: "none" }),
            "was written into its containers",
        ),
        (
            json!({ names::ENFORCE: "driver" }),
            json!({ names::ENFORCE: "driver", names::GPU_COUNT: "2" }),
            "was written into",
        ),
        (
            json!({ names::ENFORCE: "driver" }),
            json!({ names::ENFORCE: "driver", names::POLICY: "spread" }),
            "",
        ),
        // A value that an older rule accepted stays.
        (
            json!({ names::POLICY: "best" }),
            json!({ names::POLICY: "best", "team": "a" }),
            "",
        ),
    ] {
        let said = change(&site, before, after, false, false);
        assert!(
            said.contains(expected) && said.is_empty() == expected.is_empty(),
            "{said}"
        );
    }
    let site = Site::with(json!({ "requests": { "leastMiBPerExclusiveGpu": 81920 } }))?;
    let said = change(
        &site,
        none(),
        json!({ names::EXCLUSIVE: "true" }),
        false,
        false,
    );
    assert!(said.contains("ask for 81920"), "{said}");
    Ok(())
}

#[test]
fn pod_that_is_bound_keeps_what_it_requested() {
    let site = Site::default();
    let none = || json!({});
    let limit = || json!({ names::MEM_LIMIT: "8192" });
    for (after, resizes, expected) in [
        (
            json!({ names::GPU_COUNT: "2" }),
            false,
            "the pod is bound to its GPUs already: leave it as it was",
        ),
        (
            json!({ names::EVICTABLE: "true" }),
            true,
            "the pod is bound to its GPUs already",
        ),
        (limit(), false, "the right to resize limits.gpustow.dev"),
        (limit(), true, ""),
        (
            json!({ names::MEM_LIMIT: "1" }),
            true,
            "MiB are less than the 4096",
        ),
        (json!({ names::ASLEEP: "true" }), false, ""),
        (json!({ names::ASLEEP: "perhaps" }), false, "is neither"),
    ] {
        let said = change(&site, none(), after, true, resizes);
        assert!(
            said.contains(expected) && said.is_empty() == expected.is_empty(),
            "{said}"
        );
    }
}
