//! PodGroups → ledger, where the API server serves them and lets us read them.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gpustow_api::{PodGroup, PodGroupFacts};
use kube::Client;
use kube::runtime::{WatchStreamExt, watcher};
use tokio::time::sleep;

use crate::decode::{self, Each};
use crate::locked::Locked;
use crate::watch::{Retry, config};

/// Between two looks whether PodGroups can be read now.
const AGAIN: Duration = Duration::from_secs(30);

/// Why PodGroups cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unreadable {
    NotServed,
    Forbidden,
    Undecodable,
}

impl Unreadable {
    /// None if it is to be tried again at once.
    fn of(error: &watcher::Error) -> Option<Self> {
        use watcher::Error::{InitialListFailed, WatchError, WatchFailed, WatchStartFailed};
        let code = match error {
            InitialListFailed(kube::Error::Api(status))
            | WatchStartFailed(kube::Error::Api(status))
            | WatchFailed(kube::Error::Api(status)) => status.code,
            WatchError(status) => status.code,
            _ if decode::is_undecodable(error) => return Some(Self::Undecodable),
            _ => return None,
        };
        match code {
            404 => Some(Self::NotServed),
            403 => Some(Self::Forbidden),
            _ => None,
        }
    }
}

/// Follows PodGroups for as long as the process runs.
pub(crate) async fn follow(client: Client, ledger: Arc<Locked>) {
    let mut before = None;
    let mut carefully = false;
    loop {
        let why = watch(&client, &ledger, carefully).await;
        if why == Unreadable::Undecodable && !carefully {
            carefully = true;
            continue;
        }
        if before.replace(why) != Some(why) {
            match why {
                Unreadable::NotServed => tracing::info!(
                    "the API server serves no PodGroups of scheduling.k8s.io/v1beta1: groups are known by labels alone"
                ),
                Unreadable::Forbidden => tracing::warn!(
                    "may not list and watch podgroups of scheduling.k8s.io: a gang that does not fit may hold GPU memory \
                     during its scheduling cycle; apply gpustow's manifests, which allow it in the ClusterRole gpustow-extender"
                ),
                Unreadable::Undecodable => {
                    tracing::warn!("cannot read the list of PodGroups: trying again");
                }
            }
        }
        ledger.lock().reset_pod_groups(Vec::new());
        sleep(AGAIN).await;
    }
}

/// Ends when PodGroups cannot be read.
async fn watch(client: &Client, ledger: &Locked, carefully: bool) -> Unreadable {
    let events = decode::watch::<PodGroup>(client.clone(), config(), carefully);
    let mut events = std::pin::pin!(events.backoff(Retry::default()));
    let mut listed = Vec::new();
    loop {
        let facts = |object: Each<PodGroup>| PodGroupFacts::from_pod_group(&object.whole()?);
        match events.next().await {
            Some(Ok(watcher::Event::Init)) => listed.clear(),
            Some(Ok(watcher::Event::InitApply(object))) => listed.extend(facts(object)),
            Some(Ok(watcher::Event::InitDone)) => {
                let listed = std::mem::take(&mut listed);
                tracing::debug!(objects = listed.len(), "listed PodGroups");
                ledger.lock().reset_pod_groups(listed);
            }
            Some(Ok(watcher::Event::Apply(object))) => {
                if let Some(facts) = facts(object) {
                    ledger.lock().apply_pod_group(facts);
                }
            }
            Some(Ok(watcher::Event::Delete(object))) => {
                if let Some(facts) = facts(object) {
                    ledger.lock().delete_pod_group(&facts.group);
                }
            }
            Some(Err(error)) => match Unreadable::of(&error) {
                Some(why) => return why,
                None => tracing::warn!(%error, "the watch of PodGroups failed; it starts again"),
            },
            None => continue,
        }
        ledger.wake.notify_one();
    }
}
