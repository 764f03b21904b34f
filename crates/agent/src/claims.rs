//! What pods hold of cards that they did not get from gpustow, but from NVIDIA's device plugin or a driver of
//! dynamic resource allocation (DRA). Such a pod does not know of ours, so its card takes none of them, unless its
//! claim says how much memory it consumes.

use std::collections::{BTreeMap, HashMap, HashSet};

use gpustow_api::claim::{self, Consumed, Device};
use gpustow_api::gpunode::{ClaimUse, HeldBy};
use gpustow_api::names;
use gpustow_pack::Mib;
use serde_json::Value;

use crate::devices::Card;

/// A GPU with more claims is held whole.
const MAX_CLAIMS: usize = 256;

/// A device that a pod holds, by whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Who holds it, and through what.
    pub by: HeldBy,
    /// Texts of which one may be the UUID of the card, the surest first.
    pub uuids: Vec<String>,
    /// Which claim's it is, and what its driver calls it, if it is a claim's.
    pub claimed: Option<(ClaimName, Device)>,
}

/// Namespace and name of a claim.
pub type ClaimName = (String, String);

/// What claims consume of each device, as far as it is known.
pub type Claims = HashMap<ClaimName, HashMap<Device, Consumed>>;

/// What others hold of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Who holds all of it.
    pub whole: Option<HeldBy>,
    /// Claims that hold a known part of it.
    pub claims: Vec<ClaimUse>,
}

impl Held {
    /// What the claims hold together.
    #[must_use]
    pub fn claimed(&self) -> Mib {
        self.claims.iter().map(|it| Mib(it.held_mib)).sum()
    }
}

/// What drivers publish of their devices: the UUIDs of a device and of what it is a part of.
#[derive(Clone, Debug, Default)]
pub struct Slices {
    uuids: HashMap<Device, Vec<String>>,
}

impl Slices {
    /// Reads ResourceSlices.
    #[must_use]
    pub fn of(slices: &[Value]) -> Self {
        let devices = slices.iter().flat_map(claim::published);
        Self {
            uuids: devices.collect(),
        }
    }

    /// True if every claim's device is among them.
    #[must_use]
    pub fn know(&self, holdings: &[Holding]) -> bool {
        let mut devices = holdings.iter().filter_map(|it| it.claimed.as_ref());
        devices.all(|(_, device)| self.uuids.contains_key(device))
    }
}

/// What is held of `cards`, by their UUIDs. A device of NVIDIA's driver that cannot be told is every card of the node; one
/// of any other driver that is none of the cards is none of our business. A claim that does not say how much memory it
/// consumes holds the whole card, and so does one of a part of a card.
#[must_use]
pub fn held(
    holdings: &[Holding],
    slices: &Slices,
    claims: &Claims,
    cards: &[Card],
) -> HashMap<String, Held> {
    let parent = |card: &Card| card.place.parent.clone();
    let known: HashSet<String> = cards
        .iter()
        .flat_map(|card| parent(card).into_iter().chain([card.uuid.clone()]))
        .collect();
    let mut held: HashMap<String, Held> = HashMap::new();
    let mut exact: BTreeMap<(&str, &ClaimName), (Mib, &HeldBy)> = BTreeMap::new();
    let mut counted = HashSet::new();
    for holding in holdings {
        let claimed = holding.claimed.as_ref();
        let device = claimed.map(|(_, device)| device);
        let consumed = claimed.and_then(|(claim, device)| claims.get(claim)?.get(device));
        let consumed = consumed.copied().unwrap_or(Consumed::Whole);
        if consumed == Consumed::Nothing {
            continue;
        }
        let published = device.and_then(|device| slices.uuids.get(device));
        let mut texts = published.into_iter().flatten().chain(&holding.uuids);
        let uuid = texts.find(|text| known.contains(*text));
        let nvidias = device.is_some_and(|device| device.driver == names::NVIDIA_DRA_DRIVER);
        let itself = cards.iter().find(|card| Some(&card.uuid) == uuid);
        if let (Consumed::Mib(mib), Some(card), Some(it)) = (consumed, itself, claimed) {
            // Several pods may share a claim.
            if counted.insert(it) {
                let sum = exact.entry((&card.uuid, &it.0));
                let sum = sum.or_insert((Mib::ZERO, &holding.by));
                sum.0 = sum.0 + mib;
            }
            continue;
        }
        let is_it = |card: &&Card| match uuid {
            Some(uuid) => card.uuid == *uuid || parent(card).as_ref() == Some(uuid),
            None => nvidias,
        };
        for card in cards.iter().filter(is_it) {
            let card = held.entry(card.uuid.clone()).or_default();
            card.whole = Some(holding.by.clone());
        }
    }
    for ((uuid, (namespace, name)), (mib, by)) in exact {
        let card = held.entry(uuid.to_owned()).or_default();
        if card.claims.len() == MAX_CLAIMS {
            card.whole.get_or_insert_with(|| by.clone());
            continue;
        }
        card.claims.push(ClaimUse {
            claim: format!("{namespace}/{name}"),
            pod: by.pod.clone(),
            held_mib: mib.0,
        });
    }
    held
}
