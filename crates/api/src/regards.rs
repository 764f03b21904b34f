//! Which other pods decide, for kube-scheduler, whether a node is for a pod: its rules of affinity and spread, its host
//! ports, volumes and resource claims.

use k8s_openapi::api::core::v1::{PodAffinityTerm, PodSpec, Volume};

use crate::selector::Selector;
use crate::{PodFacts, names};

/// How far kube-scheduler looks for other pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Regards {
    /// No other pod counts.
    #[default]
    NoPod,
    /// Pods on the same node.
    PodsOfNode,
    /// Pods of the same zone or the like, or of the whole cluster.
    AllPods,
}

impl Regards {
    /// The pods that decide for a pod with this spec.
    #[must_use]
    pub fn of(spec: &PodSpec) -> Self {
        let affinity = spec.affinity.as_ref();
        let near = affinity.and_then(|it| it.pod_affinity.as_ref());
        let near = near.and_then(|it| {
            it.required_during_scheduling_ignored_during_execution
                .as_ref()
        });
        let containers = spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten());
        let mut ports = containers.flat_map(|it| it.ports.iter().flatten());
        let mut spreads = spec.topology_spread_constraints.iter().flatten();
        let local = spec.resource_claims.iter().flatten().next().is_some()
            || ports.any(|port| port.host_port.is_some_and(|it| it > 0))
            || !spec.volumes.iter().flatten().all(is_for_any_pod);
        match spreads.any(|spread| spread.when_unsatisfiable == "DoNotSchedule") {
            true => Self::AllPods,
            false if local => Self::PodsOfNode,
            false => Self::NoPod,
        }
        .max(Self::of_terms(near.map_or(&[], |terms| terms)))
        .max(Self::repelled_by(spec))
    }

    /// The pods that a bound pod with this spec keeps away from where it is.
    #[must_use]
    pub fn repelled_by(spec: &PodSpec) -> Self {
        Self::of_terms(anti_affinity(spec))
    }

    fn of_terms(terms: &[PodAffinityTerm]) -> Self {
        let of = |term: &PodAffinityTerm| match term.topology_key == names::HOSTNAME {
            true => Self::PodsOfNode,
            false => Self::AllPods,
        };
        terms.iter().map(of).max().unwrap_or_default()
    }
}

fn anti_affinity(spec: &PodSpec) -> &[PodAffinityTerm] {
    let affinity = spec.affinity.as_ref();
    let away = affinity.and_then(|it| it.pod_anti_affinity.as_ref());
    let away = away.and_then(|it| {
        it.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    away.map_or(&[], |terms| terms)
}

/// The pods of its own namespace that a pod keeps off its node by required anti-affinity.
pub(crate) fn kept_off(spec: &PodSpec) -> Box<[Selector]> {
    let terms = anti_affinity(spec).iter();
    let terms = terms.filter(|it| it.topology_key == names::HOSTNAME);
    let own = terms.filter(|it| it.namespaces.is_none() && it.namespace_selector.is_none());
    let selectors = own.filter_map(|it| it.label_selector.as_ref());
    selectors.map(Selector::of).collect()
}

impl PodFacts {
    /// Does required anti-affinity of one keep the other off its node? Terms for other namespaces are not looked at.
    #[must_use]
    pub fn is_kept_off_by(&self, other: &Self) -> bool {
        let keeps_off = |one: &Self, other: &Self| {
            let mut selectors = one.constraints.kept_off.iter();
            selectors.any(|it| it.selects(&other.labels))
        };
        self.namespace == other.namespace && (keeps_off(self, other) || keeps_off(other, self))
    }
}

/// May any number of pods have the volume on any node?
fn is_for_any_pod(volume: &Volume) -> bool {
    volume.config_map.is_some()
        || volume.downward_api.is_some()
        || volume.empty_dir.is_some()
        || volume.host_path.is_some()
        || volume.image.is_some()
        || volume.nfs.is_some()
        || volume.projected.is_some()
        || volume.secret.is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(mut spec: Value) -> (Regards, Regards) {
        if spec["containers"].is_null() {
            spec["containers"] = json!([]);
        }
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        (Regards::of(&spec), Regards::repelled_by(&spec))
    }

    #[test]
    fn spec_says_how_far_kube_scheduler_looks_for_other_pods() {
        use Regards::{AllPods, NoPod, PodsOfNode};
        let required = |kind: &str, key: &str| {
            let terms = json!([{ "topologyKey": key, "labelSelector": {} }]);
            let required = "requiredDuringSchedulingIgnoredDuringExecution";
            json!({ "affinity": { kind: { required: terms } } })
        };
        let spread = |then: &str| {
            let it =
                json!({ "maxSkew": 1, "topologyKey": names::HOSTNAME, "whenUnsatisfiable": then });
            json!({ "topologySpreadConstraints": [it] })
        };
        let volume = |source: &str| json!({ "volumes": [{ "name": "v", source: {} }] });
        let claim = json!({ "claimName": "c" });
        let port = |number: i32| {
            let ports = json!([{ "containerPort": 80, "hostPort": number }]);
            json!({ "containers": [{ "name": "c", "ports": ports }] })
        };
        let affinity = required("podAffinity", names::HOSTNAME);
        let cases = [
            (json!({}), NoPod, NoPod),
            (affinity, PodsOfNode, NoPod),
            (required("podAffinity", "zone"), AllPods, NoPod),
            (
                required("podAntiAffinity", names::HOSTNAME),
                PodsOfNode,
                PodsOfNode,
            ),
            (required("podAntiAffinity", "zone"), AllPods, AllPods),
            (spread("DoNotSchedule"), AllPods, NoPod),
            (spread("ScheduleAnyway"), NoPod, NoPod),
            (port(0), NoPod, NoPod),
            (port(80), PodsOfNode, NoPod),
            (volume("emptyDir"), NoPod, NoPod),
            (
                json!({ "volumes": [{ "name": "v", "persistentVolumeClaim": claim }] }),
                PodsOfNode,
                NoPod,
            ),
            (volume("ephemeral"), PodsOfNode, NoPod),
            (
                json!({ "resourceClaims": [{ "name": "r" }] }),
                PodsOfNode,
                NoPod,
            ),
        ];
        for (spec, regards, repels) in cases {
            assert_eq!(of(spec.clone()), (regards, repels), "{spec}");
        }
    }
}
