//! Disruption budgets: whose end would break one.

use std::sync::Arc;

use gpustow_api::{DisruptionBudget, PodFacts};

use super::{Books, Uid};
use crate::maps::HashMap;

impl Books {
    /// A disruption budget as a watch shows it.
    pub fn apply_budget(&mut self, budget: DisruptionBudget) {
        let namespace = self.budgets.entry(budget.namespace.clone()).or_default();
        namespace.insert(budget.name.clone(), budget);
    }

    /// A disruption budget is gone.
    pub fn delete_budget(&mut self, budget: &DisruptionBudget) {
        if let Some(namespace) = self.budgets.get_mut(&budget.namespace) {
            namespace.swap_remove(&budget.name);
        }
    }

    /// The whole list of disruption budgets.
    pub fn reset_budgets(&mut self, budgets: Vec<DisruptionBudget>) {
        self.budgets.clear();
        budgets.into_iter().for_each(|it| self.apply_budget(it));
    }

    /// The pods whose end would break a budget, if the pods end in this order.
    pub fn protected<'p>(&self, pods: impl IntoIterator<Item = &'p Arc<PodFacts>>) -> Vec<Uid> {
        let mut left: HashMap<(&Arc<str>, &Arc<str>), i32> = HashMap::default();
        let breaks = |pod: &&Arc<PodFacts>| {
            let budgets = self.budgets.get(&pod.namespace).into_iter();
            let budgets = budgets.flat_map(HashMap::values);
            let mut breaks = false;
            for budget in budgets.filter(|it| it.covers(pod)) {
                let left = left.entry((&budget.namespace, &budget.name));
                let left = left.or_insert(budget.allowed);
                *left = left.saturating_sub(1);
                breaks |= *left < 0;
            }
            breaks
        };
        let protected = pods.into_iter().filter(breaks);
        protected.map(|pod| pod.uid.clone()).collect()
    }
}
