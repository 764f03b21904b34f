//! Pods that request a percentage of a GPU, whatever its size.

use anyhow::Result;
use gpustow_api::{Assignment, names};
use gpustow_testkit::{Case, wait_bound, wait_refused};

use crate::support::{SOON, rig};

#[tokio::test]
async fn pods_hold_their_percentage_of_the_gpu_that_they_get() -> Result<()> {
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "percentage").await?;
    for (node, mib) in [("n", 10_001), ("m", 20_000)] {
        let node = case.node(node, &[mib]).label("is", node);
        node.create(&case.client).await?;
    }
    let part = |name: &str, node: &str, percentage: &str| {
        let pod = case.pod(name).gpu_mem(100);
        let pod = pod.annotation(names::GPU_MEM_PERCENTAGE, percentage);
        pod.node_selector("is", node)
    };
    for (name, node, percentage, mib) in [
        ("a", "n", "25", 2_500),
        ("b", "n", "50", 5_000),
        ("c", "m", "25", 5_000),
        // The amount is the minimum.
        ("d", "m", "1", 200),
    ] {
        let pod = part(name, node, percentage).create(&case.client).await?;
        let bound = wait_bound(&case.client, &pod, SOON).await?;
        let annotations = bound.metadata.annotations.unwrap_or_default();
        let assignment = Assignment::decode(&annotations[names::ASSIGNMENT])?;
        assert_eq!(assignment.charges[0].1.0, mib, "{name}");
        let told = annotations.get(&format!("{}main", names::MIB_OF));
        assert_eq!(told, Some(&mib.to_string()), "{name}");
    }
    // kube-scheduler counts 200 of the 10,001 MiB, and 2,501 are left.
    let large = part("e", "n", "26").create(&case.client).await?;
    wait_refused(&case.client, &large, "free memory", SOON).await?;
    let last = part("f", "n", "25").create(&case.client).await?;
    wait_bound(&case.client, &last, SOON).await?;
    rig.end(case).await
}
