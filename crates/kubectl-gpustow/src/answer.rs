//! What a command found.

/// What a command found, as its exit code says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Exit code 0.
    Yes,
    /// Exit code 1: it does not fit, it waits, something is wrong.
    No,
    /// Exit code 2: what is said leaves open whether it fits.
    Unknown,
}
