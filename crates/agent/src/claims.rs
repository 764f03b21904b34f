//! Whole cards that pods did not get from gpustow, but from NVIDIA's device plugin or a driver of
//! dynamic resource allocation (DRA). Such a pod does not know of ours, so its card takes none of them.

use std::collections::{HashMap, HashSet};

use gpustow_api::gpunode::HeldBy;
use gpustow_api::names;
use serde_json::Value;

use crate::devices::Card;

/// A device that a pod holds, by whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Who holds it, and through what.
    pub by: HeldBy,
    /// Texts of which one may be the UUID of the card, the surest first.
    pub uuids: Vec<String>,
    /// What the driver calls it, if it is a claim's.
    pub device: Option<Device>,
}

/// A claim's device, as its driver calls it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// The driver's name.
    pub driver: String,
    /// The pool's name.
    pub pool: String,
    /// The device's name in the pool.
    pub name: String,
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
        let mut uuids = HashMap::new();
        for slice in slices {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let spec = &slice["spec"];
            for device in spec["devices"].as_array().into_iter().flatten() {
                let found = ["uuid", "parentUUID"];
                let found = found
                    .iter()
                    .map(|key| text(&device["attributes"][*key]["string"]));
                let key = Device {
                    driver: text(&spec["driver"]),
                    pool: text(&spec["pool"]["name"]),
                    name: text(&device["name"]),
                };
                uuids.insert(key, found.filter(|uuid| !uuid.is_empty()).collect());
            }
        }
        Self { uuids }
    }

    /// True if every claim's device is among them.
    #[must_use]
    pub fn know(&self, holdings: &[Holding]) -> bool {
        let mut devices = holdings
            .iter()
            .filter_map(|holding| holding.device.as_ref());
        devices.all(|device| self.uuids.contains_key(device))
    }
}

/// Which of `cards` are held, by their UUIDs. A device of NVIDIA's driver that cannot be told is every
/// card of the node; one of any other driver that is none of the cards is none of our business.
#[must_use]
pub fn held(holdings: &[Holding], slices: &Slices, cards: &[Card]) -> HashMap<String, HeldBy> {
    let parent = |card: &Card| card.place.parent.clone();
    let known: HashSet<String> = cards
        .iter()
        .flat_map(|card| parent(card).into_iter().chain([card.uuid.clone()]))
        .collect();
    let mut held = HashMap::new();
    for holding in holdings {
        let device = holding.device.as_ref();
        let published = device.and_then(|device| slices.uuids.get(device));
        let mut texts = published.into_iter().flatten().chain(&holding.uuids);
        let uuid = texts.find(|text| known.contains(*text));
        let nvidias = device.is_some_and(|device| device.driver == names::NVIDIA_DRA_DRIVER);
        let is_it = |card: &&Card| match uuid {
            Some(uuid) => card.uuid == *uuid || parent(card).as_ref() == Some(uuid),
            None => nvidias,
        };
        for card in cards.iter().filter(is_it) {
            held.insert(card.uuid.clone(), holding.by.clone());
        }
    }
    held
}
