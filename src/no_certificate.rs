//! An extender that is built without TLS makes no certificate for its webhook.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gpustow_serve::Tls;
use kube::Client;
use tokio::sync::oneshot;

/// There is nothing to look after.
pub(crate) struct Keeper;

impl Keeper {
    /// The certificate never comes.
    pub(crate) fn new(_: Client, _: &str) -> (Keeper, oneshot::Receiver<Tls>) {
        (Keeper, oneshot::channel().1)
    }

    #[expect(clippy::unused_async, reason = "with TLS it runs")]
    pub(crate) async fn run(self, _: Arc<AtomicBool>) {
        tracing::error!("this extender is built without TLS and cannot serve the webhook");
    }
}
