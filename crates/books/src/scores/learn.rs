//! The requests of the pods that are listed now, as the policy sees them.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::{Bytes, Claim, Class, Mib, ModelId, Request, Tight, cost};

use super::Scores;
use crate::books::{Books, Models, asks};
use crate::maps::HashMap;

/// Scarcity is looked at once in (number of nodes) / this many decisions: so many change a cluster
/// of any size by the same share.
const DECISIONS_PER_LOOK: usize = 16;

/// `Ledger::warm` learns when the changes reach this share of the amount at which filter would have to learn.
const EARLY: f64 = 0.75;

/// A pod's request, and the labels of the models that it is bound to.
type Wish = (Arc<Request>, Arc<[Box<str>]>);

/// How many pods ask for GPU memory and have not released it, by their wish. A gated pod does not count: other
/// components decide whether it comes at all.
#[derive(Debug, Default)]
pub(super) struct Demand {
    wishes: HashMap<Wish, usize>,
    pods: usize,
}

impl Demand {
    /// A pod has changed, come or gone.
    pub(crate) fn moved(&mut self, old: Option<&PodFacts>, new: Option<&PodFacts>) {
        let wish = |pod: &PodFacts| {
            let request = pod.asks.request().filter(|_| asks(pod) && !pod.gated)?;
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
                self.wishes.swap_remove(&wish);
            }
        }
        if let Some(wish) = new {
            self.pods += 1;
            *self.wishes.entry(wish).or_default() += 1;
        }
    }
}

/// Nodes with the same cards.
struct Make {
    cards: Vec<(Mib, ModelId)>,
    cpu_milli: u64,
    ram: Bytes,
}

impl Make {
    /// Could a pod that is bound to `models`, unless that is empty, ever run there?
    fn could_hold(&self, request: &Request, models: &[ModelId]) -> bool {
        let allowed = |model| models.is_empty() || models.contains(model);
        let fitting = |claim: &Claim| {
            let cards = self.cards.iter();
            cards
                .filter(|(capacity, model)| *capacity >= claim.on(*capacity) && allowed(model))
                .count()
        };
        let mut claims = request.claims.iter();
        self.cpu_milli >= request.cpu_milli
            && self.ram >= request.ram
            && claims.all(|claim| fitting(claim) >= claim.gpus as usize)
    }
}

impl Scores {
    /// Learns the requests of pods again: from the pods that are known now and from nothing else.
    pub fn learn(&mut self, books: &Books) {
        let makes = makes(books);
        let cards = || makes.iter().flat_map(|make| &make.cards);
        let all: Mib = cards().map(|(capacity, _)| *capacity).sum();
        let mean = Mib(all.0 / u64::try_from(cards().count().max(1)).unwrap_or(u64::MAX));
        let mut mix = Vec::with_capacity(self.demand.wishes.len());
        for ((request, labels), &pods) in &self.demand.wishes {
            let models = labelled(books.models(), labels);
            // A pod bound to models that are not here cannot use anything, nor can one that is too
            // large for every node.
            let can = labels.is_empty() == models.is_empty() && !request.isolated;
            if can && makes.iter().any(|make| make.could_hold(request, &models)) {
                mix.push(match request.is_relative() {
                    true => Class::of(&request.on(mean), models, pods),
                    false => Class::of(request, models, pods),
                });
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

    /// Learns before filter would have to, and scores at most `limit` nodes for requests that came
    /// lately. True if there may be more to score.
    pub fn warm(&mut self, limit: usize, books: &Books) -> bool {
        self.learn_if_due(EARLY, books);
        let tight = &self.tight;
        self.answers.warm(limit, |view, request, policy, steps| {
            cost(view, request, policy.with(tight), steps)
        })
    }

    /// A decision is to be taken: learns if that is due.
    pub fn deciding(&mut self, books: &Books) {
        self.since_look += 1;
        self.learn_if_due(1.0, books);
    }

    /// Learns if the number of pods that ask has changed by a third since the last time. Looks at scarcity once in a
    /// while. Does both already at this `share` of the due amount.
    fn learn_if_due(&mut self, share: f64, books: &Books) {
        let (now, then) = (self.demand.pods as f64, self.learnt as f64);
        let looks = (books.nodes().len() / DECISIONS_PER_LOOK) as f64;
        if (now - then).abs() > (now.min(then) / 3.0).floor() * share {
            self.learn(books);
        } else if self.since_look as f64 > looks * share {
            self.since_look = 0;
            if self.tight.look(self.answers.views()) {
                self.answers.learnt();
            }
        }
    }
}

/// The makes of nodes there are, each with the most CPU and host memory that one of them has.
fn makes(books: &Books) -> Vec<Make> {
    let mut makes: HashMap<Vec<(Mib, ModelId)>, (u64, Bytes)> = HashMap::default();
    for node in books.nodes().map(|(_, node)| node) {
        let cards = node.view().cards.iter();
        let mut cards: Vec<_> = cards.map(|card| (card.capacity, card.model)).collect();
        cards.sort_unstable();
        let facts = node.facts();
        let (cpu_milli, ram) = facts.map_or((0, Bytes::ZERO), |node| (node.cpu_milli, node.ram));
        let most = makes.entry(cards).or_default();
        *most = (most.0.max(cpu_milli), most.1.max(ram));
    }
    let make = |(cards, (cpu_milli, ram))| Make {
        cards,
        cpu_milli,
        ram,
    };
    makes.into_iter().map(make).collect()
}

/// The models that these node labels name, in order: blanks of a model's name are dashes there.
fn labelled(models: &Models, labels: &[Box<str>]) -> Vec<ModelId> {
    if labels.is_empty() {
        return Vec::new();
    }
    let named = |model: &str| {
        let label = model.replace(' ', "-");
        labels.iter().any(|known| **known == *label)
    };
    models.those(named)
}
