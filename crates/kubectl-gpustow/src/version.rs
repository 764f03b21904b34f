//! `version`: of this program, of gpustow's parts in the cluster, and of the API server.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use gpustow_inspect::system::{AGENT, EXTENDER, SCHEDULER, container};
use gpustow_inspect::{Cluster, Error};

use crate::answer::Answer;

/// Prints this program's version first: it is known where no cluster answers.
pub(crate) fn run(cluster: Result<Box<Cluster>, Error>, out: &mut dyn Write) -> Result<Answer> {
    writeln!(out, "kubectl-gpustow: v{}", env!("CARGO_PKG_VERSION"))?;
    let system = &cluster?.system;
    for part in [EXTENDER, SCHEDULER, AGENT] {
        let mut images: BTreeMap<&str, u64> = BTreeMap::new();
        for pod in system.pods_with(part) {
            let image = container(pod, part).and_then(|it| it.image.as_deref());
            *images.entry(image.unwrap_or_default()).or_default() += 1;
        }
        for (image, pods) in images {
            writeln!(out, "{part}: {image} ({pods} pods)")?;
        }
    }
    if let Some(minor) = system.minor {
        writeln!(out, "Kubernetes: 1.{minor}")?;
    }
    Ok(Answer::Yes)
}
