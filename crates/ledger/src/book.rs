//! The state, and what watch events do to it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{NodeFacts, PodFacts, intree};
use gpustow_pack::{PolicyKind, Request};
use hashbrown::{HashMap, HashSet};

use crate::bind::Reservation;
use crate::budget::Unfinished;
use crate::gone::Gone;
use crate::models::Models;
use crate::node::{Hold, Node, Report, Uid};
use crate::nominated::Claim;
use crate::scores::{Scores, Slot};
use crate::waiting::Waiting;
use crate::wake::Wakes;

/// What an operator may tune.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The policy for pods that name none.
    pub policy: PolicyKind,
    /// A GpuNode that has not changed for longer refuses gpu-mem pods.
    pub stale_after: Duration,
    /// How long a reservation waits for its bind.
    pub reservation_ttl: Duration,
    /// The same for pods with volumes or resource claims, which kube-scheduler may take long to
    /// prepare before it binds.
    pub slow_reservation_ttl: Duration,
    /// A woken pod that has not asked after this long has woken in vain. It is woken again for the
    /// same room after twice as long, then after twice that, up to five minutes.
    pub wake_again_after: Duration,
    /// How long a nominated pod that was refused keeps its room after its nomination is cleared.
    pub claim_ttl: Duration,
    /// Steps that one call may spend on searches for pods of several containers or cards.
    pub search_steps: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            stale_after: Duration::from_secs(180),
            reservation_ttl: Duration::from_secs(30),
            slow_reservation_ttl: Duration::from_secs(660),
            wake_again_after: Duration::from_secs(2),
            claim_ttl: Duration::from_secs(5),
            search_steps: 100_000,
        }
    }
}

/// A pod that a watch or our own successful bind told of.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) facts: Arc<PodFacts>,
    /// A watch has shown the pod, if not this copy of it.
    pub(crate) seen: bool,
    /// This copy is not the watch's: we bound the pod, or read it ourselves, at this time.
    pub(crate) own: Option<Duration>,
    /// The ledger's clock before this copy came.
    pub(crate) copy: u64,
}

/// The ledger. See the crate's documentation.
#[derive(Debug, Default)]
pub struct Ledger {
    pub(crate) config: Config,
    pub(crate) nodes: HashMap<Arc<str>, Node>,
    pub(crate) pods: HashMap<Uid, Known>,
    gone: Gone,
    /// See [`Ledger::copies`].
    copies: u64,
    pub(crate) reservations: HashMap<Uid, Reservation>,
    /// No reservation without a bind under way ends before this.
    pub(crate) earliest: Duration,
    /// Nodes that something after us refused for a pod, and how often its bind met a conflict.
    pub(crate) tried: HashMap<Uid, Tried>,
    /// Unbound pods by the node that kube-scheduler nominated for them, or where they have a claim.
    pub(crate) nominated: HashMap<Arc<str>, HashSet<Uid>>,
    /// Pods that an earlier extender may still bind, as they were when nobody could prevent it.
    pub(crate) unfenced: HashMap<Uid, Arc<PodFacts>>,
    pub(crate) claims: HashMap<Uid, Claim>,
    pub(crate) waiting: Waiting,
    pub(crate) wakes: Wakes,
    pub(crate) unfinished: Unfinished,
    pub(crate) scores: Scores,
    pub(crate) models: Models,
    /// Reservations that ended because no bind came in time.
    pub(crate) expirations: u64,
}

/// What went wrong with a pod's earlier attempts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tried {
    pub(crate) nodes: BTreeSet<Arc<str>>,
    pub(crate) conflicts: u32,
    /// Where the next call begins to look at nodes that are not remembered.
    pub(crate) next: Slot,
}

