//! TLS with a certificate that may be replaced while it is in use, as Secrets are.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use thiserror::Error;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use tokio_rustls::rustls::{ConfigBuilder, RootCertStore, ServerConfig, WantsVerifier};
use tokio_rustls::server::TlsStream;

/// Why a certificate cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file is not there or does not contain PEM.
    #[error("{}: give a PEM file that this process may read: {source}", .file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// The error in the file.
        source: pem::Error,
    },
    /// The key is not the certificate's, or of a kind that is not supported.
    #[error("{} and {} are not a certificate and its key: {source}", .cert.display(), .key.display())]
    Pair {
        /// File of the certificate.
        cert: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// The error in the pair.
        source: tokio_rustls::rustls::Error,
    },
    /// A text does not contain PEM.
    #[error("not a certificate and its key in PEM: {0}")]
    Text(pem::Error),
    /// In two texts, the key is not the certificate's, or of a kind that is not supported.
    #[error("not a certificate and its key: {0}")]
    Texts(tokio_rustls::rustls::Error),
    /// The file of the authorities for clients does not contain a usable certificate.
    #[error("{}: not a certificate authority: {source}", .file.display())]
    Clients {
        /// Which.
        file: PathBuf,
        /// The error in the file.
        source: VerifierBuilderError,
    },
}

/// When the files were written.
type Stamp = [Option<SystemTime>; 3];

/// A certificate in two files, with the authorities for clients in a third one if clients need a certificate. Or a
/// certificate that its owner in this program gives and replaces. Copies are the same certificate.
#[derive(Clone, Debug)]
pub struct Tls(Arc<Source>);

#[derive(Debug)]
struct Source {
    files: Option<Files>,
    loaded: Mutex<(Stamp, Arc<ServerConfig>)>,
}

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    clients: Option<PathBuf>,
}

impl Tls {
    /// Reads `tls.crt` and `tls.key` in a folder, as a Secret of type kubernetes.io/tls is mounted.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn of(folder: &Path) -> Result<Self, TlsError> {
        Self::load(folder, None)
    }

    /// As [`Tls::of`], but serves only clients with a certificate that an authority in `ca.crt` of that folder signed.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn for_clients(folder: &Path) -> Result<Self, TlsError> {
        Self::load(folder, Some(folder.join("ca.crt")))
    }

    fn load(folder: &Path, clients: Option<PathBuf>) -> Result<Self, TlsError> {
        let [cert, key] = ["tls.crt", "tls.key"].map(|file| folder.join(file));
        let files = Files { cert, key, clients };
        let loaded = Mutex::new((files.stamp(), files.read()?));
        let files = Some(files);
        Ok(Self(Arc::new(Source { files, loaded })))
    }

    /// A certificate and its key, in PEM.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn given(cert: &str, key: &str) -> Result<Self, TlsError> {
        let loaded = Mutex::new((Stamp::default(), read(cert, key)?));
        let files = None;
        Ok(Self(Arc::new(Source { files, loaded })))
    }

    /// From the next connection on, this certificate is served: it must be one that was given.
    ///
    /// # Errors
    /// If it cannot be used; the former one stays.
    pub fn replace(&self, cert: &str, key: &str) -> Result<(), TlsError> {
        let config = read(cert, key)?;
        self.loaded().1 = config;
        Ok(())
    }

    fn loaded(&self) -> MutexGuard<'_, (Stamp, Arc<ServerConfig>)> {
        self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Greets a connection.
    pub(crate) async fn accept(self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.now()).accept(stream).await
    }

    /// The configuration for the next connection, from the files as they are now, or as they were when they last made
    /// sense.
    fn now(&self) -> Arc<ServerConfig> {
        let mut loaded = self.loaded();
        let files = self.0.files.as_ref().map(|files| (files, files.stamp()));
        if let Some((files, stamp)) = files
            && loaded.0 != stamp
        {
            loaded.0 = stamp;
            match files.read() {
                Ok(config) => loaded.1 = config,
                Err(error) => tracing::warn!(%error, "the former certificate stays in use"),
            }
        }
        loaded.1.clone()
    }
}

impl Files {
    fn stamp(&self) -> Stamp {
        let files = [Some(&self.cert), Some(&self.key), self.clients.as_ref()];
        files.map(|file| file?.metadata().and_then(|file| file.modified()).ok())
    }

    fn read(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let certs = certificates(&self.cert)?;
        let secret = PrivateKeyDer::from_pem_file(&self.key).map_err(unreadable(&self.key))?;
        let wrong = |source| TlsError::Pair {
            cert: self.cert.clone(),
            key: self.key.clone(),
            source,
        };
        let (provider, config) = builder().map_err(wrong)?;
        let config = match &self.clients {
            None => config.with_no_client_auth(),
            Some(file) => {
                let mut roots = RootCertStore::empty();
                roots.add_parsable_certificates(certificates(file)?);
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                let verifier = verifier.map_err(|source| TlsError::Clients {
                    file: file.clone(),
                    source,
                })?;
                config.with_client_cert_verifier(verifier)
            }
        };
        config
            .with_single_cert(certs, secret)
            .map(Arc::new)
            .map_err(wrong)
    }
}

/// The configuration of a certificate and its key in PEM, for clients without one.
fn read(cert: &str, key: &str) -> Result<Arc<ServerConfig>, TlsError> {
    let certs = CertificateDer::pem_slice_iter(cert.as_bytes()).collect::<Result<_, _>>();
    let secret = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(TlsError::Text)?;
    let (_, config) = builder().map_err(TlsError::Texts)?;
    config
        .with_no_client_auth()
        .with_single_cert(certs.map_err(TlsError::Text)?, secret)
        .map(Arc::new)
        .map_err(TlsError::Texts)
}

type Builder = ConfigBuilder<ServerConfig, WantsVerifier>;

fn builder() -> Result<(Arc<CryptoProvider>, Builder), tokio_rustls::rustls::Error> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone());
    Ok((provider, builder.with_safe_default_protocol_versions()?))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .map_err(unreadable(file))
}

fn unreadable(file: &Path) -> impl Fn(pem::Error) -> TlsError {
    let file = file.to_owned();
    move |source| TlsError::File {
        file: file.clone(),
        source,
    }
}
