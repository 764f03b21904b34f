//! Which GPUs are released to pods whose claims wait. It does not know rules or ledger.
//!
//! One pod has GPUs of one node released at a time. If kube-scheduler does not allocate its claims there, another node is
//! tried, because a node selector or another driver's device may keep the pod off it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::plan::Name;

/// kube-scheduler has so long to allocate the claims of a pod.
const PATIENCE: Duration = Duration::from_secs(20);
/// Between two releases: devices that come free for one pod may do for the next.
const GAP: Duration = Duration::from_millis(500);
/// A pod for which all nodes were tried begins again after so long.
const AGAIN: Duration = Duration::from_secs(60);

/// A pod whose claims wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) uid: String,
    /// So many devices.
    pub(super) devices: usize,
}

#[derive(Debug)]
struct Release {
    pod: String,
    node: Arc<str>,
    gpus: Vec<Name>,
    since: Instant,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Releases {
    all: Vec<Release>,
    last: Option<Instant>,
    tried: HashMap<String, (HashSet<Arc<str>>, Instant)>,
}

impl Releases {
    /// The GPUs that are released now.
    pub(super) fn gpus(&self) -> HashSet<Name> {
        let all = self.all.iter().flat_map(|it| &it.gpus);
        all.cloned().collect()
    }

    /// `waiting` are the pods in their order, `free` the GPUs of each node on which nothing is.
    pub(super) fn look(
        &mut self,
        waiting: &[Waiting],
        free: &HashMap<Arc<str>, Vec<Name>>,
        now: Instant,
    ) {
        let waits = |uid: &str| waiting.iter().any(|it| it.uid == *uid);
        self.tried
            .retain(|uid, (_, last)| waits(uid) && now.duration_since(*last) < AGAIN);
        let tried = &mut self.tried;
        let is_free = |gpu: &Name| free.get(&gpu.0).is_some_and(|gpus| gpus.contains(gpu));
        self.all.retain(|it| {
            // If a claim has one of them, and it is another pod's, this pod is next again.
            let holds = waits(&it.pod) && it.gpus.iter().all(is_free);
            let over = now.duration_since(it.since) >= PATIENCE;
            if holds && over {
                let of_pod = tried.entry(it.pod.clone());
                let (nodes, last) = of_pod.or_insert_with(|| (HashSet::new(), now));
                nodes.insert(it.node.clone());
                *last = now;
            }
            holds && !over
        });
        let is_early = |last: Instant| now.duration_since(last) < GAP;
        if self.last.is_some_and(is_early) {
            return;
        }
        let has = |uid: &str| self.all.iter().any(|it| it.pod == *uid);
        let taken = self.gpus();
        for pod in waiting.iter().filter(|pod| !has(&pod.uid)) {
            let tried = self.tried.get(&pod.uid).map(|(nodes, _)| nodes);
            let is_new = |node: &Arc<str>| tried.is_none_or(|nodes| !nodes.contains(node));
            let nodes = free.iter().filter(|(node, _)| is_new(node));
            let rest = nodes.map(|(node, gpus)| {
                let gpus = gpus.iter().filter(|it| !taken.contains(*it));
                (node, gpus.cloned().collect::<Vec<_>>())
            });
            let fits = rest.filter(|(_, gpus)| gpus.len() >= pod.devices);
            let best = fits.min_by(|a, b| (a.1.len(), a.0).cmp(&(b.1.len(), b.0)));
            let Some((node, mut gpus)) = best else {
                continue;
            };
            gpus.sort_unstable();
            gpus.truncate(pod.devices);
            self.all.push(Release {
                pod: pod.uid.clone(),
                node: node.clone(),
                gpus,
                since: now,
            });
            self.last = Some(now);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(nodes: &[(&str, usize)]) -> HashMap<Arc<str>, Vec<Name>> {
        let gpus = |node: &Arc<str>, count| {
            (0..count)
                .map(|it| (node.clone(), format!("GPU-{it}").into()))
                .collect()
        };
        let nodes = nodes.iter().map(|(node, count)| {
            let node: Arc<str> = (*node).into();
            (node.clone(), gpus(&node, *count))
        });
        nodes.collect()
    }

    fn waits(pods: &[(&str, usize)]) -> Vec<Waiting> {
        let pods = pods.iter().map(|(uid, devices)| Waiting {
            uid: (*uid).to_owned(),
            devices: *devices,
        });
        pods.collect()
    }

    fn nodes(releases: &Releases) -> Vec<(String, usize)> {
        let all = releases.all.iter();
        all.map(|it| (it.node.to_string(), it.gpus.len())).collect()
    }

    #[test]
    fn a_pod_has_gpus_of_one_node_and_of_another_if_it_is_not_placed() {
        let (mut releases, start) = (Releases::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let free = free(&[("a", 1), ("b", 2), ("c", 8)]);
        let pod = waits(&[("p", 2)]);
        releases.look(&pod, &free, at(0));
        assert_eq!(nodes(&releases), [("b".to_owned(), 2)]);
        releases.look(&pod, &free, at(19));
        assert_eq!(nodes(&releases), [("b".to_owned(), 2)]);
        releases.look(&pod, &free, at(20));
        assert_eq!(nodes(&releases), [("c".to_owned(), 2)]);
        releases.look(&pod, &free, at(40));
        assert_eq!(nodes(&releases), []);
        releases.look(&pod, &free, at(100));
        assert_eq!(nodes(&releases), [("b".to_owned(), 2)]);
        releases.look(&[], &free, at(101));
        assert_eq!(nodes(&releases), []);
    }

    #[test]
    fn a_pod_whose_gpu_another_one_took_is_next_again() {
        let (mut releases, start) = (Releases::default(), Instant::now());
        let pods = waits(&[("p", 1)]);
        releases.look(&pods, &free(&[("a", 1), ("b", 1)]), start);
        assert_eq!(nodes(&releases), [("a".to_owned(), 1)]);
        let later = start + GAP;
        releases.look(&pods, &free(&[("b", 1)]), later);
        assert_eq!(nodes(&releases), [("b".to_owned(), 1)]);
        assert!(releases.tried.is_empty());
    }

    #[test]
    fn pods_have_gpus_released_one_after_the_other_and_none_twice() {
        let (mut releases, start) = (Releases::default(), Instant::now());
        let free = free(&[("a", 3)]);
        let pods = waits(&[("p", 1), ("large", 3), ("q", 2), ("r", 1)]);
        for (millis, count) in [(0, 1), (100, 1), (500, 2), (1000, 2)] {
            releases.look(&pods, &free, start + Duration::from_millis(millis));
            assert_eq!(releases.all.len(), count);
        }
        assert_eq!(releases.gpus().len(), 3);
    }
}
