//! Ends a process, and no other one that has its id by now: by a descriptor of the process, after comparing.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::cgroup::owner;
use crate::giveback::Target;
use crate::processes::started;

/// How the programs of NVIDIA's MPS are called: their end is that of all their clients.
const MPS: &str = "nvidia-cuda-mps";

/// A process to which the agent has sent SIGTERM.
#[derive(Debug)]
pub struct Ending(OwnedFd);

/// Sends SIGTERM to the process, if it still is the `target`. Returns none if it is gone or another one. `proc` is this
/// process's own `/proc`.
///
/// # Errors
/// If the system does not let it, for want of CAP_KILL for example.
pub fn begin(proc: &Path, target: &Target) -> io::Result<Option<Ending>> {
    let raw = i32::try_from(target.pid).ok().and_then(Pid::from_raw);
    let Some(pid) = raw else { return Ok(None) };
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        process => process?,
    };
    // The process that has the id now is the one that the descriptor is of, or that one has ended.
    let dir = proc.join(target.pid.to_string());
    let text = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap_or_default();
    let same = started(&dir) == Some(target.started)
        && owner(&text("cgroup")).as_ref() == Some(&target.owner)
        && !text("comm").starts_with(MPS);
    if !same {
        return Ok(None);
    }
    match pidfd_send_signal(&process, Signal::TERM) {
        Err(rustix::io::Errno::SRCH) => Ok(None),
        sent => sent.map(|()| Some(Ending(process))).map_err(Into::into),
    }
}

impl Ending {
    /// Makes it end if it has not within `grace`.
    ///
    /// # Errors
    /// If the system does not let it.
    pub async fn finish(self, grace: Duration) -> io::Result<()> {
        tokio::time::sleep(grace).await;
        match pidfd_send_signal(&self.0, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }
}
