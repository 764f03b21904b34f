//! Conditions that were ended: the watch may show them as they were for a while, and each is ended once.

use std::collections::HashMap;
use std::time::Duration;

use gpustow_api::PodFacts;
use tokio::time::Instant;

use super::write::condition;
use super::{Acts, Uid};

/// A condition that stands after this time is ended again.
const AGAIN: Duration = Duration::from_secs(60);

/// By pod and type: the resourceVersion that the write gave, and when.
#[derive(Default)]
pub(super) struct Ended(HashMap<(Uid, &'static str), (String, Instant)>);

impl Ended {
    /// Forgets what is old, and pods whose condition is about to hold again.
    pub(super) fn retain(&mut self, stays: impl Fn(&str) -> bool) {
        let young = |at: &Instant| at.elapsed() < AGAIN;
        self.0.retain(|(uid, _), (_, at)| young(at) && stays(uid));
    }

    /// Does this copy of the pod not show the end yet that was written?
    fn is_late(&self, pod: &PodFacts, of_type: &'static str) -> bool {
        let written = self.0.get(&(pod.uid.clone(), of_type));
        written.is_some_and(|(version, _)| **version != *pod.resource_version)
    }
}

impl Acts {
    /// Ends a condition of the pod, unless that was written and is on its way.
    pub(super) async fn end_condition(
        &mut self,
        pod: &PodFacts,
        of_type: &'static str,
        reason: &str,
        message: &str,
    ) {
        if self.ended.is_late(pod, of_type) {
            return;
        }
        let ended = condition(of_type, "False", reason, message);
        if let Some(version) = self.written(pod, ended).await {
            let key = (pod.uid.clone(), of_type);
            self.ended.0.insert(key, (version, Instant::now()));
        }
    }
}
