//! Which nodes an autoscaler must add, because it cannot see by itself that pods need them.
//!
//! An autoscaler does not call extenders. It sees the sum of a node's free memory, and does not see a pod with a
//! scheduling gate. A *placeholder* is a pod that it sees instead. A placeholder requests the memory that pods wait
//! for, and no present node takes it. The ledger names the placeholders that are to be created and deleted
//! ([`Ledger::provision`]), but does not create them.
//!
//! A gang needs room for the pods that it lacks apart from its fitting pods, or nothing if enough fit ([`gangs`]).
//!
//! Pods for which the autoscaler adds a node by itself do not get placeholders. Neither do pods that such a node, a
//! node of another placeholder or an arriving node will take. The ledger derives the pods that a node takes from the
//! kinds of nodes that are there. Of a kind that is not there nothing is known. Each pod for it has a placeholder of
//! its own, and the autoscaler adds up their requests.

mod gangs;
mod kinds;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::intree::Constraints;
use gpustow_api::{PodFacts, names};
use gpustow_books::{Budget, Evidence, HashMap, HashSet, Reason, Turn, Uid};
use gpustow_means::Sight;
use gpustow_pack::{Bytes, Mib, Request};

use crate::Ledger;
pub(crate) use gangs::Lacks;
use kinds::{Bin, Kinds, fewest};

/// Waiting pods that one look thinks of, the first in turn.
const PODS: usize = 256;
/// More pods than that are put together one after the other, fewer in the best way.
const EXACT: usize = 6;
/// A node without a report is awaited for so long.
const ARRIVES_FOR: Duration = Duration::from_secs(600);
/// Present nodes that a placeholder names at most.
const NAMED: usize = 100;
/// A report that is stale for no longer may come again: its node counts.
const STALE_FOR: Duration = Duration::from_secs(300);

/// An autoscaler has so long to answer a placeholder with a node.
const ANSWERS_IN: Duration = Duration::from_secs(900);

/// The rest of an owner that no node answers doubles so often: to ten days.
const MOST_DOUBLED: u32 = 10;

/// The placeholders to create and to delete now.
#[derive(Clone, Debug, Default)]
pub struct Provision {
    /// Placeholders that are to be created.
    pub create: Vec<Placeholder>,
    /// Placeholders whose need has ended.
    pub delete: Vec<Arc<PodFacts>>,
    /// Placeholders that stay although no node has come for them in 15 minutes ([`Ledger::tell_time`]).
    pub unanswered: Vec<Arc<PodFacts>>,
}

/// A pod that has an autoscaler add one node.
#[derive(Clone, Debug, PartialEq)]
pub struct Placeholder {
    /// Its owner: the first in turn of the pods that wait for the node.
    pub pod: Arc<PodFacts>,
    /// All pods that wait for the node, the owner first.
    pub pods: Vec<Uid>,
    /// The sum of the GPU memory that they request.
    pub mib: Mib,
    /// The sum of the CPU that they request, in thousandths of a core.
    pub cpu_milli: u64,
    /// The sum of the host memory that they request.
    pub ram: Bytes,
    /// The node has at least this number of GPUs.
    pub gpus: u32,
    /// Each GPU has at least this much memory.
    pub gpu_mib: Mib,
    /// No second placeholder of this kind goes to the same node: the pods that the node takes were counted.
    pub is_counted: bool,
    /// Known instance types that take the pods.
    pub types: Vec<Box<str>>,
    /// Known instance types that do not.
    pub others: Vec<Box<str>>,
    /// Host names of present nodes whose free memory suffices in sum; none if they are too many to name.
    pub present: Vec<Box<str>>,
}

/// The times since which nodes that do not take pods yet have been there. Their loss at a restart is harmless.
#[derive(Debug, Default)]
pub(crate) struct Arriving(HashMap<Arc<str>, Duration>);

impl Arriving {
    /// Nodes that may soon take pods.
    fn names(&self, now: Duration) -> HashSet<Arc<str>> {
        let lately =
            |(_, since): &(&Arc<str>, &Duration)| now.saturating_sub(**since) < ARRIVES_FOR;
        let names = self.0.iter().filter(lately);
        names.map(|(name, _)| name.clone()).collect()
    }
}

/// Owners of placeholders that no node answered while others needed them: until when they have none, and how often that was.
/// Lost at a restart without harm.
#[derive(Debug, Default)]
pub(crate) struct Unanswered(HashMap<Uid, (Duration, u32)>);

