//! Tests of the decision, through [`gpustow_pack::fit`] alone.

mod cases;
mod dependencies;
mod oracle;
mod properties;
