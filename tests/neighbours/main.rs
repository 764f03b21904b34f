//! gpustow beside the real Kueue and the real Karpenter, which share a cluster with it: `make test-neighbours`.

mod karpenter;
mod kueue;
mod site;
