//! Loopback ports and plain questions over HTTP.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::http::request::Builder;
use kube::client::Body;
use kube::{Client, Config};

/// A port of 127.0.0.1 that no program listens on. Never the same twice, and below the range from
/// which the system takes ports for outgoing connections, so that it stays free until it is used.
pub fn free_port() -> Result<u16> {
    static TAKEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = taken.get_or_insert_default();
    (0..1000)
        .map(|_| rand::random_range(20_000..32_000))
        .find(|&port| taken.insert(port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok())
        .context("no free port on 127.0.0.1 between 20000 and 32000")
}

/// The body that the server at `url` answers for `path` with; an error unless the status is a success. Certificates are not
/// checked: these are our own children on the loopback interface.
pub async fn get(url: &str, path: &str) -> Result<String> {
    let request = hyper::Request::get(path).body(Vec::new())?;
    Ok(to(url)?.request_text(request).await?)
}

/// Status and body of the answer to any request.
pub(crate) async fn send(url: &str, request: Builder, body: Vec<u8>) -> Result<(u16, Bytes)> {
    let answer = to(url)?.send(request.body(Body::from(body))?).await?;
    let status = answer.status().as_u16();
    Ok((status, answer.into_body().collect().await?.to_bytes()))
}

fn to(url: &str) -> Result<Client> {
    let mut config = Config::new(url.parse()?);
    config.accept_invalid_certs = true;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}
