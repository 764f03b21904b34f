//! Makes every Binding fail that an earlier epoch still has under way.
//!
//! A Binding contains the resourceVersion of the copy of the pod that its sender saw. Each unbound pod that asks for
//! GPU memory is patched, so that its resourceVersion moves. The move counts, not the success of the patch: a value
//! that was there before writes nothing.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use gpustow_api::{PodFacts, PodObject, names};
use gpustow_serve::rate::Backoff;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, ObjectMeta, Patch};
use kube::core::Resource;
use kube::{Api, Client};
use serde_json::json;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use super::TIMEOUT;
use crate::ask::{AskError, patch_status, within};
use crate::decode::Each;

/// Patches under way at once.
const WIDTH: usize = 32;
/// Pods of one page of the list.
const PAGE: u32 = 1000;
/// For one page.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Before a pod is tried again; twice as long after each failure.
const PAUSE: Duration = Duration::from_millis(50);
/// A takeover tries a pod so often at least.
const TRIES: u32 = 3;
/// It waits this long for a pod after its first try.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same where the API server refused for a reason that seldom goes away.
const PATIENCE_IF_REFUSED: Duration = Duration::from_secs(1);
/// The API server's bound on annotations, less more than a fence adds. No extender sends a Binding,
/// which brings more of them, for a pod that is so full.
const FULL: usize = (256 << 10) - 2048;

/// Why a pod may still be bound by an earlier epoch.
#[derive(Debug, Error)]
pub(crate) enum FenceError {
    /// The write failed.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The write was taken and left the pod as it was.
    #[error("the API server took the write and the pod did not change: does a webhook undo it?")]
    Unmoved,
}

impl FenceError {
    /// Will another try most likely fail too?
    fn is_refusal(&self) -> bool {
        match self {
            Self::Unmoved => true,
            Self::Ask(error) => error.is_final(),
        }
    }

    /// How long the API server asked to be left alone.
    fn retry_after(&self) -> Duration {
        match self {
            Self::Ask(error) => error.retry_after(),
            Self::Unmoved => Duration::ZERO,
        }
    }
}

/// A pod that could not be fenced: an earlier epoch's Binding may still arrive.
#[derive(Debug)]
pub(crate) struct Unfenced {
    /// As it was listed after the epoch had begun.
    pub(crate) pod: Arc<PodFacts>,
    /// Why.
    pub(crate) error: FenceError,
}

/// The mark of one epoch, and the pods that it has fenced.
#[derive(Clone)]
pub(crate) struct Fence {
    client: Client,
    resource: Arc<str>,
    epoch: String,
    /// Was in no pod before.
    mark: String,
    /// UIDs of pods that no earlier epoch can bind.
    done: HashSet<Arc<str>>,
}

impl Fence {
    /// Of an epoch that nothing has been fenced for. No pod has borne `mark` before.
    pub(crate) fn new(client: Client, resource: Arc<str>, epoch: u64, mark: String) -> Self {
        Self {
            client,
            resource,
            epoch: epoch.to_string(),
            mark,
            done: HashSet::new(),
        }
    }

    /// How many pods it holds for.
    pub(crate) fn len(&self) -> usize {
        self.done.len()
    }

