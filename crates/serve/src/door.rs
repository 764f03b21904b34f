//! Authenticates bearer tokens by TokenReview and authorizes the path by SubjectAccessReview, as
//! kubelet and kube-scheduler do for their own metrics. Answers are cached for a short time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// How long a client is let in without asking again.
const ALLOWED: Duration = Duration::from_secs(60);
/// How long a client is kept out without asking again.
const REFUSED: Duration = Duration::from_secs(10);
/// Tokens remembered.
const KNOWN: usize = 1024;
/// Reviews under way at once: who sends many tokens waits, and the API server does not.
const REVIEWS: usize = 8;
/// For one question to the API server.
const PATIENCE: Duration = Duration::from_secs(5);

/// The API server's judgement of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// Its user may.
    Allowed,
    /// Its user may not.
    Forbidden,
    /// The token does not belong to a user.
    Unknown,
}

/// Lets in each user that may get one path.
pub struct Door {
    client: Client,
    path: &'static str,
    known: Mutex<HashMap<String, (Access, Instant)>>,
    reviews: Semaphore,
}

impl Door {
    /// A door that `client` asks about: who may `get` the non-resource URL `path` is let in. The
    /// client needs the right to create token reviews and subject access reviews, as the ClusterRole
    /// `system:auth-delegator` gives it.
    #[must_use]
    pub fn new(client: Client, path: &'static str) -> Self {
        Self {
            client,
            path,
            known: Mutex::default(),
            reviews: Semaphore::new(REVIEWS),
        }
    }

    /// Puts this door before every route of `router`.
    pub fn before(self: Arc<Self>, router: Router) -> Router {
        router.layer(from_fn_with_state(self, guard))
    }

    async fn access(&self, token: &str) -> Result<Access, String> {
        if let Some(access) = self.remembered(token) {
            return Ok(access);
        }
        let _turn = self.reviews.acquire().await;
        if let Some(access) = self.remembered(token) {
            return Ok(access);
        }
        let access = self.reviewed(token).await?;
        self.remember(token, access);
        Ok(access)
    }

    fn remembered(&self, token: &str) -> Option<Access> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (access, until) = known.get(token)?;
        (Instant::now() < *until).then_some(*access)
    }

    fn remember(&self, token: &str, access: Access) {
        let now = Instant::now();
        let lasts = match access {
            Access::Allowed => ALLOWED,
            Access::Forbidden | Access::Unknown => REFUSED,
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KNOWN {
            known.retain(|_, (access, until)| *access == Access::Allowed && now < *until);
        }
        if known.len() < KNOWN {
            known.insert(token.to_owned(), (access, now + lasts));
        }
    }

    async fn reviewed(&self, token: &str) -> Result<Access, String> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                ..TokenReviewSpec::default()
            },
            ..TokenReview::default()
        };
        let status = self.ask(&review).await?.status.unwrap_or_default();
        let Some(user) = status.user.filter(|_| status.authenticated == Some(true)) else {
            return Ok(Access::Unknown);
        };
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username,
                uid: user.uid,
                groups: user.groups,
                extra: user.extra,
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some(self.path.to_owned()),
                    verb: Some("get".to_owned()),
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let status = self.ask(&review).await?.status.unwrap_or_default();
        Ok(match status.allowed && status.denied != Some(true) {
            true => Access::Allowed,
            false => Access::Forbidden,
        })
    }

    async fn ask<R>(&self, review: &R) -> Result<R, String>
    where
        R: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + DeserializeOwned,
    {
        let api = Api::<R>::all(self.client.clone());
        let params = PostParams::default();
        match timeout(PATIENCE, api.create(&params, review)).await {
            Ok(Ok(review)) => Ok(review),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        }
    }
}

/// The token in the request's head.
fn token(head: &HeaderMap) -> Option<&str> {
    let line = head.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = line.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

async fn guard(State(door): State<Arc<Door>>, request: Request, next: Next) -> Response {
    let access = match token(request.headers()) {
        Some(token) => door.access(token).await,
        None => Ok(Access::Unknown),
    };
    match access {
        Ok(Access::Allowed) => next.run(request).await,
        Ok(Access::Forbidden) => {
            let text = format!(
                "your user may not get {}: bind a ClusterRole that allows it\n",
                door.path
            );
            (StatusCode::FORBIDDEN, text).into_response()
        }
        Ok(Access::Unknown) => (
            StatusCode::UNAUTHORIZED,
            [(header::WWW_AUTHENTICATE, "Bearer")],
            "send a token of this cluster: Authorization: Bearer TOKEN\n",
        )
            .into_response(),
        Err(error) => {
            tracing::warn!(%error, path = door.path, "cannot ask the API server who may read");
            let text = "the API server cannot be asked who you are\n";
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}
