//! The right answer by trying everything. It shares no code with the search under test: legality is recomputed by
//! walking through the pod's life, costs are recomputed from the promises of the policies.

use gpustow_pack::{
    Card, Claim, ClaimKind, Compute, Lending, Link, Mib, NodeGpus, Placement, Policy, PolicyKind,
    Refusal, Request, Rules, Starts, Tight, Traits,
};

/// The expected answer of `fit_among`: the rules are looked at card by card, in words of their own.
pub(crate) fn answer_among(
    node: &NodeGpus,
    traits: &[Traits<'_>],
    request: &Request,
    policy: PolicyKind,
    tight: &Tight,
) -> Result<Placement, Refusal> {
    let Some(rules) = &request.rules else {
        return answer(node, request, policy, tight);
    };
    let says = |pattern: &str, model: &str| match pattern.strip_suffix('*') {
        Some(start) => model.starts_with(start),
        None => model == pattern,
    };
    let selected: Vec<bool> = traits
        .iter()
        .map(|card| {
            let named = |list: &[Box<str>]| list.iter().any(|it| says(it, card.model));
            let listed = |list: &[Box<str>]| list.iter().any(|it| **it == *card.uuid);
            (named(&rules.models) || rules.models.is_empty())
                && (listed(&rules.uuids) || rules.uuids.is_empty())
                && !named(&rules.not_models)
                && !listed(&rules.not_uuids)
        })
        .collect();
    let members = |card: &Traits<'_>| {
        let same = |it: &&&Rules| it.affinity.is_some() && it.affinity == rules.affinity;
        card.holders.iter().filter(same).count()
    };
    let begun = traits.iter().map(members).sum::<usize>() > 0;
    let suits = |card: &Traits<'_>| {
        let foes = card.holders.iter().filter(|it| it.anti_affinity.is_some());
        let foes = foes.filter(|it| it.anti_affinity == rules.anti_affinity);
        foes.count() == 0 && (!begun || members(card) > 0)
    };
    let without = |keep: &dyn Fn(usize) -> bool, node: &NodeGpus| {
        let mut node = node.clone();
        for (index, card) in node.cards.iter_mut().enumerate() {
            if !keep(index) {
                (card.capacity, card.free, card.limit) = (Mib(0), Mib(0), Mib(0));
                card.usable = false;
            }
        }
        node
    };
    let chosen = without(&|index| selected[index], node);
    let suited = without(&|index| suits(&traits[index]), &chosen);
    let emptied = |node: &NodeGpus| {
        let node = with_cards(node, |card| Card {
            free: card.capacity,
            usable: true,
            compute: all_free(card.compute),
            starts: Starts::None,
            ..*card
        });
        answer(&node, request, PolicyKind::FirstFit, tight).is_ok()
    };
    match answer(&suited, request, policy, tight) {
        Ok(found) => Ok(found),
        Err(_) if answer(&chosen, request, PolicyKind::FirstFit, tight).is_ok() => {
            Err(Refusal::Neighbours)
        }
        Err(_) if emptied(node) && !emptied(&chosen) => Err(Refusal::Unselected),
        Err(_) => answer(&chosen, request, policy, tight),
    }
}

/// Card indices of every claim.
type Assignment = Vec<Vec<usize>>;

