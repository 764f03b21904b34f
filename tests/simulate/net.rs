//! The way between a process and the API server: kube's client on one side, the server's calls on the other, and
//! in between messages that are late, lost, refused, or that no client waits for any more.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response};
use futures::stream;
pub(crate) use gpustow_simworld::locked;
use gpustow_simworld::{line, refused};
use kube::Client;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tower::service_fn;

use crate::call::Call;
use crate::server::{Kind, Refusal, Server};

pub(crate) type Shared = Arc<Mutex<Server>>;

/// That of all pods.
pub(crate) const NAMESPACE: &str = "team";

/// How a process is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is.
    Up,
    /// Nothing goes out or comes in until it is up again: the process is frozen.
    Held,
    /// Nothing goes out or comes in, and the process gets errors.
    Cut,
    /// The process has ended. Messages that it sent before still arrive.
    Dead,
}

/// A message arrives at the latest this long after it was sent, and its result is known then.
pub(crate) const LATEST: Duration = Duration::from_secs(100);
/// Upper bounds on the age of a process's knowledge: where messages get lost or did, where they did not, and where
/// watches are prompt.
const VIEWS: [Duration; 3] = [
    Duration::from_secs(200),
    Duration::from_secs(15),
    Duration::from_secs(1),
];

/// The faults of a request, in ten thousand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Odds {
    /// It is answered with 429, 500 or 503, and nothing is done.
    pub(crate) refused: u32,
    /// It breaks off before or after it was done.
    pub(crate) broken: u32,
    /// It arrives a minute late, when no client waits for it.
    pub(crate) late: u32,
    /// A watch ends early at each of its events.
    pub(crate) unwatched: u32,
    /// Each request takes 0.5 to 2.5 s, and watches send events at once.
    pub(crate) slow: bool,
    /// Each that writes a pod's status is refused.
    pub(crate) mute: bool,
}

/// How far each watch is behind.
pub(crate) type Lags = BTreeMap<Kind, Duration>;

/// One process's connection.
pub(crate) struct Link {
    server: Shared,
    mode: watch::Sender<Mode>,
    odds: Mutex<Odds>,
    pub(crate) lags: Mutex<Lags>,
    /// The time of the last change of mode or odds.
    since: Mutex<Instant>,
    random: Mutex<StdRng>,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The outcome of a request.
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
            lags: Mutex::default(),
            since: Mutex::new(Instant::now()),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
        })
    }

    pub(crate) fn set(&self, mode: Mode) {
        *locked(&self.since) = Instant::now();
        self.mode.send_replace(mode);
    }

    pub(crate) fn odds(&self) -> Odds {
        *locked(&self.odds)
    }

    pub(crate) fn set_odds(&self, odds: Odds) {
        *locked(&self.since) = Instant::now();
        *locked(&self.odds) = odds;
    }

    /// The upper bound on the age of the process's knowledge.
    pub(crate) fn view(&self) -> Duration {
        let odds = self.odds();
        let settled = locked(&self.since).elapsed() > LATEST;
        let [lost, late, prompt] = VIEWS;
        let behind = locked(&self.lags).values().max().copied();
        let age = match odds {
            _ if self.mode() != Mode::Up => lost,
            Odds { slow: true, .. } if settled => prompt,
            odds if odds == Odds::default() && settled => late,
            _ => lost,
        };
        age + behind.unwrap_or_default()
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
        if self.odds().slow {
            let millis = locked(&self.random).random_range(250..1250);
            return Duration::from_millis(millis);
        }
        let mut random = locked(&self.random);
        let micros = match random.random_range(0..100_u32) {
            0 => random.random_range(0..2_000_000),
            1..10 => random.random_range(0..100_000),
            _ => random.random_range(100..5_000),
        };
        Duration::from_micros(micros)
    }

    fn fate(&self, call: &Call) -> Fate {
        let odds = self.odds();
        if self.roll(odds.refused) || odds.mute && call.writes_status() {
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
        let (head, body) = request.into_parts();
        let body = to_bytes(Body::new(body), usize::MAX).await?;
        let body: Value = match body.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&body)?,
        };
        let mut call = Call::of(&head, body);
        // The call is judged as it is sent: the process cannot know of events on the way.
        call.judge(&locked(&self.server), self.view());
        self.pass().await?;
        if call.asked.watches.is_none() || !self.odds().slow {
            sleep(self.delay()).await;
        }
        let fate = self.fate(&call);
        match fate {
            Fate::Refused(code) => {
                let text = "the server is busy".to_owned();
                return Ok(refused(&Refusal(code, "Busy", text)));
            }
            Fate::BrokenBefore => return Err("the connection broke".into()),
            Fate::Done | Fate::BrokenAfter | Fate::Late(_) => {}
        }
        if let Some(start) = call.asked.watches {
            return Ok(self.watch(call, start));
        }
        if head.uri.path() == "/version" {
            let minor = if locked(&self.server).is_1_38 {
                "38"
            } else {
                "37"
            };
            return Ok(Response::new(json!({ "minor": minor }).to_string().into()));
        }
        // A request on its way arrives whether or not a client waits.
        let (tell, told) = oneshot::channel();
        let server = self.server.clone();
        let life = locked(&server).life();
        tokio::spawn(async move {
            if let Fate::Late(delay) = fate {
                sleep(delay).await;
            }
            let mut server = locked(&server);
            if server.life() == life {
                // Perhaps no client waits any more.
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
        let (news, life) = {
            let server = locked(&self.server);
            (server.news(), server.life())
        };
        let end = Instant::now() + Duration::from_secs(call.asked.seconds);
        let watching = Watching {
            link: self,
            call,
            at: start,
            life,
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
    /// Of the server: it ends with that.
    life: u64,
    news: watch::Receiver<u64>,
    end: Instant,
}

impl Watching {
    /// The next events, or the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if !self.link.odds().slow {
                sleep(self.link.delay()).await;
            }
            if self.link.pass().await.is_err() || self.link.roll(self.link.odds().unwatched) {
                return None;
            }
            let lag = self.call.asked.kind.and_then(|kind| {
                let lags = locked(&self.link.lags);
                lags.get(&kind).copied()
            });
            let lag = lag.unwrap_or_default();
            let mut lines = Vec::new();
            // The time when the first event that is held back may be sent.
            let mut held = None;
            {
                let server = locked(&self.link.server);
                if server.life() != self.life {
                    return None;
                }
                match server.since(self.at) {
                    Err(refusal) => lines.extend(line("ERROR", &refusal.status().to_string())),
                    Ok(changes) => {
                        let due = changes.partition_point(|it| it.at.elapsed() >= lag);
                        let told = changes[..due]
                            .iter()
                            .filter_map(|it| self.call.asked.event(it));
                        told.for_each(|(kind, object)| lines.extend(line(kind, &object)));
                        held = changes.get(due).map(|it| it.at + lag);
                        let next = changes.get(due).map(|it| it.version - 1);
                        self.at = self.at.max(next.unwrap_or(server.version()));
                    }
                }
            }
            self.news.mark_unchanged();
            if !lines.is_empty() {
                return Some(lines.into());
            }
            match held {
                Some(at) => sleep_until(at).await,
                None if locked(&self.link.server).version() > self.at => {}
                None if timeout_at(self.end, self.news.changed()).await.is_err() => return None,
                None => {}
            }
        }
    }
}
