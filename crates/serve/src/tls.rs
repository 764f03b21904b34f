//! TLS with a certificate that may be replaced while it is in use, as Secrets are.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::serve::Listener;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// Handshakes under way at once.
const HANDSHAKES: usize = 64;
/// For one handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why a certificate cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file is not there or has no PEM.
    #[error("{}: give a PEM file that this process may read: {source}", .file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// The key is not the certificate's, or of a kind that is not supported.
    #[error("{} and {} are not a certificate and its key: {source}", .cert.display(), .key.display())]
    Pair {
        /// File of the certificate.
        cert: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What is wrong with them.
        source: tokio_rustls::rustls::Error,
    },
}

/// When certificate and key were written.
type Stamp = [Option<SystemTime>; 2];

/// A certificate in two files.
#[derive(Debug)]
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    loaded: Mutex<(Stamp, Arc<ServerConfig>)>,
}

impl Tls {
    /// Reads certificate and key.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn load(cert: PathBuf, key: PathBuf) -> Result<Self, TlsError> {
        let stamp = stamp(&cert, &key);
        let loaded = Mutex::new((stamp, read(&cert, &key)?));
        Ok(Self { cert, key, loaded })
    }

    /// What the next connection is served with: the files as they are now, or as they were when
    /// they last made sense.
    fn now(&self) -> Arc<ServerConfig> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(&self.cert, &self.key);
        if loaded.0 != stamp {
            loaded.0 = stamp;
            match read(&self.cert, &self.key) {
                Ok(config) => loaded.1 = config,
                Err(error) => tracing::warn!(%error, "the former certificate stays in use"),
            }
        }
        loaded.1.clone()
    }
}

fn stamp(cert: &Path, key: &Path) -> Stamp {
    [cert, key].map(|file| file.metadata().and_then(|file| file.modified()).ok())
}

fn read(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let unreadable = |file: &Path| {
        let file = file.to_owned();
        |source| TlsError::File { file, source }
    };
    let certs = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(unreadable(cert))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(unreadable(key))?;
    let provider = Arc::new(aws_lc_rs::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(certs, secret))
        .map(Arc::new)
        .map_err(|source| TlsError::Pair {
            cert: cert.to_owned(),
            key: key.to_owned(),
            source,
        })
}

/// Serves `router` until the listener fails, over TLS if there is a certificate.
///
/// # Errors
/// If the listener fails.
pub async fn serve(listener: TcpListener, tls: Option<Tls>, router: Router) -> io::Result<()> {
    match tls {
        None => axum::serve(listener, router).await,
        Some(tls) => axum::serve(Greeted::start(listener, tls)?, router).await,
    }
}

/// Connections whose handshake is done: a slow one keeps nobody waiting.
struct Greeted {
    address: SocketAddr,
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
}

impl Greeted {
    fn start(mut listener: TcpListener, tls: Tls) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (send, ready) = mpsc::channel(HANDSHAKES);
        let places = Arc::new(Semaphore::new(HANDSHAKES));
        tokio::spawn(async move {
            while let Ok(place) = places.clone().acquire_owned().await {
                let (stream, peer) = tokio::select! {
                    accepted = Listener::accept(&mut listener) => accepted,
                    () = send.closed() => return,
                };
                let (acceptor, send) = (TlsAcceptor::from(tls.now()), send.clone());
                tokio::spawn(async move {
                    let _place = place;
                    if let Ok(Ok(stream)) = timeout(HANDSHAKE, acceptor.accept(stream)).await {
                        // Nobody takes it after the end.
                        let _ = send.send((stream, peer)).await;
                    }
                });
            }
        });
        Ok(Self { address, ready })
    }
}

impl Listener for Greeted {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
