//! Does ahead what filter would make kube-scheduler wait for.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::epoch::Epoch;
use crate::locked::Locked;

/// Answers computed per slice. A slice takes about as long as one filter call, which bounds how long a
/// call can be delayed.
const SLICE: usize = 256;
/// Between two slices, at least.
const PAUSE: Duration = Duration::from_millis(1);

/// Keeps answers ready for as long as the process runs.
pub(crate) async fn run(ledger: Arc<Locked>, epoch: Arc<Epoch>) {
    loop {
        ledger.warm.notified().await;
        while epoch.held().is_some() && ledger.lock().warm(SLICE) {
            sleep(PAUSE).await;
        }
        sleep(PAUSE).await;
    }
}
