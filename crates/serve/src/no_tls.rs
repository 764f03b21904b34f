//! The substitute for TLS in a program that is built without it, and so without a certificate.

use std::io;
use std::path::Path;

use thiserror::Error;
use tokio::net::TcpStream;

/// Why a certificate cannot be used.
#[derive(Debug, Error)]
#[error("this program is built without TLS")]
pub struct TlsError;

/// There is none.
#[derive(Clone, Debug)]
pub enum Tls {}

impl Tls {
    /// As with TLS.
    ///
    /// # Errors
    /// Always.
    pub fn of(_: &Path) -> Result<Self, TlsError> {
        Err(TlsError)
    }

    /// As with TLS.
    ///
    /// # Errors
    /// Always.
    pub fn for_clients(_: &Path) -> Result<Self, TlsError> {
        Err(TlsError)
    }

    pub(crate) async fn accept(self, _: TcpStream) -> io::Result<TcpStream> {
        match self {}
    }
}
