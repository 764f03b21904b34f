//! The one answer to "does it fit on this node, and on which cards".

use std::convert::Infallible;
use std::fmt;

use crate::links::closest;
use crate::mig::Piece;
use crate::policy::cost_of;
use crate::search::Search;
use crate::several::fit_several;
use crate::{Card, Claim, Compute, Cost, Mib, NodeGpus, Policy, Request, Starts};

/// Where the containers of a pod go on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// For every claim of the request, in its order, the chosen card indices, ascending.
    pub cards: Vec<Vec<usize>>,
    /// The charge of each card: card index and MiB, ascending, each card once.
    pub charges: Vec<(usize, Mib)>,
    /// Where the MIG instance lies that the pod gets, if it asks for one.
    pub piece: Option<Piece>,
}

/// A placement and its cost.
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
    /// It would fit on cards of another model or UUID.
    Unselected,
    /// It asks for a share of compute, and no card has such shares.
    NoMps,
    /// It asks for no share of compute, and the cards are for pods that do.
    OnlyMps,
    /// It asks for a MIG instance, and no card makes one as large.
    NoMig,
    /// It asks for no MIG instance, and the cards are for pods that do.
    OnlyMig,
    /// It would fit if the driver could hold it to its limit.
    NoLimit,
    /// It would fit if every card could take pods.
    Unhealthy,
    /// It would fit if no pod started there.
    Starting,
    /// It would fit without its rules about other pods on its cards.
    Neighbours,
    /// The whole cards it wants are not there at present.
    NoWholeCard,
    /// No card has the room at present.
    NoRoom,
    /// Cards with the room have too little compute at present.
    NoCompute,
    /// No card has the slices for its MIG instance at present.
    NoSlices,
    /// The search was given up.
    TooComplex,
}

impl Refusal {
    /// Every refusal.
    pub const ALL: [Self; 16] = [
        Self::TooFewCards,
        Self::TooLarge,
        Self::Unselected,
        Self::NoMps,
        Self::OnlyMps,
        Self::NoMig,
        Self::OnlyMig,
        Self::NoLimit,
        Self::Unhealthy,
        Self::Starting,
        Self::Neighbours,
        Self::NoWholeCard,
        Self::NoRoom,
        Self::NoCompute,
        Self::NoSlices,
        Self::TooComplex,
    ];

