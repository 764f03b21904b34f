//! Quotas and LimitRanges without their apparent effect.

use gpustow_admission::adopt::Terms;
use gpustow_inspect::{Bounds, Cluster};
use kube::ResourceExt as _;

use super::{Findings, Level};
use crate::bounds::{given, stale};

pub(super) fn look(cluster: &Cluster, bounds: Option<&Bounds>, findings: &mut Findings) {
    let Some(bounds) = bounds else {
        findings.add(
            Level::Info,
            "quotas",
            "quotas and LimitRanges were not checked: you may not read them, or namespaces",
            "ask for the ClusterRole gpustow-viewer",
        );
        return;
    };
    let resource = cluster.resource();
    let terms = |name: &str| {
        let mut all = bounds.namespaces.iter();
        let found = all.find(|it| it.name_any() == name)?;
        Terms::of(&found.metadata).ok().flatten()
    };
    for it in stale(bounds, terms, resource) {
        findings.add(Level::Warning, it.object, it.problem, it.fix);
    }
    for (object, mib, is_most) in given(bounds, resource) {
        let (level, most) = match is_most {
            true => (Level::Warning, ", the most that one may request"),
            false => (Level::Info, ""),
        };
        findings.add(
            level,
            object,
            format!("it gives {mib} MiB of GPU memory to each container that requests none{most}"),
            format!("set default: {{{resource}: \"0\"}} in it: docs/quotas.md"),
        );
    }
}
