//! Cards that pods did not get from gpustow, but from NVIDIA's device plugin or a driver of dynamic resource allocation
//! (DRA). These components do not know of gpustow's pods, so the card does not get any of them. The exception is a
//! claim that states how much memory it consumes.

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
    /// The pod that holds it, and the way of allocation.
    pub by: HeldBy,
    /// Texts of which one may be the UUID of the card, the surest first.
    pub uuids: Vec<String>,
    /// The claim to which it belongs, and the driver's name for it; none for a device of a plugin.
    pub claimed: Option<(ClaimName, Device)>,
}

/// Namespace and name of a claim.
pub type ClaimName = (String, String);

/// The consumption of each claim on each device, as far as it is known.
pub type Claims = HashMap<ClaimName, HashMap<Device, Consumed>>;

/// The holders of a card that did not get it from gpustow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Who holds all of it.
    pub whole: Option<HeldBy>,
    /// Claims that hold a known part of it.
    pub claims: Vec<ClaimUse>,
}

impl Held {
    /// The memory that the claims hold together.
    #[must_use]
    pub fn claimed(&self) -> Mib {
        self.claims.iter().map(|it| Mib(it.held_mib)).sum()
    }
}

/// The published data of drivers: the UUIDs of each device and of its parent.
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

/// The holders of `cards`, by their UUIDs. If a device of NVIDIA's driver cannot be identified, it counts as every card
/// of the node. A device of another driver that is none of the cards does not count. A claim that does not state how
/// much memory it consumes holds the whole card. So does a claim for a part of a card.
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
