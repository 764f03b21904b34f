//! The ledger behind its lock, with its clock and the notifications of its changes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpustow_ledger::{Config, Ledger};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::panics::Panics;

pub(crate) struct Locked {
    ledger: Mutex<Ledger>,
    started: Instant,
    /// Something changed that may let a waiting pod in.
    pub(crate) wake: Notify,
    /// Something changed that may make answers void.
    pub(crate) warm: Notify,
    panics: Panics,
}

impl Locked {
    /// A panic under the lock is noted in `panics`: the ledger's state is not to be trusted then.
    pub(crate) fn new(config: Config, panics: Panics) -> Self {
        Self {
            ledger: Mutex::new(Ledger::new(config)),
            started: Instant::now(),
            wake: Notify::new(),
            warm: Notify::new(),
            panics,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger
            .lock()
            .inspect_err(|_| self.panics.note("ledger"))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The ledger's clock.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }
}
