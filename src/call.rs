//! What is heard of a call before anybody looks into it: who may call, and how much at once.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use futures::StreamExt;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::app::App;
use crate::failure::{ErrorKind, Failure};

/// One call's bytes: the names of 60,000 nodes, each as long as can be, beside the largest pod.
const MAX_BODY: usize = 16 << 20;
/// Bytes of all calls that are being read or answered.
const ALL_BODIES: usize = 64 << 20;
/// For a call to come in whole; kube-scheduler itself gives up earlier.
const PATIENCE: Duration = Duration::from_secs(30);

/// Room for the calls under way.
pub(crate) struct Calls {
    room: Arc<Semaphore>,
    /// The address at which calls come in, unless clients show a certificate.
    address: Option<IpAddr>,
}

impl Calls {
    /// For callers at `address`, or with a certificate that was checked.
    pub(crate) fn new(address: Option<IpAddr>) -> Self {
        Self {
            room: Arc::new(Semaphore::new(ALL_BODIES)),
            address,
        }
    }

    /// Lets nobody in whom a web page may have sent: a page can make a browser on this machine post
    /// text or forms to any address, and JSON to an address behind a name of its own.
    fn admit(&self, head: &HeaderMap) -> Result<(), Rejected> {
        let text = |name: header::HeaderName| head.get(name)?.to_str().ok();
        if let Some(address) = self.address
            && !text(header::HOST).is_some_and(|host| is_own(host, address))
        {
            return Err((
                StatusCode::MISDIRECTED_REQUEST,
                "call gpustow by its address or as localhost; by another name only over TLS with a \
                 client's certificate\n",
            ));
        }
        let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next());
        match kind {
            Some(kind) if kind.trim().eq_ignore_ascii_case("application/json") => Ok(()),
            _ => Err((
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "send application/json\n",
            )),
        }
    }

    async fn read(&self, body: Body) -> Result<(Vec<u8>, OwnedSemaphorePermit), Failure> {
        let failed = |text: &str| Err(Failure::new(ErrorKind::Decode, text));
        let Ok(mut share) = self.room.clone().try_acquire_many_owned(0) else {
            return failed("gpustow is shutting down");
        };
        let mut pieces = body.into_data_stream();
        let mut all = Vec::new();
        while let Some(piece) = pieces.next().await {
            let Ok(piece) = piece else {
                return failed("gpustow: the call broke off");
            };
            if all.len() + piece.len() > MAX_BODY {
                return failed(
                    "gpustow: the call has more than 16 MiB: if kube-scheduler sends whole Node \
                     objects, set nodeCacheCapable: true for this extender",
                );
            }
            let more = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            match self.room.clone().try_acquire_many_owned(more) {
                Ok(more) => share.merge(more),
                Err(_) => return failed("gpustow: too many large calls at once"),
            }
            all.extend_from_slice(&piece);
        }
        Ok((all, share))
    }
}

/// Is this a name of ours? A name that its owner may point at us is not; no address is such a name.
fn is_own(host: &str, address: IpAddr) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    match name.parse::<IpAddr>() {
        Ok(ip) => ip.is_loopback() || !address.is_loopback(),
        Err(_) => name.eq_ignore_ascii_case("localhost"),
    }
}

pub(crate) type Rejected = (StatusCode, &'static str);

/// A call as it came in.
pub(crate) struct Call {
    body: Result<Vec<u8>, Failure>,
    /// Given back once the call is answered.
    _share: Option<OwnedSemaphorePermit>,
}

impl FromRequest<Arc<App>> for Call {
    type Rejection = Rejected;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Rejected> {
        Call::hear(&app.calls, request).await
    }
}

impl Call {
    /// Reads a request whole, if its sender may call.
    pub(crate) async fn hear(calls: &Calls, request: Request) -> Result<Self, Rejected> {
        if let Err(rejected) = calls.admit(request.headers()) {
            tracing::warn!(
                path = request.uri().path(),
                why = rejected.1.trim(),
                "a call is refused"
            );
            return Err(rejected);
        }
        let read = timeout(PATIENCE, calls.read(request.into_body())).await;
        let read = read.unwrap_or_else(|_| {
            let text = "gpustow: the call did not come in whole in time";
            Err(Failure::new(ErrorKind::Timeout, text))
        });
        let (body, share) = read.map_or_else(|error| (Err(error), None), |(b, s)| (Ok(b), Some(s)));
        Ok(Self {
            body,
            _share: share,
        })
    }

    /// Reads it as a call of `/verb`.
    pub(crate) fn read<'a, T: Deserialize<'a>>(&'a self, verb: &str) -> Result<T, Failure> {
        let body = self.body.as_ref().map_err(Failure::clone)?;
        // One look at all of it is much faster than one at each of thousands of names.
        let text = std::str::from_utf8(body).map_err(|error| error.to_string());
        text.and_then(|text| serde_json::from_str(text).map_err(|error| error.to_string()))
            .map_err(|error| {
                let text = format!("gpustow: cannot read the call of /{verb}: {error}");
                Failure::new(ErrorKind::Decode, text)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_else_can_point_at_us_is_our_name() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let other = IpAddr::from([10, 0, 0, 1]);
        for (host, beside, from_afar) in [
            ("127.0.0.1:32766", true, true),
            ("127.0.0.1", true, true),
            ("[::1]:32766", true, true),
            ("localhost:32766", true, true),
            ("LocalHost", true, true),
            ("10.0.0.1:32766", false, true),
            ("evil.example", false, false),
            ("evil.example:32766", false, false),
            ("127.0.0.1.evil.example", false, false),
            ("localhost.", false, false),
            ("", false, false),
        ] {
            assert_eq!(is_own(host, loopback), beside, "{host}");
            assert_eq!(is_own(host, other), from_afar, "{host}");
        }
    }
}
