//! A reverse proxy before the API server, plain HTTP on loopback, that misbehaves by rules.
//!
//! It passes `Authorization` through and streams bodies, so that a kubeconfig with its address works for any client.
//! Requests that a rule matches are forwarded even if their sender goes away: such a write outlives its sender.

use std::convert::Infallible;
use std::future::pending;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, TRANSFER_ENCODING};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::control_plane::ControlPlane;

type Answer = Response<UnsyncBoxBody<Bytes, kube::Error>>;

/// The effect of a rule on a matching request.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// Not forwarded before [`Rule::release`].
    Hold,
    /// Forwarded; its reply is passed on at [`Rule::release`].
    HoldReply,
    /// Forwarded; its reply is read to the end and the connection is cut instead.
    DropReply,
    /// Not forwarded; answered with this status and body.
    Answer(StatusCode, &'static str),
    /// Forwarded; every piece of the reply's body arrives this much later, in order.
    DelayReply(Duration),
    /// Not forwarded; the connection is cut.
    Cut,
}

/// A running proxy. Dropping it ends it with all its connections.
pub struct ApiProxy {
    url: String,
    state: Arc<State>,
    accepting: AbortHandle,
}

struct State {
    upstream: Client,
    rules: Mutex<Vec<Arc<Entry>>>,
    /// Its change, or its end, ends the connections there are.
    cut: watch::Sender<()>,
}

type Matches = dyn Fn(&Method, &Uri) -> bool + Send + Sync;

struct Entry {
    matches: Box<Matches>,
    action: Action,
    progress: watch::Sender<Progress>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    seen: usize,
    answered: usize,
    released: bool,
}

/// A rule in force. Dropping it removes the rule and releases the held requests.
pub struct Rule {
    entry: Arc<Entry>,
    state: Arc<State>,
}

impl ApiProxy {
    /// Starts one before the API server, on the caller's runtime.
    pub async fn start(cluster: &ControlPlane) -> Result<ApiProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        // The sender's own identity passes through.
        let mut config = cluster.admin_config().clone();
        config.auth_info = Default::default();
        let state = Arc::new(State {
            upstream: Client::try_from(config)?,
            rules: Mutex::default(),
            cut: watch::Sender::new(()),
        });
        let accepting = tokio::spawn(accept(listener, state.clone())).abort_handle();
        Ok(ApiProxy {
            url,
            state,
            accepting,
        })
    }

    /// Its address, for a kubeconfig.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Adds a rule for requests whose method and path with query `matches` accepts. The oldest rule
    /// that matches a request decides.
    pub fn rule(
        &self,
        matches: impl Fn(&Method, &Uri) -> bool + Send + Sync + 'static,
        action: Action,
    ) -> Rule {
        let progress = watch::Sender::default();
        let entry = Arc::new(Entry {
            matches: Box::new(matches),
            action,
            progress,
        });
        self.state.rules().push(entry.clone());
        Rule {
            entry,
            state: self.state.clone(),
        }
    }

    /// A rule for the POSTs that bind the pod.
    pub fn on_bind(&self, namespace: &str, pod: &str, action: Action) -> Rule {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/binding");
        self.rule(
            move |method, uri| method == Method::POST && uri.path() == path,
            action,
        )
    }

    /// A rule for watches of all pods.
    pub fn on_pod_watch(&self, action: Action) -> Rule {
        let watches = |query: &str| {
            query
                .split('&')
                .any(|p| p == "watch=true" || p == "watch=1")
        };
        self.rule(
            move |method, uri| {
                method == Method::GET
                    && uri.path() == "/api/v1/pods"
                    && uri.query().is_some_and(watches)
            },
            action,
        )
    }

    /// Cuts every connection there is; clients reconnect, and the rules of now apply.
    pub fn cut_connections(&self) {
        self.state.cut.send_replace(());
    }
}

impl Drop for ApiProxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut_connections();
    }
}

impl Rule {
    /// Waits until `count` requests in all have matched: with [`Action::Hold`], are held or were.
    pub async fn seen(&self, count: usize, deadline: Duration) -> Result<()> {
        self.wait("seen", deadline, |progress| progress.seen >= count)
            .await
    }

    /// Waits until the API server has answered `count` of them in all, whether or not a client heard it.
    pub async fn answered(&self, count: usize, deadline: Duration) -> Result<()> {
        self.wait("answered", deadline, |progress| progress.answered >= count)
            .await
    }

    /// How many requests have matched so far.
    #[must_use]
    pub fn count(&self) -> usize {
        self.entry.progress.borrow().seen
    }

    /// Forwards the held requests, and holds no further ones.
    pub fn release(&self) {
        self.entry
            .progress
            .send_modify(|progress| progress.released = true);
    }

