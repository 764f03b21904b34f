//! Advice on the request of a workload for a GPU, from its past use.
//!
//! A [`History`] has two parts. One is a histogram of the peak of each minute, with at most [`BUCKETS`] numbers. Its
//! buckets grow by a constant ratio, and its weights decay by half each day. The Vertical Pod Autoscaler keeps memory
//! of the host in this way (`vertical-pod-autoscaler/pkg/recommender/util/decaying_histogram.go` of
//! kubernetes/autoscaler). The other part is about each hour of the last eight days. It has the hour's peak, and the
//! amount that was used for twelve minutes of the hour. [`advise()`] computes a request and a limit from both, and
//! lists the reasons against them.
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
