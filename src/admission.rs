//! Looks now and then whether the policies still hold on which the ledger relies: that nobody else
//! writes assignments, above all. A weak policy is told, and stops nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpustow_api::admission::{POLICIES, weakness};
use kube::Api;
use tokio::time::sleep;

use crate::App;
use crate::ask::{AskError, within};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(60);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What was found at the last look: each policy that was read, and what is wrong with it, if anything.
#[derive(Default)]
pub(crate) struct Found(Mutex<Vec<(&'static str, Option<&'static str>)>>);

impl Found {
    /// The policies that were read.
    pub(crate) fn all(&self) -> Vec<(&'static str, Option<&'static str>)> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// A line for each that is weak.
    pub(crate) fn warnings(&self) -> String {
        let weak = self.all().into_iter();
        let lines = weak.filter_map(|(policy, problem)| Some((policy, problem?)));
        lines
            .map(|(policy, problem)| format!("warning: admission policy {policy} {problem}\n"))
            .collect()
    }
}

/// Looks for as long as the process runs.
pub(crate) async fn run(app: Arc<App>) {
    app.lists.all_in().await;
    loop {
        let mut found = Vec::new();
        for name in POLICIES {
            match look(&app, name).await {
                Ok(problem) => found.push((name, problem)),
                Err(error) => tracing::debug!(%error, policy = name, "cannot read the policy"),
            }
        }
        let before = app.policies.all();
        for (policy, problem) in &found {
            if let Some(problem) = problem
                && !before.contains(&(policy, Some(problem)))
            {
                tracing::warn!(policy, problem, "apply gpustow's manifests again");
            }
        }
        *app.policies
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = found;
        sleep(PERIOD).await;
    }
}

async fn look(app: &App, name: &str) -> Result<Option<&'static str>, AskError> {
    let policies = Api::all(app.client.clone());
    let bindings = Api::all(app.client.clone());
    let policy = within(TIMEOUT, policies.get_opt(name)).await?;
    let binding = within(TIMEOUT, bindings.get_opt(name)).await?;
    let resource = &app.args.resource_name;
    Ok(weakness(name, resource, policy.as_ref(), binding.as_ref()))
}
