//! The search for a pod of which several containers ask.

use crate::fit::lending;
use crate::policy::Survey;
use crate::{Choice, Claim, ClaimKind, Cost, Mib, NodeGpus, Placement, Policy, Refusal, Request};

/// Steps after which one search stops looking for a better placement. Pods that a person writes need
/// far fewer; the bound is there for pods written to keep a scheduler busy.
pub(crate) const MAX_STEPS: u32 = 5_000;
/// A request to the policy for a cost counts as this number of steps.
pub(crate) const STEPS_PER_COST: u32 = 8;

/// The memory of the claims placed so far on one card.
#[derive(Clone, Copy, Default, PartialEq)]
struct Held {
    claims: u32,
    sidecars: Mib,
    mains: Mib,
    /// Of an init container and the sidecars before it.
    peak: Mib,
}

impl Held {
    /// `self` with one claim more, of `mib`; sidecars and init containers come in their order.
    fn with(self, claim: &Claim, mib: Mib) -> Self {
        let mut held = Self {
            claims: self.claims + 1,
            ..self
        };
        match claim.kind {
            ClaimKind::Init => held.peak = held.peak.max(held.sidecars + mib),
            ClaimKind::Sidecar => held.sidecars = held.sidecars + mib,
            ClaimKind::Main => held.mains = held.mains + mib,
        }
        held
    }

    fn lasting(&self) -> Mib {
        self.sidecars + self.mains
    }

    fn most(&self) -> Mib {
        self.peak.max(self.lasting())
    }
}

/// Depth-first search over claims. It tries one of several equal choices: cards in the same state that hold as much,
/// and containers with equal requests.
pub(crate) struct Search<'a> {
    node: &'a NodeGpus,
    request: &'a Request,
    policy: &'a dyn Policy,
    survey: Survey,
    /// Claims in the order in which they are placed.
    order: Vec<usize>,
    /// For each place of the order the one before it with an equal request, if any.
    alike: Vec<Option<usize>>,
    /// For each place of the order the memory that it and the later places hold for the pod's life, at least.
    lasting: Vec<Mib>,
    /// For each card the memory that it may hold; none if it does not get pods.
    limits: Vec<Option<Mib>>,
    held: Vec<Held>,
    /// Cards that hold something.
    used: usize,
    /// Chosen cards of each claim.
    chosen: Vec<Vec<usize>>,
    best: Option<Choice>,
    steps: u32,
    costs: u32,
    first_only: bool,
}

impl<'a> Search<'a> {
    /// For the best placement.
    pub(crate) fn new(node: &'a NodeGpus, request: &'a Request, policy: &'a dyn Policy) -> Self {
        Self::of(node, request, policy, (0..request.claims.len()).collect())
    }

    /// For any placement: large containers are placed first.
    pub(crate) fn any(node: &'a NodeGpus, request: &'a Request, policy: &'a dyn Policy) -> Self {
        let claims = &request.claims;
        let mut order: Vec<usize> = (0..claims.len()).collect();
        // Containers that run to the end may be placed in any order.
        let first = claims
            .iter()
            .take_while(|claim| claim.kind != ClaimKind::Main);
        let mains = &mut order[first.count()..];
        mains.sort_by_key(|&claim| {
            let Claim {
                mib,
                percentage,
                gpus,
                ..
            } = claims[claim];
            std::cmp::Reverse((percentage, mib, gpus))
        });
        Self {
            first_only: true,
            ..Self::of(node, request, policy, order)
        }
    }

    fn of(
        node: &'a NodeGpus,
        request: &'a Request,
        policy: &'a dyn Policy,
        order: Vec<usize>,
    ) -> Self {
        let claims = &request.claims;
        let mut lasting = vec![Mib::ZERO; order.len() + 1];
        for (at, &claim) in order.iter().enumerate().rev() {
            let Claim { kind, .. } = claims[claim];
            let own = match kind {
                ClaimKind::Init => Mib::ZERO,
                _ => claims[claim].in_sum(),
            };
            lasting[at] = lasting[at + 1] + own;
        }
        Self {
            node,
            request,
            policy,
            survey: policy.survey(node),
            alike: (0..order.len())
                .map(|at| alike(claims, &order, at))
                .collect(),
            order,
            lasting,
            limits: node.cards.iter().map(|card| request.room(card)).collect(),
            held: vec![Held::default(); node.cards.len()],
            used: 0,
            chosen: vec![Vec::new(); claims.len()],
            best: None,
            steps: 0,
            costs: 0,
            first_only: false,
        }
    }

