//! `/preempt`: which of the scheduler's candidate nodes would do, and who else must go there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, Victims};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::ListParams;
use kube::core::{Selector, SelectorExt};
use kube::{Api, ResourceExt};

use crate::App;
use crate::failure::{ErrorKind, Failure};
use crate::wire::{ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaPod};

/// The candidate nodes on which the pod fits once its victims are gone. Never a node without a
/// victim: kube-scheduler takes that for a failure.
///
/// # Errors
/// With a text for the log; the protocol has no place for it.
pub(crate) async fn preempt(
    app: &Arc<App>,
    args: ExtenderPreemptionArgs,
) -> Result<ExtenderPreemptionResult, Failure> {
    if args.has_full_victims {
        return Err(Failure::new(
            ErrorKind::Decode,
            "kube-scheduler sends whole pods: set nodeCacheCapable: true",
        ));
    }
    let pod = PodFacts::from_pod(&args.pod, &app.args.resource_name)
        .ok_or_else(|| Failure::new(ErrorKind::Decode, "the pod has no UID"))?;
    let request = pod.request.as_ref();
    let request = request.map_err(|bad| Failure::of_pod(bad.to_string()))?;
    if request.is_empty() {
        return Ok(ExtenderPreemptionResult {
            node_name_to_meta_victims: args.victims,
        });
    }
    app.may_decide().await?;
    let mut answer = BTreeMap::new();
    for (node, mut victims) in args.victims {
        let uids: Vec<Arc<str>> = victims
            .pods
            .iter()
            .map(|pod| pod.uid.as_str().into())
            .collect();
        let Some(mut added) = added(app, &pod, &node, &uids, &HashSet::new()) else {
            continue;
        };
        if !added.uids.is_empty() {
            let protected = protected(app, &node).await.map_err(|error| {
                let text = format!("cannot read disruption budgets for node {node}: {error}");
                Failure::new(ErrorKind::Api, text)
            })?;
            match self::added(app, &pod, &node, &uids, &protected) {
                Some(better) => added = better,
                None => continue,
            }
        }
        let extra = added.uids.iter().map(|uid| MetaPod {
            uid: uid.to_string(),
        });
        victims.pods.extend(extra);
        victims.num_pdb_violations = victims.num_pdb_violations.saturating_add(added.protected);
        if !victims.pods.is_empty() {
            answer.insert(node, victims);
        }
    }
    tracing::info!(
        namespace = %pod.namespace, pod = %pod.name, nodes = answer.len(), "asked whom to evict"
    );
    Ok(ExtenderPreemptionResult {
        node_name_to_meta_victims: answer,
    })
}

fn added(
    app: &App,
    pod: &PodFacts,
    node: &str,
    victims: &[Arc<str>],
    protected: &HashSet<String>,
) -> Option<Victims> {
    let ask = Ask {
        pod,
        cooperative: false,
        slow: false,
        tolerates: &|_| true,
    };
    let now = app.now();
    app.ledger()
        .preempt(&ask, node, victims, &|uid| protected.contains(uid), now)
}

/// UIDs of pods on a node whose eviction would break a disruption budget.
async fn protected(app: &App, node: &str) -> Result<HashSet<String>, kube::Error> {
    let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods = Api::<Pod>::all(app.client.clone()).list(&here).await?;
    let budgets = Api::<PodDisruptionBudget>::all(app.client.clone());
    let budgets = budgets.list(&ListParams::default()).await?;
    let mut used: HashMap<String, i32> = HashMap::new();
    let mut protected = HashSet::new();
    for pod in pods {
        let covering = budgets.iter().filter(|budget| covers(budget, &pod));
        for budget in covering {
            let allowed = budget
                .status
                .as_ref()
                .map_or(0, |status| status.disruptions_allowed);
            let used = used.entry(budget.uid().unwrap_or_default()).or_default();
            *used += 1;
            if *used > allowed {
                protected.extend(pod.uid());
            }
        }
    }
    Ok(protected)
}

fn covers(budget: &PodDisruptionBudget, pod: &Pod) -> bool {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.clone());
    let selector: Option<Selector> = selector.and_then(|s: LabelSelector| s.try_into().ok());
    budget.namespace() == pod.namespace()
        && selector.is_some_and(|selector| selector.matches(pod.labels()))
}