    /// The text for users.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::TooFewCards => "fewer GPUs than the pod asks for",
            Self::TooLarge => "no GPU as large as the pod asks for",
            Self::Unselected => "no GPU as large with a model or UUID that the pod allows",
            Self::NoMps => "no GPU with MPS, which a pod with compute-percent needs",
            Self::OnlyMps => "GPUs with MPS take only pods with compute-percent",
            Self::NoMig => "no GPU that makes a MIG instance as large as the pod asks for",
            Self::OnlyMig => "GPUs that make MIG instances take only pods with isolation mig",
            Self::NoLimit => "no GPU here can limit memory",
            Self::Unhealthy => "the GPUs it would fit on are unhealthy or taken out of sharing",
            Self::Starting => "another pod starts on the GPUs it would fit on",
            Self::Neighbours => "the pod may not share the GPUs with room, or its group has others",
            Self::NoWholeCard => "not enough wholly free GPUs",
            Self::NoRoom => "not enough free memory on any one GPU",
            Self::NoCompute => "not enough free compute on any one GPU with the memory",
            Self::NoSlices => "no room for the pod's MIG instance on any one GPU",
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
/// The best placement takes the fewest cards for the pod as a whole: its containers share a card where they fit. Then
/// the lowest cost of the policy decides, then the least lent memory ([`crate::Lending`]), then the lowest card
/// indices, container by container. Where [`NodeGpus::links`] are known, the search then exchanges cards for others in
/// the same state. It prefers cards that are closest to each other. Then it prefers cards whose loss breaks the fewest
/// close groups of whole free cards, then the lowest indices. A search that reaches its bound answers with the best
/// placement it has seen.
///
/// ```
/// use gpustow_pack::policy::Binpack;
/// use gpustow_pack::{
///     Card, Claim, ClaimKind, Compute, Lending, Mib, ModelId, NodeGpus, Refusal, Request, Starts, fit,
/// };
///
/// let card = |free| Card {
///     capacity: Mib(24_000),
///     free: Mib(free),
///     model: ModelId::default(),
///     usable: true,
///     limit: Mib::ZERO,
///     lending: Lending::default(),
///     compute: Compute::default(),
///     slices: None,
///     starts: Starts::None,
/// };
/// let node = NodeGpus {
///     cards: vec![card(24_000), card(9_000)],
///     ..NodeGpus::default()
/// };
/// let asks = |mib| Request {
///     claims: vec![Claim::new(ClaimKind::Main, 1, Mib(mib))],
///     ..Request::default()
/// };
/// let choice = fit(&node, &asks(8_000), &Binpack)?;
/// assert_eq!(choice.placement.charges, [(1, Mib(8_000))]);
/// assert_eq!(fit(&node, &asks(30_000), &Binpack), Err(Refusal::TooLarge));
/// # Ok::<(), Refusal>(())
/// ```
///
/// # Errors
/// A [`Refusal`] means that no assignment of cards to containers is legal on this view;
/// [`Refusal::TooComplex`], that the search was given up before it found a placement, or the reason that there is none.
pub fn fit(node: &NodeGpus, request: &Request, policy: &dyn Policy) -> Result<Choice, Refusal> {
    fit_counting(node, request, policy, &mut 0)
}

/// [`fit`], which adds the steps of the search to `steps`. A caller that asks of thousands of nodes stops when it is
/// enough. A pod of one container on one card takes none.
///
/// # Errors
/// As [`fit`].
pub fn fit_counting(
    node: &NodeGpus,
    request: &Request,
    policy: &dyn Policy,
    steps: &mut u64,
) -> Result<Choice, Refusal> {
    let found = match only_claim(request) {
        Some(claim) => {
            let (charges, cost, piece) = if claim.gpus == 1 {
                let One {
                    card,
                    charge,
                    cost,
                    piece,
                } = fit_one(node, request, claim, policy)?;
                (vec![(card, charge)], cost, piece)
            } else {
                let (charges, cost) = fit_several(node, request, claim, policy, steps)?;
                (charges, cost, None)
            };
            let cards = vec![charges.iter().map(|&(card, _)| card).collect()];
            let placement = Placement {
                cards,
                charges,
                piece,
            };
            Some(Choice { placement, cost })
        }
        None => match Search::new(node, request, policy).run(steps) {
            // Large containers first finds a place more often, if not the best.
            Err(Refusal::TooComplex) => Search::any(node, request, policy).run(steps)?,
            found => found?,
        },
    };
    let Some(mut choice) = found else {
        return Err(refusal_of_several(node, request, steps)?);
    };
    if policy.breaks_ties() {
        closest(node, request, &mut choice, steps);
        choice.cost.lending = lending(policy, node, request, &choice.placement.charges);
    }
    Ok(choice)
}

/// The memory that is lent on these cards, as far as it counts.
pub(crate) fn lending(
    policy: &dyn Policy,
    node: &NodeGpus,
    request: &Request,
    charges: &[(usize, Mib)],
) -> u16 {
    match policy.breaks_ties() {
        true => request.lending(&node.cards, charges.iter().map(|(card, _)| *card)),
        false => 0,
    }
}

/// The cost of the choice that [`fit_counting`] would return.
///
/// # Errors
/// As [`fit`].
pub fn cost(
    node: &NodeGpus,
    request: &Request,
    policy: &dyn Policy,
    steps: &mut u64,
) -> Result<Cost, Refusal> {
    match only_claim(request) {
        Some(claim) if claim.gpus == 1 => fit_one(node, request, claim, policy).map(|one| one.cost),
        _ => fit_counting(node, request, policy, steps).map(|choice| choice.cost),
    }
}

/// The claim of a request that has only one, as nearly all have.
fn only_claim(request: &Request) -> Option<&Claim> {
    match request.claims.as_slice() {
        [claim] if claim.gpus > 0 => Some(claim),
        _ => None,
    }
}

/// The card for a request that takes one.
struct One {
    card: usize,
    charge: Mib,
    cost: Cost,
    piece: Option<Piece>,
}

/// The search for a request that takes one card, with the charge of that card.
fn fit_one(
    node: &NodeGpus,
    request: &Request,
    claim: &Claim,
    policy: &dyn Policy,
) -> Result<One, Refusal> {
    let mut best: Option<One> = None;
    let mut survey = None;
    for (index, card) in node.cards.iter().enumerate() {
        // The first of equal cards wins; here only neighbours are compared.
        if !request.may_take(card, claim) || index > 0 && node.cards[index - 1] == *card {
            continue;
        }
        let survey = survey.get_or_insert_with(|| policy.survey(node));
        let sliced = card
            .slices
            .and_then(|slices| Some((slices, slices.place(claim.mib)?)));
        let charge = match &sliced {
            Some((slices, piece)) => slices.charge(piece.profile),
            None => request.charge(card, claim.on(card.capacity)),
        };
        let cost = Cost {
            cards: 1,
            policy: match &sliced {
                Some((_, piece)) if policy.breaks_ties() => (piece.lost.into(), cost_of(card.free)),
                _ => policy.cost(node, survey, request, &[(index, charge)]),
            },
            apart: 0,
            lending: lending(policy, node, request, &[(index, charge)]),
        };
        if best.as_ref().is_none_or(|best| cost < best.cost) {
            best = Some(One {
                card: index,
                charge,
                cost,
                piece: sliced.map(|(_, piece)| piece),
            });
        }
    }
    best.ok_or_else(|| refusal_of_one(node, request, claim))
}

/// A question about the reason why a request does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Would it fit if every card were empty, took pods and could limit memory, however much?
    FitsUnlimited,
    /// As [`Self::FitsUnlimited`], if the cards shared their compute as the request needs it?
    FitsShared,
    /// As [`Self::FitsUnlimited`], if no card were kept for MIG instances?
    FitsWhole,
    /// Would it fit if every card were empty and took pods?
    FitsEmpty,
    /// Are there cards that it would fit on if they took pods?
    AwaitsHealth,
    /// Would it fit if no pod started there?
    AwaitsStarts,
    /// Would it fit if the cards had all the compute that it asks for?
    AwaitsCompute,
}

