//! The gpustow extender.
