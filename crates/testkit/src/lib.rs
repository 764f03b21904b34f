//! Drives a real Kubernetes control plane for the tests.
