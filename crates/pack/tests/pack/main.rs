//! Tests of the decision, through [`gpustow_pack::fit`] alone.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod because;
mod cases;
mod links;
mod mig;
mod oracle;
mod properties;
mod tight;
