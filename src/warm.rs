//! Computes answers ahead, so that kube-scheduler does not wait for them in filter.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::app::App;

/// Answers computed per slice. A slice takes about as long as one filter call, which bounds how long a
/// call can be delayed.
const SLICE: usize = 256;
/// Between two slices, at least.
const PAUSE: Duration = Duration::from_millis(1);

/// Keeps answers ready for as long as the process runs.
pub(crate) async fn run(app: Arc<App>) {
    let ledger = &app.ledger;
    loop {
        ledger.warm.notified().await;
        while app.leads().is_some() && ledger.lock().warm(SLICE) {
            sleep(PAUSE).await;
        }
        sleep(PAUSE).await;
    }
}
