//! Which GPUs of a node a pod goes to.
//!
//! This crate is the decision and nothing else: no I/O, no clock, no Kubernetes types, no
//! dependencies. [`fit()`] is the only answer to "does it fit, and where"; filter, prioritize,
//! preempt, bind, the simulator and the command line all call it.
//!
//! All memory is in whole MiB ([`Mib`]); all comparisons are on integers; every tie is broken by
//! a written order, so that the same view and request always give the same placement.

mod because;
mod card;
mod fit;
mod links;
pub mod mig;
pub mod policy;
mod request;
mod rules;
mod search;
mod several;

pub use because::because;
pub use card::{Bytes, Card, Compute, Lending, Mib, ModelId, NodeGpus, Starts};
pub use fit::{Choice, Placement, Question, Refusal, cost, fit, fit_counting, refusal};
pub use links::{Link, Links};
pub use policy::{Class, Cost, Policy, PolicyKind, Tight};
pub use request::{Claim, ClaimKind, Request};
pub use rules::{Rules, Traits, fit_among};
