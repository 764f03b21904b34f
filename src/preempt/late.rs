//! Before others are evicted for a pod: does it fit already, or soon, on a node that kube-scheduler offered for it?
//!
//! kube-scheduler may see a pod's end before this extender's watch does. It then offers the node, the extender refuses
//! it, and kube-scheduler asks for victims elsewhere. The refusal was late and the eviction would be for nothing. So
//! filter notes the parts of its view that may be late, and preempt asks the API server about them. preempt also asks
//! about the node that the pod is nominated to, because the victims there may be gone by now. The normal case does not
//! cost a request: a node that kube-scheduler refuses itself is never offered. Nor does kube-scheduler offer all nodes
//! of a large cluster: one that it did not show may have room.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::{try_join, try_join_all};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use gpustow_api::{GpuNode, PodFacts, gone_by};
use gpustow_ledger::Reason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use tokio::time::Instant;

use crate::app::App;
use crate::ask::{AskError, within};
use crate::bind::reread;
use crate::decode::Each;
use crate::failure::Failure;

/// For one answer of the API server.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Between filter and preempt in one cycle of kube-scheduler.
const CYCLE: Duration = Duration::from_secs(10);
/// After this time a pod no longer waits for memory of pods that should be gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pods of a node that are read again at the same time.
const WIDTH: usize = 16;
/// Nodes that are looked up for one pod.
const NODES: usize = 16;
/// Old ones are dropped each time that so many pods more are remembered.
const PODS: usize = 1024;

/// Per pod, the offered nodes that filter refused on a view that may be late.
#[derive(Default)]
pub(crate) struct Doubts {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pods: HashMap<Arc<str>, Doubt>,
}

#[derive(Clone, Debug)]
struct Doubt {
    nodes: Vec<Arc<str>>,
    at: Instant,
    /// The node that the pod was nominated to last, and when it still was: kube-scheduler may end a nomination whose
    /// victims are gone because filter refuses the node on a late view.
    nominated: Option<(Arc<str>, Instant)>,
    /// Since when preempt lets the pod wait for its nominated node, and which that is.
    waits: Option<(Arc<str>, Instant)>,
}

impl Doubts {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Filter found a node for the pod.
    pub(crate) fn placed(&self, pod: &PodFacts) {
        self.lock().pods.remove(&pod.uid);
    }

    /// Filter refused the pod on every node that kube-scheduler offered.
    pub(crate) fn refused(&self, app: &App, pod: &PodFacts, refused: &[(&str, Reason)]) {
        let now_nominated = nominated(app, pod).map(|node| (node, Instant::now()));
        let nominated = now_nominated.or_else(|| self.nominated(pod));
        let own = nominated.as_ref().map(|(node, _)| &**node);
        let nodes: Vec<Arc<str>> = {
            let (now, ledger) = (app.ledger.now(), app.ledger.lock());
            let names = || refused.iter().map(|(name, _)| *name);
            let first = names().find(|name| own == Some(name));
            let behind = names().filter(|name| Some(*name) != first);
            let behind = behind.filter(|name| ledger.is_behind(pod, name, now));
            let nodes = first.into_iter().chain(behind);
            nodes.take(NODES).map(Arc::from).collect()
        };
        let mut inner = self.lock();
        if nodes.is_empty() && nominated.is_none() {
            inner.pods.remove(&pod.uid);
            return;
        }
        let before = inner.pods.remove(&pod.uid);
        let waits = before.and_then(|doubt| doubt.waits);
        let doubt = Doubt {
            nominated,
            waits,
            ..Doubt::new(nodes)
        };
        inner.pods.insert(pod.uid.clone(), doubt);
        if inner.pods.len().is_multiple_of(PODS) {
            inner.pods.retain(|_, doubt| doubt.at.elapsed() < PATIENCE);
        }
    }

