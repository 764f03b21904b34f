//! What a workload should request of a GPU, from what it has used.
//!
//! A [`History`] is a histogram of the peak of each minute, with buckets that grow by a constant ratio and weights that
//! decay by half each day, as the Vertical Pod Autoscaler keeps memory of the host
//! (`vertical-pod-autoscaler/pkg/recommender/util/decaying_histogram.go` of kubernetes/autoscaler). It has at most
//! [`BUCKETS`] numbers, however long a workload runs. [`advise()`] reads a request and a limit off it, and says what speaks
//! against them.
//!
//! The crate reads no clock and knows no Kubernetes: times are arguments, in seconds since 1970.
//!
//! ```
//! use gpustow_advice::{History, advise};
//! use gpustow_pack::Mib;
//!
//! let mut history = History::default();
//! for minute in 0..2880 {
//!     history.add(if minute % 50 == 0 { Mib(20_000) } else { Mib(9_000) }, 60 * minute);
//! }
//! let advice = advise(&history, Mib(81_920)).ok_or("no history")?;
//! assert!((9_000..=9_500).contains(&advice.request.0));
//! assert!(advice.limit >= Mib(20_000));
//! assert!(advice.cautions.is_empty());
//! # Ok::<(), &str>(())
//! ```

mod advise;
mod history;

pub use advise::{Advice, Caution, DAY, advise, advise_at};
pub use history::{BUCKETS, Checkpoint, History};
