//! The result of a command.

/// The result of a command, as an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Exit code 0.
    Yes,
    /// Exit code 1: it does not fit, it waits, something is wrong.
    No,
    /// Exit code 2: the command leaves open whether it fits.
    Unknown,
}
