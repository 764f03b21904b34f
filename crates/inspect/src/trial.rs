//! One pod asked of every node, as kube-scheduler and the extender would.

use std::collections::{BTreeMap, BTreeSet};

use gpustow_api::PodFacts;
use gpustow_ledger::NodeView;
use gpustow_pack::{Choice, Cost};

use crate::Cluster;

/// The nodes on which a pod would fit now, best first, and why the others refuse it.
pub struct Trial<'a> {
    /// The nodes that fit the pod, best first, and the chosen cards.
    pub fits: Vec<(&'a NodeView, Choice)>,
    /// How many nodes refuse it, by why.
    pub refusals: BTreeMap<&'static str, usize>,
    /// The labels and taints by which kube-scheduler refuses them.
    pub causes: BTreeMap<&'static str, BTreeSet<String>>,
    /// Nodes that the extender would be asked about.
    pub asked: Vec<&'a NodeView>,
}

/// Asks every node about a pod as kube-scheduler and the extender would.
pub fn try_pod<'a>(cluster: &Cluster, views: &'a [NodeView], facts: &PodFacts) -> Trial<'a> {
    let mut trial = Trial {
        fits: Vec::new(),
        refusals: BTreeMap::new(),
        causes: BTreeMap::new(),
        asked: Vec::new(),
    };
    for view in views {
        let refused = match cluster.ledger.refused_in_tree(&view.name, facts) {
            Some(reason) => {
                let cause = cluster.ledger.cause_in_tree(&view.name, facts);
                trial.causes.entry(reason).or_default().extend(cause);
                reason
            }
            None => {
                trial.asked.push(view);
                match cluster.ledger.explain(facts, &view.name, cluster.now) {
                    Ok(choice) => {
                        trial.fits.push((view, choice));
                        continue;
                    }
                    Err(reason) => reason.text(),
                }
            }
        };
        *trial.refusals.entry(refused).or_default() += 1;
    }
    let key = |(view, choice): &(&NodeView, Choice)| -> (Cost, String) {
        (choice.cost, view.name.to_string())
    };
    trial.fits.sort_by_key(key);
    trial
}
