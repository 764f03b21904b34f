//! What gpustow lets into a cluster. Policies and custom resources are generated from the types of [`gpustow_api`], the
//! policies that a cluster has are compared with them, and a webhook does the same where the API server cannot.

pub mod admission;
pub mod adopt;
pub mod auto;
mod expressions;
pub mod keys;
pub mod manifests;
pub mod mutate;
mod values;
