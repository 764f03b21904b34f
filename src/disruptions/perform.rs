//! Performs one demand: marks the victim, confirms that this replica leads, looks again, acts, counts and reports.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Action, Cause, Demand};
use gpustow_serve::rate::Backoff;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Preconditions};
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use serde_json::Value;
use tokio::time::Instant;

use super::conditions::{Says, is_settled};
use super::demand::reasons;
use super::{Disruptions, TIMEOUT, say};
use crate::ask::{AskError, within};
use crate::events::Kind;

/// Before a refused action is tried again; twice as long after each refusal, up to [`MAX_PAUSE`].
const PAUSE: Duration = Duration::from_secs(2);
const MAX_PAUSE: Duration = Duration::from_secs(60);

impl Disruptions {
    /// Performs one demand as far as that can be done now. False if its basis has changed.
    pub(super) async fn perform(&mut self, epoch: u64, demand: &Demand) -> bool {
        let uid = &demand.victim.uid;
        let pauses = self.pauses(demand);
        let is_marked = demand.is_marked();
        let done = is_marked && !demand.terminates() && self.names_beneficiary(demand);
        if pauses || done || self.disrupted.contains(uid) || !self.is_wanted(demand) {
            return true;
        }
        if !is_marked && !self.may_disrupt(demand) {
            return demand.purpose.pod().is_none();
        }
        if demand.cause == Cause::Defragment && self.evictions_left() == 0 {
            return false;
        }
        match self.carry_out(epoch, demand).await {
            Ok(true) => {
                if !is_marked || demand.terminates() {
                    self.done(demand);
                }
                true
            }
            Ok(false) => false,
            // It has changed, or is gone: the next look knows it.
            Err(error) if is_settled(&error) => false,
            Err(error) => {
                self.failed(demand, &error);
                true
            }
        }
    }

    /// Was it refused so lately that it is not tried again yet?
    pub(super) fn pauses(&self, demand: &Demand) -> bool {
        let known = self.refused.get(&demand.victim.uid);
        known.is_some_and(|(until, _)| *until > Instant::now())
    }

    /// Do the limits of all disruptions together allow this one? Then it counts.
    fn may_disrupt(&mut self, demand: &Demand) -> bool {
        let limits = self.app.config.spec().disruptions.clone();
        let (now, node) = (self.app.ledger.now(), &demand.node);
        let [all, here] = [limits.per_minute, limits.per_node_per_minute].map(|it| it as usize);
        let may = self.lately.left(all, now) > 0 && self.lately.left_of(node, here, now) > 0;
        if may {
            self.lately.note(node.clone(), now);
        } else {
            tracing::warn!(
                %node, namespace = %demand.victim.namespace, pod = %demand.victim.name,
                "more disruptions than spec.disruptions of the GpustowConfig allows: this one waits"
            );
            if let Some(pod) = demand.purpose.pod() {
                self.app.events.limited(pod);
            }
        }
        may
    }

    /// Does the victim's condition, as this leadership wrote it, name the pod that needs its memory now?
    fn names_beneficiary(&self, demand: &Demand) -> bool {
        let named = self.marked.get(&demand.victim.uid);
        named.is_some_and(|named| named.as_ref() == demand.purpose.uid())
    }

    /// Is this still demanded, for the same pod? The look that found it may be some requests old.
    fn is_wanted(&self, demand: &Demand) -> bool {
        let now = self.app.ledger.now();
        self.app.ledger.lock().still(demand, now)
    }

    /// False if this replica leads no more, or the victim need not be disrupted any more.
    async fn carry_out(&mut self, epoch: u64, demand: &Demand) -> Result<bool, AskError> {
        let Some(version) = self.mark(epoch, demand).await? else {
            return Ok(false);
        };
        if !demand.terminates() {
            return Ok(true);
        }
        if self.app.epoch.confirm(epoch).await.is_err() || !self.is_wanted(demand) {
            return Ok(false);
        }
        let terminated = self.terminate(demand, version, false).await;
        terminated.map(|()| true)
    }

