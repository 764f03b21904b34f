//! What an earlier leader had begun goes on before anything else is decided.

use k8s_openapi::jiff::Timestamp;

use crate::app::App;

/// Before the first call is answered, this replica reserves again what pods of low priority would take otherwise: GPUs for
/// pods that have waited for long, and memory that is being reclaimed.
pub(crate) fn resume(app: &App) {
    let now = app.ledger.now();
    let unix = Timestamp::now().as_second();
    let mut ledger = app.ledger.lock();
    ledger.tell_time(unix);
    ledger.keep_reservations(now, unix);
    ledger.reclaim(now);
}
