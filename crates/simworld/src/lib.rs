//! A simulated Kubernetes API server, without sockets and on the runtime's clock: as much of the API as gpustow's programs
//! call. The demo and the simulated world of the tests run on it.
//!
//! [`Server`] keeps objects and the history that watches follow. [`Call`] is a request to it, understood. The program
//! around it adds the rest: the delay of a message, further refusals, and checks after a write. [`Extender`] is called
//! as kube-scheduler calls it.

mod call;
mod extender;
mod objects;
mod patch;
pub mod repeat;
mod server;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use call::{Call, line, refused};
pub use extender::Extender;
pub use objects::{Answer, Copy, Key, Kind, Objects, Refusal, key_of};
pub use patch::merge;
pub use server::{Change, Server};

/// The value in the mutex, even if a thread panicked while it held it.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
