//! Tests of the decision, through [`gpustow_pack::fit`] alone, and of what the repository's layout
//! promises.

mod cases;
mod layout;
mod oracle;
mod properties;
mod tight;
