//! What a workload should request of a GPU, from what it has used.
//!
//! A [`History`] has two parts. One is a histogram of the peak of each minute, with buckets that grow by a constant ratio and
//! weights that decay by half each day, as the Vertical Pod Autoscaler keeps memory of the host
//! (`vertical-pod-autoscaler/pkg/recommender/util/decaying_histogram.go` of kubernetes/autoscaler). It has at most
//! [`BUCKETS`] numbers. The other has the peak of each hour of the last eight days, and what was used for twelve minutes
//! of it. [`advise()`] reads a request and a limit off them, and says what speaks against them.
//!
//! The crate reads no clock and knows no Kubernetes: times are arguments, in seconds since 1970.
//!
//! ```
//! use gpustow_advice::{History, advise};
//! use gpustow_pack::Mib;
//!
//! let mut history = History::default();
//! for minute in 0..2880 {
//!     history.add(if minute % 100 == 0 { Mib(10_000) } else { Mib(9_000) }, 60 * minute);
//! }
//! let advice = advise(&history, Mib(81_920)).ok_or("no history")?;
//! assert!((9_000..=9_500).contains(&advice.request.0));
//! assert!(advice.limit >= Mib(10_000));
//! assert!(advice.cautions.is_empty());
//! # Ok::<(), &str>(())
//! ```

mod advise;
mod history;
mod hours;
mod peaks;

pub use advise::{Advice, Caution, DAY, ENOUGH, advise, advise_at};
pub use history::{BUCKETS, Checkpoint, History};
pub use hours::HOURS;
pub use peaks::{Peaks, When};
