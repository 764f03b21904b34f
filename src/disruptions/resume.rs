//! Continues the work of an earlier leader before anything else is decided.

use gpustow_ledger::Cause;
use k8s_openapi::jiff::Timestamp;

use crate::app::App;

/// Before the first call is answered, this replica reserves again the resources that pods of low priority would take
/// otherwise: GPUs for pods that have waited long, and memory that is being reclaimed.
pub(crate) fn resume(app: &App) {
    let now = app.ledger.now();
    let mut ledger = app.ledger.lock();
    ledger.tell_time(Timestamp::now().as_second());
    for means in [Cause::Reserve, Cause::Reclaim] {
        ledger.look(means, 0, now);
    }
}