/// The expected answer of `fit`.
pub(crate) fn answer(
    node: &NodeGpus,
    request: &Request,
    policy: PolicyKind,
    tight: &Tight,
) -> Result<Placement, Refusal> {
    let assignments = assignments(node.cards.len(), &request.claims);
    let legal = |node: &NodeGpus| -> Vec<Placement> {
        assignments
            .iter()
            .filter_map(|cards| placement(node, request, cards))
            .collect()
    };
    let best = legal(node).into_iter().min_by_key(|placement| {
        (
            placement.charges.len(),
            match policy {
                PolicyKind::Tight => {
                    tight.cost(node, &tight.survey(node), request, &placement.charges)
                }
                _ => (cost(node, &placement.charges, policy), 0),
            },
            match policy {
                PolicyKind::FirstFit => 0,
                _ => lending(node, request, placement),
            },
            placement.cards.clone(),
        )
    });
    if let Some(best) = best {
        if node.links.is_none() || policy == PolicyKind::FirstFit {
            return Ok(best);
        }
        let roles = roles(node, &best);
        let alike = legal(node)
            .into_iter()
            .filter(|other| self::roles(node, other) == roles);
        let key = |other: &Placement| {
            let lending = lending(node, request, other);
            (
                apart(node, other),
                lending,
                lost(node, other),
                other.cards.clone(),
            )
        };
        return Ok(alike.min_by_key(key).unwrap());
    }
    let healthy = with_cards(node, |card| Card {
        usable: true,
        ..*card
    });
    let empty = with_cards(&healthy, |card| Card {
        free: card.capacity,
        compute: all_free(card.compute),
        starts: Starts::None,
        ..*card
    });
    let whatever = with_cards(&empty, |card| Card {
        limit: if card.limit == Mib::ZERO {
            Mib(1_000_000)
        } else {
            card.limit
        },
        ..*card
    });
    let asked = u16::from(request.compute);
    let enough = Compute {
        capacity: asked,
        free: asked,
    };
    let shared = with_cards(&whatever, |card| Card {
        compute: enough,
        ..*card
    });
    let roomy = with_cards(node, |card| Card {
        compute: match card.compute.capacity {
            0 => card.compute,
            _ => enough,
        },
        ..*card
    });
    let started = with_cards(node, |card| Card {
        starts: Starts::None,
        ..*card
    });
    let few = request
        .claims
        .iter()
        .any(|claim| claim.gpus as usize > node.cards.len());
    Err(if few {
        Refusal::TooFewCards
    } else if legal(&shared).is_empty() {
        Refusal::TooLarge
    } else if legal(&whatever).is_empty() {
        match request.compute {
            0 => Refusal::OnlyMps,
            _ => Refusal::NoMps,
        }
    } else if legal(&empty).is_empty() {
        Refusal::NoLimit
    } else if !legal(&healthy).is_empty() {
        Refusal::Unhealthy
    } else if !legal(&started).is_empty() {
        Refusal::Starting
    } else if request.exclusive {
        Refusal::NoWholeCard
    } else if request.compute > 0 && !legal(&roomy).is_empty() {
        Refusal::NoCompute
    } else {
        Refusal::NoRoom
    })
}

fn all_free(compute: Compute) -> Compute {
    Compute {
        free: compute.capacity,
        ..compute
    }
}

fn with_cards(node: &NodeGpus, change: impl Fn(&Card) -> Card) -> NodeGpus {
    NodeGpus {
        cards: node.cards.iter().map(change).collect(),
        ..node.clone()
    }
}

/// The memory in use on the chosen cards, for a pod that may use free memory. For others, the memory lent there.
fn lending(node: &NodeGpus, request: &Request, placement: &Placement) -> u32 {
    let charged = placement.charges.iter();
    let of = charged.map(|&(card, _)| match request.bursts {
        true => u32::from(node.cards[card].lending.used),
        false => u32::from(node.cards[card].lending.lent),
    });
    of.sum()
}

/// The state of the chosen cards, and the claims that hold each, whatever their places.
fn roles(node: &NodeGpus, placement: &Placement) -> Vec<String> {
    let role = |&(card, _): &(usize, Mib)| {
        let held = placement.cards.iter().map(|cards| cards.contains(&card));
        let state = Card {
            lending: Lending::default(),
            ..node.cards[card]
        };
        format!("{state:?} {:?}", held.collect::<Vec<_>>())
    };
    let mut roles: Vec<String> = placement.charges.iter().map(role).collect();
    roles.sort();
    roles
}

/// The distance between two cards, by the table in docs/packing.md.
fn distance(node: &NodeGpus, one: usize, other: usize) -> u32 {
    match node
        .links
        .as_ref()
        .and_then(|links| links.slowest(&[one, other]))
    {
        Some(Link::NvLink(links)) => 40 - u32::from(links),
        Some(Link::PcieSwitch) => 50,
        Some(Link::PcieSwitches) => 60,
        None => 65,
        Some(Link::HostBridge) => 70,
        Some(Link::NumaNode) => 80,
        Some(Link::System) => 90,
    }
}

/// The largest distance between the pod's cards, and their sum with those inside a container.
pub(crate) fn apart(node: &NodeGpus, placement: &Placement) -> (u32, u32) {
    let pairs = |cards: Vec<usize>| -> Vec<u32> {
        let below = |&one: &usize| cards.iter().map(move |&other| (one, other));
        let pairs = cards.iter().flat_map(below);
        pairs
            .filter(|(one, other)| one < other)
            .map(|(one, other)| distance(node, one, other))
            .collect()
    };
    let pod = pairs(placement.charges.iter().map(|&(card, _)| card).collect());
    let inside = placement.cards.iter().cloned().flat_map(pairs).sum::<u32>();
    (
        pod.iter().copied().max().unwrap_or(0),
        pod.iter().sum::<u32>() + inside,
    )
}