    /// The nodes in doubt for a pod in this cycle.
    fn of(&self, pod: &PodFacts) -> Vec<Arc<str>> {
        let inner = self.lock();
        let doubt = inner.pods.get(&pod.uid);
        let doubt = doubt.filter(|doubt| doubt.at.elapsed() < CYCLE);
        doubt.map(|doubt| doubt.nodes.clone()).unwrap_or_default()
    }

    /// The node that the pod was nominated to until lately, and when it still was. Preempt may have let the pod wait for it
    /// though filter was not called meanwhile.
    fn nominated(&self, pod: &PodFacts) -> Option<(Arc<str>, Instant)> {
        let inner = self.lock();
        let doubt = inner.pods.get(&pod.uid)?;
        let both = [&doubt.nominated, &doubt.waits];
        let last = both.into_iter().flatten().max_by_key(|(_, at)| *at)?;
        Some(last.clone()).filter(|(_, at)| at.elapsed() < PATIENCE)
    }

    /// May the pod wait (longer) for its nominated node? The time begins with the first call for that node.
    fn may_wait(&self, pod: &PodFacts, node: &Arc<str>) -> bool {
        let mut inner = self.lock();
        let doubt = inner.pods.entry(pod.uid.clone());
        let doubt = doubt.or_insert_with(|| Doubt::new(Vec::new()));
        let before = doubt.waits.take().filter(|(before, _)| before == node);
        let (_, since) = doubt
            .waits
            .insert(before.unwrap_or_else(|| (node.clone(), Instant::now())));
        since.elapsed() < PATIENCE
    }
}

impl Doubt {
    fn new(nodes: Vec<Arc<str>>) -> Self {
        Self {
            nodes,
            at: Instant::now(),
            nominated: None,
            waits: None,
        }
    }
}

/// The node that kube-scheduler nominated the pod to by its copy, the one where the extender has others disrupted for the
/// pod, the one where its nomination ended lately, or the nominated one by our copy.
fn nominated(app: &App, pod: &PodFacts) -> Option<Arc<str>> {
    let (now, ledger) = (app.ledger.now(), app.ledger.lock());
    let nominated = pod.nominated.clone();
    let nominated = nominated.or_else(|| ledger.disrupted_on(&pod.uid));
    let nominated = nominated.or_else(|| ledger.expected_on(&pod.uid, now));
    // Our copy can be older than the end of its nomination.
    nominated.or_else(|| ledger.pod(&pod.uid)?.nominated.clone())
}

/// The node on which the pod fits without further victims, now or as soon as its earlier victims are gone.
///
/// # Errors
/// If the API server cannot be asked, with a text for the log. Then it is not known whether evictions help.
pub(crate) async fn fits_without_victims(
    app: &App,
    pod: &PodFacts,
) -> Result<Option<Arc<str>>, Failure> {
    let lately = || app.doubts.nominated(pod).map(|(node, _)| node);
    let nominated = nominated(app, pod).or_else(lately);
    let unshown = app.ledger.lock().fits_unshown(pod, app.ledger.now());
    if unshown.is_some() {
        app.ledger.wake.notify_one();
        return Ok(unshown);
    }
    let offered = app.doubts.of(pod);
    let own = nominated.iter().filter(|node| !offered.contains(node));
    let nodes: Vec<Arc<str>> = offered.iter().chain(own).cloned().collect();
    if nodes.is_empty() {
        return Ok(None);
    }
    let looks = nodes.iter().map(|node| look_up(app, node));
    let leaving = try_join_all(looks).await.map_err(|error| {
        let text = format!("cannot look up whether a node has room already: {error}");
        Failure::new((&error).into(), text)
    })?;
    let fits = |node: &str, leaving: &[Arc<str>], ended| {
        let now = app.ledger.now();
        let ledger = app.ledger.lock();
        ledger.fits_without(pod, node, leaving, ended, now)
    };
    for (node, leaving) in nodes.iter().zip(&leaving) {
        // Room that a pod leaves elsewhere is for others.
        let own = nominated.as_ref() == Some(node);
        // Only for a while on one that kube-scheduler does not offer: it may have other reasons.
        let is_offered = offered.contains(node);
        let fits_now = is_offered && fits(node, &[], false);
        if fits_now
            || is_offered && own && fits(node, leaving, false)
            || own && fits(node, leaving, true) && app.doubts.may_wait(pod, node)
        {
            if !fits_now {
                let now = app.ledger.now();
                app.ledger.lock().expect_room(&pod.uid, node, now);
            }
            app.ledger.wake.notify_one();
            return Ok(Some(node.clone()));
        }
    }
    Ok(None)
}

