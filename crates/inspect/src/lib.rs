//! The decisions of gpustow's extender about a cluster, from Lists, watches or files alone. The extender's ledger runs
//! here on the objects that a user may read, and on the GpustowConfig.
//!
//! It works with the extender down. It does not know reservations in flight, which only the extender's memory has, and
//! it writes nothing.

mod advised;
mod borrowed;
mod cluster;
mod error;
mod fence;
mod live;
pub mod owner;
mod source;
pub mod state;
pub mod system;
mod trial;
mod units;

pub use advised::Advised;
pub use borrowed::{Borrowed, Borrowings};
pub use cluster::{Cluster, PodInfo, Scope};
pub use error::Error;
pub use gpustow_settings::{Feature, Right};
pub use live::Live;
pub use source::{Bounds, Lists, Source, cluster, last_seen, load, load_own};
pub use trial::{Trial, try_pod};
pub use units::{age, memory};
