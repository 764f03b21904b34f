//! Rules for kube-scheduler's configuration.

use gpustow_api::intree::nodes_to_find;
use gpustow_api::names;
use gpustow_inspect::Cluster;
use serde::Deserialize as _;
use serde_json::Value as Json;

use super::{Findings, Level};

/// Nodes that kube-scheduler looks at for a pod in a few milliseconds.
const MANY: usize = 500;
pub(super) fn look(cluster: &Cluster, findings: &mut Findings) {
    let Some(configs) = &cluster.configs else {
        findings.add(
            Level::Info,
            "configuration",
            "the scheduler's configuration was not checked: you may not read it",
            format!(
                "ask for the right to list ConfigMaps in {}",
                names::NAMESPACE
            ),
        );
        return;
    };
    for config in configs {
        let name = config.metadata.name.as_deref().unwrap_or_default();
        for text in config.data.iter().flat_map(|data| data.values()) {
            for document in serde_yaml::Deserializer::from_str(text) {
                if let Ok(value) = Json::deserialize(document)
                    && value["kind"] == "KubeSchedulerConfiguration"
                {
                    configuration(&format!("configmap/{name}"), &value, cluster, findings);
                }
            }
        }
    }
}

/// Checks the scheduler's configuration against the rules.
fn configuration(object: &str, config: &Json, cluster: &Cluster, findings: &mut Findings) {
    let list = |value: &Json, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let ours = list(config, "extenders").into_iter().find_map(|extender| {
        let resources = list(&extender, "managedResources");
        let resource = resources
            .iter()
            .find(|it| it["name"] == cluster.resource())?
            .clone();
        Some((extender, resource))
    });
    let Some((extender, resource)) = ours else {
        findings.add(
            Level::Error,
            object,
            format!("no extender manages {}", cluster.resource()),
            "take extenders from scheduler-config/gpustow-scheduler.yaml",
        );
        return;
    };
    let mut wrong = |is: bool, setting: &str, why: &str| {
        if is {
            findings.add(Level::Error, object, why, format!("set {setting}"));
        }
    };
    let on = |value: &Json| value == true;
    wrong(
        !on(&extender["nodeCacheCapable"]),
        "nodeCacheCapable: true",
        "the extender is sent whole nodes and answers with an error",
    );
    wrong(
        on(&extender["ignorable"]),
        "ignorable: false",
        "pods are bound without a GPU while the extender is down",
    );
    wrong(
        extender["weight"] != 1,
        "weight: 1",
        "the extender's scores outweigh the pods' own preferences",
    );
    wrong(
        on(&resource["ignoredByScheduler"]),
        "ignoredByScheduler: false",
        "kube-scheduler does not count the node's memory itself",
    );
    for verb in ["filterVerb", "preemptVerb", "bindVerb"] {
        wrong(
            extender[verb].as_str().is_none_or(str::is_empty),
            &format!("{verb}, as in scheduler-config/"),
            &format!("the extender is not called: {verb} is missing"),
        );
    }
    for profile in list(config, "profiles") {
        if profile["schedulerName"] == names::SCHEDULER {
            sampling(object, config, &profile, cluster, findings);
        }
    }
}

/// Looking at many nodes for each pod costs time; looking at few nodes opens nodes that could have stayed empty. The
/// limits are in docs/packing.md.
fn sampling(
    object: &str,
    config: &Json,
    profile: &Json,
    cluster: &Cluster,
    findings: &mut Findings,
) {
    let key = "percentageOfNodesToScore";
    // As for kube-scheduler, a profile without the key has the configuration's.
    let set = [&profile[key], &config[key]]
        .into_iter()
        .find_map(Json::as_u64)
        .unwrap_or_default();
    let nodes = cluster.nodes.len();
    let found = nodes_to_find(usize::try_from(set).unwrap_or(usize::MAX), nodes);
    let adaptive = nodes_to_find(0, nodes);
    let (level, costs) = if found > MANY && found > 2 * adaptive {
        (Level::Warning, "which makes it slow")
    } else if 3 * found < adaptive {
        (Level::Info, "which leaves fewer nodes empty")
    } else {
        return;
    };
    findings.add(
        level,
        object,
        format!("kube-scheduler looks at {found} of {nodes} nodes for each pod, {costs}"),
        format!("set {key}: 0 (adaptive) in the profile"),
    );
}
