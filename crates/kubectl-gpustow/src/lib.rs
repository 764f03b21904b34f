//! `kubectl gpustow`: its commands, and the forms in which they print.
//!
//! [`gpustow_inspect`] computes the answers about the cluster. It works with the extender down and with the right to
//! read, and writes nothing to the cluster.

mod admitted;
mod adopt;
mod advise;
mod answer;
mod args;
mod bounds;
mod capacity;
mod check;
mod completion;
mod defrag;
mod fit;
mod global;
mod lists;
mod output;
mod selector;
mod top;
mod ui;
mod version;
mod whatif;
mod why;

use std::collections::HashSet;
use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use clap::CommandFactory as _;
use gpustow_inspect::load;
use tokio::time::sleep;

pub use answer::Answer;
pub use args::Args;
use args::Command;
pub use output::Screen;
use output::{Format, Output};

/// Between two looks at a list that is watched.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Runs one command, with its output to `out`; with `--watch` again and again, with the changes.
///
/// # Errors
/// If the question cannot be answered: exit code 2.
pub async fn run(args: Args, out: &mut (dyn Write + Send), screen: Screen) -> Result<Answer> {
    let Some(format) = args.command.watched().cloned() else {
        return once(args, out, screen).await;
    };
    let is_document = matches!(format, Format::Json | Format::Yaml | Format::JsonPath(_));
    let mut before = String::new();
    loop {
        let mut now = Vec::new();
        Box::pin(once(args.clone(), &mut now, screen)).await?;
        let now = String::from_utf8(now)?;
        if is_document && now != before {
            let begin = if format == Format::Yaml { "---\n" } else { "" };
            write!(out, "{begin}{now}")?;
        } else {
            let known: HashSet<&str> = before.lines().collect();
            let mut new = now.lines().filter(|line| !known.contains(line));
            new.try_for_each(|line| writeln!(out, "{line}"))?;
        }
        out.flush()?;
        before = now;
        sleep(LOOK_EVERY).await;
    }
}

async fn once(args: Args, out: &mut (dyn Write + Send), screen: Screen) -> Result<Answer> {
    let Args { global, command } = args;
    // On the heap: every arm would have one of its own on the stack.
    let cluster = || Box::pin(async { load(&global.source).await.map(Box::new) });
    match command {
        Command::Nodes { output } => lists::nodes(&*cluster().await?).print(&output, screen, out),
        Command::Gpus { node, output } => {
            lists::gpus(&*cluster().await?, node.as_deref())?.print(&output, screen, out)
        }
        Command::Pods { output } => {
            let cluster = Box::pin(global.cluster_or_own(None)).await?;
            let left_out = cluster.left_out;
            let output = Output { left_out, ..output };
            lists::pods(&cluster, &global.scope(&cluster)).print(&output, screen, out)
        }
        Command::Report { by, output } => {
            let cluster = cluster().await?;
            // Showback is for the whole cluster unless a namespace is named.
            lists::report(&cluster, &global.scope_in(None), &by).print(&output, screen, out)
        }
        Command::Why { pod, answer } => {
            Box::pin(why::run(&global, &pod, &answer.format, out)).await
        }
        Command::Fit { file, answer } => {
            Box::pin(fit::run(&global, &file, &answer.format, out)).await
        }
        Command::Adopt(args) => Box::pin(adopt::run(&global, &args, out, screen)).await,
        Command::Advise(args) => Box::pin(advise::run(&global, &args, out, screen)).await,
        Command::Whatif(args) => Box::pin(whatif::run(&global.source, &args, out, screen)).await,
        Command::Defrag { output } => {
            let cluster = cluster().await?;
            // The free memory is the whole cluster's, and so are the waiting pods unless a namespace is named.
            defrag::plans(&cluster, &global.scope_in(None)).print(&output, screen, out)
        }
        Command::Capacity(args) => capacity::run(&*cluster().await?, &args, screen, out),
        Command::Check { bundle, output } => {
            let cluster = cluster().await?;
            let webhook = Box::pin(admitted::problem(&global.source)).await?;
            let bounds = Box::pin(global.source.bounds()).await.ok();
            let found = check::run(&cluster, webhook, bounds.as_ref());
            let Some(file) = bundle else {
                return found.print(&output, screen, out);
            };
            let (mut text, mut versions) = (Vec::new(), Vec::new());
            let answer = found.print(&output, Screen::default(), &mut text)?;
            version::run(Ok(cluster), &mut versions)?;
            let texts = [("check.txt", text), ("versions.txt", versions)];
            Box::pin(check::bundle::write(&global.source, &file, &texts)).await?;
            let file = file.display();
            writeln!(
                out,
                "Wrote {file}. It names pods, nodes, namespaces and images: read it before you pass it on."
            )?;
            Ok(answer)
        }
        Command::Version => version::run(cluster().await, out),
        Command::Top(top) => Box::pin(top::run(&global, &top, out, screen)).await,
        Command::Ui(ui) => Box::pin(ui::run(&global, &ui, out)).await,
        Command::Completion(completion) => completion::run(&completion, out),
        Command::Complete { words } => {
            Box::pin(completion::complete(Args::command(), &global, &words, out)).await
        }
    }
}
