//! A server of HTTP/1 that limits the costs of requests by strangers: connections, the time until a request has
//! arrived, and the memory for an incomplete request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::tls::Tls;

/// For one handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections at once. One more ends the oldest of which no whole request has come.
    pub connections: usize,
    /// From one answer, or the start, to the next request's whole head.
    pub patience: Duration,
    /// Bytes of a request that are held before the program reads them.
    pub buffer: usize,
    /// From the stop on, the server answers calls for this long, each as the last one of its connection. A client that
    /// keeps its connections may send a call just as the other side closes one. The server does not close a connection
    /// in use in this way.
    pub farewell: Duration,
}

/// For health, metrics and pages, which anybody may be able to reach.
const OPEN: Bounds = Bounds {
    connections: 256,
    patience: Duration::from_secs(20),
    buffer: 16 << 10,
    farewell: Duration::ZERO,
};

/// Serves health, metrics or pages for good, over TLS if there is a certificate.
pub async fn serve(listener: TcpListener, tls: Option<Tls>, router: Router) {
    serve_until(listener, tls, OPEN, router, std::future::pending()).await;
}

/// Serves `router` until `stop` and the farewell after it, then sees the calls under way through.
pub async fn serve_until(
    mut listener: TcpListener,
    tls: Option<Tls>,
    bounds: Bounds,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let (stopping, stopped) = watch::channel(());
    let leaving = Arc::new(AtomicBool::new(false));
    let mut stop = pin!(async {
        stop.await;
        leaving.store(true, Ordering::Relaxed);
        sleep(bounds.farewell).await;
    });
    let mut tasks = JoinSet::new();
    let mut open: VecDeque<Connection> = VecDeque::new();
    loop {
        let stream = tokio::select! {
            (stream, _) = Listener::accept(&mut listener) => stream,
            () = &mut stop => break,
            Some(_) = tasks.join_next() => continue,
        };
        if open.len() >= bounds.connections {
            open.retain(|connection| !connection.task.is_finished());
        }
        if open.len() >= bounds.connections {
            let Some(idle) = open.iter().position(Connection::is_idle) else {
                continue;
            };
            open.remove(idle).iter().for_each(|idle| idle.task.abort());
        }
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "answers may be held back by the kernel");
        }
        let busy = Arc::new(AtomicBool::new(false));
        let (tls, router, stopped) = (tls.clone(), router.clone(), stopped.clone());
        let flags = Flags {
            busy: busy.clone(),
            leaving: leaving.clone(),
        };
        let task = tasks.spawn(async move {
            match tls {
                None => talk(stream, bounds, router, flags, stopped).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = timeout(HANDSHAKE, tls.accept(stream)).await {
                        talk(stream, bounds, router, flags, stopped).await;
                    }
                }
            }
        });
        open.push_back(Connection { task, busy });
    }
    drop((listener, stopping));
    while tasks.join_next().await.is_some() {}
}

/// Flags that a connection and its server share.
struct Flags {
    busy: Arc<AtomicBool>,
    leaving: Arc<AtomicBool>,
}

struct Connection {
    task: AbortHandle,
    /// A call has come whole and is being answered.
    busy: Arc<AtomicBool>,
}

impl Connection {
    fn is_idle(&self) -> bool {
        !self.busy.load(Ordering::Relaxed)
    }
}

/// A request's body. When all of it has come, its connection is busy: a client that begins calls and never ends them
/// keeps no other out.
struct Coming {
    body: Incoming,
    busy: Arc<AtomicBool>,
}

impl Coming {
    fn new(body: Incoming, busy: Arc<AtomicBool>) -> Self {
        let coming = Self { body, busy };
        coming.look();
        coming
    }

    fn look(&self) {
        if self.body.is_end_stream() {
            self.busy.store(true, Ordering::Relaxed);
        }
    }
}

impl Body for Coming {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match frame {
            Poll::Ready(None) => self.busy.store(true, Ordering::Relaxed),
            Poll::Ready(Some(_)) => self.look(),
            Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Marks its connection as busy no more when it ends.
struct Call(Arc<AtomicBool>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    bounds: Bounds,
    router: Router,
    Flags { busy, leaving }: Flags,
    mut stopped: watch::Receiver<()>,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let call = Call(busy.clone());
        let request = request.map(|body| Coming::new(body, busy.clone()));
        let (answer, leaving) = (router.call(request), leaving.clone());
        async move {
            let mut answer = answer.await?;
            drop(call);
            if leaving.load(Ordering::Relaxed) {
                let last = HeaderValue::from_static("close");
                answer.headers_mut().insert(CONNECTION, last);
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.patience)
        .max_buf_size(bounds.buffer)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // Errors are the other side's going away.
    tokio::select! {
        _ = connection.as_mut() => return,
        // The sender is dropped, not used.
        _ = stopped.changed() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

#[cfg(test)]
mod tests {
    use anyhow::{Result, ensure};
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    const CALL: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";

    async fn answered(stream: &mut TcpStream) -> Result<String> {
        stream.write_all(CALL).await?;
        let mut answer = vec![0; 1024];
        let read = stream.read(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer[..read]).into_owned())
    }

    #[tokio::test]
    async fn who_calls_during_the_farewell_is_answered_and_told_to_go() -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let bounds = Bounds {
            farewell: Duration::from_secs(3600),
            ..OPEN
        };
        let (stopping, stop) = tokio::sync::oneshot::channel::<()>();
        let router = Router::new().route("/", get(async || "ok"));
        let stop = async { drop(stop.await) };
        let served = tokio::spawn(serve_until(listener, None, bounds, router, stop));
        let mut kept = TcpStream::connect(address).await?;
        let before = answered(&mut kept).await?;
        ensure!(before.ends_with("ok") && !before.contains("connection: close"));
        drop(stopping);
        for mut stream in [kept, TcpStream::connect(address).await?] {
            let last = answered(&mut stream).await?;
            ensure!(
                last.ends_with("ok") && last.contains("connection: close"),
                "{last}"
            );
            ensure!(stream.read(&mut [0]).await? == 0, "the connection is kept");
        }
        // The clock runs to the next timer as nothing else is to do.
        tokio::time::pause();
        served.await?;
        ensure!(TcpStream::connect(address).await.is_err());
        Ok(())
    }
}
