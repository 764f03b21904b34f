//! Whether the control daemon of NVIDIA's MPS answers, and the directory that its clients share.

use std::fs::{Permissions, set_permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The daemon's socket, among its pipes: clients begin by a connection to it.
const SOCKET: &str = "control";
/// A daemon that takes longer does not answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why no client could start with these pipes, if so. Nothing is sent: a daemon that hangs takes connections until its queue
/// is full.
pub async fn fails(pipes: &Path) -> Option<String> {
    let socket = pipes.join(SOCKET);
    let error = match timeout(PATIENCE, UnixStream::connect(&socket)).await {
        Ok(Ok(_)) => return None,
        // A socket of another kind: its process lives.
        Ok(Err(error)) if error.raw_os_error() == Some(Errno::PROTOTYPE.raw_os_error()) => {
            return None;
        }
        Ok(Err(error)) => error,
        Err(_) => io::ErrorKind::TimedOut.into(),
    };
    Some(format!(
        "MPS's control daemon does not answer at {}: {error}",
        socket.display()
    ))
}

/// Lets programs of all users make files in the directory, and delete their own: as in /dev/shm.
///
/// # Errors
/// If it is not there, or the agent does not own it.
pub fn share(directory: &Path) -> io::Result<()> {
    set_permissions(directory, Permissions::from_mode(0o1777))
}