impl Unanswered {
    fn times(&self, owner: &Uid) -> u32 {
        self.0.get(owner).map_or(0, |(_, times)| *times)
    }

    /// No node came: its owner has none for twice as long as the last time.
    fn note(&mut self, owner: &Uid, now: Duration) {
        let times = self.times(owner);
        let rest = ANSWERS_IN * 2_u32.pow(times.min(MOST_DOUBLED));
        self.0.insert(owner.clone(), (now + rest, times + 1));
    }
}

/// A pod that no present node can take.
#[derive(Clone, Debug)]
struct Need {
    pod: Arc<PodFacts>,
    request: Arc<Request>,
    /// The autoscaler sees that, and adds a node by itself.
    is_seen: bool,
}

impl Ledger {
    /// Which placeholders are to be created and deleted. To be called every second or so, and when a node has come.
    pub fn provision(&mut self, now: Duration) -> Provision {
        let present = self.placeholders();
        if self.parts.config.provision == 0 {
            return Provision {
                delete: present,
                ..Provision::default()
            };
        }
        self.expire(now);
        self.note_arriving(now);
        let arriving = self.arriving.names(now);
        let mut lacks = std::mem::take(&mut self.lacks);
        let mut spent = u64::try_from(self.parts.books.arriving().len()).unwrap_or(u64::MAX);
        let sight = self.sight(now);
        lacks.look(&sight, &present, &arriving, &mut spent);
        let needs = needs(&sight, &arriving, &lacks, &present, &mut spent);
        self.lacks = lacks;
        self.parts.count_spent(spent);
        if needs.is_empty() {
            return Provision {
                delete: present,
                ..Provision::default()
            };
        }
        let mut unanswered = std::mem::take(&mut self.unanswered);
        unanswered
            .0
            .retain(|uid, _| self.parts.books.pod(uid).is_some());
        let mut spent = 0;
        let sight = self.sight(now);
        let provision = placeholders(&sight, &needs, present, &arriving, &unanswered, &mut spent);
        self.parts.count_spent(spent);
        for placeholder in &provision.unanswered {
            if let Some(owner) = placeholder.placeholder_owner()
                && provision.delete.contains(placeholder)
            {
                unanswered.note(owner, now);
            }
        }
        self.unanswered = unanswered;
        provision
    }

    /// The placeholders that there are, the oldest first.
    #[must_use]
    pub fn placeholders(&self) -> Vec<Arc<PodFacts>> {
        let all = self.parts.queue.placeholders().iter();
        let pods = all.filter_map(|uid| self.parts.books.pod(uid));
        let mut pods: Vec<_> = pods.filter(|pod| !pod.deleting).cloned().collect();
        pods.sort_by(|a, b| (a.created, &a.uid).cmp(&(b.created, &b.uid)));
        pods
    }

    /// Notes since when nodes have been there that do not report, or have the startup taint.
    fn note_arriving(&mut self, now: Duration) {
        let starting = self.parts.books.arriving();
        self.arriving.0.retain(|name, _| starting.contains(name));
        for name in starting {
            self.arriving.0.entry(name.clone()).or_insert(now);
        }
    }
}

/// The waiting pods that no present node can take, the first in turn. Pods with placeholders are looked at before the
/// others, because the cost of a look is bounded.
fn needs(
    sight: &Sight<'_>,
    arriving: &HashSet<Arc<str>>,
    lacks: &Lacks,
    present: &[Arc<PodFacts>],
    spent: &mut u64,
) -> Vec<Need> {
    let named = present.iter().flat_map(|it| it.stands_for.iter());
    let named: HashSet<&Uid> = named.flat_map(|uids| uids.iter()).collect();
    let mut turns: Vec<&Turn> = sight.queue.waiting().turns().collect();
    turns.sort_unstable_by_key(|turn| (!named.contains(turn.uid()), *turn));
    let mut fits: HashMap<(Arc<Request>, Arc<Constraints>), bool> = HashMap::default();
    let mut budget = Budget::of_look();
    budget.charge(turns.len() / 8);
    let mut of_sums = Budget::of_look();
    let mut needs = Vec::new();
    // The memory that pods before this one would take.
    let mut taken = HashMap::default();
    let mut seen = 0;
    for turn in turns {
        if needs.len() - seen == PODS {
            break;
        }
        let Some((pod, request)) = without_means(sight, turn.uid()) else {
            continue;
        };
        let lacks = lacks.lacks(&pod);
        let key = (request.clone(), pod.constraints.clone());
        let fits = || {
            *(fits.entry(key)).or_insert_with(|| may_fit_some(sight, &pod, arriving, &mut budget))
        };
        if lacks.is_none() && fits() {
            continue;
        }
        // It counts the pods that fit and wait for the rest of their gang.
        let is_seen = !pod.queued
            && match seems_to_fit(sight, &pod, &request, &mut taken, &mut of_sums) {
                Some(fits) => !fits,
                None => !named.contains(&pod.uid),
            };
        // The nodes that the autoscaler adds for this number of pods take others as well.
        if lacks != Some(false) && (!is_seen || seen < PODS) {
            seen += usize::from(is_seen);
            needs.push(Need {
                pod,
                request,
                is_seen,
            });
        }
    }
    needs.sort_by_cached_key(|need| Turn::of(&need.pod));
    *spent += budget.spent() + of_sums.spent();
    needs
}

