//! The fit of a pod whose rules do not leave it every GPU.

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, NodeGpus, Refusal, Rules};

use crate::Reason;
use crate::books::Node;
use crate::budget::Budget;
use crate::sight::Sight;

impl Sight<'_> {
    /// The best placement of `pod` on a view of the node, on which those that `gone` names are not.
    pub(crate) fn fit_on(
        &self,
        name: &str,
        node: &Node,
        view: &NodeGpus,
        pod: &PodFacts,
        gone: impl Fn(&str) -> bool,
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        self.fit_beside(name, node, view, pod, gone, &[], budget)
    }

    /// The same beside pods that are planned on GPUs of the view's order.
    #[expect(
        clippy::too_many_arguments,
        reason = "a view and all that it does not tell"
    )]
    pub(crate) fn fit_beside(
        &self,
        name: &str,
        node: &Node,
        view: &NodeGpus,
        pod: &PodFacts,
        gone: impl Fn(&str) -> bool,
        planned: &[(&Rules, &Choice)],
        budget: &mut Budget,
    ) -> Result<Choice, Reason> {
        let request = pod.asks.readable();
        let request = request.map_err(|_| Reason::Fit(Refusal::TooComplex))?;
        let Some(rules) = &request.rules else {
            return self.scores.fit_within(view, request, budget);
        };
        let group = rules.affinity.as_ref();
        if group.is_some_and(|group| self.books.is_group_elsewhere(group, name)) {
            return Err(Reason::Fit(Refusal::Neighbours));
        }
        budget.charge_view(node);
        let mut traits = node.traits(gone);
        for (rules, choice) in planned {
            for (card, _) in &choice.placement.charges {
                if let Some(card) = traits.get_mut(*card) {
                    card.holders.push(rules);
                }
            }
        }
        self.scores.fit_among(view, &traits, request, budget)
    }
}
