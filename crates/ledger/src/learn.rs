//! What the pods that are listed now ask for, as the policy sees it.

use std::sync::Arc;

use gpustow_pack::{Choice, Class, ModelId, NodeGpus, Refusal, Request, Tight, fit};
use hashbrown::HashMap;

use crate::Ledger;
use crate::book::asks;

/// Scarcity is looked at once in (number of nodes) / this many decisions: so many change a cluster
/// of any size by the same share.
const DECISIONS_PER_LOOK: usize = 16;

impl Ledger {
    /// Learns anew what pods ask for: from those known now and from nothing else, so that a
    /// restart loses nothing. Filter does this by itself when their number has changed by a
    /// third; call it now and then, so that a mix that changes at constant numbers is followed.
    pub fn learn(&mut self) {
        let mut counts: HashMap<(Arc<Request>, Vec<ModelId>), usize> = HashMap::new();
        for pod in self.pods().filter(|pod| asks(pod)) {
            let models = self.labelled(&pod.models);
            // A pod bound to models that are not here cannot use anything.
            if let Ok(request) = &pod.request
                && pod.models.is_empty() == models.is_empty()
            {
                *counts.entry((request.clone(), models)).or_default() += 1;
            }
        }
        let mut mix: Vec<Class> = counts
            .into_iter()
            .map(|((request, models), pods)| Class::of(&request, models, pods))
            .collect();
        mix.sort_unstable();
        self.learnt = self.asking;
        self.since_look = 0;
        self.tight = Tight::learn(&mix, self.nodes.values().map(|node| &node.view));
        self.answers.forget();
    }

    /// Learns if the number of pods that ask has changed by a third since the last time; looks at
    /// what is scarce once in a while.
    pub(crate) fn learn_if_due(&mut self) {
        let (now, then) = (self.asking, self.learnt);
        self.since_look += 1;
        if now > then + then / 3 || then > now + now / 3 {
            self.learn();
        } else if self.since_look > self.nodes.len() / DECISIONS_PER_LOOK {
            self.since_look = 0;
            if self.tight.look(self.nodes.values().map(|node| &node.view)) {
                self.answers.forget();
            }
        }
    }

    /// The models that these node labels name, in order: blanks of a model's name are dashes there.
    fn labelled(&self, labels: &[Box<str>]) -> Vec<ModelId> {
        let named = |model: &String| {
            let label = model.replace(' ', "-");
            labels.iter().any(|known| **known == *label)
        };
        let indices = (0..self.models.len()).filter(|&index| named(&self.models[index]));
        indices
            .filter_map(|index| u16::try_from(index).ok())
            .map(ModelId)
            .collect()
    }

    pub(crate) fn fit(&self, view: &NodeGpus, request: &Request) -> Result<Choice, Refusal> {
        fit(view, request, self.policy(request).with(&self.tight))
    }
}