/// The pod, if it waits and no other means makes room for it.
fn without_means(sight: &Sight<'_>, uid: &Uid) -> Option<(Arc<PodFacts>, Arc<Request>)> {
    let pod = sight.asleep(uid)?;
    let request = pod.asks.request()?.clone();
    // A new GPU has an unknown UUID, and which pods share it was not counted.
    let rules = request.rules.as_ref();
    let is_bound_to_gpus = rules.is_some_and(|rules| {
        !rules.uuids.is_empty() || rules.affinity.is_some() || rules.anti_affinity.is_some()
    });
    let waits = !sight.earmarks.is_nominated(&pod)
        && !is_bound_to_gpus
        && sight.books.assumed(uid).is_none()
        && !sight.books.is_unfenced(uid)
        && !sight.earmarks.has_more_than_reservation(uid)
        && !sight.expects_room(&pod);
    waits.then_some((pod, request))
}

/// Can a present node take the pod? True, too, if the budget is spent before the answer, or if the node may report
/// again.
fn may_fit_some(
    sight: &Sight<'_>,
    pod: &PodFacts,
    arriving: &HashSet<Arc<str>>,
    budget: &mut Budget,
) -> bool {
    let Some(request) = pod.asks.request() else {
        return true;
    };
    let least = request.claims.iter().map(|claim| claim.mib).max();
    let mut names = sight.books.with_room(least.unwrap_or_default());
    names.any(|name| {
        budget.charge(1);
        budget.is_spent() || may_take(sight, name, pod, arriving, budget)
    })
}

fn may_take(
    sight: &Sight<'_>,
    name: &Arc<str>,
    pod: &PodFacts,
    arriving: &HashSet<Arc<str>>,
    budget: &mut Budget,
) -> bool {
    let Some(node) = sight.books.node(name) else {
        return false;
    };
    let refused = match arriving.contains(name) {
        true => sight.books.refused_once_started(name, pod),
        false => sight.books.refused_in_tree(name, pod),
    };
    let lately = sight.config.stale_after + STALE_FOR;
    node.facts().is_some()
        && node.gate().is_stale(sight.now, lately) == Some(false)
        && refused.is_none()
        && !matches!(
            sight.trial().choose(pod, name, budget),
            Err(reason) if reason != Reason::NotYet
        )
}

/// The host names of nodes with so much free in sum.
fn seem_to_hold(sight: &Sight<'_>, mib: Mib) -> Vec<Box<str>> {
    let free = sight.books.with_sum(mib).map(|(_, name)| name);
    let nodes: Vec<&Arc<str>> = free.take(NAMED + 1).collect();
    if nodes.len() > NAMED {
        return Vec::new();
    }
    let facts = nodes
        .iter()
        .filter_map(|name| sight.books.node(name)?.facts());
    let hosts = facts.filter_map(|facts| facts.label(names::HOSTNAME));
    let mut hosts: Vec<Box<str>> = hosts.map(Box::from).collect();
    hosts.sort_unstable();
    hosts
}

/// Does a node take the pod by all that an autoscaler sees, in addition to the `taken` memory? Then the pod's memory
/// counts as `taken` for the next pods. None if the budget is spent before the answer.
fn seems_to_fit(
    sight: &Sight<'_>,
    pod: &PodFacts,
    request: &Request,
    taken: &mut HashMap<Arc<str>, Mib>,
    budget: &mut Budget,
) -> Option<bool> {
    let asked = request.in_sum();
    for (left, name) in sight.books.with_sum(asked) {
        budget.charge(1);
        if budget.is_spent() {
            return None;
        }
        let before = taken.get(name).copied().unwrap_or_default();
        if left.minus(before) >= asked
            && sight.evidence(pod, name) != Evidence::Rejected
            && sight.books.refused_in_tree(name, pod).is_none()
        {
            taken.insert(name.clone(), before + asked);
            return Some(true);
        }
    }
    Some(false)
}

