//! The search for a pod of which one container asks, for several cards.

use crate::fit::{lending, refusal_of_one};
use crate::policy::Survey;
use crate::search::{MAX_STEPS, STEPS_PER_COST};
use crate::{Claim, Cost, Mib, NodeGpus, Policy, Refusal, Request};

/// The best cards for the only claim of `request`, with the charge of each.
pub(crate) fn fit_several(
    node: &NodeGpus,
    request: &Request,
    claim: &Claim,
    policy: &dyn Policy,
    steps: &mut u64,
) -> Result<(Vec<(usize, Mib)>, Cost), Refusal> {
    let may_take = |&card: &usize| request.may_take(&node.cards[card], claim);
    let cards: Vec<usize> = (0..node.cards.len()).filter(may_take).collect();
    if cards.len() < claim.gpus as usize {
        return Err(refusal_of_one(node, request, claim));
    }
    let mut search = Search {
        node,
        request,
        policy,
        survey: policy.survey(node),
        cards,
        wanted: claim.gpus as usize,
        claim,
        chosen: Vec::new(),
        best: None,
        steps: 0,
        costs: 0,
    };
    search.choose(0);
    *steps += u64::from(search.steps + STEPS_PER_COST * (search.costs + 1));
    search.best.ok_or(Refusal::TooComplex)
}

struct Search<'a> {
    node: &'a NodeGpus,
    request: &'a Request,
    policy: &'a dyn Policy,
    survey: Survey,
    /// The cards that may take the claim.
    cards: Vec<usize>,
    wanted: usize,
    claim: &'a Claim,
    chosen: Vec<(usize, Mib)>,
    best: Option<(Vec<(usize, Mib)>, Cost)>,
    steps: u32,
    costs: u32,
}

impl Search<'_> {
    /// Adds cards from place `from` on until there are as many as wanted.
    fn choose(&mut self, from: usize) {
        let missing = self.wanted - self.chosen.len();
        if missing == 0 {
            return self.consider();
        }
        for at in from..self.cards.len() {
            if self.cards.len() - at < missing || self.steps > MAX_STEPS {
                return;
            }
            self.steps += 1;
            let index = self.cards[at];
            let card = &self.node.cards[index];
            // The first of equal cards is tried.
            let mut before = self.cards[from..at].iter();
            if before.any(|&twin| self.node.cards[twin] == *card) {
                continue;
            }
            let charge = self.request.charge(card, self.claim.on(card.capacity));
            self.chosen.push((index, charge));
            self.choose(at + 1);
            self.chosen.pop();
        }
    }

    fn consider(&mut self) {
        let chosen = &self.chosen;
        self.costs += 1;
        let cost = Cost {
            cards: u16::try_from(chosen.len()).unwrap_or(u16::MAX),
            policy: self
                .policy
                .cost(self.node, &self.survey, self.request, chosen),
            apart: 0,
            lending: lending(self.policy, self.node, self.request, chosen),
        };
        // Of equal costs, the first one stays: it has the lower indices.
        if self.best.as_ref().is_none_or(|(_, best)| cost < *best) {
            self.best = Some((chosen.clone(), cost));
        }
    }
}
