//! Flags and environment variables, from the programs' own command definitions.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use clap::{Arg, Command, CommandFactory as _};

use super::{Table, code, sentence, titled};

/// The page.
pub(super) fn page() -> Result<String> {
    let intro = "A flag wins over its environment variable. `--help` of each program prints them too. The [GpustowConfig](config.md) has the \
                 settings of the whole cluster.";
    let mut page = titled(
        "Flags and environment variables",
        "the programs' command definitions",
        intro,
    );
    let plugin = kubectl_gpustow::Args::command();
    for (name, command) in [
        ("gpustow, the extender", gpustow::Args::command()),
        ("gpustow-agent", gpustow_agent::Args::command()),
        ("kubectl gpustow", plugin.clone()),
    ] {
        page += &format!("\n## {name}\n\n{}\n", about(&command));
        page += &flags(&command)?;
    }
    for command in plugin.get_subcommands().filter(|it| !it.is_hide_set()) {
        of_command(&mut page, "kubectl gpustow", command)?;
    }
    Ok(page)
}

/// A command of the plugin and those below it.
fn of_command(page: &mut String, before: &str, command: &Command) -> Result<()> {
    let name = format!("{before} {}", command.get_name());
    *page += &format!("\n### {name}\n\n{}\n", about(command));
    *page += &flags(command)?;
    for below in command.get_subcommands() {
        of_command(page, &name, below)?;
    }
    Ok(())
}

fn about(command: &Command) -> String {
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let paragraphs = about.split("\n\n").map(sentence);
    paragraphs.collect::<Vec<_>>().join("\n\n")
}

/// A table for each heading of the help, without the flags that every program has.
fn flags(command: &Command) -> Result<String> {
    let mut groups: BTreeMap<&str, Table<4>> = BTreeMap::new();
    let args = command.get_arguments();
    for arg in args
        .filter(|arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str()))
    {
        let heading = arg.get_help_heading().unwrap_or_default();
        let help = arg.get_long_help().or(arg.get_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        ensure!(!help.is_empty(), "{} has no help", arg.get_id());
        let table = groups.entry(heading);
        let table = table.or_insert_with(|| Table::new(["flag", "variable", "default", "effect"]));
        let variable = arg.get_env().map(|it| it.to_string_lossy().into_owned());
        table.row([
            code(&flag(arg)),
            code(&variable.unwrap_or_default()),
            code(&default(arg)),
            sentence(&help) + &values(arg),
        ]);
    }
    let parts = groups.into_iter().map(|(heading, table)| match heading {
        "" => table.0,
        heading => format!("\n**{heading}**\n{}", table.0),
    });
    Ok(parts.collect())
}

fn takes_a_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

/// As it is written: `-o, --output FORMAT`.
fn flag(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let value = match takes_a_value(arg) {
        true => names.join(" "),
        false => String::new(),
    };
    let short = arg.get_short().map(|it| format!("-{it}"));
    let long = arg.get_long().map(|it| format!("--{it}"));
    let words: Vec<_> = short.into_iter().chain(long).collect();
    format!("{} {value}", words.join(", ")).trim().to_owned()
}

fn default(arg: &Arg) -> String {
    if !takes_a_value(arg) {
        return String::new();
    }
    let delimiter = arg
        .get_value_delimiter()
        .map(String::from)
        .unwrap_or_default();
    let values = arg.get_default_values().iter();
    let values: Vec<_> = values.map(|it| it.to_string_lossy()).collect();
    values.join(&delimiter)
}

/// The words that the flag takes, if it takes certain ones.
fn values(arg: &Arg) -> String {
    if !takes_a_value(arg) {
        return String::new();
    }
    let values = arg.get_possible_values();
    let words: Vec<_> = values.iter().map(|it| code(it.get_name())).collect();
    match words.is_empty() {
        true => String::new(),
        false => format!(" One of {}.", words.join(", ")),
    }
}
