//! The gpustow extender.
fn main() {}