/// The placeholders to create and to delete for these pods, given the `present` placeholders.
fn placeholders(
    sight: &Sight<'_>,
    needs: &[Need],
    present: Vec<Arc<PodFacts>>,
    arriving: &HashSet<Arc<str>>,
    rest: &Unanswered,
    spent: &mut u64,
) -> Provision {
    let kinds = Kinds::of(sight, needs);
    let mut open: Vec<usize> = (0..needs.len()).collect();
    let mut provision = Provision::default();
    let mut bins: Vec<Bin> = Vec::new();
    let mut kept = HashSet::default();
    let mut stay = Vec::new();
    for placeholder in present {
        let pods = needed_for(&placeholder, needs);
        // Its owner may wait for the others of its gang.
        let owner = placeholder.placeholder_owner();
        let owner = owner.and_then(|uid| sight.books.pod(uid));
        let waits = owner.is_some_and(|owner| owner.node.is_none());
        let unseen = pods.iter().filter(|it| waits && !needs[**it].is_seen);
        let is_needed = unseen
            .min()
            .is_some_and(|first| kept.len() < sight.config.provision && kept.insert(*first));
        if !is_needed {
            provision.delete.push(placeholder);
            continue;
        }
        open.retain(|it| !pods.contains(it));
        bins.push(Bin::with(&pods, &kinds));
        stay.push(placeholder);
    }
    // The nodes of these placeholders are among the arriving nodes: the oldest placeholder has the first.
    let arriving = arriving
        .iter()
        .filter_map(|name| kinds.of_unknown(name, sight));
    let arriving: Vec<usize> = arriving.collect();
    let unanswered = stay.into_iter().skip(arriving.len());
    let unanswered =
        unanswered.filter(|it| sight.unix.is_some() && sight.has_waited(it, ANSWERS_IN));
    provision.unanswered = unanswered.collect();
    let others = arriving.into_iter().skip(kept.len());
    let others = others.map(|kind| Bin::of(kind, &kinds));
    bins.splice(0..0, others);
    // The nodes that the autoscaler adds by itself take other pods as well.
    let (seen, mut open): (Vec<usize>, Vec<usize>) =
        open.into_iter().partition(|it| needs[*it].is_seen);
    for index in seen {
        if !bins.iter_mut().any(|bin| bin.take(index, &kinds)) {
            bins.push(Bin::with(&[index], &kinds));
        }
    }
    open.retain(|index| !bins.iter_mut().any(|bin| bin.take(*index, &kinds)));
    let free = sight.config.provision - kept.len();
    let rests = |uid: &Uid| rest.0.get(uid).is_some_and(|(until, _)| sight.now < *until);
    open.retain(|index| !rests(&needs[*index].pod.uid));
    let times = |index: usize| rest.times(&needs[index].pod.uid);
    let new = fewest(&open, &kinds, times);
    // A placeholder that no node answered gives way to the next.
    let short = new.len().saturating_sub(free);
    let give_way = provision.unanswered.iter().take(short).cloned();
    provision.delete.extend(give_way);
    let new = new.into_iter().take(free);
    provision
        .create
        .extend(new.map(|bin| bin.placeholder(&kinds, sight)));
    *spent += kinds.spent(sight);
    provision
}

/// The needs for which the placeholder is.
fn needed_for(placeholder: &PodFacts, needs: &[Need]) -> Vec<usize> {
    let pods = placeholder.stands_for.iter().flat_map(|pods| pods.iter());
    let by_uid = |uid: &Uid| needs.iter().position(|need| need.pod.uid == *uid);
    pods.filter_map(by_uid).collect()
}

impl Need {
    fn gpu_mib(&self) -> Mib {
        let claims = self.request.claims.iter().map(|claim| claim.mib);
        claims.max().unwrap_or_default()
    }

    fn gpus(&self) -> u32 {
        let claims = self.request.claims.iter().map(|claim| claim.gpus);
        claims.max().unwrap_or_default()
    }
}

/// The instance type of a node, if a label names it.
fn instance_type(facts: &gpustow_api::NodeFacts) -> Option<&str> {
    facts.label(names::INSTANCE_TYPE)
}
