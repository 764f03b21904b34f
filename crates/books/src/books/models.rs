//! The names of card models, and the small numbers that stand for them in decisions. Names come from agents, so the
//! ledger bounds their number.

use std::sync::Arc;

use gpustow_pack::ModelId;

use crate::maps::HashMap;

/// More models than any cluster has. Models that come when this many are in use share one number.
const MAX: usize = 1024;
/// The bound for one node, so that an agent with made-up names does not use up the numbers of other nodes.
const MAX_OF_NODE: usize = 8;
/// Stands for all others.
const OTHER: ModelId = ModelId(u16::MAX);

/// The names that reports use now.
#[derive(Debug, Default)]
pub struct Models {
    ids: HashMap<Arc<str>, u16>,
    /// By number: the name, and how many reported cards have it.
    names: Vec<(Arc<str>, usize)>,
    /// Numbers that are not in use.
    free: Vec<u16>,
}

impl Models {
    /// The numbers of the models of one node's cards, in the cards' order. They are that report's until
    /// [`Self::release`] gets them back.
    pub(crate) fn take<'a>(&mut self, cards: impl Iterator<Item = &'a str>) -> Vec<ModelId> {
        let mut of_node: Vec<&str> = Vec::new();
        let number = |name: &'a str| {
            if !of_node.contains(&name) {
                if of_node.len() == MAX_OF_NODE {
                    return OTHER;
                }
                of_node.push(name);
            }
            self.one(name)
        };
        cards.map(number).collect()
    }

    fn one(&mut self, name: &str) -> ModelId {
        let known = self.ids.get(name).copied();
        let Some(id) = known.or_else(|| self.new_id(name)) else {
            return OTHER;
        };
        if let Some((_, cards)) = self.names.get_mut(usize::from(id)) {
            *cards += 1;
        }
        ModelId(id)
    }

    fn new_id(&mut self, name: &str) -> Option<u16> {
        let name: Arc<str> = name.into();
        let id = match self.free.pop() {
            Some(id) => {
                *self.names.get_mut(usize::from(id))? = (name.clone(), 0);
                id
            }
            None if self.names.len() < MAX => {
                self.names.push((name.clone(), 0));
                u16::try_from(self.names.len() - 1).ok()?
            }
            None => return None,
        };
        self.ids.insert(name, id);
        Some(id)
    }

    /// A report that is no more used these.
    pub(crate) fn release(&mut self, models: &[ModelId]) {
        for &ModelId(id) in models {
            let Some((name, cards)) = self.names.get_mut(usize::from(id)) else {
                continue;
            };
            *cards = cards.saturating_sub(1);
            if *cards == 0 && self.ids.swap_remove(name).is_some() {
                self.free.push(id);
            }
        }
    }

    /// The models whose name `is` accepts, in order.
    pub(crate) fn those(&self, is: impl Fn(&str) -> bool) -> Vec<ModelId> {
        let used = (0u16..)
            .zip(&self.names)
            .filter(|(_, (_, cards))| *cards > 0);
        used.filter(|(_, (name, _))| is(name))
            .map(|(id, _)| ModelId(id))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(models: &mut Models, names: &[String]) -> Vec<ModelId> {
        models.take(names.iter().map(String::as_str))
    }

    fn named(prefix: &str, count: usize) -> Vec<String> {
        (0..count)
            .map(|number| format!("{prefix}{number}"))
            .collect()
    }

    #[test]
    fn equal_names_have_equal_numbers_and_others_others() {
        let mut models = Models::default();
        let one = models.take(["a", "b", "a"].into_iter());
        let two = models.take(["b", "c"].into_iter());
        assert_eq!((one[0], one[1]), (one[2], two[0]));
        assert!(one[0] != one[1] && two[1] != one[0] && two[1] != one[1]);
        assert_eq!(models.those(|name| name != "b"), [one[0], two[1]]);
    }

    #[test]
    fn a_name_that_no_report_bears_is_forgotten() {
        let mut models = Models::default();
        for round in 0..100_000 {
            let names = named(&format!("{round}-"), 3);
            let taken = take(&mut models, &names);
            assert_eq!(models.those(|_| true).len(), 3);
            models.release(&taken);
        }
        assert!(models.ids.is_empty() && models.names.len() == 3);
    }

    #[test]
    fn an_agent_that_makes_up_names_takes_no_numbers_from_others() {
        let mut models = Models::default();
        let made_up = take(&mut models, &named("x", 256));
        assert_eq!(models.names.len(), MAX_OF_NODE);
        assert!(made_up[MAX_OF_NODE..].iter().all(|id| *id == OTHER));
        let real = models.take(["a"].into_iter());
        assert!(real[0] != OTHER && !made_up.contains(&real[0]));
        // Many such agents.
        for node in 0..1000 {
            take(&mut models, &named(&format!("{node}/"), 256));
        }
        assert_eq!(models.names.len(), MAX);
        assert_eq!(models.take(["a", "late"].into_iter()), [real[0], OTHER]);
        models.release(&made_up);
        assert_ne!(models.take(["late"].into_iter()), [OTHER]);
    }
}
