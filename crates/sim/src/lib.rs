//! gpustow without a cluster: the demo.

pub mod demo;
