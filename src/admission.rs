//! Looks now and then whether the policies still hold on which the ledger relies: that no other client writes
//! assignments, above all. A weak policy is reported, and stops nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpustow_policies::admission::{Expected, Weakness};
use kube::{Api, Client};
use tokio::time::sleep;

use crate::ask::{AskError, within};
use crate::watch::Lists;

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(60);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Policies, each with its weakness, if it has one.
type Looked = Vec<(&'static str, Option<Weakness>)>;

/// The results of the last look, for the policies that could be read.
#[derive(Default)]
pub(crate) struct Found(Mutex<Looked>);

impl Found {
    fn lock(&self) -> MutexGuard<'_, Looked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The policies that were read.
    pub(crate) fn all(&self) -> Looked {
        self.lock().clone()
    }

    /// A line for each that is weak.
    pub(crate) fn warnings(&self) -> String {
        let weak = self.all().into_iter();
        let weak = weak.filter_map(|(policy, weak)| Some((policy, weak?)));
        weak.filter(|(_, weak)| weak.is_open())
            .map(|(policy, weak)| format!("warning: admission policy {policy} {weak}\n"))
            .collect()
    }
}

/// Looks for as long as the process runs.
pub(crate) async fn run(client: Client, expected: Expected, told: Arc<Found>, lists: Arc<Lists>) {
    lists.all_in().await;
    loop {
        let mut found = Vec::new();
        for (policy, looked) in expected.look(|name| read(client.clone(), name)).await {
            match looked {
                Ok(weak) => found.push((policy, weak)),
                Err(error) => tracing::debug!(%error, policy, "cannot read the policy"),
            }
        }
        let before = told.all();
        for new in found.iter().filter(|new| !before.contains(new)) {
            if let (policy, Some(weak)) = new {
                tracing::warn!(policy, %weak, "are gpustow's manifests of this build's version?");
            }
        }
        *told.lock() = found;
        sleep(PERIOD).await;
    }
}

async fn read(
    client: Client,
    name: &'static str,
) -> Result<gpustow_policies::admission::Found, AskError> {
    let policies = Api::all(client.clone());
    let bindings = Api::all(client);
    tokio::try_join!(
        within(TIMEOUT, policies.get_opt(name)),
        within(TIMEOUT, bindings.get_opt(name)),
    )
}
