//! Work that a replica repeats while it leads.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::app::App;

impl App {
    /// The epoch, if this replica leads, has every list and is not about to stop.
    pub(crate) fn leads(&self) -> Option<u64> {
        let epoch = self.epoch.held()?;
        (self.lists.missing().is_empty() && !self.is_draining()).then_some(epoch)
    }
}

/// Calls `look` every so often while this replica leads, for as long as the process runs. The state of `look` is
/// dropped when this replica no longer leads.
pub(crate) async fn while_leading<S: Default>(
    app: Arc<App>,
    every: Duration,
    mut look: impl AsyncFnMut(&mut S, &Arc<App>, u64),
) {
    let mut known = S::default();
    loop {
        sleep(every).await;
        match app.leads() {
            Some(epoch) => look(&mut known, &app, epoch).await,
            None => known = S::default(),
        }
    }
}
