//! The one answer to "does it fit on this node, and on which cards".

use std::fmt;

use crate::links::closest;
use crate::policy::Survey;
use crate::several::{self, fit_several};
use crate::{Card, Claim, Cost, Mib, NodeGpus, Policy, Request};

/// Search steps after which [`fit`] stops looking for a better placement. Pods that a person
/// writes need far fewer; the bound is there for pods written to keep a scheduler busy.
pub(crate) const MAX_STEPS: u32 = 5_000;

/// Where the containers of a pod go on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// For every claim of the request, in its order, the chosen card indices, ascending.
    pub cards: Vec<Vec<usize>>,
    /// What each card is charged: card index and MiB, ascending, each card once.
    pub charges: Vec<(usize, Mib)>,
}

/// A placement and what it costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The placement.
    pub placement: Placement,
    /// Its cost under the policy that was asked.
    pub cost: Cost,
}

/// Why a pod does not fit on a node. The texts are constant: kube-scheduler counts nodes by text,
/// and a text that changed with every attempt would wake the pod each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The node has fewer cards than a container wants.
    TooFewCards,
    /// No card, however empty, is as large as the request.
    TooLarge,
    /// It would fit if every card could take pods.
    Unhealthy,
    /// The whole cards it wants are not there at present.
    NoWholeCard,
    /// No card has the room at present.
    NoRoom,
    /// The search was given up.
    TooComplex,
}

impl Refusal {
    /// Every refusal.
    pub const ALL: [Self; 6] = [
        Self::TooFewCards,
        Self::TooLarge,
        Self::Unhealthy,
        Self::NoWholeCard,
        Self::NoRoom,
        Self::TooComplex,
    ];

    /// The text for users.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::TooFewCards => "fewer GPUs than the pod asks for",
            Self::TooLarge => "no GPU as large as the pod asks for",
            Self::Unhealthy => "the GPUs it would fit on are unhealthy or taken out of sharing",
            Self::NoWholeCard => "not enough wholly free GPUs",
            Self::NoRoom => "not enough free memory on any one GPU",
            Self::TooComplex => "too many containers and GPUs to place",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for Refusal {}

/// The best placement of `request` on `node` under `policy`, or why there is none.
///
/// Best is: fewest cards for the pod as a whole (its containers share a card where they fit), then
/// the least that the policy says, then lowest card indices, container by container. Then, where
/// [`NodeGpus::links`] are known, cards are exchanged for others in the same state: those closest
/// to each other, then those whose loss breaks the fewest close groups of whole free cards, then
/// those with the lowest indices. A search that reaches its bound answers with the best placement
/// it has seen.
///
/// # Errors
/// A [`Refusal`] means that no assignment of cards to containers is legal on this view;
/// [`Refusal::TooComplex`], that the search was given up before it could tell, or tell why.
pub fn fit(node: &NodeGpus, request: &Request, policy: &dyn Policy) -> Result<Choice, Refusal> {
    let found = match only_claim(request) {
        Some(claim) => {
            let (charges, cost) = if claim.gpus == 1 {
                let (card, charge, cost) = fit_one(node, request, claim, policy)?;
                (vec![(card, charge)], cost)
            } else {
                fit_several(node, request, claim, policy)?
            };
            let cards = vec![charges.iter().map(|&(card, _)| card).collect()];
            let placement = Placement { cards, charges };
            Some(Choice { placement, cost })
        }
        None => Search::new(node, request, policy).run()?,
    };
    let Some(mut choice) = found else {
        return Err(refusal(node, request)?);
    };
    if policy.heeds_links() {
        closest(node, &mut choice);
    }
    Ok(choice)
}

/// The cost of what [`fit`] would answer.
///
/// # Errors
/// As [`fit`].
pub fn cost(node: &NodeGpus, request: &Request, policy: &dyn Policy) -> Result<Cost, Refusal> {
    match only_claim(request) {
        Some(claim) if claim.gpus == 1 => {
            fit_one(node, request, claim, policy).map(|(.., cost)| cost)
        }
        _ => fit(node, request, policy).map(|choice| choice.cost),
    }
}

/// The claim of a request that has only one, as nearly all have.
fn only_claim(request: &Request) -> Option<&Claim> {
    match request.claims.as_slice() {
        [claim] if claim.gpus > 0 => Some(claim),
        _ => None,
    }
}

/// The search for a request that takes one card, and what it is charged there.
fn fit_one(
    node: &NodeGpus,
    request: &Request,
    claim: &Claim,
    policy: &dyn Policy,
) -> Result<(usize, Mib, Cost), Refusal> {
    let mut best: Option<(usize, Mib, Cost)> = None;
    let mut survey = None;
    for (index, card) in node.cards.iter().enumerate() {
        // Of cards that cannot be told apart the first wins; here only neighbours are.
        let does = card.usable && several::has_room(card, request, claim);
        if !does || index > 0 && node.cards[index - 1] == *card {
            continue;
        }
        let survey = survey.get_or_insert_with(|| policy.survey(node));
        let charge = if request.exclusive {
            card.capacity
        } else {
            claim.mib
        };
        let cost = Cost {
            cards: 1,
            policy: policy.cost(node, survey, request, &[(index, charge)]),
            apart: 0,
        };
        if best.is_none_or(|(.., lowest)| cost < lowest) {
            best = Some((index, charge, cost));
        }
    }
    best.ok_or_else(|| several::refusal(node, request, claim))
}

/// Why nothing fits, from the most lasting reason to the most passing; an error if that cannot be
/// told within the bound.
fn refusal(node: &NodeGpus, request: &Request) -> Result<Refusal, Refusal> {
    let could_with = |free: fn(&Card) -> Mib| {
        let healthy = |card: &Card| Card {
            free: free(card),
            usable: true,
            ..*card
        };
        let node = NodeGpus {
            cards: node.cards.iter().map(healthy).collect(),
            links: None,
            ..*node
        };
        let mut search = Search::new(&node, request, &crate::policy::FirstFit);
        search.first_only = true;
        search.run().map(|found| found.is_some())
    };
    let widest = request
        .claims
        .iter()
        .map(|claim| claim.gpus as usize)
        .max()
        .unwrap_or(0);
    Ok(if widest > node.cards.len() {
        Refusal::TooFewCards
    } else if !could_with(|card| card.capacity)? {
        Refusal::TooLarge
    } else if could_with(|card| card.free)? {
        Refusal::Unhealthy
    } else if request.exclusive {
        Refusal::NoWholeCard
    } else {
        Refusal::NoRoom
    })
}

/// Depth-first search over claims; cards that cannot be told apart are tried once.
struct Search<'a> {
    node: &'a NodeGpus,
    request: &'a Request,
    policy: &'a dyn Policy,
    survey: Survey,
    /// Chosen cards of the claims placed so far.
    chosen: Vec<Vec<usize>>,
    best: Option<Choice>,
    steps: u32,
    first_only: bool,
}