impl Question {
    /// Is the node as the question supposes it, so that the answer is known?
    fn is_moot(self, node: &NodeGpus) -> bool {
        self == Self::AwaitsStarts && !node.has_starts()
    }

    /// A card as the question supposes it.
    fn suppose(self, card: &Card, request: &Request) -> Card {
        let shared = || Compute::suiting(request.compute);
        match self {
            // A card that cannot limit memory counts as if it could, however much.
            Self::FitsUnlimited => Card {
                limit: match card.limit {
                    Mib::ZERO => Mib(u64::MAX),
                    limit => limit,
                },
                ..card.emptied()
            },
            Self::FitsShared => Card {
                compute: shared(),
                ..Self::FitsUnlimited.suppose(card, request)
            },
            Self::FitsWhole => Card {
                slices: None,
                ..Self::FitsUnlimited.suppose(card, request)
            },
            Self::FitsEmpty => card.emptied(),
            Self::AwaitsHealth => Card {
                usable: true,
                ..*card
            },
            Self::AwaitsStarts => Card {
                starts: Starts::None,
                ..*card
            },
            Self::AwaitsCompute => Card {
                compute: match card.compute.capacity {
                    0 => card.compute,
                    _ => shared(),
                },
                ..*card
            },
        }
    }
}

/// Why a request does not fit where a container gets `cards` cards at most, from the most lasting
/// reason to the most passing.
///
/// # Errors
/// The first of `answer`.
pub fn refusal<E>(
    request: &Request,
    cards: usize,
    mut answer: impl FnMut(Question) -> Result<bool, E>,
) -> Result<Refusal, E> {
    let widest = request.claims.iter().map(|claim| claim.gpus as usize).max();
    Ok(if widest.unwrap_or(0) > cards {
        Refusal::TooFewCards
    } else if !answer(Question::FitsUnlimited)? {
        if request.isolated {
            return Ok(Refusal::NoMig);
        }
        if answer(Question::FitsWhole)? {
            return Ok(Refusal::OnlyMig);
        }
        match (answer(Question::FitsShared)?, request.compute) {
            (false, _) => Refusal::TooLarge,
            (true, 0) => Refusal::OnlyMps,
            (true, _) => Refusal::NoMps,
        }
    } else if request.limit() > Mib::ZERO && !answer(Question::FitsEmpty)? {
        Refusal::NoLimit
    } else if answer(Question::AwaitsHealth)? {
        Refusal::Unhealthy
    } else if answer(Question::AwaitsStarts)? {
        Refusal::Starting
    } else if request.exclusive {
        Refusal::NoWholeCard
    } else if request.compute > 0 && answer(Question::AwaitsCompute)? {
        Refusal::NoCompute
    } else if request.isolated {
        Refusal::NoSlices
    } else {
        Refusal::NoRoom
    })
}

/// Why the only claim of a request does not fit.
pub(crate) fn refusal_of_one(node: &NodeGpus, request: &Request, claim: &Claim) -> Refusal {
    let Ok(why) = refusal(request, node.cards.len(), |question| {
        if question.is_moot(node) {
            return Ok::<_, Infallible>(false);
        }
        let cards = node
            .cards
            .iter()
            .map(|card| question.suppose(card, request));
        Ok(request.has_cards(claim, cards))
    });
    why
}

/// The reason why a request of several containers does not fit; an error if the search reaches its bound first.
fn refusal_of_several(
    node: &NodeGpus,
    request: &Request,
    steps: &mut u64,
) -> Result<Refusal, Refusal> {
    refusal(request, node.cards.len(), |question| {
        if question.is_moot(node) {
            return Ok(false);
        }
        let cards = node
            .cards
            .iter()
            .map(|card| question.suppose(card, request));
        let node = NodeGpus {
            cards: cards.collect(),
            links: None,
            ..*node
        };
        let search = Search::any(&node, request, &crate::policy::FirstFit);
        search.run(steps).map(|found| found.is_some())
    })
}
