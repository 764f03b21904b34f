//! Which card models have series of their own. Names come from agents, and a label that changes costs
//! Prometheus a series for ever.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use gpustow_ledger::NodeView;

/// Models with series of their own in the life of this process.
const MOST: usize = 64;
/// The label of all others.
const OTHER: &str = "other";

/// The models that got series.
#[derive(Debug, Default)]
pub(super) struct Models {
    own: BTreeSet<String>,
}

impl Models {
    /// Takes in new models while there is room: models on most nodes first, then by name.
    pub(super) fn meet(&mut self, nodes: &[NodeView]) {
        let mut new: BTreeMap<&str, usize> = BTreeMap::new();
        for node in nodes {
            let models: BTreeSet<&str> = node.cards.iter().map(|card| &*card.model).collect();
            for model in models
                .into_iter()
                .filter(|model| !self.own.contains(*model))
            {
                *new.entry(model).or_default() += 1;
            }
        }
        let mut new: Vec<(&str, usize)> = new.into_iter().collect();
        new.sort_by_key(|&(model, nodes)| (Reverse(nodes), model));
        let room = MOST - self.own.len();
        let new = new.into_iter().take(room);
        self.own.extend(new.map(|(model, _)| model.to_owned()));
    }

    /// The label of a model.
    pub(super) fn label<'a>(&self, model: &'a str) -> &'a str {
        if self.own.contains(model) {
            model
        } else {
            OTHER
        }
    }
}

#[cfg(test)]
mod tests {
    use gpustow_ledger::{CardView, Mismatches};
    use gpustow_pack::{Compute, Mib};

    use super::*;

    fn node(models: &[String]) -> NodeView {
        let card = |model: &String| CardView {
            uuid: String::new(),
            index: 0,
            model: model.clone(),
            total: Mib::ZERO,
            capacity: Mib::ZERO,
            held: Mib::ZERO,
            free: Mib::ZERO,
            unmanaged: Mib::ZERO,
            healthy: true,
            cordoned: false,
            claimed: false,
            limit: Mib::ZERO,
            compute: Compute::default(),
            slices: None,
            pods: Vec::new(),
        };
        NodeView {
            name: "n".into(),
            stale: false,
            cards: models.iter().map(card).collect(),
            problems: Vec::new(),
            mismatches: Mismatches::default(),
            unreported: 0,
        }
    }

    #[test]
    fn names_that_an_agent_makes_up_at_every_scrape_get_no_series() {
        let real = || node(&["NVIDIA H100".to_owned()]);
        let mut models = Models::default();
        let mut labels = BTreeSet::new();
        for scrape in 0..100 {
            let made_up: Vec<String> = (0..256).map(|card| format!("a{scrape}-{card}")).collect();
            let nodes = [node(&made_up), real(), real()];
            models.meet(&nodes);
            let seen = nodes.iter().flat_map(|node| &node.cards);
            labels.extend(seen.map(|card| models.label(&card.model).to_owned()));
        }
        assert_eq!(labels.len(), MOST + 1);
        assert!(labels.contains("NVIDIA H100") && labels.contains(OTHER));
    }
}
