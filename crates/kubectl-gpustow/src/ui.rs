//! `ui`: the page, served on this machine alone with the user's own rights, or from a pod with the
//! pod's.
//!
//! Any program on this machine can connect, and any page in the user's browser can make it try. So the path holds a
//! secret, and the `Host` must be ours (a rebound DNS name is not). The page may load and run nothing but these files.
//! From a pod everybody can connect. Then the API server decides for each user, and only the files of the page are
//! served without a token.

mod picture;

use std::convert::Infallible;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::extract::{Query, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use futures::{Stream, stream};
use gpustow_inspect::{Live, Scope, load};
use gpustow_serve::{Door, Tls};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::answer::Answer;
use crate::global::Global;
use crate::why;
use picture::{Picture, Seen};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UiArgs {
    /// Loopback address to listen on; port 0 for a free one
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDRESS")]
    pub(crate) listen: SocketAddr,
    /// Serve other people, from a pod: over TLS, under these names alone, and only to users whose token may get
    /// the non-resource URL /gpustow
    #[arg(long, requires_all = ["tls", "hosts"])]
    pub(crate) in_cluster: bool,
    /// Serve with tls.crt and tls.key of this folder, read again when they change
    #[arg(long, value_name = "FOLDER", requires = "in_cluster")]
    pub(crate) tls: Option<PathBuf>,
    /// A name under which people open it; may be repeated
    #[arg(long = "host", value_name = "NAME", requires = "in_cluster")]
    pub(crate) hosts: Vec<String>,
}

/// Pages that may be open at once.
const CLIENTS: usize = 16;

const HEADERS: [(header::HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
         img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (
        header::HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        header::HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];

/// The files of the page: name, type, text.
const FILES: [(&str, &str, &str); 7] = [
    ("", "text/html; charset=utf-8", include_str!("ui/page.html")),
    ("page.css", "text/css", include_str!("ui/page.css")),
    ("page.js", SCRIPT, include_str!("ui/page.js")),
    ("base.js", SCRIPT, include_str!("ui/base.js")),
    ("overview.js", SCRIPT, include_str!("ui/overview.js")),
    ("tabs.js", SCRIPT, include_str!("ui/tabs.js")),
    ("icon.svg", "image/svg+xml", include_str!("ui/icon.svg")),
];
const SCRIPT: &str = "text/javascript";

struct Page {
    live: Live,
    hosts: Hosts,
    pictures: watch::Sender<Arc<Picture>>,
    clients: Arc<Semaphore>,
}

/// Names under which the page may be opened.
enum Hosts {
    /// These, with the port.
    Exact([String; 3]),
    /// These, at whatever port they are forwarded from.
    Names(Vec<String>),
}

impl Hosts {
    fn has(&self, host: &str) -> bool {
        match self {
            Self::Exact(hosts) => hosts.iter().any(|ours| ours == host),
            Self::Names(names) => {
                let name = match host.rsplit_once(':') {
                    Some((name, port)) if port.bytes().all(|it| it.is_ascii_digit()) => name,
                    _ => host,
                };
                names.iter().any(|ours| ours == name)
            }
        }
    }
}

/// Serves until Ctrl-C.
pub(crate) async fn run(
    global: &Global,
    args: &UiArgs,
    out: &mut (dyn Write + Send),
) -> Result<Answer> {
    ensure!(
        args.in_cluster || args.listen.ip().is_loopback(),
        "--listen {}: the page shows your view of the cluster to everyone who reaches it: use a loopback address",
        args.listen
    );
    let tls = args.tls.as_deref().map(Tls::of).transpose()?;
    let live = Live::start(&global.source, load(&global.source).await?).await?;
    let listener = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("--listen {}", args.listen))?;
    let address = listener.local_addr()?;
    let port = address.port();
    let picture = Arc::new(Picture::of(&live.now()));
    let page = Arc::new(Page {
        live,
        hosts: match args.in_cluster {
            true => Hosts::Names(args.hosts.clone()),
            false => Hosts::Exact(
                ["127.0.0.1", "localhost", "[::1]"].map(|host| format!("{host}:{port}")),
            ),
        },
        pictures: watch::channel(picture).0,
        clients: Arc::new(Semaphore::new(CLIENTS)),
    });
    tokio::spawn(look(page.clone()));
    let router = if args.in_cluster {
        let (client, _) = global.source.client().await?;
        writeln!(out, "https://{address}/")?;
        router(page, "", Some(Door::new(client, "/gpustow")))
    } else {
        let secret = format!("/{:032x}", rand::random::<u128>());
        writeln!(
            out,
            "http://{address}{secret}/\nOpen it in a browser on this machine; Ctrl-C ends it."
        )?;
        router(page, &secret, None)
    };
    out.flush()?;
    tokio::select! {
        () = gpustow_serve::serve(listener, tls, router) => {}
        () = stopped() => {}
    }
    Ok(Answer::Yes)
}

/// Ctrl-C, or SIGTERM as a pod gets it.
async fn stopped() {
    let mut terminated = signal(SignalKind::terminate()).ok();
    let terminated = async {
        match &mut terminated {
            Some(signal) => drop(signal.recv().await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = terminated => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// The page's files below `base`, and their data behind `door`.
fn router(page: Arc<Page>, base: &str, door: Option<Door>) -> Router {
    let shown = Router::new()
        .route(&format!("{base}/events"), get(events))
        .route(&format!("{base}/why"), get(explain))
        .with_state(page.clone());
    let shown = match door {
        Some(door) => Arc::new(door).before(shown),
        None => shown,
    };
    let mut files = Router::new();
    for (name, kind, text) in FILES {
        let file = get(async move || ([(header::CONTENT_TYPE, kind)], text));
        files = files.route(&format!("{base}/{name}"), file);
    }
    files
        .merge(shown)
        .layer(from_fn_with_state(page, own_host))
        .layer(middleware::map_response(harden))
}

/// A page of another site that has pointed its name at 127.0.0.1 still sends its own name.
async fn own_host(State(page): State<Arc<Page>>, request: Request, next: Next) -> Response {
    let host = request
        .headers()
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    if host.is_some_and(|host| page.hosts.has(host)) {
        next.run(request).await
    } else {
        (
            StatusCode::BAD_REQUEST,
            "this page is not served under this name",
        )
            .into_response()
    }
}

async fn harden(mut response: Response) -> Response {
    for (name, value) in HEADERS {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Takes a picture a second while a browser looks.
async fn look(page: Arc<Page>) {
    let mut tick = interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        if page.pictures.receiver_count() > 0 {
            let picture = Picture::of(&page.live.now());
            page.pictures.send_replace(Arc::new(picture));
        }
    }
}

/// Sends everything once, then the changes.
async fn events(State(page): State<Arc<Page>>) -> Response {
    let Ok(place) = page.clients.clone().try_acquire_owned() else {
        let text = "too many pages are open: close one";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    page.pictures
        .send_replace(Arc::new(Picture::of(&page.live.now())));
    let mut pictures = page.pictures.subscribe();
    pictures.mark_changed();
    let stream = stream::unfold((pictures, Seen::default(), place), next_event);
    Sse::new(named(stream))
        .keep_alive(KeepAlive::default())
        .into_response()
}

fn named<S>(stream: S) -> impl Stream<Item = Result<Event, Infallible>> + Send
where
    S: Stream<Item = String> + Send,
{
    use futures::StreamExt as _;
    stream.map(|data| Ok(Event::default().data(data)))
}

type Following = (
    watch::Receiver<Arc<Picture>>,
    Seen,
    tokio::sync::OwnedSemaphorePermit,
);

async fn next_event((mut pictures, mut seen, place): Following) -> Option<(String, Following)> {
    loop {
        pictures.changed().await.ok()?;
        let picture = pictures.borrow_and_update().clone();
        if let Some(data) = seen.changes(&picture) {
            return Some((data, (pictures, seen, place)));
        }
    }
}

#[derive(Deserialize)]
struct Question {
    pod: String,
}

/// `why`, as the command answers it.
async fn explain(State(page): State<Arc<Page>>, Query(question): Query<Question>) -> Response {
    let mut cluster = page.live.now();
    let scope = Scope {
        namespace: None,
        selector: None,
    };
    let found = cluster
        .find(&scope, &question.pod)
        .map(|pod| pod.facts.uid.clone());
    match found
        .map_err(anyhow::Error::from)
        .and_then(|uid| why::of(&mut cluster, &uid))
    {
        Ok(why) => Json(why).into_response(),
        Err(error) => (StatusCode::NOT_FOUND, error.to_string()).into_response(),
    }
}
