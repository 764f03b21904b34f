//! Completion of words by kubectl, 1.26 and later: it runs `kubectl_complete-gpustow` from $PATH.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Command, Subcommand};

use crate::answer::Answer;
use crate::global::Global;
use crate::output::OF_LISTS;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    #[command(subcommand)]
    pub(crate) action: CompletionAction,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum CompletionAction {
    /// Put `kubectl_complete-gpustow` into this program's folder, where kubectl 1.26 and later looks
    Install {
        /// Another folder of $PATH
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
    },
}

/// The file name that kubectl looks for.
const PROGRAM: &str = "kubectl_complete-gpustow";
/// Cobra's directive: do not fall back to names of files.
const NO_FILES: u32 = 4;

/// Installs the program that kubectl calls.
pub(crate) fn run(args: &CompletionArgs, out: &mut dyn Write) -> Result<Answer> {
    let CompletionAction::Install { dir } = &args.action;
    let beside = || -> Result<PathBuf> {
        let program = std::env::current_exe()?;
        Ok(program
            .parent()
            .context("this program is in no folder")?
            .to_owned())
    };
    let path = dir.clone().map_or_else(beside, Ok)?.join(PROGRAM);
    fs::write(
        &path,
        "#!/bin/sh\nexec kubectl-gpustow __complete -- \"$@\"\n",
    )
    .with_context(|| format!("{}: give a folder of $PATH with --dir", path.display()))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    writeln!(out, "{}", path.display())?;
    Ok(Answer::Yes)
}

/// Prints the words that the last of `words` may become below `root`, as kubectl reads them.
pub(crate) async fn complete(
    root: Command,
    global: &Global,
    words: &[String],
    out: &mut (dyn Write + Send),
) -> Result<Answer> {
    let (word, before) = match words.split_last() {
        Some((word, before)) => (word.as_str(), before),
        None => ("", [].as_slice()),
    };
    let command = before
        .iter()
        .find_map(|it| root.find_subcommand(it))
        .unwrap_or(&root);
    let mut found: Vec<(String, String)> = Vec::new();
    let last = before.last().map(String::as_str).unwrap_or_default();
    if word.starts_with('-') {
        let flags = command.get_arguments().chain(root.get_arguments());
        found.extend(flags.filter_map(|flag| {
            let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
            Some((format!("--{}", flag.get_long()?), help))
        }));
    } else if last == "-o" || last == "--output" {
        let formats = OF_LISTS.0.iter();
        found.extend(formats.map(|format| (format.to_string(), String::new())));
    } else if command.get_name() == root.get_name() {
        found.extend(
            root.get_subcommands()
                .filter(|it| !it.is_hide_set())
                .map(|it| {
                    let about = it.get_about().map(ToString::to_string).unwrap_or_default();
                    (it.get_name().to_owned(), about)
                }),
        );
    } else {
        found.extend(names(global, command.get_name()).await.unwrap_or_default());
    }
    found.dedup();
    for (value, about) in found.iter().filter(|(value, _)| value.starts_with(word)) {
        match about.as_str() {
            "" => writeln!(out, "{value}")?,
            about => writeln!(out, "{value}\t{about}")?,
        }
    }
    writeln!(out, ":{NO_FILES}")?;
    Ok(Answer::Yes)
}

/// Names in the cluster; none if it cannot be asked.
async fn names(global: &Global, command: &str) -> Result<Vec<(String, String)>> {
    let cluster = global.cluster_or_own(None).await?;
    let scope = global.scope(&cluster);
    Ok(match command {
        "gpus" => cluster
            .reports
            .keys()
            .map(|name| (name.clone(), String::new()))
            .collect(),
        "why" => {
            let pods = cluster.pods_in(&scope).into_iter();
            pods.map(|pod| (pod.facts.name.to_string(), pod.facts.namespace.to_string()))
                .collect()
        }
        _ => Vec::new(),
    })
}
