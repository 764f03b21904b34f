//! Preempts pods for one that free memory is too scattered for, if the GpustowConfig allows it (`preempt.fragmented`).
//!
//! Who ends is the ledger's answer, by kube-scheduler's order. First the pod that it is for is told where room is kept
//! for it; then each victim gets the condition `DisruptionTarget` and is deleted, by its uid and the resourceVersion
//! that the condition left.

use std::sync::Arc;

use gpustow_api::{PodFacts, kept, names};
use gpustow_ledger::Preemption;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use tokio::time::Instant;

use super::write::{condition, is_settled};
use super::{Acts, MAX_PAUSE, PAUSE, TIMEOUT, name};
use crate::ask::{AskError, within};
use crate::budgets::{broken, budgets};
use crate::metrics::{MOVE, PREEMPT};

impl Acts {
    /// Who is to end now, and for whom.
    pub(super) fn preemptions(&self) -> Vec<Preemption> {
        let now = self.app.ledger.now();
        self.app.ledger.lock().preemptions(now)
    }

    /// Is this pod to end for that one still? The look that said so may be some requests old.
    fn is_to_end(&self, preemption: &Preemption, victim: &PodFacts) -> bool {
        let now = self.app.ledger.now();
        let of_it = self.app.ledger.lock().preemption(&preemption.pod.uid, now);
        of_it.is_some_and(|it| {
            it.node == preemption.node && it.victims.iter().any(|pod| pod.uid == victim.uid)
        })
    }

    /// Has the ledger choose who ends for these pods, and who moves for that one.
    pub(super) async fn choose(&mut self, due: &[Arc<PodFacts>], to_move: Option<&PodFacts>) {
        if due.is_empty() && to_move.is_none() {
            return;
        }
        let budgets = match budgets(&self.app).await {
            Ok(budgets) => budgets,
            Err(error) => {
                tracing::warn!(
                    error = %error.text, "nobody is preempted or moved for pods that free memory is too scattered for"
                );
                return;
            }
        };
        let now = self.app.ledger.now();
        let broken = |pods: &[Arc<PodFacts>]| broken(pods, &budgets);
        for pod in due {
            let mut ledger = self.app.ledger.lock();
            ledger.preempt_scattered(&pod.uid, &broken, now);
        }
        if let Some(pod) = to_move {
            let most = self.moves_left();
            let mut ledger = self.app.ledger.lock();
            ledger.move_for(&pod.uid, &broken, most, now);
        }
    }

    /// Goes on with one preemption.
    pub(super) async fn preempt(&mut self, epoch: u64, preemption: &Preemption) {
        // It begins after every copy that this rests on.
        if self.app.epoch.confirm(epoch).await.is_err() || !self.announce(preemption).await {
            return;
        }
        for victim in &preemption.victims {
            let refused = self.refused.get(&victim.uid);
            let waits = refused.is_some_and(|(at, _)| *at > Instant::now());
            let done = self.evicted.contains(&victim.uid);
            if waits || done || !self.is_to_end(preemption, victim) {
                continue;
            }
            if !victim.preempted && !self.may_disrupt(&preemption.node) {
                tracing::warn!(
                    node = %preemption.node, namespace = %victim.namespace, pod = %victim.name,
                    "more disruptions than spec.disruptions of the GpustowConfig allows: this preemption waits"
                );
                return;
            }
            if preemption.moves && self.moves_left() == 0 {
                return;
            }
            match self.end_one(epoch, preemption, victim).await {
                Ok(true) if preemption.moves => self.moved(preemption, victim),
                Ok(true) => self.preempted(preemption, victim),
                Ok(false) => return,
                // It has changed, or is gone: the next look knows it.
                Err(error) if is_settled(&error) => return,
                Err(error) => self.not_preempted(preemption, victim, &error),
            }
        }
    }

    /// Says on the pod that room is kept for it, and where, before anybody ends. False if it has changed.
    async fn announce(&mut self, preemption: &Preemption) -> bool {
        let pod = &preemption.pod;
        let cards = preemption.cards.iter();
        let cards = cards.map(|(uuid, mib)| format!("{mib} of GPU {uuid}"));
        let cards = cards.collect::<Vec<_>>().join(" and ");
        let told = format!("{cards} on node {}", preemption.node);
        if self.kept.get(&pod.uid) == Some(&told) {
            return true;
        }
        let victims: Vec<String> = preemption.victims.iter().map(|it| name(it)).collect();
        let whom = match victims.is_empty() {
            true => "pods that end already".to_owned(),
            false => victims.join(", "),
        };
        let what = match preemption.moves {
            true => format!("{cards} after {whom} moved"),
            false => format!("{cards} after the end of {whom}"),
        };
        let left = preemption.until.saturating_sub(self.app.ledger.now());
        let until = Timestamp::now() + left;
        let text = kept::message(&preemption.node, &kept::until_then(&what, until));
        let reason = if preemption.moves {
            "Moving"
        } else {
            "Preempting"
        };
        let says = condition(names::KEPT_CONDITION, "True", reason, &text);
        let version = pod.resource_version.to_string();
        match self.write(pod, Some(&version), says).await {
            Ok(_) => {
                let note = format!("Room is kept {text}");
                self.app.events.calls_back(pod, note);
                self.kept.insert(pod.uid.clone(), told);
                true
            }
            Err(error) => {
                if !is_settled(&error) {
                    tracing::warn!(
                        namespace = %pod.namespace, pod = %pod.name, %error,
                        "cannot say on a pod that room is kept for it: nobody ends for it"
                    );
                }
                false
            }
        }
    }

