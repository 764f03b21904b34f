//! What the pods that are listed now ask for, as the policy sees it.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, Class, ModelId, NodeGpus, Refusal, Request, Tight, fit};
use hashbrown::HashMap;

use crate::Ledger;
use crate::book::asks;

/// Scarcity is looked at once in (number of nodes) / this many decisions: so many change a cluster
/// of any size by the same share.
const DECISIONS_PER_LOOK: usize = 16;

/// What a pod asks for, and the models that it is bound to, by label.
type Wish = (Arc<Request>, Arc<[Box<str>]>);

/// How many pods ask for GPU memory and have not released it, by their wish.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    wishes: HashMap<Wish, usize>,
    pods: usize,
}

impl Demand {
    /// A pod has changed, come or gone.
    pub(crate) fn moved(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let wish = |pod: &PodFacts| {
            let request = pod.request.as_ref().ok().filter(|_| asks(pod))?;
            Some((request.clone(), pod.models.clone()))
        };
        let (old, new) = (old.and_then(wish), new.and_then(wish));
        if old == new {
            return;
        }
        if let Some(wish) = old
            && let Some(pods) = self.wishes.get_mut(&wish)
        {
            self.pods -= 1;
            *pods -= 1;
            if *pods == 0 {
                self.wishes.remove(&wish);
            }
        }
        if let Some(wish) = new {
            self.pods += 1;
            *self.wishes.entry(wish).or_default() += 1;
        }
    }
}

impl Ledger {
    /// Learns anew what pods ask for: from those known now and from nothing else, so that a
    /// restart loses nothing. Filter does this by itself when their number has changed by a
    /// third; call it now and then, so that a mix that changes at constant numbers is followed.
    pub fn learn(&mut self) {
        let mut mix = Vec::with_capacity(self.demand.wishes.len());
        for ((request, labels), &pods) in &self.demand.wishes {
            let models = self.labelled(labels);
            // A pod bound to models that are not here cannot use anything.
            if labels.is_empty() == models.is_empty() {
                mix.push(Class::of(request, models, pods));
            }
        }
        mix.sort_unstable();
        self.learnt = self.demand.pods;
        self.since_look = 0;
        let tight = Tight::learn(&mix, self.answers.views());
        if tight != self.tight {
            self.tight = tight;
            self.answers.learnt();
        }
    }

    /// Learns if the number of pods that ask has changed by a third since the last time; looks at
    /// what is scarce once in a while.
    pub(crate) fn learn_if_due(&mut self) {
        let (now, then) = (self.demand.pods, self.learnt);
        self.since_look += 1;
        if now > then + then / 3 || then > now + now / 3 {
            self.learn();
        } else if self.since_look > self.nodes.len() / DECISIONS_PER_LOOK {
            self.since_look = 0;
            if self.tight.look(self.answers.views()) {
                self.answers.learnt();
            }
        }
    }

    /// The models that these node labels name, in order: blanks of a model's name are dashes there.
    fn labelled(&self, labels: &[Box<str>]) -> Vec<ModelId> {
        if labels.is_empty() {
            return Vec::new();
        }
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
