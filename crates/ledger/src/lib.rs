//! The free memory on every GPU of the cluster: capacity − bound − reserved − memory that live use takes.
//!
//! A synchronous state machine. Watch events go in through [`Ledger::apply_pod`] and its siblings. Decisions come out
//! of [`Ledger::filter`], [`Ledger::rank`], [`Ledger::preempt`] and [`Ledger::begin_bind`]. It does not know Kubernetes
//! clients, HTTP, or the time: `now` is an argument, a duration on the caller's monotonic clock.
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
//! Below are three crates. `gpustow-books` holds the facts, the other knowledge, and the only what-if check.
//! `gpustow-queue` holds the pods that wait for room. `gpustow-means` makes room and places gangs. Only the books hold
//! facts. Each of their verbs returns a `Change`, and the other parts follow it in one place. The verbs of this crate's
//! users, one file each, use all three crates.
//!
//! A binding whose outcome is unknown stays in `Binding`: its memory is held until the pod has
//! been read back.
//!
//! ```
//! use std::time::Duration;
//!
//! use gpustow_api::gpunode::{Gpu, GpuNodeStatus};
//! use gpustow_api::{NodeFacts, PodFacts, names};
//! use gpustow_ledger::{Ask, Config, Ledger};
//!
//! let now = Duration::ZERO;
//! let mut ledger = Ledger::new(Config::default());
//! ledger.apply_node(NodeFacts { name: "n".into(), ..NodeFacts::default() });
//! let gpu = Gpu { uuid: "GPU-0".into(), total_mib: 24_576, healthy: true, ..Gpu::default() };
//! let status = GpuNodeStatus { gpus: vec![gpu], ..GpuNodeStatus::default() };
//! ledger.apply_gpunode("n", status, now);
//! let pod = serde_json::from_value(serde_json::json!({
//!     "metadata": { "namespace": "team", "name": "p", "uid": "u" },
//!     "spec": { "schedulerName": names::SCHEDULER, "containers": [
//!         { "name": "main", "resources": { "limits": { names::GPU_MEM: "8192" } } },
//!     ] },
//! }))?;
//! let pod = PodFacts::from_pod(&pod, names::GPU_MEM).ok_or("no UID")?;
//! let answer = ledger.filter(&Ask::of(&pod), &["n", "without-gpus"], now);
//! assert_eq!(answer.nodes, ["n"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod asleep;
mod bind;
mod claims;
mod configure;
mod decide;
mod earmarked;
mod explain;
mod late;
mod look;
mod members;
mod preempt;
mod problems;
mod provision;
mod report;
mod snapshot;
mod wake;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use gpustow_books::Change;
use gpustow_means::{Cycles, Parts, Registry, Sight};

pub use asleep::News;
pub use bind::BindRefusal;
pub use claims::Fenced;
pub use decide::{Ask, Filtered};
pub use gpustow_books::{Budget, Cause, Config, Ended, Outcome, Reason};
pub use gpustow_means::{
    Action, Borrower, Demand, Demands, Emptying, Extent, GangView, MOST_PODS, Move, Moves, NotNow,
    OverLimit, Purpose, Reserved, Shortage, Shortfall, Standing, TURNS, Victims,
};
pub use gpustow_queue::{Queued, Ungate};
pub use problems::Problem;
pub use provision::{Placeholder, Provision};
pub use report::{MEANS, Pursuit};
pub use snapshot::{Assumed, CardView, Mismatches, NodeView, PodShare, ShareState, twice};

/// The ledger: the books, and all state that follows from them. See the crate's documentation.
#[derive(Debug, Default)]
pub struct Ledger {
    parts: Parts,
    means: Registry,
    wakes: wake::Wakes,
    gangs: Cycles,
    arriving: provision::Arriving,
    unanswered: provision::Unanswered,
    lacks: provision::Lacks,
    /// The last sleeping pod that a look for news of memory came to, if it did not come to all.
    news_after: Option<Arc<str>>,
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            parts: Parts::new(config),
            ..Self::default()
        }
    }

    pub(crate) fn sight(&self, now: Duration) -> Sight<'_> {
        let mut sight = self.parts.sight();
        sight.known.now = now;
        sight
    }

    /// Lets scores and queue follow a change of the books.
    fn follow(&mut self, change: Change) {
        let parts = &mut self.parts;
        for event in change.into_events() {
            parts.shown.follow(&event, &parts.books, &parts.scores);
            self.means
                .reclaim
                .limits_mut()
                .follow(&event, parts.config.over_limit_for);
            parts.scores.follow(&event, &mut parts.books);
            let (earmarks, books) = (&mut parts.earmarks, &parts.books);
            parts.queue.follow(&event, earmarks, books);
            self.wakes.follow(&event);
        }
    }

    /// The cost so far of periodic looks for pods to disrupt. A fit counts as 8, and a pod or node that is only looked
    /// at as one.
    #[must_use]
    pub fn work(&self) -> u64 {
        self.parts.work()
    }

    /// The budget of one call for searches, for [`Ledger::preempt`] and [`Ledger::spared`].
    #[must_use]
    pub fn budget(&self) -> Budget {
        Budget::of(&self.parts.config)
    }
}
