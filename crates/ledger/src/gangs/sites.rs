//! The nodes that a plan for a gang may use, as they are while the search places pods on them.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_pack::{Choice, NodeGpus, Request};

use crate::Budget;
use crate::books::Uid;
use crate::maps::{HashMap, HashSet};
use crate::sight::Sight;

/// A node as the search has it.
pub(super) struct Site<'s> {
    pub(super) name: &'s Arc<str>,
    pub(super) view: NodeGpus,
    /// Pods that it takes still.
    pub(super) pods: u64,
    /// CPU and memory of the host are known.
    is_known: bool,
}

/// Nodes that the search may use.
pub(super) struct Sites<'s> {
    sight: &'s Sight<'s>,
    gone: &'s HashSet<Uid>,
    asking: &'s PodFacts,
    index: HashMap<&'s str, usize>,
    pub(super) all: Vec<Site<'s>>,
}

impl<'s> Sites<'s> {
    pub(super) fn new(sight: &'s Sight<'s>, gone: &'s HashSet<Uid>, asking: &'s PodFacts) -> Self {
        Self {
            sight,
            gone,
            asking,
            index: HashMap::default(),
            all: Vec::new(),
        }
    }

    pub(super) fn of(&mut self, names: &[Arc<str>], most: usize) -> Vec<usize> {
        let names = names.iter().take(most);
        names.filter_map(|name| self.site(name)).collect()
    }

    fn site(&mut self, name: &str) -> Option<usize> {
        if let Some(known) = self.index.get(name) {
            return Some(*known);
        }
        let sight = self.sight;
        let (name, node) = sight.books.named_node(name)?;
        let (gone, mut budget) = (self.gone, Budget::all());
        let view = match gone.is_empty() {
            true => sight.beside_kept(name, node, self.asking, |_| false, &mut budget),
            false => {
                let gone = |uid: &str| gone.contains(uid);
                let view = sight.view_without(name, node, self.asking, gone, &mut budget);
                view.map(Some)
            }
        };
        let facts = node.facts();
        let pods = facts.and_then(|facts| facts.pods);
        let left = gone.iter().filter(|uid| node.bound().contains_key(*uid));
        let left = u64::try_from(left.count()).unwrap_or(u64::MAX);
        let count = node.count().saturating_sub(left);
        self.all.push(Site {
            name,
            view: view.ok()?.unwrap_or_else(|| node.view().clone()),
            pods: pods.map_or(u64::MAX, |pods| pods.saturating_sub(count)),
            is_known: facts.is_some(),
        });
        self.index.insert(name, self.all.len() - 1);
        Some(self.all.len() - 1)
    }
}

impl Site<'_> {
    /// What can be said at little cost: false if the pod does not fit.
    pub(super) fn may_fit(&self, request: &Request) -> bool {
        let view = &self.view;
        let host = view.cpu_free_milli >= request.cpu_milli && view.ram_free >= request.ram;
        self.pods > 0 && (host || !self.is_known) && request.may_fit(view)
    }

    pub(super) fn take(&mut self, request: &Request, choice: &Choice) {
        self.view.take(request, &choice.placement.charges);
        self.pods = self.pods.saturating_sub(1);
    }
}
