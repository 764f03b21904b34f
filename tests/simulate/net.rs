//! The way between a process and the API server: kube's client on one side, the server's calls on the other, and
//! in between messages that are late, lost, refused, or that nobody waits for any more.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Method, Request, Response, StatusCode};
use futures::stream;
use kube::Client;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tower::service_fn;

use crate::check;
use crate::server::{Change, Copy, Kind, Refusal, Server};

pub(crate) type Shared = Arc<Mutex<Server>>;

/// That of all pods.
pub(crate) const NAMESPACE: &str = "team";

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a process is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is.
    Up,
    /// Nothing goes out or comes in until it is up again: the process is frozen.
    Held,
    /// Nothing does, and it is told so.
    Cut,
    /// It has ended; what it had sent still arrives.
    Dead,
}

/// What can go wrong with a request, in ten thousand.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Odds {
    /// It is answered with 429, 500 or 503, and nothing is done.
    pub(crate) refused: u32,
    /// It breaks off before or after it was done.
    pub(crate) broken: u32,
    /// It arrives a minute late, when nobody waits for it.
    pub(crate) late: u32,
    /// A watch ends early at each of its events.
    pub(crate) unwatched: u32,
}

/// One process's connection.
pub(crate) struct Link {
    server: Shared,
    mode: watch::Sender<Mode>,
    pub(crate) odds: Mutex<Odds>,
    random: Mutex<StdRng>,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What becomes of a request.
#[derive(Clone, Copy)]
enum Fate {
    Done,
    Refused(u16),
    BrokenBefore,
    BrokenAfter,
    Late(Duration),
}

impl Link {
    pub(crate) fn new(server: &Shared, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            server: server.clone(),
            mode: watch::Sender::new(Mode::Up),
            odds: Mutex::default(),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
        })
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    pub(crate) fn mode(&self) -> Mode {
        *self.mode.borrow()
    }

    /// A client of the server through this link.
    pub(crate) fn client(self: &Arc<Self>) -> Client {
        let link = self.clone();
        let service = service_fn(move |request: Request<kube::client::Body>| {
            let link = link.clone();
            async move { link.send(request).await }
        });
        Client::new(service, "default")
    }

    /// Waits until messages pass.
    pub(crate) async fn pass(&self) -> Result<(), Failure> {
        let mut mode = self.mode.subscribe();
        loop {
            match *mode.borrow_and_update() {
                Mode::Up => return Ok(()),
                Mode::Cut => return Err("the network is down".into()),
                Mode::Held | Mode::Dead => {}
            }
            // The sender lives as long as the link.
            let _ = mode.changed().await;
        }
    }

    fn roll(&self, odds: u32) -> bool {
        odds > 0 && locked(&self.random).random_range(0..10_000) < odds
    }

    /// The time that a message takes: a moment as a rule, and now and then long enough to be overtaken.
    fn delay(&self) -> Duration {
        let mut random = locked(&self.random);
        let micros = match random.random_range(0..100_u32) {
            0 => random.random_range(0..2_000_000),
            1..10 => random.random_range(0..100_000),
            _ => random.random_range(100..5_000),
        };
        Duration::from_micros(micros)
    }

    fn fate(&self) -> Fate {
        let odds = *locked(&self.odds);
        if self.roll(odds.refused) {
            let code = [429, 500, 503][locked(&self.random).random_range(0..3)];
            return Fate::Refused(code);
        }
        if self.roll(odds.broken) {
            return match self.roll(5_000) {
                true => Fate::BrokenBefore,
                false => Fate::BrokenAfter,
            };
        }
        if self.roll(odds.late) {
            let seconds = locked(&self.random).random_range(1..90);
            return Fate::Late(Duration::from_secs(seconds));
        }
        Fate::Done
    }

    async fn send(
        self: Arc<Self>,
        request: Request<kube::client::Body>,
    ) -> Result<Response<Body>, Failure> {
        self.pass().await?;
        let (head, body) = request.into_parts();
        let body = to_bytes(Body::new(body), usize::MAX).await?;
        let body: Value = match body.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&body)?,
        };
        let mut call = Call::of(&head, body);
        // As it is sent: what happens while it is under way nobody can know.
        call.unwanted = call.is_unwanted(&locked(&self.server));
        sleep(self.delay()).await;
        let fate = self.fate();
        match fate {
            Fate::Refused(code) => {
                let text = "the server is busy".to_owned();
                return Ok(refused(&Refusal(code, "Busy", text)));
            }
            Fate::BrokenBefore => return Err("the connection broke".into()),
            Fate::Done | Fate::BrokenAfter | Fate::Late(_) => {}
        }
        if let Some(start) = call.watches {
            return Ok(self.watch(call, start));
        }
        // What is under way arrives whether or not somebody waits.
        let (tell, told) = oneshot::channel();
        let server = self.server.clone();
        let life = locked(&server).life;
        tokio::spawn(async move {
            if let Fate::Late(delay) = fate {
                sleep(delay).await;
            }
            let mut server = locked(&server);
            if server.life == life {
                // Nobody may wait any more.
                let _ = tell.send(call.answer(&mut server));
            }
        });
        let answer = told.await?;
        sleep(self.delay()).await;
        self.pass().await?;
        match fate {
            Fate::BrokenAfter => Err("the connection broke".into()),
            _ => Ok(answer),
        }
    }

    fn watch(self: Arc<Self>, call: Call, start: u64) -> Response<Body> {
        let news = locked(&self.server).news();
        let end = Instant::now() + Duration::from_secs(call.seconds);
        let watching = Watching {
            link: self,
            call,
            at: start,
            news,
            end,
        };
        let lines = stream::unfold(watching, async |mut watching| {
            let lines = watching.next().await?;
            Some((Ok::<_, Infallible>(lines), watching))
        });
        Response::new(Body::from_stream(lines))
    }
}