/// How close the cards that stay wholly free were to the wholly free ones that are taken.
fn lost(node: &NodeGpus, placement: &Placement) -> u32 {
    let taken = |card: usize| placement.charges.iter().any(|&(it, _)| it == card);
    let whole = |card: usize| {
        let Card {
            capacity,
            free,
            usable,
            ..
        } = node.cards[card];
        usable && free == capacity
    };
    let cards = 0..node.cards.len();
    let broken = cards.clone().filter(|&card| taken(card) && whole(card));
    broken
        .map(|one| -> u32 {
            let stay = cards.clone().filter(|&card| !taken(card) && whole(card));
            stay.map(|other| 90 - distance(node, one, other)).sum()
        })
        .sum()
}

/// Every choice of cards for every claim, legal or not.
fn assignments(cards: usize, claims: &[Claim]) -> Vec<Assignment> {
    let mut all = vec![Vec::new()];
    for claim in claims {
        let sets = (0_u32..1 << cards).filter(|set| set.count_ones() == claim.gpus);
        let sets: Vec<Vec<usize>> = sets
            .map(|set| (0..cards).filter(|card| set >> card & 1 == 1).collect())
            .collect();
        all = all
            .into_iter()
            .flat_map(|chosen| {
                sets.iter()
                    .map(move |set| [chosen.as_slice(), std::slice::from_ref(set)].concat())
            })
            .collect();
    }
    all
}

/// The placement that an assignment stands for, if no card is over its bound at any moment.
fn placement(node: &NodeGpus, request: &Request, cards: &Assignment) -> Option<Placement> {
    let mut charges = Vec::new();
    for (index, card) in node.cards.iter().enumerate() {
        if !cards.iter().any(|chosen| chosen.contains(&index)) {
            continue;
        }
        let wants = |claim: &Claim| {
            let part = card.capacity.0 * u64::from(claim.percentage) / 100;
            part.max(claim.mib.0)
        };
        let held = |running: &Vec<usize>| -> u64 {
            let here = running
                .iter()
                .filter(|&&claim| cards[claim].contains(&index));
            here.map(|&claim| wants(&request.claims[claim])).sum()
        };
        let peak = life(&request.claims).iter().map(held).max()?;
        let waits = match request.alone {
            true => card.starts != Starts::None,
            false => card.starts == Starts::Alone,
        };
        if waits
            || !card.usable
            || peak > card.free.0
            || request.exclusive && card.free != card.capacity
        {
            return None;
        }
        // The driver would not start a container with a limit that it cannot hold.
        if request
            .claims
            .iter()
            .any(|claim| claim.driver_limit > card.limit)
        {
            return None;
        }
        let asked = u16::from(request.compute);
        let Compute { capacity, free } = card.compute;
        if asked > free || (capacity > 0) != (asked > 0) {
            return None;
        }
        charges.push((
            index,
            if request.exclusive {
                card.capacity
            } else {
                Mib(peak)
            },
        ));
    }
    Some(Placement {
        cards: cards.clone(),
        charges,
        piece: None,
    })
}

/// Which claims run together at each moment of the pod's life.
fn life(claims: &[Claim]) -> Vec<Vec<usize>> {
    let of_kind = |kind| (0..claims.len()).filter(move |&claim| claims[claim].kind == kind);
    let mut moments: Vec<Vec<usize>> = of_kind(ClaimKind::Init)
        .map(|init| {
            of_kind(ClaimKind::Sidecar)
                .filter(|&sidecar| sidecar < init)
                .chain([init])
                .collect()
        })
        .collect();
    moments.push(
        of_kind(ClaimKind::Sidecar)
            .chain(of_kind(ClaimKind::Main))
            .collect(),
    );
    moments
}

/// The policies' own costs, as far as they distinguish placements on one node.
fn cost(node: &NodeGpus, charges: &[(usize, Mib)], policy: PolicyKind) -> i64 {
    let of_card = |&(card, Mib(charge)): &(usize, Mib)| {
        let Card { capacity, free, .. } = node.cards[card];
        match policy {
            PolicyKind::Binpack => free.0 - charge,
            PolicyKind::Spread => (capacity.0 - free.0 + charge) * 1_000_000 / capacity.0,
            PolicyKind::Tight | PolicyKind::FirstFit => 0,
        }
    };
    i64::try_from(charges.iter().map(of_card).sum::<u64>()).unwrap()
}
