//! gpustow's rules for objects that enter a cluster. Policies and custom resources are generated from the types of
//! [`gpustow_api`]. The policies in a cluster are compared with the generated ones. `gpustow_admission` handles pods.

pub mod admission;
mod expressions;
pub mod manifests;
mod values;
