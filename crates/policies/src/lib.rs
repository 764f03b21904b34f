//! What gpustow lets into a cluster. Policies and custom resources are generated from the types of [`gpustow_api`], and the
//! policies that a cluster has are compared with them. What becomes of pods is `gpustow_admission`'s affair.

pub mod admission;
mod expressions;
pub mod manifests;
mod values;
