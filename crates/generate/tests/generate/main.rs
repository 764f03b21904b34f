//! What the source tree promises: its rules, its words, its links, and that generated files are up to date.

mod generated;
mod lines;
mod links;
mod prose;
mod targets;
mod tidy;
mod words;