impl<'a> Search<'a> {
    fn new(node: &'a NodeGpus, request: &'a Request, policy: &'a dyn Policy) -> Self {
        let chosen = Vec::with_capacity(request.claims.len());
        Self {
            node,
            request,
            policy,
            survey: policy.survey(node),
            chosen,
            best: None,
            steps: 0,
            first_only: false,
        }
    }

    /// The best placement, none if there is none, or an error if the search was given up first.
    fn run(mut self) -> Result<Option<Choice>, Refusal> {
        self.place(0);
        match self.best {
            None if self.steps > MAX_STEPS => Err(Refusal::TooComplex),
            best => Ok(best),
        }
    }

    fn place(&mut self, claim: usize) {
        if claim == self.request.claims.len() {
            self.consider();
        } else {
            self.chosen.push(Vec::new());
            self.choose(claim, 0);
            self.chosen.pop();
        }
    }

    /// Adds cards from index `from` on to the claim placed last, until it has as many as it wants.
    fn choose(&mut self, claim: usize, from: usize) {
        let missing = self.request.claims[claim].gpus as usize - self.chosen[claim].len();
        if missing == 0 {
            return self.place(claim + 1);
        }
        for card in from..self.node.cards.len() {
            if self.node.cards.len() - card < missing || self.done() {
                return;
            }
            self.steps += 1;
            if self.twin_before(claim, from, card) {
                continue;
            }
            self.chosen[claim].push(card);
            if !self.spread_too_wide() && self.charge(card).is_some() {
                self.choose(claim, card + 1);
            }
            self.chosen[claim].pop();
        }
    }

    fn is_used(&self, card: usize) -> bool {
        self.chosen.iter().any(|cards| cards.contains(&card))
    }

    /// True if the cards chosen so far are more than the best placement has.
    fn spread_too_wide(&self) -> bool {
        let used = || {
            (0..self.node.cards.len())
                .filter(|&card| self.is_used(card))
                .count()
        };
        self.best
            .as_ref()
            .is_some_and(|best| used() > best.cost.cards as usize)
    }

    fn done(&self) -> bool {
        self.steps > MAX_STEPS || self.first_only && self.best.is_some()
    }

    /// True if a card before `card` in the same state was already tried in its place.
    fn twin_before(&self, claim: usize, from: usize, card: usize) -> bool {
        let held = |card: usize| self.chosen[..claim].iter().map(move |c| c.contains(&card));
        (from..card)
            .any(|twin| self.node.cards[twin] == self.node.cards[card] && held(twin).eq(held(card)))
    }

    /// What the claims placed so far hold on `card`, if that is legal.
    fn charge(&self, card: usize) -> Option<Mib> {
        let on_card = |claim: usize| self.chosen.get(claim).is_some_and(|c| c.contains(&card));
        let held = self.request.held(on_card);
        let Card {
            capacity,
            free,
            usable,
            ..
        } = self.node.cards[card];
        let fits = if self.request.exclusive {
            free == capacity && held <= capacity
        } else {
            held <= free
        };
        (usable && fits).then_some(if self.request.exclusive {
            capacity
        } else {
            held
        })
    }

    fn consider(&mut self) {
        let charges: Option<Vec<_>> = (0..self.node.cards.len())
            .filter(|&card| self.is_used(card))
            .map(|card| Some((card, self.charge(card)?)))
            .collect();
        let Some(charges) = charges else { return };
        let cost = Cost {
            cards: u32::try_from(charges.len()).unwrap_or(u32::MAX),
            policy: self
                .policy
                .cost(self.node, &self.survey, self.request, &charges),
            apart: 0,
        };
        // Placements come in order of card indices: an equal one later never replaces one before.
        if self.best.as_ref().is_none_or(|best| cost < best.cost) {
            let placement = Placement {
                cards: self.chosen.clone(),
                charges,
            };
            self.best = Some(Choice { placement, cost });
        }
    }
}
