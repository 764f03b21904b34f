//! What is free on every GPU of the cluster: capacity − bound − reserved − what live use takes.
//!
//! A synchronous state machine. Watch events go in through [`Ledger::apply_pod`] and its
//! siblings, decisions come out of [`Ledger::filter`], [`Ledger::rank`], [`Ledger::preempt`] and
//! [`Ledger::begin_bind`]. It does not know Kubernetes clients, HTTP, or what time it is: `now` is
//! an argument, a duration on the caller's monotonic clock.
//!
//! ```text
//!            filter                begin_bind              end_bind(Bound)
//!  unseen ──────────▶ Reserved ───────────────▶ Binding ───────────────────▶ bound
//!    ▲                 │  │ ▲                    │    │                       │
//!    │   expire, filter│  │ │   end_bind(Failed) │    │ watch: has a node     │ watch: released,
//!    └─────────────────┘  │ └──(released)────────┘    └──────────▶ bound      │ or deleted
//!                         └─ watch: has a node ─▶ bound                       ▼
//!                                                                            gone
//! ```
//! A binding whose outcome is unknown stays in `Binding`: its memory is held until the pod has
//! been read back.

mod bind;
mod book;
mod budget;
mod decide;
mod explain;
mod gone;
mod models;
mod node;
mod nominated;
mod offers;
mod preempt;
mod scores;
mod snapshot;
mod unfenced;
mod waiting;
mod wake;

pub use bind::{BindRefusal, Outcome};
pub use book::{Config, Ledger};
pub use budget::Budget;
pub use decide::{Ask, Reason, Verdict};
pub use preempt::Victims;
pub use snapshot::{CardView, Mismatches, NodeView, PodShare, Problem, ShareState, twice};
