//! What the cluster is short of: whole cards side by side, and models that pods are bound to.

use super::Class;
use crate::{Card, ModelId, NodeGpus};

/// How much more than what is expected to be asked for counts as plenty.
pub(super) const SLACK: f64 = 1.3;
/// Share of the cluster that is worth keeping whatever is expected: expectations are means.
const SPARE: f64 = 0.1;
/// The most that a MiB of a scarce model costs beyond itself.
const MODEL: f64 = 0.5;
/// Scarcity is told in so many steps, so that costs, which callers remember, seldom change.
const STEPS: f64 = 8.0;

/// Pods that take several cards of one node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wide {
    pub(super) gpus: u32,
    cpu_milli: u64,
    /// Share of all pods that ask for as much or more.
    share: f64,
    /// How scarce places for them are, 0 to 1.
    pub(super) scarcity: f64,
}

impl Wide {
    /// How many such pods would find a place beside each other.
    pub(super) fn places(&self, whole_cards: u32, cpu: u64) -> u64 {
        let by_cpu = cpu.checked_div(self.cpu_milli).unwrap_or(u64::MAX);
        u64::from(whole_cards / self.gpus).min(by_cpu)
    }
}

/// The classes of pods that take several cards.
pub(super) fn wide(mix: &[Class]) -> Vec<Wide> {
    let pods: usize = mix.iter().map(|class| class.pods).sum();
    let several = || mix.iter().filter(|class| class.gpus > 1);
    let wide = several().map(|class| {
        let more = several()
            .filter(|other| other.gpus >= class.gpus && other.cpu_milli >= class.cpu_milli);
        let more: usize = more.map(|other| other.pods).sum();
        Wide {
            gpus: class.gpus,
            cpu_milli: class.cpu_milli,
            share: more as f64 / pods.max(1) as f64,
            scarcity: 0.0,
        }
    });
    wide.collect()
}

/// Models that some pods are bound to.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bound {
    models: Vec<ModelId>,
    /// Share of all demand that is bound to these models or to some of them.
    share: f64,
}

/// The sets of models that pods are bound to.
pub(super) fn bound(mix: &[Class], whole: f64) -> Vec<Bound> {
    let asked: f64 = mix.iter().map(|class| class.asked(whole)).sum();
    let mut sets: Vec<&Vec<ModelId>> = mix.iter().map(|class| &class.models).collect();
    sets.sort_unstable();
    sets.dedup();
    let sets = sets.into_iter().filter(|models| !models.is_empty());
    let bound = sets.map(|models| {
        let within = mix.iter().filter(|class| {
            !class.models.is_empty() && class.models.iter().all(|model| models.contains(model))
        });
        let within: f64 = within.map(|class| class.asked(whole)).sum();
        Bound {
            models: models.clone(),
            share: within / asked.max(1.0),
        }
    });
    bound.collect()
}

/// Scarcity of what there are `free` of `all`, when so many are expected to be asked for.
fn scarcity(free: f64, expected: f64, all: f64) -> f64 {
    let plenty = SLACK * expected + SPARE * all;
    let scarcity = if plenty > 0.0 {
        (1.0 - free / plenty).max(0.0)
    } else {
        0.0
    };
    (scarcity * STEPS).ceil() / STEPS
}

/// What is free, and what there is.
#[derive(Clone, Copy, Default)]
struct Room {
    free: f64,
    all: f64,
}

/// Sets the scarcity of places for `wide` pods, whose mean request is `mean` MiB, and gives the
/// premium on each MiB by model.
pub(super) fn look<'a>(
    wide: &mut [Wide],
    bound: &[Bound],
    mean: f64,
    nodes: impl Iterator<Item = (&'a NodeGpus, u32)>,
) -> Vec<f64> {
    let mut places = vec![Room::default(); wide.len()];
    let mut models: Vec<Room> = Vec::new();
    for (node, count) in nodes {
        let count = f64::from(count);
        let is_whole = |card: &&Card| card.usable && card.free == card.capacity;
        let whole = u32::try_from(node.cards.iter().filter(is_whole).count()).unwrap_or(0);
        for (places, wide) in places.iter_mut().zip(&*wide) {
            places.free += wide.places(whole, node.cpu_free_milli) as f64 * count;
            places.all += f64::from(u8::from(node.cards.len() >= wide.gpus as usize)) * count;
        }
        for card in &node.cards {
            let model = usize::from(card.model.0);
            models.resize(models.len().max(model + 1), Room::default());
            models[model].free += if card.usable {
                card.free.0 as f64 * count
            } else {
                0.0
            };
            models[model].all += card.capacity.0 as f64 * count;
        }
    }
    let free: f64 = models.iter().map(|model| model.free).sum();
    let to_come = free / mean.max(1.0);
    for (places, wide) in places.iter().zip(wide) {
        wide.scarcity = scarcity(places.free, wide.share * to_come, places.all);
    }
    let mut premiums = vec![0.0_f64; models.len()];
    for Bound { models: set, share } in bound {
        let set = || {
            set.iter()
                .map(|model| usize::from(model.0))
                .filter(|&m| m < models.len())
        };
        let sum = |of: fn(&Room) -> f64| -> f64 { set().map(|model| of(&models[model])).sum() };
        let premium = MODEL * scarcity(sum(|room| room.free), share * free, sum(|room| room.all));
        set().for_each(|model| premiums[model] = premiums[model].max(premium));
    }
    premiums
}
