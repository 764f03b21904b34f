//! `kubectl gpustow`: what the extender would say, from Lists alone.
//!
//! It feeds the same ledger and the same `fit` as the extender, so it works with the extender down
//! and with the right to read. It does not know reservations in flight, which only the extender's
//! memory has, and it writes nothing to the cluster.

mod args;
mod check;
mod cluster;
mod completion;
mod fit;
mod lists;
mod live;
mod output;
mod owner;
mod selector;
mod source;
mod state;
mod system;
mod top;
mod ui;
mod why;

use std::io::Write;

use anyhow::Result;

pub use args::Args;
use args::Command;
pub use output::Screen;
pub use source::{Lists, Source};

/// What a command found, as its exit code says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Exit code 0.
    Yes,
    /// Exit code 1: it does not fit, it waits, something is wrong.
    No,
}

/// Runs one command, with its output to `out`.
///
/// # Errors
/// If the question cannot be answered: exit code 2.
pub async fn run(args: Args, out: &mut (dyn Write + Send), screen: Screen) -> Result<Answer> {
    let Args { global, command } = args;
    match command {
        Command::Completion(completion) => return completion::run(&completion, out),
        Command::Complete { words } => return completion::complete(&global, &words, out).await,
        Command::Top(top) => return top::run(&global, &top, out, screen).await,
        Command::Ui(ui) => return ui::run(&global, &ui, out).await,
        _ => {}
    }
    let mut cluster = source::load(&global.source).await?;
    let scope = global.scope(&cluster)?;
    match command {
        Command::Nodes { output } => lists::nodes(&cluster).print(&output, screen, out),
        Command::Gpus { node, output } => {
            lists::gpus(&cluster, node.as_deref())?.print(&output, screen, out)
        }
        Command::Pods { output } => lists::pods(&cluster, &scope).print(&output, screen, out),
        Command::Report { by, output } => {
            // Showback is for the whole cluster unless a namespace is named.
            let scope = args::Scope {
                namespace: global.namespace.clone(),
                ..scope
            };
            lists::report(&cluster, &scope, &by).print(&output, screen, out)
        }
        Command::Why { pod, format } => {
            let pod = cluster.find(&scope, &pod)?.facts.uid.clone();
            let why = why::of(&mut cluster, &pod)?;
            why.print(format, out)?;
            Ok(why.answer())
        }
        Command::Fit { file, format } => fit::run(&cluster, &file, format, out),
        Command::Check { output } => check::run(&cluster).print(&output, screen, out),
        Command::Completion(_) | Command::Complete { .. } | Command::Top(_) | Command::Ui(_) => {
            Ok(Answer::Yes)
        }
    }
}
