//! The work of kube-scheduler and the extender in the model: filter, bind, and the result of the Binding.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, BindRefusal, Filtered, Outcome, Reason};
use gpustow_pack::Mib;

use super::server::{NODES, Post};
use super::world::{World, require};
use crate::build::ask;

/// Longer than a gang holds memory without a bind.
const HELD: Duration = Duration::from_secs(3);

impl World {
    pub(super) fn filter(
        &mut self,
        pod: &PodFacts,
        nodes: &[&'static str],
        cooperative: bool,
    ) -> Result<(), String> {
        let nodes = self.candidates(pod, nodes);
        self.filter_among(pod, &nodes, cooperative)
    }

    /// The nodes that refused the pod and have room by preempt's answer. A pod of a gang waits for the pods before it,
    /// and for the rest of its gang.
    fn missed<'v>(&self, pod: &PodFacts, verdict: &Filtered<'v>) -> Vec<(&'v str, Reason)> {
        let refused = verdict.refused.iter().copied();
        let refused = refused.filter(|(_, why)| {
            !matches!(why, Reason::Queued | Reason::Gang | Reason::BindUnderWay)
        });
        refused
            .filter(|(name, _)| self.has_room(&self.ledger, pod, name))
            .collect()
    }

    /// Filters the nodes that kube-scheduler's own filters pass.
    pub(super) fn filter_among(
        &mut self,
        pod: &PodFacts,
        nodes: &[&'static str],
        cooperative: bool,
    ) -> Result<(), String> {
        self.note_shown(pod, nodes);
        let gaining = self.gaining();
        let asked = Ask {
            cooperative,
            ..ask(pod)
        };
        // If another client has bound the pod, its agent may show its use before our watch shows the bind.
        let truth = self.server.find(&pod.uid);
        let truth = truth.map(|index| self.server.pods[index].node.clone());
        let known = self.ledger.pod(&pod.uid).map(|known| known.node.clone());
        let settled = !self.ledger.is_binding(&pod.uid)
            && truth.into_iter().chain(known).all(|node| node.is_none());
        let mut verdict = self.ledger.filter(&asked, nodes, self.now);
        // A refused pod counts among the waiting pods: for others, room may then be kept on another GPU. The memory
        // that others of its gang held is free, too.
        if settled && !self.missed(pod, &verdict).is_empty() {
            verdict = self.ledger.filter(&asked, nodes, self.now);
        }
        self.given_up.remove(&pod.uid);
        self.check_shortfall(pod, &verdict)?;
        let room = |name: &str| self.has_room(&self.ledger, pod, name);
        for name in &verdict.nodes {
            require(!settled || room(name), || {
                format!("filter takes {name}, preempt does not")
            })?;
        }
        for (name, reason) in &verdict.refused {
            require(!settled || *reason != Reason::BindUnderWay, || {
                format!("no bind is under way to {name}")
            })?;
        }
        let missed = self.missed(pod, &verdict);
        require(!settled || missed.is_empty(), || {
            format!("filter refuses {missed:?}, preempt does not")
        })?;
        let scores = self
            .ledger
            .rank(pod, asked.tolerates, &verdict.nodes, self.now);
        require(
            !settled || scores.first().is_none_or(|&best| best == 10),
            || format!("prioritize gives {scores:?} to {:?}", verdict.nodes),
        )?;
        match verdict.nodes.first() {
            Some(name) => self.chosen.insert(pod.uid.clone(), name),
            None => self.chosen.remove(&pod.uid),
        };
        // Where a bind is under way nothing is decided.
        let nodes = verdict.nodes.first().filter(|_| settled).copied();
        self.check_gains(&gaining, pod)?;
        self.check_kept(pod, &verdict.refused)?;
        self.check_queued(pod, nodes, &verdict.refused)
    }

    /// kube-scheduler tries every pod that it may, `rounds` times.
    pub(super) fn schedule(&mut self, rounds: usize) -> Result<(), String> {
        for round in 0..rounds {
            let mut pods = self.server.pods.clone();
            pods.retain(|pod| pod.node.is_none() && !pod.gated && !pod.queued && !pod.deleting);
            pods.sort_by_key(|pod| (-pod.priority, pod.created, pod.uid.clone()));
            for pod in pods {
                self.begin_window(round);
                if let Some(group) = &pod.group {
                    self.cycle(group, true)?;
                } else {
                    self.filter(&pod, &NODES, false)?;
                    if let Some(&name) = self.chosen.get(&pod.uid) {
                        self.begin_bind(&pod.uid, name)?;
                    }
                }
                for post in 0..self.server.posts.len() {
                    self.server.land(post);
                    self.end_bind(post);
                }
                self.deliver_pods(usize::MAX);
            }
            // kube-scheduler may give up a gang without a call: the memory that the gang holds is freed with time.
            if self.switches.gangs {
                self.now += HELD;
            }
        }
        Ok(())
    }

    /// Begins a bind of the copy that the ledger has, as the extender does.
    pub(super) fn begin_bind(
        &mut self,
        uid: &Arc<str>,
        name: &str,
    ) -> Result<Option<BindRefusal>, String> {
        let index = self.server.find(uid).ok_or("it is there")?;
        let pod = match self.ledger.pod(uid) {
            Some(known) => PodFacts::clone(&known),
            None => self.server.pods[index].clone(),
        };
        if pod.node.is_some() || pod.gated || pod.queued || pod.deleting {
            return Ok(None);
        }
        let gaining = self.gaining();
        let assignment = match self.ledger.begin_bind(&pod, name, self.now) {
            Ok(assignment) => assignment,
            Err(refusal) => return Ok(Some(refusal)),
        };
        self.check_gains(&gaining, &pod)?;
        let whole = pod.asks.is_exclusive();
        let claims = pod.asks.claims().iter();
        let least = |total| claims.clone().map(|claim| claim.on(Mib(total))).max();
        for (uuid, mib) in &assignment.charges {
            let report = self
                .known
                .get(name)
                .ok_or("bound to a node without a report")?;
            let card = report.gpus.iter().find(|gpu| *gpu.uuid == **uuid);
            let card = card.ok_or_else(|| format!("{uuid} is not there"))?;
            let (others, computed) = self.server.assigned(name, uuid, uid);
            let limit = pod.asks.request().map_or(0, |request| request.limit().0);
            require(limit <= card.limit().0, || {
                format!("the driver cannot hold {uid} to {limit} MiB on {uuid}")
            })?;
            require(Some(*mib) >= least(card.total_mib), || {
                format!("{uid} takes {mib} of {uuid}, which has {}", card.total_mib)
            })?;
            self.check_instance(&pod, name, card, &assignment)?;
            self.check_apart(&pod, uuid)?;
            let compute = u64::from(assignment.compute);
            require(card.mps == (compute > 0), || {
                format!("{uid} has {compute} % of the compute of {card:?}")
            })?;
            require(computed + compute <= 100, || {
                format!("{uid} takes {compute} % beside {computed} % of {uuid}")
            })?;
            require(card.healthy, || format!("{uuid} is not healthy"))?;
            require(others + mib.0 <= card.total_mib, || {
                format!(
                    "{uid} takes {mib} beside {others} on {uuid}, which has {}",
                    card.total_mib
                )
            })?;
            require(!whole || others == 0, || {
                format!("{uid} is not alone on {uuid}")
            })?;
        }
        self.server.posts.push(Post {
            pod,
            node: name.into(),
            assignment,
            landed: None,
            refused: false,
            awaited: true,
        });
        Ok(None)
    }

    /// No other pod holds the card that shares none with this one.
    fn check_apart(&self, pod: &PodFacts, uuid: &str) -> Result<(), String> {
        let group = |pod: &PodFacts| pod.asks.request()?.rules.as_ref()?.anti_affinity.clone();
        let Some(own) = group(pod) else {
            return Ok(());
        };
        let shares = self.shares().into_iter();
        let mut others = shares.filter(|(uid, _, card, _)| *uid != pod.uid && *card == *uuid);
        let other = others.find(|(uid, ..)| {
            let known = self.ledger.pod(uid);
            known.is_some_and(|known| group(&known).as_ref() == Some(&own))
        });
        require(other.is_none(), || {
            format!("{} gets {uuid} beside {other:?}", pod.uid)
        })
    }

    pub(super) fn end_bind(&mut self, index: usize) {
        let post = self.server.posts[index].clone();
        let outcome = match post.landed {
            _ if !post.awaited => return,
            Some(true) => Outcome::Bound,
            Some(false) if post.refused => Outcome::Refused,
            Some(false) => Outcome::Conflict,
            None if self.server.may_land(&post) => return,
            None => Outcome::Failed,
        };
        // Half of the callers learn it by reading the pod back.
        if let Some(pod) = self
            .server
            .find(&post.pod.uid)
            .filter(|_| index.is_multiple_of(2))
        {
            let copy = self.server.pods[pod].clone();
            self.ledger.read_back(copy, self.ledger.copies(), self.now);
        }
        self.ledger.end_bind(&post.pod, outcome, self.now);
        self.server.posts[index].awaited = false;
    }
}