    /// Marks the victim, then deletes that very copy of it, or evicts it if it moves. False if this extender decides no more, or nobody needs its
    /// end any more.
    async fn end_one(
        &self,
        epoch: u64,
        preemption: &Preemption,
        victim: &PodFacts,
    ) -> Result<bool, AskError> {
        let (node, whom) = (&preemption.node, name(&preemption.pod));
        let (reason, text) = match preemption.moves {
            true => (
                names::MOVED,
                format!(
                    "gpustow moves it from node {node} for {whom}, which waits for GPU memory that is free in pieces"
                ),
            ),
            false => (
                names::PREEMPTED,
                format!(
                    "gpustow preempts it on node {node} for {whom}, which has a higher priority: free GPU memory is too \
                     scattered"
                ),
            ),
        };
        let target = condition(names::DISRUPTION_TARGET, "True", reason, &text);
        let version = victim.resource_version.to_string();
        let version = self.write(victim, Some(&version), target).await?;
        if self.app.epoch.confirm(epoch).await.is_err() || !self.is_to_end(preemption, victim) {
            return Ok(false);
        }
        if preemption.moves {
            self.ask_to_evict(victim, version).await?;
            return Ok(true);
        }
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                resource_version: Some(version),
                uid: Some(victim.uid.to_string()),
            }),
            ..DeleteParams::default()
        };
        let pods = self.pods(victim);
        within(TIMEOUT, pods.delete(&victim.name, &params)).await?;
        Ok(true)
    }

    fn preempted(&mut self, preemption: &Preemption, victim: &PodFacts) {
        self.evicted.insert(victim.uid.clone());
        self.refused.remove(&victim.uid);
        self.count_as(PREEMPT, "done");
        let whom = name(&preemption.pod);
        tracing::warn!(
            namespace = %victim.namespace, pod = %victim.name, node = %preemption.node, %whom,
            "preempted"
        );
        let note = format!(
            "Ends for {whom}, which has priority {}, and this pod {}: the free memory of node {} is too scattered over \
             its GPUs, and kube-scheduler, which sees their sum, preempts nobody",
            preemption.pod.priority, victim.priority, preemption.node
        );
        self.app.events.preempted(victim, note);
    }

    fn moved(&mut self, preemption: &Preemption, victim: &PodFacts) {
        self.evicted.insert(victim.uid.clone());
        self.refused.remove(&victim.uid);
        self.moves.note();
        self.count_as(MOVE, "done");
        let whom = name(&preemption.pod);
        tracing::warn!(
            namespace = %victim.namespace, pod = %victim.name, node = %preemption.node, %whom,
            "evicted, so that it moves"
        );
        let note = format!(
            "Evicted from node {} for {whom}, which waits for GPU memory that is free in pieces: its owner lets it be \
             moved ({}), and a place elsewhere is kept for the pod that its controller makes instead",
            preemption.node,
            names::MOVABLE
        );
        self.app.events.moved(victim, note);
    }

    /// The API server refused or failed: it is tried again after a pause, until the room is given up.
    fn not_preempted(&mut self, preemption: &Preemption, victim: &PodFacts, error: &AskError) {
        let by_budget = preemption.moves && error.status() == Some(429);
        let outcome = if by_budget { "refused" } else { "failed" };
        let act = if preemption.moves { MOVE } else { PREEMPT };
        self.count_as(act, outcome);
        tracing::warn!(
            namespace = %victim.namespace, pod = %victim.name, %error,
            act, "cannot make the pod end for another; it is tried again"
        );
        let refused = self.refused.get(&victim.uid);
        let pause = refused.map_or(PAUSE, |(_, pause)| *pause);
        let wait = pause.max(error.retry_after().min(MAX_PAUSE));
        let next = (pause * 2).min(MAX_PAUSE);
        self.refused
            .insert(victim.uid.clone(), (Instant::now() + wait, next));
        let (who, whom) = (name(victim), name(&preemption.pod));
        let does = if preemption.moves { "move" } else { "end" };
        let mut note = format!(
            "{who} is to {does} for {whom}, and the API server refuses: {error}. It is tried again"
        );
        if !by_budget {
            note += ". Is the ClusterRole gpustow-disruptions installed?";
        }
        for pod in [victim, &preemption.pod] {
            match preemption.moves {
                true => self.app.events.not_moved(pod, note.clone()),
                false => self.app.events.not_preempted(pod, note.clone()),
            }
        }
    }
}
