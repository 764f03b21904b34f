//! Who is to give memory back, for whom, and what is said about it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_ledger::{Borrower, CallBack, Harm, OverLimit, Shortage};
use gpustow_pack::Mib;

use tokio::time::sleep;

use super::{TURN, Uid};
use crate::app::App;

/// Nodes that are looked at before filter has its turn.
const AT_ONCE: usize = 8;

/// A pod that is to give memory back.
pub(super) struct Victim {
    pub(super) pod: Arc<PodFacts>,
    pub(super) whom: Whom,
    pub(super) node: Arc<str>,
    /// What it uses too much of.
    pub(super) cards: Vec<Borrower>,
}

/// For whom a pod is to give memory back.
#[derive(Clone, Debug)]
pub(super) enum Whom {
    /// This pod waits for it.
    Waits(Arc<PodFacts>),
    /// This pod could not grow to its request.
    Neighbour(Arc<PodFacts>),
    /// So much is to be kept free.
    Headroom(Mib),
    /// Nobody in particular: it has been over its limit for too long.
    Limit,
}

impl Whom {
    /// The pod that it is for, if it is for one.
    pub(super) fn pod(&self) -> Option<&Arc<PodFacts>> {
        match self {
            Self::Waits(pod) | Self::Neighbour(pod) => Some(pod),
            Self::Headroom(_) | Self::Limit => None,
        }
    }
}

impl fmt::Display for Whom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waits(pod) | Self::Neighbour(pod) => f.write_str(&name(pod)),
            Self::Headroom(mib) => write!(f, "the {mib} that are to be kept free"),
            Self::Limit => f.write_str("being over its limit"),
        }
    }
}

/// The GPUs that are short of what was lent, by node and UUID.
pub(super) async fn shortages(app: &App) -> Vec<Shortage> {
    let nodes = app.ledger.lock().may_be_short();
    let mut all = Vec::new();
    for (index, few) in nodes.chunks(AT_ONCE).enumerate() {
        if index > 0 {
            sleep(TURN).await;
        }
        let now = app.ledger.now();
        let ledger = app.ledger.lock();
        all.extend(few.iter().flat_map(|name| ledger.shortages_on(name, now)));
    }
    all.sort_by(|one, other| (&one.node, &one.uuid).cmp(&(&other.node, &other.uuid)));
    all
}

/// Everybody who is to give memory back, each once: for who waits for it before all others, then for who is there.
pub(super) fn victims(
    backs: &[CallBack],
    short: Vec<Shortage>,
    over: Vec<OverLimit>,
) -> BTreeMap<Uid, Victim> {
    let backs = backs.iter().map(|back| {
        let whom = Whom::Waits(back.pod.clone());
        (back.node.clone(), whom, back.victims.clone())
    });
    let short = short.into_iter().map(|short| {
        let whom = match short.harm {
            Harm::Neighbour(pod) => Whom::Neighbour(pod),
            Harm::Headroom(mib) => Whom::Headroom(mib),
        };
        (short.node, whom, short.victims)
    });
    let over = over.into_iter();
    let over = over.map(|over| (over.node, Whom::Limit, vec![over.victim]));
    let mut victims: BTreeMap<Uid, Victim> = BTreeMap::new();
    for (node, whom, borrowers) in backs.chain(short).chain(over) {
        for borrower in borrowers {
            let uid = borrower.pod.uid.clone();
            let victim = victims.entry(uid).or_insert_with(|| Victim {
                pod: borrower.pod.clone(),
                whom: whom.clone(),
                node: node.clone(),
                cards: Vec::new(),
            });
            if victim.cards.iter().all(|card| card.uuid != borrower.uuid) {
                victim.cards.push(borrower);
            }
        }
    }
    victims
}

impl Victim {
    /// The cards, for people.
    pub(super) fn gpus(&self) -> String {
        let cards = self.cards.iter().map(|card| format!("GPU {}", card.uuid));
        cards.collect::<Vec<_>>().join(" and ")
    }

    /// What is said to the pod: what it uses, what it may, and who has a right to it.
    pub(super) fn told(&self) -> String {
        let cards = self.cards.iter().map(|card| {
            let limit = match self.pod.limit_on(&card.uuid) {
                Some(Mib(u64::MAX)) => "all of it".to_owned(),
                limit => limit.unwrap_or(card.held).to_string(),
            };
            format!(
                "Uses {} of GPU {}, asked for {} and may use {limit} while nobody else has a right to it",
                card.used, card.uuid, card.held
            )
        });
        let asks = |pod: &PodFacts| match &pod.request {
            Ok(request) => request.hardest().map_or(Mib::ZERO, |claim| claim.mib),
            Err(_) => Mib::ZERO,
        };
        let why = match &self.whom {
            Whom::Waits(pod) => {
                format!(
                    "Pod {}, which asks for {}, waits for it",
                    name(pod),
                    asks(pod)
                )
            }
            Whom::Neighbour(pod) => format!(
                "Pod {}, which asked for {} there, could not use all of that",
                name(pod),
                asks(pod)
            ),
            Whom::Limit => "It has used more than it may for too long".to_owned(),
            Whom::Headroom(mib) => {
                format!("Less than the {mib} that are to be kept free is free there")
            }
        };
        format!(
            "{}. {why}: give back what is more than the request",
            cards.collect::<Vec<_>>().join("; ")
        )
    }
}

pub(super) fn name(pod: &PodFacts) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}