/// Asks the API server which pods are still on a node, and reads the others again for the ledger. Returns the pods that
/// are gone, or are being deleted and not overdue.
async fn look_up(app: &App, node: &str) -> Result<Vec<Arc<str>>, AskError> {
    let (lacks_report, known) = {
        let (now, ledger) = (app.ledger.now(), app.ledger.lock());
        (ledger.lacks_report(node, now), ledger.bound_on(node))
    };
    let report = async {
        match lacks_report {
            true => look_up_report(app, node).await,
            false => Ok(()),
        }
    };
    if known.is_empty() {
        return report.await.map(|()| Vec::new());
    }
    let here = ListParams::default().fields(&format!(
        "spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
    ));
    let pods = Api::<Pod>::all(app.client.clone());
    let list = within(TIMEOUT, pods.list_metadata(&here));
    let (listed, ()) = try_join(list, report).await?;
    let there: HashSet<&str> = listed
        .iter()
        .filter_map(|pod| pod.metadata.uid.as_deref())
        .collect();
    let mut gone = known;
    gone.retain(|pod| !there.contains(&*pod.uid));
    let uids: Vec<Arc<str>> = gone.iter().map(|pod| pod.uid.clone()).collect();
    let rereads = stream::iter(gone).map(async |pod| reread(app, &pod).await);
    rereads.buffer_unordered(WIDTH).try_collect::<()>().await?;
    let now = Timestamp::now().as_second();
    let patience = i64::try_from(PATIENCE.as_secs()).unwrap_or(0);
    let is_due = |by: i64| now.saturating_sub(by) < patience;
    let leaving = listed.iter();
    let leaving = leaving.filter(|pod| gone_by(&pod.metadata).is_some_and(is_due));
    let leaving = leaving.filter_map(|pod| pod.metadata.uid.as_deref());
    // A watch that is late brings a pod back that is gone.
    Ok(leaving.map(Arc::from).chain(uids).collect())
}

/// Passes the node's report to the ledger if the API server has a newer one.
async fn look_up_report(app: &App, node: &str) -> Result<(), AskError> {
    let gpunodes = Api::<Each<GpuNode>>::all(app.client.clone());
    let found = within(TIMEOUT, gpunodes.get_opt(node)).await?;
    let Some(status) = found.and_then(Each::whole).and_then(|found| found.status) else {
        return Ok(());
    };
    let now = app.ledger.now();
    let mut ledger = app.ledger.lock();
    if ledger.report_written(node) < status.written() {
        ledger.apply_gpunode(node, status, now);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_that_waits_for_its_node_is_remembered_without_a_filter_call() {
        let (doubts, node): (_, Arc<str>) = (Doubts::default(), "n".into());
        let pod = Pod::default();
        let pod = Pod {
            metadata: kube::api::ObjectMeta {
                uid: Some("u".to_owned()),
                ..pod.metadata
            },
            ..pod
        };
        let pod = PodFacts::from_pod(&pod, gpustow_api::names::GPU_MEM).expect("it has a uid");
        assert!(doubts.nominated(&pod).is_none());
        assert!(doubts.may_wait(&pod, &node));
        assert_eq!(doubts.nominated(&pod).map(|(node, _)| node), Some(node));
        doubts.placed(&pod);
        assert!(doubts.nominated(&pod).is_none());
    }
}
