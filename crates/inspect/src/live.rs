//! A cluster that follows watches, for a program that looks at it for a while.

use std::fmt::Debug;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use gpustow_api::{GpuNode, GpuWorkload, GpustowConfig, PodGroup, PodObject};
use k8s_openapi::api::core::v1::Node;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use crate::source::Source;
use crate::source::files::{read, written};
use crate::system::Seen;
use crate::{Cluster, Error};

/// Shared by the watches and the view.
#[derive(Clone)]
pub struct Live {
    cluster: Arc<Mutex<Cluster>>,
    started: Instant,
    /// Files have a time of their own.
    still: bool,
}

impl Live {
    /// Starts with the listed objects and follows watches until the process ends.
    ///
    /// # Errors
    /// If the cluster cannot be reached.
    pub async fn start(source: &Source, cluster: Cluster) -> Result<Self, Error> {
        let still = source.from.is_some();
        let cluster = Arc::new(Mutex::new(cluster));
        let live = Self {
            cluster,
            started: Instant::now(),
            still,
        };
        if let Some(path) = &source.from {
            live.reread(path.clone(), source.resource_name.clone());
        } else {
            let (client, _) = source.client().await?;
            live.follow::<PodObject>(&client, |cluster, change| match change {
                Change::Apply(pod) => cluster.apply_pod(pod),
                Change::Delete(pod) => cluster.delete_pod(&pod),
                Change::Reset(pods) => cluster.reset_pods(pods),
            });
            live.follow::<PodGroup>(&client, |cluster, change| match change {
                Change::Apply(group) => cluster.apply_pod_group(&group),
                Change::Delete(group) => cluster.delete_pod_group(&group),
                Change::Reset(groups) => cluster.reset_pod_groups(&groups),
            });
            live.follow::<Node>(&client, |cluster, change| match change {
                Change::Apply(node) => cluster.apply_node(node),
                Change::Delete(node) => cluster.delete_node(&node),
                Change::Reset(nodes) => cluster.reset_nodes(nodes),
            });
            live.follow::<GpustowConfig>(&client, |cluster, change| {
                let config = match change {
                    Change::Apply(config) => Some(config),
                    Change::Delete(_) => None,
                    Change::Reset(configs) => configs.into_iter().next(),
                };
                cluster.set_config(config.map_or(Seen::NotThere, Seen::Read));
            });
            live.follow::<GpuWorkload>(&client, |cluster, change| match change {
                Change::Apply(workload) => cluster.advised.apply(workload),
                Change::Delete(workload) => cluster.advised.delete(&workload),
                Change::Reset(workloads) => cluster.advised.reset(workloads),
            });
            live.follow::<GpuNode>(&client, |cluster, change| match change {
                Change::Apply(node) => cluster.apply_gpunode(node),
                Change::Delete(node) => cluster.delete_gpunode(&node),
                Change::Reset(nodes) => cluster.reset_gpunodes(nodes),
            });
        }
        Ok(live)
    }

    /// The cluster as it is now.
    pub fn now(&self) -> MutexGuard<'_, Cluster> {
        let mut cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.still {
            cluster.pass(self.started.elapsed());
        }
        cluster
    }

    /// Files may be written again.
    fn reread(&self, path: PathBuf, resource: String) {
        let live = self.clone();
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(Duration::from_secs(1));
            let mut last = written(&path);
            loop {
                tick.tick().await;
                let time = written(&path);
                // One that is half written is read again.
                if time != last
                    && let Ok(cluster) = read(&path, &resource)
                {
                    *live.now() = cluster;
                    last = time;
                }
            }
        });
    }

    fn follow<K>(&self, client: &Client, change: impl Fn(&mut Cluster, Change<K>) + Send + 'static)
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let live = self.clone();
        let all = Api::<K>::all(client.clone());
        tokio::spawn(async move {
            let mut events = pin!(watcher(all, watcher::Config::default()).default_backoff());
            let mut listed = Vec::new();
            while let Some(event) = events.next().await {
                match event {
                    Ok(watcher::Event::Apply(object)) => {
                        change(&mut live.now(), Change::Apply(object));
                    }
                    Ok(watcher::Event::Delete(object)) => {
                        change(&mut live.now(), Change::Delete(object));
                    }
                    Ok(watcher::Event::Init) => listed = Vec::new(),
                    Ok(watcher::Event::InitApply(object)) => listed.push(object),
                    Ok(watcher::Event::InitDone) => {
                        let all = std::mem::take(&mut listed);
                        change(&mut live.now(), Change::Reset(all));
                    }
                    // It starts again; meanwhile the agents' ages show that time stands still.
                    Err(_) => {}
                }
            }
        });
    }
}

enum Change<K> {
    Apply(K),
    Delete(K),
    Reset(Vec<K>),
}