/// A watch under way.
struct Watching {
    link: Arc<Link>,
    call: Call,
    at: u64,
    news: watch::Receiver<u64>,
    end: Instant,
}

impl Watching {
    /// The next events, or the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            sleep(self.link.delay()).await;
            if self.link.pass().await.is_err() {
                return None;
            }
            if self.link.roll(locked(&self.link.odds).unwatched) {
                return None;
            }
            let mut lines = Vec::new();
            {
                let server = locked(&self.link.server);
                match server.since(self.at) {
                    Err(refusal) => lines.extend(line("ERROR", &status(&refusal).to_string())),
                    Ok(changes) => {
                        let told = changes.iter().filter_map(|change| self.call.event(change));
                        told.for_each(|(kind, object)| lines.extend(line(kind, &object)));
                        self.at = server.version();
                    }
                }
            }
            self.news.mark_unchanged();
            if !lines.is_empty() {
                return Some(lines.into());
            }
            if locked(&self.link.server).version() > self.at {
                continue;
            }
            if timeout_at(self.end, self.news.changed()).await.is_err() {
                return None;
            }
        }
    }
}

/// The type comes first, as the API server has it: who reads the line then knows what the rest is.
fn line(kind: &str, object: &str) -> Vec<u8> {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n").into_bytes()
}

fn status(Refusal(code, reason, message): &Refusal) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message,
    })
}

