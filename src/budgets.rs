//! Disruption budgets: whose end would break one.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::core::{Selector, SelectorExt};
use kube::{Api, ResourceExt};

use crate::app::App;
use crate::ask::within;
use crate::failure::Failure;

/// For the list of disruption budgets.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A disruption budget.
pub(crate) struct Disruption {
    namespace: Option<String>,
    selector: Selector,
    allowed: i32,
}

/// Every disruption budget that covers anybody.
///
/// # Errors
/// If they cannot be listed, with a text for the log.
pub(crate) async fn budgets(app: &App) -> Result<Vec<Disruption>, Failure> {
    let budgets = Api::<PodDisruptionBudget>::all(app.client.clone());
    let listed = within(TIMEOUT, budgets.list(&ListParams::default())).await;
    let listed = listed.map_err(|error| {
        let text = format!("cannot read disruption budgets: {error}");
        Failure::new((&error).into(), text)
    })?;
    let budget = |budget: PodDisruptionBudget| {
        let namespace = budget.namespace();
        let selector = budget.spec?.selector?.try_into().ok()?;
        let allowed = budget.status.map_or(0, |status| status.disruptions_allowed);
        Some(Disruption {
            namespace,
            selector,
            allowed,
        })
    };
    Ok(listed.into_iter().filter_map(budget).collect())
}

impl Disruption {
    fn covers(&self, pod: &PodFacts) -> bool {
        let labels = pod.labels.iter();
        let labels = labels.map(|label| (label.key.to_string(), label.value.to_string()));
        self.namespace.as_deref() == Some(&*pod.namespace)
            && !pod.labels.is_empty()
            && self.selector.matches(&labels.collect())
    }
}

/// Those of the pods whose end would break a budget, if they end in this order.
pub(crate) fn broken(pods: &[Arc<PodFacts>], budgets: &[Disruption]) -> Vec<Arc<str>> {
    let mut left: Vec<i32> = budgets.iter().map(|budget| budget.allowed).collect();
    let breaks = |pod: &&Arc<PodFacts>| {
        let mut breaks = false;
        for (budget, left) in budgets.iter().zip(&mut left) {
            if budget.covers(pod) {
                *left = left.saturating_sub(1);
                breaks |= *left < 0;
            }
        }
        breaks
    };
    let broken = pods.iter().filter(breaks);
    broken.map(|pod| pod.uid.clone()).collect()
}