    /// Fences every pod that needs it and is not fenced yet. Returns the pods that could not be fenced. The scheduler
    /// of a pod does not matter: it may have been another when the Binding was sent.
    ///
    /// # Errors
    /// If the pods cannot be listed. Fenced pods stay fenced.
    pub(crate) async fn run(&mut self) -> Result<Vec<Unfenced>, AskError> {
        let pods = Api::<Each<PodObject>>::all(self.client.clone());
        let mut page = ListParams::default().fields("spec.nodeName=").limit(PAGE);
        let mut unfenced = Vec::new();
        loop {
            let listed = within(LIST_TIMEOUT, pods.list(&page)).await?;
            let targets = listed.items.iter().filter_map(|pod| self.target(pod));
            let targets: Vec<_> = targets.collect();
            let slots = Semaphore::new(WIDTH);
            let this = &*self;
            let tries = targets.iter().map(|pod| this.insist(pod, &slots));
            let tries: Vec<_> = tries.collect();
            // A pod that waits for its next try keeps no other from being tried.
            let width = tries.len().max(1);
            let errors: Vec<_> = stream::iter(tries).buffered(width).collect().await;
            for (pod, error) in targets.into_iter().zip(errors) {
                match error {
                    None => drop(self.done.insert(pod.uid.clone())),
                    // The request in this copy is unreadable, so no Binding can rest on this copy.
                    Some(_) if pod.asks.readable().is_err() => {}
                    Some(error) => unfenced.push(Unfenced { pod, error }),
                }
            }
            match listed.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(unfenced),
            }
        }
    }

    /// The pod, if an earlier epoch may have a Binding for this very copy of it. The API server binds
    /// none that is gated or being deleted; no pod becomes gated, and none is deleted no more.
    fn target(&self, pod: &Each<PodObject>) -> Option<Arc<PodFacts>> {
        let facts = pod.facts(&self.resource)?;
        let annotations = pod.meta().annotations.iter().flatten();
        let bytes: usize = annotations
            .map(|(key, value)| key.len() + value.len())
            .sum();
        let exposed = !facts.asks.is_nothing()
            && !facts.gated
            && !facts.queued
            && !facts.deleting
            && bytes <= FULL
            && !self.done.contains(&facts.uid);
        exposed.then(|| Arc::new(facts))
    }

    /// Tries until it is of no use to wait longer; the last error.
    async fn insist(&self, pod: &PodFacts, slots: &Semaphore) -> Option<FenceError> {
        let mut began = None;
        let mut pauses = Backoff::new(PAUSE, PATIENCE);
        for tries in 1.. {
            let slot = slots.acquire().await;
            let began = *began.get_or_insert_with(Instant::now);
            let error = self.fence(pod).await.err()?;
            drop(slot);
            let patience = match error.is_refusal() {
                true => PATIENCE_IF_REFUSED,
                false => PATIENCE,
            };
            let wait = pauses.pause().max(error.retry_after());
            if tries >= TRIES && began.elapsed() + wait > patience {
                return Some(error);
            }
            sleep(wait).await;
        }
        None
    }

    /// Tries for as long as the epoch lasts; ends when no earlier one can bind the pod.
    pub(crate) async fn keep_trying(&self, unfenced: &Unfenced, lasts: impl Fn() -> bool) {
        let mut pauses = Backoff::new(PATIENCE_IF_REFUSED, Duration::from_secs(60));
        let mut after = unfenced.error.retry_after();
        loop {
            sleep(pauses.pause().max(after)).await;
            if !lasts() {
                return;
            }
            match self.fence(&unfenced.pod).await {
                Ok(()) => return,
                Err(error) => after = error.retry_after(),
            }
        }
    }

    /// Writes a mark into the pod that no pod has had before.
    pub(crate) async fn mark(&self, pod: &PodFacts) -> Result<ObjectMeta, AskError> {
        let patch = json!({"metadata": {
            "uid": &*pod.uid,
            "annotations": {names::EPOCH: &self.epoch, names::FENCE: &self.mark},
        }});
        let patch = Patch::Merge(patch);
        within(TIMEOUT, patch_status(&self.client, pod, &patch)).await
    }

    /// Moves the resourceVersion of the pod away from that of this copy. It is also right if the pod
    /// is gone, or if another client has moved it.
    async fn fence(&self, pod: &PodFacts) -> Result<(), FenceError> {
        let now = match self.mark(pod).await {
            Ok(now) => Some(now),
            Err(error) if error.status() == Some(404) => None,
            // Another pod of that name, or another client writes it just now.
            Err(error) if error.status() == Some(409) => {
                let pods = Api::<Pod>::namespaced(self.client.clone(), &pod.namespace);
                let now = within(TIMEOUT, pods.get_metadata_opt(&pod.name)).await?;
                now.map(|now| now.metadata)
            }
            Err(error) => return Err(error.into()),
        };
        let same = now.is_some_and(|now| {
            now.uid.as_deref() == Some(&*pod.uid)
                && now.resource_version.as_deref() == Some(&*pod.resource_version)
        });
        match same {
            true => Err(FenceError::Unmoved),
            false => Ok(()),
        }
    }
}
