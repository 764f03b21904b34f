//! Requests to the API server, each with an end.

use std::time::Duration;

use axum::body::to_bytes;
use axum::http::{Request, header};
use gpustow_api::PodFacts;
use gpustow_serve::status_patch;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822;
use kube::Client;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::client::Body;
use kube::core::response::StatusDetails;
use kube::core::{PartialObjectMeta, Resource as _, Status};
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;
use tokio::time::timeout;

/// Bytes of an answer: more than the API server takes of one object.
const MAX_ANSWER: usize = 16 << 20;

/// A request that was not answered as hoped.
#[derive(Debug, Error)]
pub(crate) enum AskError {
    /// The API server refused the request.
    #[error("the API server refused: {} (status {})", .0.message, .0.code)]
    Refused(Box<Status>),
    /// The answer did not come, or cannot be read.
    #[error("no answer from the API server: {0}")]
    Broken(#[source] Box<kube::Error>),
    /// It did not come in time.
    #[error("no answer from the API server in time")]
    Timeout,
}

impl From<kube::Error> for AskError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Refused(status),
            other => Self::Broken(Box::new(other)),
        }
    }
}

impl AskError {
    /// The status with which the API server refused, if it did.
    #[must_use]
    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Refused(status) => Some(status.code),
            _ => None,
        }
    }

    /// Would the same request be refused again, however often it is sent?
    #[must_use]
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.status(), Some(status @ 400..500) if ![401, 408, 429].contains(&status))
    }

    /// How long the API server asked to be left alone; nothing if it did not.
    #[must_use]
    pub(crate) fn retry_after(&self) -> Duration {
        let details = match self {
            Self::Refused(status) => status.details.as_ref(),
            _ => None,
        };
        Duration::from_secs(details.map_or(0, |details| details.retry_after_seconds.into()))
    }
}

/// Sends a request whose refusal may name in its header when to come again. [`Client::request`] drops that header.
///
/// # Errors
/// If the API server refuses, or its answer cannot be read.
pub(crate) async fn send<T: DeserializeOwned>(
    client: &Client,
    request: Request<Vec<u8>>,
) -> Result<T, kube::Error> {
    send_dated(client, request).await?.0
}

/// As [`send`], with the time at which the API server answered, by its own clock.
///
/// # Errors
/// If there is no answer; one that refuses has a time, too.
pub(crate) async fn send_dated<T: DeserializeOwned>(
    client: &Client,
    request: Request<Vec<u8>>,
) -> Result<(Result<T, kube::Error>, Option<Timestamp>), kube::Error> {
    let answer = client.send(request.map(Body::from)).await?;
    let date = answer.headers().get(header::DATE);
    let date = date.and_then(|date| rfc2822::parse(date.to_str().ok()?).ok());
    let date = date.map(|date| date.timestamp());
    let code = answer.status();
    let after = answer.headers().get(header::RETRY_AFTER);
    let after = after.and_then(|value| value.to_str().ok()?.parse().ok());
    let body = axum::body::Body::new(answer.into_body());
    let body = to_bytes(body, MAX_ANSWER).await;
    let body = body.map_err(|error| kube::Error::Service(error.into()))?;
    if code.is_success() {
        let object = serde_json::from_slice(&body).map_err(kube::Error::SerdeError);
        return Ok((object, date));
    }
    let text = String::from_utf8_lossy(&body);
    let mut status = serde_json::from_slice(&body)
        .unwrap_or_else(|_| Status::failure(text.trim(), "Failed to parse error data"));
    status.code = code.as_u16();
    if let Some(seconds) = after {
        let details = status.details.get_or_insert_with(|| StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes: Vec::new(),
            retry_after_seconds: 0,
        });
        details.retry_after_seconds = details.retry_after_seconds.max(seconds);
    }
    Ok((Err(kube::Error::Api(status.boxed())), date))
}

/// Patches the status of a pod; its metadata after that.
///
/// # Errors
/// If there is no answer, or one that refuses.
pub(crate) async fn patch_status(
    client: &Client,
    pod: &PodFacts,
    patch: &Patch<Value>,
) -> Result<ObjectMeta, kube::Error> {
    let url = Pod::url_path(&(), Some(&pod.namespace));
    let request = status_patch(url, &pod.name, &PatchParams::default(), patch)?;
    let patched: PartialObjectMeta<Pod> = send(client, request).await?;
    Ok(patched.metadata)
}

/// The request's answer, awaited no longer than `limit`.
///
/// # Errors
/// [`AskError::Timeout`] after `limit`: a write may still arrive.
pub(crate) async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, AskError> {
    match timeout(limit, request).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(AskError::Timeout),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Response;
    use tower::service_fn;

    use super::*;

    #[tokio::test]
    async fn answer_tells_the_time_of_the_api_server() {
        let service = service_fn(|_: Request<kube::client::Body>| async {
            let answer = Response::builder().header(header::DATE, "Tue, 24 Nov 2026 17:00:05 GMT");
            Ok::<_, kube::Error>(answer.body(Body::from("1")).unwrap())
        });
        let client = Client::new(service, "default");
        let request = Request::get("/").body(Vec::new()).unwrap();
        let (answer, date) = send_dated::<u8>(&client, request).await.unwrap();
        assert_eq!(answer.unwrap(), 1);
        let at = "2026-11-24T17:00:05Z".parse::<Timestamp>().unwrap();
        assert_eq!(date, Some(at));
    }

    /// The error from an answer with this status, header and body.
    async fn asked(status: u16, after: &str, body: &'static str) -> AskError {
        let answer = Response::builder()
            .status(status)
            .header(header::RETRY_AFTER, after)
            .body(Body::from(body));
        let answer = std::sync::Mutex::new(answer.ok());
        let service = service_fn(move |_: Request<kube::client::Body>| {
            let answer = answer.lock().unwrap().take().unwrap();
            async { Ok::<_, kube::Error>(answer) }
        });
        let client = Client::new(service, "default");
        let request = Request::patch("/").body(Vec::new()).unwrap();
        let answer = send::<serde_json::Value>(&client, request).await;
        answer.unwrap_err().into()
    }

    #[tokio::test]
    async fn a_refusal_says_when_to_come_again() {
        let plain = asked(429, "7", "Too many requests, please try again later.").await;
        assert_eq!(plain.status(), Some(429));
        assert_eq!(plain.retry_after(), Duration::from_secs(7));
        let status = r#"{"kind":"Status","code":503,"details":{"retryAfterSeconds":9}}"#;
        let told = asked(503, "2", status).await;
        assert_eq!(told.retry_after(), Duration::from_secs(9));
        let date = asked(503, "Wed, 21 Oct 2026 07:28:00 GMT", "").await;
        assert_eq!(date.retry_after(), Duration::ZERO);
    }
}
