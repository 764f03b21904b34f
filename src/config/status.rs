//! The status of the GpustowConfig, which the leader writes: whether each feature works, and which permission it lacks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::config::{
    self, GpustowConfigSpec, GpustowConfigStatus, NOT_SERVED, PERMISSION_MISSING, UNREADABLE,
    WORKING,
};
use gpustow_api::{GpustowConfig, QueueFrom};
use gpustow_settings::{Feature, Right};
use k8s_openapi::api::authorization::v1::{SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::Current;
use crate::app::App;
use crate::ask::{AskError, within};

/// Between two looks, and after a change of the object.
const LOOK: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_millis(100);
/// A permission that is there is asked for again after so long, and one that is missing after this.
const ASK_AGAIN: Duration = Duration::from_secs(300);
const ASK_MISSING: Duration = Duration::from_secs(10);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Writes the status for as long as the process runs, while this replica leads.
pub(crate) async fn run(app: Arc<App>) {
    let mut permissions = Permissions::default();
    let mut changes = app.config.changes();
    let mut told = None;
    loop {
        // A change of the object ends the pause, also one that came during the last look.
        let _ = timeout(LOOK, changes.changed()).await;
        sleep(SOON).await;
        let Some(epoch) = app.leads() else {
            told = None;
            continue;
        };
        let current = changes.borrow_and_update().clone();
        if current.problem != told {
            told.clone_from(&current.problem);
            told.iter()
                .for_each(|problem| app.events.config_unreadable(problem));
        }
        permissions.look(&app, &current.spec).await;
        let Some(written) = &current.status else {
            continue;
        };
        let wanted = conditions(&current, written, &permissions, app.unserved.is());
        let follows = current.generation == written.observed_generation;
        if (follows && wanted == written.conditions) || app.epoch.confirm(epoch).await.is_err() {
            continue;
        }
        let says = json!({ "observedGeneration": current.generation, "conditions": wanted });
        if let Err(error) = write(&app.client, says).await {
            tracing::warn!(%error, "cannot write the status of the GpustowConfig");
        }
    }
}

/// Writes which new pods are queued.
pub(crate) async fn write_queue_from(app: &App, from: &[QueueFrom]) -> Result<(), AskError> {
    write(&app.client, json!({ "queueFrom": from })).await
}

async fn write(client: &Client, status: Value) -> Result<(), AskError> {
    // The answer may have fields that this version cannot decode.
    let kind = ApiResource::erase::<GpustowConfig>(&());
    let configs: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let (params, patch) = (
        PatchParams::default(),
        Patch::Merge(json!({ "status": status })),
    );
    let written = configs.patch_status(config::NAME, &params, &patch);
    within(TIMEOUT, written).await.map(drop)
}

/// The API server's answers about the needed permissions.
#[derive(Default)]
struct Permissions(HashMap<String, (bool, Instant)>);

impl Permissions {
    async fn look(&mut self, app: &App, spec: &GpustowConfigSpec) {
        for (feature, right) in gpustow_settings::rights(spec) {
            let text = right.text();
            let fresh = |(has, at): &(bool, Instant)| {
                at.elapsed() < if *has { ASK_AGAIN } else { ASK_MISSING }
            };
            let before = self.0.get(&text);
            if before.is_some_and(fresh) {
                continue;
            }
            let known = before.map(|(has, _)| *has);
            let Some(has) = has(&app.client, &right).await else {
                continue;
            };
            if !has && known != Some(false) {
                tracing::error!("{}: {}", feature.name(), lacks(&right));
            }
            self.0.insert(text, (has, Instant::now()));
        }
    }

    fn lacks(&self, right: &Right) -> bool {
        let known = self.0.get(&right.text());
        known.is_some_and(|(has, _)| !has)
    }
}

/// Does this extender have the permission? None if the API server does not answer.
pub(crate) async fn has(client: &Client, right: &Right) -> Option<bool> {
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(right.attributes()),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let (reviews, params) = (Api::all(client.clone()), PostParams::default());
    let answer = within(TIMEOUT, reviews.create(&params, &review)).await;
    let answer = answer.inspect_err(|error| {
        tracing::debug!(%error, right = right.text(), "cannot ask whether this extender has a permission");
    });
    Some(answer.ok()?.status?.allowed)
}

fn lacks(right: &Right) -> String {
    format!(
        "the extender may not {}: apply the ClusterRole {} (manifests/{})",
        right.text(),
        right.role,
        right.component
    )
}

/// The message if the API server cannot keep claims off GPUs.
const UNSERVED: &str = "the API server serves no DeviceTaintRules, so ResourceClaims are not kept off GPUs that pods have: \
    upgrade to Kubernetes 1.37, or on 1.36 turn on the feature gate DRADeviceTaintRules and resource.k8s.io/v1beta2";

/// The conditions that should be written. A condition whose status is written already keeps its time.
fn conditions(
    current: &Current,
    written: &GpustowConfigStatus,
    permissions: &Permissions,
    unserved: bool,
) -> Vec<Condition> {
    let spec = &current.spec;
    let of_feature = |feature: Feature| {
        let right = feature.needs(spec).filter(|right| permissions.lacks(right));
        let (status, reason, message) = match right {
            Some(right) => ("False", PERMISSION_MISSING, lacks(&right)),
            None if feature == Feature::Claims && unserved => {
                ("False", NOT_SERVED, UNSERVED.into())
            }
            None if feature.is_on(spec) => ("True", "On", "The feature is on.".to_owned()),
            None => ("False", "Off", "The feature is off.".to_owned()),
        };
        (feature.name(), status, reason, message)
    };
    let features: Vec<_> = Feature::ALL.map(of_feature).into();
    let is_broken = |reason| [PERMISSION_MISSING, NOT_SERVED].contains(&reason);
    let broken = features.iter().filter(|it| is_broken(it.2));
    let broken: Vec<_> = broken.map(|it| (it.0, it.2)).collect();
    let all = match (&current.problem, &*broken) {
        (Some(problem), _) => (
            WORKING,
            "False",
            UNREADABLE,
            format!(
                "the extender cannot decode this object and follows the last valid one: {problem}"
            ),
        ),
        (None, []) => (
            WORKING,
            "True",
            "AsConfigured",
            "Every feature that is on works.".to_owned(),
        ),
        (None, [(_, first), ..]) => {
            let names: Vec<_> = broken.iter().map(|it| it.0).collect();
            let message = format!("see the condition {}", names.join(", "));
            (WORKING, "False", *first, message)
        }
    };
    let conditions = [all].into_iter().chain(features);
    let conditions = conditions.map(|(type_, status, reason, message)| {
        let before = written.conditions.iter().find(|it| it.type_ == type_);
        let since = before.filter(|it| it.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: current.generation,
            last_transition_time: since.map_or_else(
                || {
                    Time(
                        Timestamp::now()
                            .round(k8s_openapi::jiff::Unit::Second)
                            .unwrap_or_default(),
                    )
                },
                |it| it.last_transition_time.clone(),
            ),
        }
    });
    conditions.collect()
}
