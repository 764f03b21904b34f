//! Tests of the decision, through [`gpustow_pack::fit`] alone, and of what the repository's layout
//! promises.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod because;
mod cases;
mod layout;
mod links;
mod oracle;
mod properties;
mod tight;