    async fn wait(
        &self,
        what: &str,
        deadline: Duration,
        done: impl Fn(&Progress) -> bool,
    ) -> Result<()> {
        let mut progress = self.entry.progress.subscribe();
        match tokio::time::timeout(deadline, progress.wait_for(done)).await {
            Ok(seen) => seen.map(drop).context("rule without progress"),
            Err(_) => bail!(
                "requests {what}: not within {deadline:?}; last seen: {:?}",
                { *self.entry.progress.borrow() }
            ),
        }
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        self.state
            .rules()
            .retain(|entry| !Arc::ptr_eq(entry, &self.entry));
        self.release();
    }
}

impl State {
    fn rules(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rule_for(&self, method: &Method, uri: &Uri) -> Option<Arc<Entry>> {
        self.rules()
            .iter()
            .find(|entry| (entry.matches)(method, uri))
            .cloned()
    }
}

impl Entry {
    fn count(&self, step: impl FnOnce(&mut Progress)) {
        self.progress.send_modify(step);
    }

    async fn released(&self) {
        let mut progress = self.progress.subscribe();
        if progress
            .wait_for(|progress| progress.released)
            .await
            .is_err()
        {
            pending().await
        }
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) -> Infallible {
    loop {
        // A connection that ended before it was accepted is no concern of others.
        if let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, state.clone()));
        }
    }
}

async fn serve(stream: TcpStream, state: Arc<State>) {
    let mut cut = state.cut.subscribe();
    let service = service_fn(move |request| answer(state.clone(), request));
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // Its error is the client's going away, or a cut that was asked for.
        _ = connection => {}
        _ = cut.changed() => {}
    }
}

/// An error cuts the connection.
async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Answer, anyhow::Error> {
    let entry = state.rule_for(request.method(), request.uri());
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut request = Request::from_parts(parts, Body::from(body));
    for header in [CONNECTION, TRANSFER_ENCODING] {
        request.headers_mut().remove(header);
    }
    match entry {
        // Ends with the client's connection.
        None => forward(&state.upstream, request).await,
        // Does not.
        Some(entry) => tokio::spawn(obey(entry, state, request)).await?,
    }
}

async fn obey(entry: Arc<Entry>, state: Arc<State>, request: Request<Body>) -> Result<Answer> {
    entry.count(|progress| progress.seen += 1);
    match entry.action {
        Action::Hold => entry.released().await,
        Action::Cut => bail!("cut"),
        Action::Answer(status, body) => {
            let body = Full::from(body)
                .map_err(|never| match never {})
                .boxed_unsync();
            let mut answer = Response::new(body);
            *answer.status_mut() = status;
            return Ok(answer);
        }
        Action::DropReply | Action::DelayReply(_) | Action::HoldReply => {}
    }
    let answer = forward(&state.upstream, request).await?;
    match entry.action {
        Action::DropReply => {
            answer.into_body().collect().await?;
            entry.count(|progress| progress.answered += 1);
            Err(anyhow!("reply dropped"))
        }
        Action::HoldReply => {
            let (head, body) = answer.into_parts();
            let body = Full::new(body.collect().await?.to_bytes());
            entry.count(|progress| progress.answered += 1);
            entry.released().await;
            let body = body.map_err(|never| match never {}).boxed_unsync();
            Ok(Response::from_parts(head, body))
        }
        Action::DelayReply(delay) => {
            entry.count(|progress| progress.answered += 1);
            Ok(answer.map(|body| late(body, delay)))
        }
        _ => {
            entry.count(|progress| progress.answered += 1);
            Ok(answer)
        }
    }
}

async fn forward(upstream: &Client, request: Request<Body>) -> Result<Answer> {
    let mut answer = upstream.send(request).await?;
    for header in [CONNECTION, TRANSFER_ENCODING] {
        answer.headers_mut().remove(header);
    }
    Ok(answer.map(|body| body.boxed_unsync()))
}

/// The same frames, each `delay` after it came, so that a busy stream is late but not slow.
fn late(
    mut body: UnsyncBoxBody<Bytes, kube::Error>,
    delay: Duration,
) -> UnsyncBoxBody<Bytes, kube::Error> {
    let (send, receive) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while !body.is_end_stream() {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                // The client has gone.
                () = send.closed() => break,
            };
            let Some(frame) = frame else { break };
            if send.send((Instant::now() + delay, frame)).is_err() {
                break;
            }
        }
    });
    let frames = futures::stream::unfold(receive, async |mut receive| {
        let (due, frame) = receive.recv().await?;
        tokio::time::sleep_until(due).await;
        Some((frame, receive))
    });
    StreamBody::new(frames).boxed_unsync()
}
