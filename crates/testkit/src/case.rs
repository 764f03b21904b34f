//! One test's corner of a shared control plane: a namespace, and nodes that only its pods may use.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::builders::{GpuNodeBuilder, PodBuilder, gpu_node, pod};
use crate::check::check_cluster;
use crate::control_plane::ControlPlane;
use crate::wait::eventually;

/// Node label that holds the case's namespace.
const LABEL: &str = "testkit/case";

/// A test's own namespace and nodes.
#[derive(Clone)]
pub struct Case {
    /// A client that may do anything.
    pub client: Client,
    /// The namespace, also the prefix of its nodes' names and the value of their label.
    pub namespace: String,
}

impl Case {
    /// Makes a namespace whose name starts with `name`.
    pub async fn new(cluster: &ControlPlane, name: &str) -> Result<Case> {
        let client = cluster.admin()?;
        let namespace = format!("{name}-{:06x}", rand::random_range(0..0x100_0000_u32));
        let mut object = Namespace::default();
        object.metadata.name = Some(namespace.clone());
        Api::all(client.clone())
            .create(&PostParams::default(), &object)
            .await?;
        Ok(Case { client, namespace })
    }

    /// The cluster-wide name of this case's node `name`.
    #[must_use]
    pub fn node_name(&self, name: &str) -> String {
        format!("{}-{name}", self.namespace)
    }

    /// The UUID of a card of this case's node `name`.
    #[must_use]
    pub fn uuid(&self, name: &str, card: usize) -> String {
        format!("GPU-{}-{card}", self.node_name(name))
    }

    /// A node with 64 cores, 512 GiB and cards of these sizes in MiB, not created yet.
    #[must_use]
    pub fn node(&self, name: &str, cards: &[u64]) -> GpuNodeBuilder {
        let uuids: Vec<_> = (0..cards.len()).map(|card| self.uuid(name, card)).collect();
        let cards: Vec<_> = uuids
            .iter()
            .map(String::as_str)
            .zip(cards.iter().copied())
            .collect();
        gpu_node(&self.node_name(name), "64", "512Gi", &cards).label(LABEL, &self.namespace)
    }

    /// A pod that only this case's nodes can take, not created yet.
    #[must_use]
    pub fn pod(&self, name: &str) -> PodBuilder {
        pod(&self.namespace, name).node_selector(LABEL, &self.namespace)
    }

    /// Creates a disruption budget for the pods with this label `app`, by its name. `bound` is a field of its
    /// specification, `minAvailable` for example.
    pub async fn budget(&self, app: &str, bound: (&str, u64)) -> Result<Api<PodDisruptionBudget>> {
        let (field, pods) = bound;
        let budget = serde_json::from_value(json!({
            "metadata": { "name": app },
            "spec": { field: pods, "selector": { "matchLabels": { "app": app } } },
        }))?;
        let budgets = Api::namespaced(self.client.clone(), &self.namespace);
        budgets.create(&PostParams::default(), &budget).await?;
        Ok(budgets)
    }

    /// This case's pods.
    #[must_use]
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Checks this case's nodes as [`check_cluster`] does.
    pub async fn check(&self) -> Result<()> {
        check_cluster(&self.client, Some(&self.selector())).await
    }

    /// Checks, then removes everything.
    pub async fn end(self) -> Result<()> {
        self.check().await?;
        let at_once = DeleteParams::default().grace_period(0);
        let nodes = ListParams::default().labels(&self.selector());
        self.pods()
            .delete_collection(&at_once, &ListParams::default())
            .await?;
        Api::<Node>::all(self.client.clone())
            .delete_collection(&at_once, &nodes)
            .await?;
        Api::<Namespace>::all(self.client.clone())
            .delete(&self.namespace, &at_once)
            .await?;
        Ok(())
    }

    /// Deletes this case's pods, or only the pods with the labels, and waits until they are gone.
    pub async fn clear(&self, labels: Option<&str>, deadline: Duration) -> Result<()> {
        let at_once = DeleteParams::default().grace_period(0);
        let selected = ListParams {
            label_selector: labels.map(str::to_owned),
            ..ListParams::default()
        };
        eventually(deadline, "the pods are gone", async || {
            // A request may take a minute. The next request deletes the pods that remain of ten thousand after it.
            self.pods().delete_collection(&at_once, &selected).await?;
            let some = selected.clone().limit(1);
            let left = self.pods().list_metadata(&some).await?.items;
            ensure!(left.is_empty(), "some are there");
            Ok(())
        })
        .await
    }

    fn selector(&self) -> String {
        format!("{LABEL}={}", self.namespace)
    }
}
