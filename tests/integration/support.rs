//! What the cases share beyond the rig.

use std::time::Duration;

/// Bound on waits that end at once when all is well.
pub(crate) const SOON: Duration = Duration::from_secs(30);