impl Tried {
    /// How often something after us said no.
    pub(crate) fn failures(&self) -> usize {
        self.nodes.len() + self.conflicts as usize
    }
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            scores: Scores::new(config.policy),
            ..Self::default()
        }
    }

    /// The policy that applies to a request.
    #[must_use]
    pub fn policy(&self, request: &Request) -> PolicyKind {
        self.scores.policy(request)
    }

    /// Learns anew what pods ask for: from those known now and from nothing else, so that a
    /// restart loses nothing. Filter does this by itself when their number has changed by a
    /// third; call it now and then, so that a mix that changes at constant numbers is followed.
    pub fn learn(&mut self) {
        self.scores.learn(&self.nodes, &self.models);
    }

    /// Does what filter would do first, or is likely to be asked, in advance, so that kube-scheduler
    /// does not wait for it: learns, and scores at most `limit` nodes for requests that came lately.
    /// True if there may be more to score.
    pub fn warm(&mut self, limit: usize) -> bool {
        self.scores.warm(limit, &self.nodes, &self.models)
    }

    /// The ledger's own clock: how many copies of pods, ends of pods and reservations it has noted.
    /// What it notes later has at least this number, so that a read of the API server is in order
    /// with all else: take the number before the read is sent.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.copies
    }

    pub(crate) fn tick(&mut self) -> u64 {
        self.copies += 1;
        self.copies - 1
    }

    /// A pod as a watch shows it.
    pub fn apply_pod(&mut self, pod: PodFacts) {
        // Only a list or a read of our own unbinds: such a copy is older than what we know.
        if pod.node.is_none() && self.is_bound(&pod.uid) {
            return;
        }
        self.end_given_up(&pod);
        self.put_pod(pod, true, None);
    }

    /// A pod as a read of our own shows it that was sent at `asked` on the ledger's clock
    /// ([`Ledger::copies`]). It counts if nothing newer came meanwhile: whole, even if the pod was
    /// bound before and is not any more, since the API server can be restored to an older state.
    pub fn read_back(&mut self, pod: PodFacts, asked: u64, now: Duration) {
        if self.gone.when(&pod.uid).is_some_and(|when| when >= asked) {
            return;
        }
        let known = self.pods.get(&pod.uid);
        let is_same = |known: &Known| known.facts.resource_version == pod.resource_version;
        let is_newer =
            |known: &Known| known.copy < asked || pod.node.is_some() && known.facts.node.is_none();
        if known.is_none_or(|known| is_newer(known) && (known.own.is_some() || !is_same(known))) {
            let seen = known.is_some_and(|known| known.seen);
            self.end_given_up(&pod);
            self.put_pod(pod, seen, Some(now));
        }
    }

    /// Bound pods of which only we know, by our own Binding or read, for so long that a watch should
    /// have shown them: to be read again.
    pub fn unconfirmed(&self, now: Duration) -> Vec<Arc<PodFacts>> {
        let late = |own: Duration| now.saturating_sub(own) >= CONFIRMED_AFTER;
        let known = self.pods.values();
        known
            .filter(|known| known.facts.node.is_some() && known.own.is_some_and(late))
            .map(|known| known.facts.clone())
            .collect()
    }

    /// Our own bind of this pod succeeded; the watch has yet to say so.
    pub(crate) fn put_bound(&mut self, pod: PodFacts, now: Duration) {
        let known = self.pods.get(&pod.uid);
        if known.is_some_and(|known| known.facts.node.is_some()) {
            self.drop_reservation(&pod.uid);
        } else {
            let seen = known.is_some_and(|known| known.seen);
            self.put_pod(pod, seen, Some(now));
        }
    }

    fn is_bound(&self, uid: &str) -> bool {
        let known = self.pods.get(uid);
        known.is_some_and(|known| known.facts.node.is_some())
    }

    /// True if the pod has ended, as far as we know.
    pub(crate) fn is_gone(&self, uid: &str) -> bool {
        self.gone.when(uid).is_some()
    }

    fn put_pod(&mut self, pod: PodFacts, seen: bool, own: Option<Duration>) {
        let (uid, pod) = (pod.uid.clone(), Arc::new(pod));
        self.gone.is_back(&uid);
        let known = Known {
            facts: pod.clone(),
            seen,
            own,
            copy: self.tick(),
        };
        let same = |then: &Arc<PodFacts>| then.resource_version == pod.resource_version;
        if !self.unfenced.get(&uid).is_none_or(same) {
            self.release_unfenced(&uid);
        }
        let old = self.pods.insert(uid.clone(), known);
        self.scores
            .pod_moved(old.as_ref().map(|old| &*old.facts), Some(&pod));
        self.index_nomination(old.as_ref().map(|old| &*old.facts), Some(&pod));
        let ended = pod.node.is_some() || pod.released;
        let was_held = match ended {
            true => self.take_reservation(&uid),
            false => None,
        };
        let was_bound = old.and_then(|old| old.facts.node.clone());
        let mut changed: Vec<_> = was_held.into_iter().collect();
        if let Some(name) = was_bound.filter(|name| pod.released || Some(name) != pod.node.as_ref())
            && let Some(node) = self.nodes.get_mut(&name)
            && node.bound.remove(&uid).is_some()
        {
            self.waiting.opened(&name);
            changed.push(name);
        }
        if let Some(name) = pod.node.as_ref().filter(|_| !pod.released) {
            let node = self.nodes.entry(name.clone()).or_default();
            let hold = Hold::of(&pod);
            if node.bound.get(&uid) != Some(&hold) {
                node.bound.insert(uid.clone(), hold);
                changed.push(name.clone());
            }
        }
        changed.dedup();
        changed.iter().for_each(|name| self.touch(name));
        if ended {
            self.tried.remove(&uid);
        }
        if let Some(Ok(_)) = &pod.assignment {
            self.waiting.asks_us(&pod.scheduler);
        }
        if ended || pod.gated || pod.deleting || !asks(&pod) {
            self.waiting.remove(&uid);
            return;
        }
        if let Ok(request) = &pod.request {
            self.scores.expect(request);
        }
        if pod.waiting {
            self.wait(&pod);
        }
    }

    /// A pod is gone. A filter call or a read that is late does not bring it back.
    pub fn delete_pod(&mut self, uid: &str) {
        let when = self.tick();
        let known = self.pods.remove(uid);
        let asks = |known: &Known| !known.facts.request.as_ref().is_ok_and(|r| r.is_empty());
        if known.as_ref().is_none_or(asks) {
            self.gone.note(uid.into(), when);
        }
        if let Some(Known { facts, .. }) = known {
            self.scores.pod_moved(Some(&facts), None);
            self.index_nomination(Some(&facts), None);
            if let Some(name) = &facts.node
                && let Some(node) = self.nodes.get_mut(name)
                && node.bound.remove(uid).is_some()
            {
                self.waiting.opened(name);
                self.touch(name);
            }
        }
        self.release_unfenced(uid);
        self.drop_reservation(uid);
        self.tried.remove(uid);
        self.waiting.remove(uid);
    }

    /// The whole list of pods, asked for at `began` on the ledger's clock ([`Ledger::copies`]). It
    /// wins over all that came before: what it lacks is gone, and who is unbound in it is unbound.
    /// Of what we did and read ourselves since nobody can tell before the next list.
    pub fn reset_pods(&mut self, pods: Vec<PodFacts>, began: u64) {
        let listed: HashSet<Uid> = pods.iter().map(|pod| pod.uid.clone()).collect();
        let gone = self
            .pods
            .iter()
            .filter(|(uid, known)| !listed.contains(*uid) && (known.seen || known.copy < began));
        let known = |uid: &Uid| self.pods.contains_key(uid) || listed.contains(uid);
        let never_seen = self
            .reservations
            .iter()
            .filter(|(uid, held)| !known(uid) && held.made < began && held.binds == 0);
        let gone = gone.map(|(uid, _)| uid.clone());
        let gone: Vec<Uid> = gone.chain(never_seen.map(|(uid, _)| uid.clone())).collect();
        gone.iter().for_each(|uid| self.delete_pod(uid));
        for pod in pods {
            let keeps = |known: &Known| known.copy >= began && known.facts.node.is_some();
            if pod.node.is_some() || !self.pods.get(&pod.uid).is_some_and(keeps) {
                self.end_given_up(&pod);
                self.put_pod(pod, true, None);
            }
        }
        let (pods, reservations) = (&self.pods, &self.reservations);
        self.tried
            .retain(|uid, _| pods.contains_key(uid) || reservations.contains_key(uid));
    }

    /// A node as a watch shows it.
    pub fn apply_node(&mut self, facts: NodeFacts) {
        let name = facts.name.clone();
        let node = self.nodes.entry(name.clone()).or_default();
        if node.facts.as_ref() != Some(&facts) {
            if !node
                .facts
                .as_ref()
                .is_some_and(|old| intree::alike(old, &facts))
            {
                self.waiting.opened(&name);
            }
            node.facts = Some(facts);
            self.touch(&name);
        }
    }

    /// A node is gone. Pods bound to it still count should it come back.
    pub fn delete_node(&mut self, name: &str) {
        self.with_node(name, |node| node.facts = None);
    }

    /// The whole list of nodes.
    pub fn reset_nodes(&mut self, nodes: Vec<NodeFacts>) {
        let listed: HashSet<Arc<str>> = nodes.iter().map(|node| node.name.clone()).collect();
        let gone: Vec<_> = self
            .nodes
            .keys()
            .filter(|name| !listed.contains(*name))
            .cloned()
            .collect();
        gone.iter().for_each(|name| self.delete_node(name));
        nodes.into_iter().for_each(|node| self.apply_node(node));
    }

    /// A GpuNode as a watch shows it. It is fresh from `now` on if it says something new.
    pub fn apply_gpunode(&mut self, name: &str, status: GpuNodeStatus, now: Duration) {
        let known = self.nodes.get(name).and_then(|node| node.report.as_ref());
        if known.is_some_and(|report| report.status == status) {
            return;
        }
        let models = self.models.take(status.gpus.iter().map(|gpu| &*gpu.model));
        let name: Arc<str> = name.into();
        let node = self.nodes.entry(name.clone()).or_default();
        let stale_after = self.config.stale_after;
        let was_stale = node.gate().is_stale(now, stale_after) == Some(true);
        let links = status.links();
        let old = node.report.replace(Report {
            status,
            seen: now,
            models,
            links,
        });
        if was_stale && node.gate().is_stale(now, stale_after) == Some(false) {
            self.waiting.room_on(&name);
        }
        self.touch(&name);
        match old {
            Some(old) => self.models.release(&old.models),
            None => self.withhold_on(&name),
        }
    }

    /// A GpuNode is gone.
    pub fn delete_gpunode(&mut self, name: &str) {
        let node = self.nodes.get_mut(name);
        if let Some(old) = node.and_then(|node| node.report.take()) {
            self.models.release(&old.models);
            self.touch(name);
        }
    }

    /// The whole list of GpuNodes.
    pub fn reset_gpunodes(&mut self, gpunodes: Vec<(String, GpuNodeStatus)>, now: Duration) {
        let listed: HashSet<&str> = gpunodes.iter().map(|(name, _)| name.as_str()).collect();
        let gone: Vec<_> = self
            .nodes
            .keys()
            .filter(|name| !listed.contains(&***name))
            .cloned()
            .collect();
        drop(listed);
        gone.iter().for_each(|name| self.delete_gpunode(name));
        for (name, status) in gpunodes {
            self.apply_gpunode(&name, status, now);
        }
    }

    fn with_node(&mut self, name: &str, change: impl FnOnce(&mut Node)) {
        if let Some(node) = self.nodes.get_mut(name) {
            change(node);
            self.touch(name);
        }
    }

    /// Recomputes a node after a change and notes room that appeared.
    pub(crate) fn touch(&mut self, name: &str) {
        let Some((name, node)) = self.nodes.get_key_value_mut(name) else {
            return;
        };
        if node.is_empty() {
            let name = name.clone();
            self.nodes.remove(&name);
            self.scores.node_gone(&name);
            return;
        }
        if node.refresh() {
            self.waiting.room_on(name);
        }
        self.scores.node_changed(name, node.gate(), &mut node.view);
    }
}

/// A bound pod that no watch has shown for this long is to be read again.
const CONFIRMED_AFTER: Duration = Duration::from_secs(10);

/// True if the pod asks for GPU memory and has not released it.
pub(crate) fn asks(pod: &PodFacts) -> bool {
    let request = pod.request.as_ref();
    !pod.released && request.is_ok_and(|request| !request.is_empty())
}
