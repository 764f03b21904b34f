//! Common parts of the programs that measure: many requests at once, pods at a steady pace, and the time until they are
//! bound.

use std::collections::HashMap;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::Api;
use kube::runtime::watcher::{Config, Event};
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::time::{interval, timeout};

use crate::stats::sorted;
use crate::wait::node_of;

/// Does this with each of them, `width` at a time.
pub async fn at_once<T, R, F: Future<Output = Result<R>>>(
    width: usize,
    all: impl IntoIterator<Item = T>,
    each: impl FnMut(T) -> F,
) -> Result<()> {
    let done = stream::iter(all).map(each).buffer_unordered(width);
    done.try_for_each(|_| async { Ok(()) }).await
}

/// Minutes and seconds since then.
#[must_use]
pub fn since(began: Instant) -> String {
    let seconds = began.elapsed().as_secs();
    format!("{:3}:{:02}", seconds / 60, seconds % 60)
}

/// Pods as a watch shows them bound, from now on.
pub struct Binds(Pin<Box<dyn Stream<Item = Pod> + Send>>);

impl Binds {
    /// Watches these pods, or only the pods with the labels. The existing pods have been read. A watch that breaks
    /// begins again.
    pub async fn of(pods: Api<Pod>, labels: Option<&str>) -> Result<Self> {
        let config = Config {
            label_selector: labels.map(str::to_owned),
            ..Config::default()
        };
        let mut events = Box::pin(watcher(pods, config).default_backoff());
        while !matches!(events.try_next().await?, Some(Event::InitDone) | None) {}
        let pods = events.applied_objects();
        Ok(Self(Box::pin(pods.filter_map(async |pod| pod.ok()))))
    }

    /// The name and the node of the next bound pod whose name begins like this.
    pub async fn next(&mut self, prefix: &str) -> Result<(String, String)> {
        loop {
            let pod = self.0.next().await.context("the watch ended")?;
            if let Some(node) = node_of(&pod).filter(|_| pod.name_any().starts_with(prefix)) {
                return Ok((pod.name_any(), node.to_owned()));
            }
        }
    }
}

/// Creates `paced-0` and so on, ten a second; milliseconds from the creation of each to bound, ascending. Ends early when
/// none was bound for so long.
pub async fn paced(
    count: usize,
    binds: &mut Binds,
    quiet: Duration,
    create: impl AsyncFn(&str, usize) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut created = HashMap::new();
    let mut waits = Vec::new();
    let mut next = 0;
    let mut pace = interval(Duration::from_millis(100));
    while waits.len() < count {
        tokio::select! {
            _ = pace.tick(), if next < count => {
                let name = format!("paced-{next}");
                created.insert(name.clone(), Instant::now());
                create(&name, next).await?;
                next += 1;
            }
            bound = timeout(quiet, binds.next("paced-")) => {
                let Ok(bound) = bound else { break };
                if let Some(at) = created.remove(&bound?.0) {
                    waits.push(at.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
    }
    Ok(sorted(waits.into_iter()))
}
