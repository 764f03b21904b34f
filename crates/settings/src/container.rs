//! The settings of a container that runs the extender: its arguments, and the environment variables of its pod.

use clap::builder::Resettable;
use clap::{Arg, Command, CommandFactory as _, FromArgMatches as _, Parser};
use k8s_openapi::api::core::v1::Container;

use crate::Settings;

/// The flags alone, without the rest of a command line.
#[derive(Parser)]
#[command(
    no_binary_name = true,
    args_override_self = true,
    disable_help_flag = true,
    disable_version_flag = true
)]
struct Flags {
    #[command(flatten)]
    settings: Settings,
}

impl Settings {
    /// The settings of this container. A flag that this version cannot read, as one of a later extender, counts as not
    /// given.
    #[must_use]
    pub fn of_container(container: &Container) -> Self {
        let mut words = words(container, &Flags::command());
        if parse(&words).is_none() {
            words.retain(|word| parse(std::slice::from_ref(word)).is_some());
        }
        parse(&words).unwrap_or_default()
    }
}

/// What the words say, and not the environment of this program.
fn parse(words: &[String]) -> Option<Settings> {
    let command = Flags::command().mut_args(|arg| arg.env(Resettable::Reset));
    let matches = command.try_get_matches_from(words).ok()?;
    Some(Flags::from_arg_matches(&matches).ok()?.settings)
}

/// The container's own words about these flags, each in one piece: an argument, else the environment variable.
fn words(container: &Container, command: &Command) -> Vec<String> {
    let mut said: Vec<(&str, String)> = Vec::new();
    let mut all = container.command.iter().chain(&container.args).flatten();
    while let Some(word) = all.next() {
        let Some(flag) = word.strip_prefix("--") else {
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        let known = |arg: &&Arg| arg.get_long() == Some(name);
        let Some(arg) = command.get_arguments().find(known) else {
            continue;
        };
        let value = match takes_value(arg) {
            true => value.or_else(|| all.next().cloned()),
            false => value,
        };
        let word = value.map_or_else(|| word.clone(), |value| format!("--{name}={value}"));
        said.push((arg.get_id().as_str(), word));
    }
    let unsaid = command.get_arguments().filter_map(|arg| {
        let name = arg.get_env()?.to_str()?;
        let mut variables = container.env.iter().flatten();
        let value = variables.find(|it| it.name == name)?.value.clone()?;
        let given = said.iter().any(|(id, _)| *id == arg.get_id().as_str());
        (!given).then_some(())?;
        let flag = arg.get_long()?;
        match takes_value(arg) {
            true => Some(format!("--{flag}={value}")),
            // As clap reads the variable of a switch.
            false => (value == "true").then(|| format!("--{flag}")),
        }
    });
    let unsaid: Vec<_> = unsaid.collect();
    let said = said.into_iter().map(|(_, word)| word);
    said.chain(unsaid).collect()
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(container: Value) -> serde_json::Result<Settings> {
        Ok(Settings::of_container(&serde_json::from_value(container)?))
    }

    #[test]
    fn a_container_without_flags_has_the_defaults() -> serde_json::Result<()> {
        assert_eq!(parse(&[]), Some(Settings::default()));
        assert_eq!(of(json!({ "name": "extender" }))?, Settings::default());
        assert_eq!(
            format!("{:?}", Settings::default().ledger()),
            format!("{:?}", gpustow_ledger::Config::default())
        );
        Ok(())
    }

    /// As an argument in one word, in two, and as a variable.
    #[test]
    fn every_flag_is_read_in_each_form() -> serde_json::Result<()> {
        let command = Flags::command();
        for arg in command.get_arguments() {
            let (Some(flag), Some(env)) = (arg.get_long(), arg.get_env()) else {
                panic!("{arg:?}");
            };
            let env = env.to_str().unwrap_or_default();
            let value = match flag {
                "policy" => "spread",
                "line" => "always",
                "act" => "evict",
                _ => "77",
            };
            let switch = format!("--{flag}");
            let mut forms = vec![];
            if takes_value(arg) {
                forms.push(json!({ "args": [format!("{switch}={value}")] }));
                forms.push(json!({ "command": ["gpustow", switch, value] }));
                forms.push(json!({ "env": [{ "name": env, "value": value }] }));
            } else {
                // One that needs another comes with it.
                forms.push(json!({ "args": [switch, "--keep=60"] }));
                forms.push(
                    json!({ "args": ["--keep=60"], "env": [{ "name": env, "value": "true" }] }),
                );
            }
            let mut read = Vec::new();
            for mut form in forms {
                form["name"] = json!("extender");
                read.push(of(form)?);
            }
            assert_ne!(read[0], Settings::default(), "{flag}");
            assert!(read.iter().all(|it| *it == read[0]), "{flag}: {read:?}");
        }
        Ok(())
    }

    #[test]
    fn what_cannot_be_read_leaves_the_rest() -> serde_json::Result<()> {
        let settings = of(json!({ "name": "extender",
            "args": ["--listen", "127.0.0.1:1", "--policy=of-tomorrow", "--call-back", "--new-flag=1", "--move", "3"],
            "env": [{ "name": "GPUSTOW_PREEMPT_SCATTERED", "value": "false" },
                { "name": "GPUSTOW_MOVE", "value": "9" }] }))?;
        let expected = Settings {
            call_back: true,
            moves: 3,
            ..Settings::default()
        };
        assert_eq!(settings, expected);
        Ok(())
    }
}
