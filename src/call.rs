//! The checks of a call before its content is read: who may call, and how much at once.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use futures::StreamExt;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use crate::app::App;
use crate::failure::{ErrorKind, Failure};

/// Bytes of one call of kube-scheduler: the names of 60,000 nodes, each as long as can be, and the largest pod.
const MAX_BODY: usize = 16 << 20;
/// Bytes of one review: two objects of the largest size that the API server takes, and the text around them.
const MAX_REVIEW: usize = 8 << 20;
/// Bytes of all calls that are being read or answered.
const ALL_BODIES: usize = 64 << 20;
/// For a call to come in whole; kube-scheduler itself gives up earlier.
const PATIENCE: Duration = Duration::from_secs(30);
const TOO_MUCH: &str = "gpustow: too many large calls at once";

/// Room for the calls under way.
pub(crate) struct Calls {
    room: Arc<Semaphore>,
    coming: Mutex<Coming>,
    /// Bytes of one call, at most, and the error for a larger one.
    max: (usize, &'static str),
    /// The address at which calls come in, unless clients show a certificate.
    address: Option<IpAddr>,
}

/// Bodies that have not come in whole, in the order in which they began.
#[derive(Default)]
struct Coming {
    bodies: BTreeMap<u64, Incomplete>,
    last: u64,
}

struct Incomplete {
    share: OwnedSemaphorePermit,
    /// Ends the reading when it is dropped.
    _reading: oneshot::Sender<()>,
}

impl Calls {
    /// For kube-schedulers at `address`, or with a certificate that was checked.
    pub(crate) fn of_schedulers(address: Option<IpAddr>) -> Self {
        let text = "gpustow: the call has more than 16 MiB: if kube-scheduler sends whole Node \
                    objects, set nodeCacheCapable: true for this extender";
        Self::new((MAX_BODY, text), address)
    }

    /// For API servers, which send reviews. Every pod of the cluster may reach that address.
    pub(crate) fn of_api_servers() -> Self {
        Self::new(
            (MAX_REVIEW, "gpustow: the review has more than 8 MiB"),
            None,
        )
    }

    fn new(max: (usize, &'static str), address: Option<IpAddr>) -> Self {
        Self {
            room: Arc::new(Semaphore::new(ALL_BODIES)),
            coming: Mutex::default(),
            max,
            address,
        }
    }

    fn coming(&self) -> MutexGuard<'_, Coming> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room for more of a body. If there is none, the oldest incomplete body ends, be it this one.
    fn take(&self, number: u64, bytes: usize) -> Result<(), &'static str> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let mut coming = self.coming();
        loop {
            if let Ok(more) = self.room.clone().try_acquire_many_owned(bytes) {
                let body = coming.bodies.get_mut(&number).ok_or(TOO_MUCH)?;
                body.share.merge(more);
                return Ok(());
            }
            match coming.bodies.pop_first() {
                Some((oldest, _)) if oldest != number => {}
                _ => return Err(TOO_MUCH),
            }
        }
    }

    /// Refuses a call that a web page may have sent: a page can make a browser on this machine post
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
        let Some((begun, ended)) = Begun::new(self) else {
            return failed("gpustow is shutting down");
        };
        let read = async {
            let mut pieces = body.into_data_stream();
            let mut all = Vec::new();
            while let Some(piece) = pieces.next().await {
                let piece = piece.map_err(|_| "gpustow: the call broke off")?;
                let (max, text) = self.max;
                if all.len() + piece.len() > max {
                    return Err(text);
                }
                self.take(begun.number, piece.len())?;
                all.extend_from_slice(&piece);
            }
            Ok(all)
        };
        let read = tokio::select! {
            read = read => read,
            _ = ended => Err(TOO_MUCH),
        };
        let share = begun.whole();
        match (read, share) {
            (Ok(all), Some(share)) => Ok((all, share)),
            (Ok(_), None) => failed(TOO_MUCH),
            (Err(text), _) => failed(text),
        }
    }
}

/// A body that has begun to come in; its room is given back if the reading ends early.
struct Begun<'a> {
    calls: &'a Calls,
    number: u64,
}

impl<'a> Begun<'a> {
    fn new(calls: &'a Calls) -> Option<(Self, oneshot::Receiver<()>)> {
        let share = calls.room.clone().try_acquire_many_owned(0).ok()?;
        let (reading, ended) = oneshot::channel();
        let mut coming = calls.coming();
        coming.last += 1;
        let number = coming.last;
        let body = Incomplete {
            share,
            _reading: reading,
        };
        coming.bodies.insert(number, body);
        Some((Self { calls, number }, ended))
    }

    /// All of it has come, or no more is wanted. Gives its share unless it had to end for others.
    fn whole(self) -> Option<OwnedSemaphorePermit> {
        let body = self.calls.coming().bodies.remove(&self.number)?;
        Some(body.share)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.calls.coming().bodies.remove(&self.number);
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

    /// A body of which so many bytes come, and then no more.
    fn stuck(bytes: usize) -> Body {
        let first = futures::stream::iter([Ok::<_, std::io::Error>(vec![b' '; bytes])]);
        Body::from_stream(first.chain(futures::stream::pending()))
    }

    #[tokio::test]
    async fn review_is_read_however_many_bodies_never_end() {
        let calls = Calls::of_api_servers();
        let mut readings: Vec<_> = (0..20)
            .map(|_| Box::pin(calls.read(stuck(MAX_REVIEW))))
            .collect();
        let mut ended = 0;
        for reading in &mut readings {
            assert!(futures::poll!(reading).is_pending());
        }
        let (all, share) = calls.read(Body::from("{}")).await.unwrap();
        assert_eq!(all, b"{}");
        for reading in &mut readings {
            if let std::task::Poll::Ready(read) = futures::poll!(reading) {
                assert_eq!(read.unwrap_err().text, TOO_MUCH);
                ended += 1;
            }
        }
        // The youngest seven and this review are within the bound.
        assert_eq!(ended, 13);
        drop((share, readings));
        assert_eq!(calls.room.available_permits(), ALL_BODIES);
        assert!(calls.coming().bodies.is_empty());
    }

    #[tokio::test]
    async fn review_that_is_too_large_is_refused_and_gives_its_room_back() {
        let calls = Calls::of_api_servers();
        let read = calls.read(stuck(MAX_REVIEW + 1)).await;
        assert!(read.unwrap_err().text.contains("8 MiB"));
        assert_eq!(calls.room.available_permits(), ALL_BODIES);
    }

    #[test]
    fn only_a_name_that_no_other_can_point_at_us_is_ours() {
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
