//! The search for a pod of which one container asks, for several cards.

use crate::policy::Survey;
use crate::search::{MAX_STEPS, STEPS_PER_COST};
use crate::{Card, Claim, Cost, Mib, NodeGpus, Policy, Refusal, Request};

/// The best cards for the only claim of `request`, with what each is charged.
pub(crate) fn fit_several(
    node: &NodeGpus,
    request: &Request,
    claim: &Claim,
    policy: &dyn Policy,
    steps: &mut u64,
) -> Result<(Vec<(usize, Mib)>, Cost), Refusal> {
    let does = |card: &Card| card.usable && has_room(card, request, claim);
    let count = node.cards.iter().filter(|card| does(card)).count();
    if count < claim.gpus as usize {
        return Err(refusal(node, request, claim));
    }
    let indices = (0..node.cards.len()).filter(|&card| does(&node.cards[card]));
    let mut search = Search {
        node,
        request,
        policy,
        survey: policy.survey(node),
        cards: indices.collect(),
        wanted: claim.gpus as usize,
        mib: claim.mib,
        chosen: Vec::new(),
        best: None,
        steps: 0,
        costs: 0,
    };
    search.choose(0);
    *steps += u64::from(search.steps + STEPS_PER_COST * (search.costs + 1));
    search.best.ok_or(Refusal::TooComplex)
}

/// Has a card the room that each card of the claim must have, its health aside?
pub(crate) fn has_room(card: &Card, request: &Request, claim: &Claim) -> bool {
    match request.exclusive {
        true => card.free == card.capacity && claim.mib <= card.capacity,
        false => claim.mib <= card.free,
    }
}

/// Why the only claim of a request does not fit, from the most lasting reason to the most passing.
pub(crate) fn refusal(node: &NodeGpus, request: &Request, claim: &Claim) -> Refusal {
    let enough = |is: &dyn Fn(&Card) -> bool| {
        node.cards.iter().filter(|card| is(card)).count() >= claim.gpus as usize
    };
    if !enough(&|_| true) {
        Refusal::TooFewCards
    } else if !enough(&|card| claim.mib <= card.capacity) {
        Refusal::TooLarge
    } else if enough(&|card| has_room(card, request, claim)) {
        Refusal::Unhealthy
    } else if request.exclusive {
        Refusal::NoWholeCard
    } else {
        Refusal::NoRoom
    }
}

struct Search<'a> {
    node: &'a NodeGpus,
    request: &'a Request,
    policy: &'a dyn Policy,
    survey: Survey,
    /// Those that would do.
    cards: Vec<usize>,
    wanted: usize,
    mib: Mib,
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
            // Of cards that cannot be told apart the first is tried.
            let mut before = self.cards[from..at].iter();
            if before.any(|&twin| self.node.cards[twin] == *card) {
                continue;
            }
            let charge = match self.request.exclusive {
                true => card.capacity,
                false => self.mib,
            };
            self.chosen.push((index, charge));
            self.choose(at + 1);
            self.chosen.pop();
        }
    }

    fn consider(&mut self) {
        let chosen = &self.chosen;
        self.costs += 1;
        let cost = Cost {
            cards: u32::try_from(chosen.len()).unwrap_or(u32::MAX),
            policy: self
                .policy
                .cost(self.node, &self.survey, self.request, chosen),
            apart: 0,
        };
        // Those with lower indices come first.
        if self.best.as_ref().is_none_or(|(_, best)| cost < *best) {
            self.best = Some((chosen.clone(), cost));
        }
    }
}
