//! The promises of the source tree: its rules, its words, its links, and that generated files are up to date.

mod book;
mod generated;
mod habits;
mod lines;
mod links;
mod prose;
mod switches;
mod targets;
mod tidy;
mod words;

use std::path::{Path, PathBuf};

/// The root of the source tree.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
