//! Cards in MIG mode on which the agent makes instances for pods.

use nvml_wrapper::Device;

use super::{Session, now, place, processes};
use crate::devices::{Card, DeviceError, Wanted, mig};
use crate::instances;

impl<'a> Session<'a> {
    /// Of a card in MIG mode: the card itself comes first, and the instances that the agent made go.
    pub(super) fn divide(
        &mut self,
        cards: &mut Vec<(Device<'a>, Card)>,
        before: &[(Device<'a>, Card)],
        index: u32,
    ) {
        let Ok(device) = self.nvml.device_by_index(index) else {
            return;
        };
        let Ok(uuid) = device.uuid() else {
            return;
        };
        if cards.iter().any(|(_, card)| card.uuid == uuid) {
            return;
        }
        let known = before.iter().find(|(_, card)| card.uuid == uuid);
        let on_demand = known.and_then(|(_, card)| card.on_demand.clone());
        let on_demand = on_demand.unwrap_or_default();
        let made = |instance: &Device<'a>| {
            let place = mig::place(self.nvml, instance);
            let mut own = on_demand.instances.iter().filter(|it| it.pod.is_some());
            place.is_some_and(|place| own.any(|it| (it.start, it.slices) == place))
        };
        let (own, others) = std::mem::take(cards)
            .into_iter()
            .partition(|(instance, _)| made(instance));
        let own: Vec<(Device<'a>, Card)> = own;
        self.own
            .extend(own.into_iter().map(|(device, _)| (device, uuid.clone())));
        let place = place(self.nvml, &device, index, self.count);
        let card = Card {
            uuid,
            index,
            model: device.name().unwrap_or_default(),
            place,
            on_demand: Some(on_demand),
            ..Card::default()
        };
        cards.push((device, card));
        cards.extend::<Vec<_>>(others);
    }

    /// Makes and ends instances, and notes the instances and profiles that each card in MIG mode has then.
    pub(super) fn make(&mut self, wanted: &Wanted) -> Result<(), DeviceError> {
        let Some(makes) = wanted.makes() else {
            return Ok(());
        };
        let is_pool = |(_, card): &&(Device<'a>, Card)| card.on_demand.is_some();
        let pools: Vec<_> = self.cards.iter().filter(is_pool).collect();
        let drivers: Vec<_> = pools
            .iter()
            .map(|(device, _)| mig::Card {
                nvml: self.nvml,
                device,
            })
            .collect();
        let pools = pools.iter().zip(&drivers);
        let cards: Vec<_> = pools
            .map(|((_, card), driver)| instances::Card {
                uuid: &card.uuid,
                minor: card.place.minor,
                driver,
            })
            .collect();
        let orders = makes.orders.as_deref();
        let lives = |uid: &str| wanted.lives(uid);
        let done = instances::reconcile(&makes.places, &cards, orders, lives);
        self.unmade = done.unmade;
        let mut changed = false;
        let pools = self.cards.iter_mut().map(|(_, card)| card);
        for (card, told) in pools
            .filter(|card| card.on_demand.is_some())
            .zip(done.cards)
        {
            match told {
                Ok(told) => {
                    let before = card.on_demand.as_ref().map(|it| &it.instances);
                    changed |= before != Some(&told.instances);
                    card.on_demand = Some(told);
                    card.failure = None;
                }
                Err(problem) => card.failure = Some(problem),
            }
        }
        match changed {
            true => self.refresh(),
            false => Ok(()),
        }
    }

    /// A card on which the agent makes instances, with the processes of the agent's own instances.
    pub(super) fn pool(&self, device: &Device<'a>, card: &Card) -> Card {
        let own = self.own.iter().filter(|(_, of)| *of == card.uuid);
        let lists = own.map(|(instance, _)| processes(instance, None));
        let lists: Result<Vec<_>, _> = lists.collect();
        Card {
            processes: lists
                .ok()
                .map(|lists| lists.into_iter().flatten().collect()),
            failure: card.failure.clone(),
            memory: now(device, card).memory,
            ..card.clone()
        }
    }
}