    /// The best placement, none if there is none, or an error if the search was given up first.
    pub(crate) fn run(mut self, steps: &mut u64) -> Result<Option<Choice>, Refusal> {
        self.place(0);
        *steps += u64::from(self.steps + STEPS_PER_COST * self.costs.saturating_add(1));
        match self.best {
            None if self.steps > MAX_STEPS => Err(Refusal::TooComplex),
            best => Ok(best),
        }
    }

    fn place(&mut self, at: usize) {
        if at == self.order.len() {
            self.consider();
        } else if self.has_room_from(at) {
            self.choose(at, 0);
        }
    }

    /// Could the claims from here on be held by the cards that may hold them, were they one?
    fn has_room_from(&self, at: usize) -> bool {
        let full = self.is_at_its_widest();
        let cards = self.limits.iter().zip(&self.held);
        let may = cards.filter(|(_, held)| !full || held.claims > 0);
        let room = may.filter_map(|(limit, held)| Some(limit.as_ref()?.minus(held.lasting())));
        self.lasting[at] <= room.sum()
    }

    /// True if one card more would be more than the best placement has.
    fn is_at_its_widest(&self) -> bool {
        let best = self.best.as_ref();
        best.is_some_and(|best| self.used >= best.cost.cards as usize)
    }

    /// Adds cards from index `from` on to a claim until it has as many as it wants.
    fn choose(&mut self, at: usize, from: usize) {
        let claim = self.order[at];
        let wanted = self.request.claims[claim];
        let missing = wanted.gpus as usize - self.chosen[claim].len();
        if missing == 0 {
            return self.place(at + 1);
        }
        let cards = self.node.cards.len();
        for card in from.max(self.least(at))..cards {
            if cards - card < missing || self.done() {
                return;
            }
            self.steps += 1;
            let before = self.held[card];
            let held = before.with(&wanted, wanted.on(self.node.cards[card].capacity));
            if self.limits[card].is_none_or(|limit| held.most() > limit)
                || before.claims == 0 && self.is_at_its_widest()
                || self.twin_before(from, card)
            {
                continue;
            }
            self.used += usize::from(before.claims == 0);
            self.held[card] = held;
            self.chosen[claim].push(card);
            self.choose(at, card + 1);
            self.chosen[claim].pop();
            self.held[card] = before;
            self.used -= usize::from(before.claims == 0);
        }
    }

    /// The lowest card for the next of a claim: containers that ask for the same take their cards
    /// in order.
    fn least(&self, at: usize) -> usize {
        let Some(alike) = self.alike[at] else {
            return 0;
        };
        let (own, other) = (
            &self.chosen[self.order[at]],
            &self.chosen[self.order[alike]],
        );
        match other.strip_prefix(own.as_slice()) {
            Some([next, ..]) => *next,
            _ => 0,
        }
    }

    fn done(&self) -> bool {
        self.steps > MAX_STEPS || self.first_only && self.best.is_some()
    }

    /// True if a card before `card` in the same state, that holds as much, was already tried in its
    /// place.
    fn twin_before(&self, from: usize, card: usize) -> bool {
        let (cards, held) = (&self.node.cards, &self.held);
        (from..card).any(|twin| cards[twin] == cards[card] && held[twin] == held[card])
    }

    fn consider(&mut self) {
        let used = (0..self.held.len()).filter(|&card| self.held[card].claims > 0);
        let charge = |card: usize| {
            let (state, held) = (&self.node.cards[card], self.held[card].most());
            (card, self.request.charge(state, held))
        };
        let charges: Vec<_> = used.map(charge).collect();
        self.costs += 1;
        let cost = Cost {
            cards: u16::try_from(charges.len()).unwrap_or(u16::MAX),
            policy: self
                .policy
                .cost(self.node, &self.survey, self.request, &charges),
            apart: 0,
            lending: lending(self.policy, self.node, self.request, &charges),
        };
        // Placements come in order of card indices: an equal one later never replaces one before.
        if self.best.as_ref().is_none_or(|best| cost < best.cost) {
            let placement = Placement {
                cards: self.chosen.clone(),
                charges,
                piece: None,
            };
            self.best = Some(Choice { placement, cost });
        }
    }
}

/// The nearest place of the order before `at` whose claim can be exchanged for that at `at`: the same
/// wish, held at the same time.
fn alike(claims: &[Claim], order: &[usize], at: usize) -> Option<usize> {
    let own = claims[order[at]];
    let same = order[..at]
        .iter()
        .rposition(|&claim| claims[claim] == own)?;
    let others = order[same + 1..at].iter().map(|&claim| claims[claim].kind);
    let apart = match own.kind {
        ClaimKind::Main => None,
        ClaimKind::Init => others.into_iter().find(|&kind| kind == ClaimKind::Sidecar),
        ClaimKind::Sidecar => others.into_iter().find(|&kind| kind == ClaimKind::Init),
    };
    apart.is_none().then_some(same)
}