    /// Writes on the victim why it is disrupted. Returns the resourceVersion after that. None if this replica does not
    /// lead any more.
    pub(super) async fn mark(
        &mut self,
        epoch: u64,
        demand: &Demand,
    ) -> Result<Option<String>, AskError> {
        let (victim, of_type) = (&demand.victim, demand.condition());
        let text = say::why(
            demand,
            self.app.config.spec().reclaim.over_limit_after.into(),
        );
        let mut version = victim.resource_version.to_string();
        if !demand.is_marked() {
            for (nth, reason) in reasons(demand).iter().enumerate() {
                // By the second the victim's agent, or the next leader, would act.
                if nth > 0 && self.app.epoch.confirm(epoch).await.is_err() {
                    return Ok(None);
                }
                let says = Says::condition(of_type, "True", reason, &text);
                version = self.write(victim, Some(&version), says).await?;
            }
        } else if !self.names_beneficiary(demand) {
            // Replaces the fence's message, or the name of a pod that does not need the memory any more.
            let says = Says::message(of_type, &text);
            version = self.write(victim, Some(&version), says).await?;
        }
        let named = demand.purpose.uid().cloned();
        self.marked.insert(victim.uid.clone(), named);
        Ok(Some(version))
    }

    /// Evicts or deletes this very copy of the victim. With `dry_run`, the API server only checks whether it would be
    /// deleted.
    pub(super) async fn terminate(
        &self,
        demand: &Demand,
        version: String,
        dry_run: bool,
    ) -> Result<(), AskError> {
        let victim: &PodFacts = &demand.victim;
        let pods = self.pods(victim);
        if demand.action == Action::Delete {
            let params = DeleteParams {
                preconditions: Some(kube::api::Preconditions {
                    resource_version: Some(version),
                    uid: Some(victim.uid.to_string()),
                }),
                dry_run,
                ..DeleteParams::default()
            };
            let deleted = pods.delete(&victim.name, &params);
            return within(TIMEOUT, deleted).await.map(drop);
        }
        // kube's own request misspells the preconditions, and the API server drops unknown fields.
        let eviction = Eviction {
            metadata: ObjectMeta {
                name: Some(victim.name.to_string()),
                ..ObjectMeta::default()
            },
            delete_options: Some(DeleteOptions {
                preconditions: Some(Preconditions {
                    resource_version: Some(version),
                    uid: Some(victim.uid.to_string()),
                }),
                ..DeleteOptions::default()
            }),
        };
        let params = PostParams::default();
        let post =
            pods.create_subresource::<_, Value>("eviction", &victim.name, &params, &eviction);
        within(TIMEOUT, post).await.map(drop)
    }

    /// Counts the disruption, and notifies the pods that it concerns.
    pub(super) fn done(&mut self, demand: &Demand) {
        let Demand {
            victim,
            cause,
            action,
            node,
            ..
        } = demand;
        self.refused.remove(&victim.uid);
        if demand.terminates() {
            self.disrupted.insert(victim.uid.clone());
        }
        if *cause == Cause::Defragment {
            self.defragmented.note((), self.app.ledger.now());
        }
        self.app.metrics.disrupted(*cause, *action, "done");
        let why = say::why(
            demand,
            self.app.config.spec().reclaim.over_limit_after.into(),
        );
        tracing::warn!(
            namespace = %victim.namespace, pod = %victim.name, %node, cause = <&str>::from(cause),
            action = <&str>::from(action), why, "disrupted a pod"
        );
        let events = &self.app.events;
        let note = format!("{why} {}", say::then(*action));
        events.warn(Kind::PodDisrupted, victim, note);
        if let (Cause::Pressure, Some(pod)) = (cause, demand.purpose.pod()) {
            let note = say::pressure(demand);
            events.tell(Kind::MemoryReserved, pod, note);
        }
    }

    /// The API server refused or failed: it is tried again after a pause.
    pub(super) fn failed(&mut self, demand: &Demand, error: &AskError) {
        let Demand {
            victim,
            cause,
            action,
            ..
        } = demand;
        let by_budget = *action == Action::Evict && error.status() == Some(429);
        let outcome = if by_budget { "refused" } else { "failed" };
        self.app.metrics.disrupted(*cause, *action, outcome);
        tracing::warn!(
            namespace = %victim.namespace, pod = %victim.name, %error, cause = <&str>::from(cause),
            action = <&str>::from(action), "cannot disrupt a pod, and tries again"
        );
        let first = (Instant::now(), Backoff::new(PAUSE, MAX_PAUSE));
        let (until, backoff) = self.refused.entry(victim.uid.clone()).or_insert(first);
        let pause = backoff.pause().max(error.retry_after().min(MAX_PAUSE));
        *until = Instant::now() + pause;
        let note = say::refused(demand, error);
        for pod in [Some(victim), demand.purpose.pod()].into_iter().flatten() {
            let events = &self.app.events;
            events.warn(Kind::DisruptionRefused, pod, note.clone());
        }
    }
}
