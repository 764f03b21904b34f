//! Shares of GPUs that NVIDIA's device plugin gives to several pods in turn.

use anyhow::{Context as _, Result};
use gpustow_api::names;
use serde_json::json;

use crate::auto::site as with_history;
use crate::{Site, amount, note, of, pod};

const SHARED: &str = "nvidia.com/gpu.shared";
const PART: &str = "gpu-mem-percentage.gpustow.dev/a";

fn site(replicas: &str, more: &[(&str, &str)]) -> Site {
    let labels = [
        (names::ADOPT_LABEL, "time-slicing"),
        (names::ADOPT_REPLICAS_LABEL, replicas),
    ];
    Site::labelled(&[&labels, more].concat())
}

#[test]
fn share_of_a_gpu_becomes_a_percentage_of_it() -> Result<()> {
    let sized: &[_] = &[(names::ADOPT_MIB_LABEL, "40960")];
    for (replicas, labels, key, shares, mib, percentage, gpus) in [
        ("10", &[][..], names::NVIDIA_GPU, "1", "102", "10", None),
        ("10", sized, names::NVIDIA_GPU, "1", "4096", "10", None),
        ("10", sized, SHARED, "3", "12288", "30", None),
        ("3", sized, names::NVIDIA_GPU, "1", "13516", "33", None),
        ("4", sized, names::NVIDIA_GPU, "4", "40960", "100", None),
        ("4", sized, names::NVIDIA_GPU, "6", "61440", "75", Some("2")),
        ("100", &[], names::NVIDIA_GPU, "1", "10", "1", None),
    ] {
        let what = format!("{shares} of {replicas}");
        let asked = pod(json!({}), json!([of("a", json!({ key: shares }))]));
        let made = site(replicas, labels)
            .create(&asked)
            .context(what.clone())?;
        assert_eq!(amount(&made.pod, 0), Some(mib), "{what}");
        assert_eq!(note(&made.pod, PART), Some(percentage), "{what}");
        assert_eq!(note(&made.pod, "gpu-count.gpustow.dev/a"), gpus, "{what}");
        assert_eq!(note(&made.pod, names::EXCLUSIVE), None, "{what}");
        assert_eq!(note(&made.pod, names::ADOPTED), Some("time-slicing"));
        assert_eq!(made.warnings, Vec::<String>::new());
    }
    Ok(())
}

#[test]
fn namespace_must_say_how_many_shares_a_gpu_has() -> Result<()> {
    let asked = pod(json!({}), json!([of("a", json!({ SHARED: "1" }))]));
    for replicas in ["", "0", "101", "ten"] {
        let said = site(replicas, &[]).refusal(&asked)?;
        assert!(
            said.contains("namespace label gpustow.dev/adopt-replicas")
                && said.contains("write 1 to 100"),
            "{said}"
        );
    }
    Ok(())
}

#[test]
fn workload_with_a_history_gets_its_amount_where_the_namespace_allows_that() -> Result<()> {
    let mut container = of("a", json!({ names::NVIDIA_GPU: "1" }));
    container["image"] = json!("cuda");
    let asked = pod(json!({}), json!([container]));
    for (allowed, known, mib, from) in [
        (true, true, "4000", Some("auto-p99")),
        (true, false, "102", None),
        (false, true, "102", None),
    ] {
        let auto: &[_] = if allowed {
            &[(names::AUTO_LABEL, "p99")]
        } else {
            &[]
        };
        let mut site = site("10", auto);
        site.history = with_history("p99", None).history.filter(|_| known);
        let made = site.create(&asked)?;
        assert_eq!(amount(&made.pod, 0), Some(mib));
        assert_eq!(note(&made.pod, names::GPU_MEM), from);
        assert_eq!(note(&made.pod, PART).is_none(), from.is_some());
        let again = site.create(&made.pod)?;
        assert_eq!(again.pod, made.pod);
    }
    Ok(())
}
