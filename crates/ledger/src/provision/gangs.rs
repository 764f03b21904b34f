//! The needs of gangs that wait as a whole: the pods that do not get a place together with the fitting pods.
//!
//! This search may take long, so one look does it for a few gangs, the gangs with the oldest looks first. For the
//! others the look uses its earlier result, or the pods for which their placeholders stand.

use std::sync::Arc;

use gpustow_api::{Group, PodFacts};
use gpustow_books::{Budget, HashMap, HashSet, Uid, left_of_new};
use gpustow_means::Sight;
use gpustow_pack::NodeGpus;

use super::{Need, may_take, without_means};

/// The pods that gangs lack, by gang. Lost at a restart without harm.
#[derive(Debug, Default)]
pub(crate) struct Lacks {
    gangs: HashMap<Group, Lack>,
    looks: u64,
}

#[derive(Debug, Default)]
struct Lack {
    /// The look that found it out.
    looked: u64,
    pods: HashSet<Uid>,
}

impl Lacks {
    /// Looks at the gangs that wait.
    pub(super) fn look(
        &mut self,
        sight: &Sight<'_>,
        placeholders: &[Arc<PodFacts>],
        arriving: &HashSet<Arc<str>>,
        spent: &mut u64,
    ) {
        self.looks += 1;
        let mut before = std::mem::take(&mut self.gangs);
        for gang in whole_gangs(sight) {
            let lack = before.swap_remove(gang).unwrap_or_else(|| Lack {
                looked: 0,
                pods: stood_for(placeholders),
            });
            self.gangs.insert(gang.clone(), lack);
        }
        if self.gangs.is_empty() {
            return;
        }
        let mut budget = Budget::of_look();
        budget.charge(sight.books.nodes().len() / 8);
        let awaited = awaited(sight, arriving);
        let mut oldest: Vec<(u64, usize)> =
            self.gangs.values().map(|it| it.looked).zip(0..).collect();
        oldest.sort_unstable();
        for (_, index) in oldest {
            if budget.is_spent() {
                break;
            }
            if let Some((gang, lack)) = self.gangs.get_index_mut(index) {
                lack.looked = self.looks;
                if let Some(pods) = lacking(sight, gang, &awaited, arriving, &mut budget) {
                    lack.pods = pods.into_iter().collect();
                }
            }
        }
        *spent += budget.spent();
    }

    /// Is a pod that waits with its gang one that the gang lacks? None if it does not wait with a gang.
    pub(super) fn lacks(&self, pod: &PodFacts) -> Option<bool> {
        let lack = self.gangs.get(pod.group.as_ref()?)?;
        Some(lack.pods.contains(&pod.uid))
    }
}

/// The pods for which there are placeholders.
fn stood_for(placeholders: &[Arc<PodFacts>]) -> HashSet<Uid> {
    let pods = placeholders
        .iter()
        .filter_map(|it| it.stands_for.as_deref());
    pods.flatten().cloned().collect()
}

/// The gangs of waiting pods that kube-scheduler binds with others or not at all.
fn whole_gangs<'a>(sight: &Sight<'a>) -> Vec<&'a Group> {
    let pods = sight
        .queue
        .waiting()
        .turns()
        .filter_map(|turn| sight.books.pod(turn.uid()));
    let gangs = pods.filter_map(|pod| sight.books.gang(pod));
    let gangs: HashSet<&Group> = gangs.filter(|gang| gang.is_in_tree()).collect();
    let mut gangs: Vec<_> = gangs.into_iter().collect();
    gangs.retain(|gang| sight.waits_for_others(gang));
    gangs
}

/// Nodes that are to take pods again, or for the first time.
fn awaited<'a>(sight: &Sight<'a>, arriving: &HashSet<Arc<str>>) -> Vec<&'a Arc<str>> {
    let names = sight.books.nodes().map(|(name, _)| name);
    let is_awaited = |name: &&Arc<str>| arriving.contains(*name) || sight.check(name).is_err();
    names.filter(is_awaited).collect()
}

/// The pods that the gang lacks: with them, enough of it are placed together with the fitting pods. Empty if no
/// placeholder can stand for one of them, or if another means makes room for it. None if one look is not enough for the
/// answer.
fn lacking(
    sight: &Sight<'_>,
    gang: &Group,
    awaited: &[&Arc<str>],
    arriving: &HashSet<Arc<str>>,
    whole: &mut Budget,
) -> Option<Vec<Uid>> {
    let mut views: HashMap<&Arc<str>, NodeGpus> = HashMap::default();
    let mut lacking = Vec::new();
    let mut of_search = Budget::of_look();
    let unseated = sight.unseated(gang, &mut of_search);
    whole.charge_spent(&of_search);
    let mut budget = Budget::of_look();
    for pod in unseated {
        let Some((pod, request)) = without_means(sight, &pod.uid) else {
            return Some(Vec::new());
        };
        let need = Need {
            pod,
            request,
            is_seen: false,
        };
        let goes_to = awaited.iter().find_map(|name| {
            budget.charge(1);
            if budget.is_spent() {
                return None;
            }
            let may = may_take(sight, name, &need.pod, arriving, &mut budget);
            let view = views
                .get(name)
                .or_else(|| Some(sight.books.node(name)?.view()));
            budget.charge_fits(1);
            let view = view.filter(|_| may)?;
            let left = left_of_new(view, &need.request, None, sight.scores)?;
            Some((*name, left))
        });
        match goes_to {
            Some((name, left)) => drop(views.insert(name, left)),
            None => lacking.push(need.pod.uid.clone()),
        }
    }
    whole.charge_spent(&budget);
    (!budget.is_spent()).then_some(lacking)
}