fn refused(refusal: &Refusal) -> Response<Body> {
    let mut response = Response::new(Body::from(status(refusal).to_string()));
    *response.status_mut() =
        StatusCode::from_u16(refusal.0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}

/// A request, understood.
struct Call {
    method: Method,
    kind: Option<Kind>,
    plural: String,
    namespace: String,
    name: String,
    part: String,
    /// Pods that have not ended, or those that are not bound, or those of one node.
    unfinished: bool,
    node: Option<String>,
    /// The one with this name.
    only: Option<String>,
    strategic: bool,
    /// Server-side.
    applies: bool,
    /// Only metadata is wanted.
    partial: bool,
    /// It is a watch, from this version on.
    watches: Option<u64>,
    seconds: u64,
    body: Value,
    /// Why it should not have been sent.
    unwanted: Option<String>,
}

impl Call {
    fn of(head: &axum::http::request::Parts, body: Value) -> Self {
        let path = head.uri.path().trim_matches('/').split('/');
        let mut path: Vec<&str> = path.collect();
        // /api/v1 or /apis/GROUP/VERSION.
        path.drain(
            ..match path.first() {
                Some(&"api") => 2,
                _ => 3,
            },
        );
        let namespace = match path.first() {
            Some(&"namespaces") if path.len() > 2 => path.drain(..2).nth(1),
            _ => None,
        };
        let part = |at: usize| path.get(at).copied().unwrap_or_default().to_owned();
        let query = head.uri.query().unwrap_or_default();
        let value = |key: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(it, _)| *it == key).map(|(_, value)| value)
        };
        let number = |key: &str| value(key).and_then(|text| text.parse().ok());
        let header = |name: &str| {
            let value = head.headers.get(name);
            value.and_then(|it| it.to_str().ok()).unwrap_or_default()
        };
        let selects = |field: &str| {
            let selector = value("fieldSelector").unwrap_or_default();
            let selector = selector.replace("%3D", "=").replace("%21", "!");
            let selector = selector.replace("%2C", ",");
            let mut parts = selector.split(',');
            parts.find_map(|part| part.strip_prefix(field).map(str::to_owned))
        };
        Self {
            method: head.method.clone(),
            kind: Kind::of_plural(&part(0)),
            plural: part(0),
            namespace: namespace.unwrap_or_default().to_owned(),
            name: part(1),
            part: part(2),
            unfinished: selects("status.phase").is_some(),
            node: selects("spec.nodeName="),
            only: selects("metadata.name="),
            strategic: header("content-type").contains("strategic"),
            applies: header("content-type").contains("apply-patch"),
            partial: header("accept").contains("as=PartialObjectMetadata"),
            watches: value("watch").map(|_| number("resourceVersion").unwrap_or(0)),
            seconds: number("timeoutSeconds").unwrap_or(300),
            body,
            unwanted: None,
        }
    }

    /// Should this pod not be deleted?
    fn is_unwanted(&self, server: &Server) -> Option<String> {
        let deletes = self.method == Method::DELETE && self.kind == Some(Kind::Pod);
        let key = (Kind::Pod, self.namespace.clone(), self.name.clone());
        let pod = server.get(&key).ok().filter(|_| deletes)?;
        check::preempted(server, &pod, &self.body["preconditions"])
    }

    fn wants(&self, object: &Value) -> bool {
        (self.namespace.is_empty() || object["metadata"]["namespace"] == *self.namespace)
            && !(self.unfinished && check::ended(object))
            && self
                .node
                .as_ref()
                .is_none_or(|node| object["spec"]["nodeName"].as_str().unwrap_or_default() == node)
            && (self.only.as_ref()).is_none_or(|only| object["metadata"]["name"] == **only)
    }

    /// What a watch tells of a change.
    fn event<'c>(&self, change: &'c Change) -> Option<(&'static str, Cow<'c, str>)> {
        if Some(change.kind) != self.kind {
            return None;
        }
        let seen = |copy: &'c Option<Copy>| copy.as_ref().filter(|it| self.wants(it));
        match (seen(&change.before), seen(&change.after)) {
            (None, Some(after)) => Some(("ADDED", change.told(after).into())),
            (Some(_), Some(after)) => Some(("MODIFIED", change.told(after).into())),
            (Some(before), None) => {
                let last = change.after.as_ref().unwrap_or(before);
                let mut last = Value::clone(last);
                last["metadata"]["resourceVersion"] = json!(change.version.to_string());
                Some(("DELETED", last.to_string().into()))
            }
            (None, None) => None,
        }
    }

    fn answer(self, server: &mut Server) -> Response<Body> {
        let created = self.method == Method::POST;
        match self.decide(server) {
            Ok(answer) => {
                let mut response = Response::new(Body::from(answer));
                if created {
                    *response.status_mut() = StatusCode::CREATED;
                }
                response
            }
            Err(refusal) => refused(&refusal),
        }
    }

    /// What it is answered, as it is sent.
    fn decide(self, server: &mut Server) -> Result<String, Refusal> {
        let Some(kind) = self.kind else {
            // Events are told to nobody; of policies and settings there are none.
            return match self.plural.as_str() {
                "events" => Ok(self.body.to_string()),
                "poddisruptionbudgets" => Ok(server.budgets().to_string()),
                other => Err(Refusal(404, "NotFound", format!("no {other} here"))),
            };
        };
        let key = (kind, self.namespace.clone(), self.name.clone());
        let partial = self.partial;
        let answer = match (&self.method, self.part.as_str()) {
            (&Method::GET, _) if self.name.is_empty() => {
                let items = server.all(kind).filter(|object| self.wants(object));
                let items: Vec<String> = items.map(|object| object.to_string()).collect();
                return Ok(format!(
                    r#"{{"kind":"{kind:?}List","apiVersion":"{}","metadata":{{"resourceVersion":"{}"}},"items":[{}]}}"#,
                    kind.api_version(),
                    server.version(),
                    items.join(",")
                ));
            }
            (&Method::GET, _) => server.get(&key),
            (&Method::POST, "binding") => {
                server.bind(key, &self.body).map(|_| {
                    let done = json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {} });
                    Arc::new(done)
                })
            }
            (&Method::POST, "eviction") => server.evict(key, &self.body),
            (&Method::POST, "") => server.create(kind, &self.namespace, self.body),
            (&Method::DELETE, "") if kind == Kind::Pod => server.preempt(key, &self.body, self.unwanted),
            (&Method::PUT, _) => server.replace(key, self.body),
            (&Method::PATCH, part) if self.applies => {
                server.apply(key, self.body, part == "status")
            }
            (&Method::PATCH, part) => {
                let before = server.get(&key);
                let patched = server.patch(key, &self.body, self.strategic, part == "status");
                if let (Kind::Pod, "", Ok(before), Ok(after)) = (kind, part, before, &patched) {
                    server.wrong.extend(check::lift(&before, after));
                }
                patched
            }
            (method, part) => {
                let text = format!("the simulated server has no {method} of {kind:?}/{part}");
                server.wrong.push(text.clone());
                Err(Refusal(405, "MethodNotAllowed", text))
            }
        };
        answer.map(|object| match partial {
            false => object.to_string(),
            true => json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
            })
            .to_string(),
        })
    }
}
