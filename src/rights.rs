//! The rights that switches need beyond the base installation: asked of the API server once at the start, so that a
//! switch without its component is said in one line, and not only when it is too late.

use std::time::Duration;

use gpustow_settings::{Right, Settings};
use k8s_openapi::api::authorization::v1::{SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::sleep;

use crate::ask::within;

/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The API server may be starting as well.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(2);

/// Logs each component whose right is missing.
pub(crate) async fn report(client: Client, settings: Settings) {
    let mut reported: Option<&str> = None;
    for right in settings.rights() {
        // One component may give several rights.
        if reported == Some(right.component) || asked(&client, &right).await != Some(false) {
            continue;
        }
        reported = Some(right.component);
        tracing::error!("{}", missing(&right));
    }
}

fn missing(right: &Right) -> String {
    let Right {
        switch, component, ..
    } = right;
    format!(
        "{switch} does not work, because this extender may not {}: apply manifests/{component}/rbac.yaml, or set the \
         switch by its value of the Helm chart",
        right.text()
    )
}

/// Asks until there is an answer, or for so long that the API server answers nothing else either.
async fn asked(client: &Client, right: &Right) -> Option<bool> {
    for _ in 0..ATTEMPTS {
        if let Some(answer) = has(client, right).await {
            return Some(answer);
        }
        sleep(PAUSE).await;
    }
    None
}

/// Has this extender the right? None if the API server does not say.
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
        tracing::debug!(%error, right = right.text(), "cannot ask whether this extender has a right");
    });
    Some(answer.ok()?.status?.allowed)
}
