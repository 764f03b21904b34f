//! Notifies pods that sleep now and then about the memory that they requested.

use std::time::Duration;

use gpustow_api::{Memory, names};
use gpustow_ledger::News;
use tokio::time::Instant;

use super::conditions::{Says, is_settled};
use super::{Disruptions, say};

/// Pods that are notified in one look.
const AT_ONCE: usize = 64;
/// A copy of the pod shows a write within this time.
pub(super) const SHOWN_WITHIN: Duration = Duration::from_secs(10);

impl Disruptions {
    /// Writes the news in a condition of each pod, in the copy that the news is about.
    pub(super) async fn tell_of_memory(&mut self, news: &[News]) {
        for it in news.iter().take(AT_ONCE) {
            let (pod, reason) = (&it.pod, it.memory.into());
            let status = match it.memory {
                Memory::Free => "True",
                Memory::Asleep | Memory::Reclaiming => "False",
            };
            let text = say::memory(it);
            let says = Says::condition(names::AVAILABLE_CONDITION, status, reason, &text);
            self.told_free.remove(&pod.uid);
            let written = self.write(pod, Some(&pod.resource_version), says).await;
            let is_undone = written.as_ref().is_err_and(is_settled);
            // A write of which no answer came may have been done.
            if it.memory == Memory::Free && !is_undone {
                self.told_free.insert(pod.uid.clone(), Instant::now());
            }
            if let Err(error) = written
                && !is_undone
            {
                tracing::warn!(
                    namespace = %pod.namespace, pod = %pod.name, %error,
                    "cannot inform a pod whether the memory that it requested is free"
                );
            }
        }
    }
}
