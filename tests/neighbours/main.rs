//! gpustow with the real Kueue, Karpenter and JobSet, which share a cluster with it: `make test-neighbours`.

mod jobset;
mod karpenter;
mod kueue;
mod manager;
mod placeholders;
mod site;
