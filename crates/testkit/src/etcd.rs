//! Direct calls of etcd, past the API server, by its JSON gateway.

use anyhow::{Context as _, Result, ensure};
use hyper::Request;
use serde_json::Value;

use crate::control_plane::ControlPlane;
use crate::net::send;

impl ControlPlane {
    /// The answer of etcd to a call like `/v3/maintenance/status`.
    pub async fn etcd_call(&self, path: &str, call: &Value) -> Result<Value> {
        let (status, answer) =
            send(&self.etcd_url, Request::post(path), call.to_string().into()).await?;
        let text = String::from_utf8_lossy(&answer);
        ensure!(
            status == 200,
            "etcd answers {path} with status {status}: {text}"
        );
        serde_json::from_str(&text).with_context(|| format!("etcd's answer to {path}: {text}"))
    }
}
