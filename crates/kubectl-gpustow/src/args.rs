//! Commands and flags: kubectl's own where kubectl has one.

use std::path::PathBuf;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::adopt::AdoptArgs;
use crate::advise::AdviseArgs;
use crate::capacity::CapacityArgs;
use crate::completion::CompletionArgs;
use crate::global::{AnswerFormat, Global};
use crate::output::{Format, Output};
use crate::top::TopArgs;
use crate::ui::UiArgs;
use crate::whatif::WhatifArgs;

/// The commands, by the user's question.
const GROUPS: [(&str, &[&str]); 5] = [
    (
        "See nodes, GPUs and pods",
        &["nodes", "gpus", "pods", "report", "top", "ui"],
    ),
    ("Ask about a pod", &["why", "fit"]),
    ("Plan", &["adopt", "advise", "whatif", "defrag"]),
    ("Find problems", &["check", "version"]),
    ("Set up", &["capacity", "completion"]),
];

/// See which pods sit on which GPU, and why a pod waits.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-gpustow",
    bin_name = "kubectl gpustow",
    version,
    after_help = "Examples:\n  kubectl gpustow gpus                  which pods are on which GPU\n  \
                  kubectl gpustow why deploy/triton     why its oldest pod waits\n  \
                  kubectl gpustow check                 problems, and how to solve them\n\n\
                  Exit codes: 0 yes, 1 no (does not fit, waits, something is wrong), 2 no answer.\n\
                  Each command has examples of its own: kubectl gpustow gpus --help"
)]
pub struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// The process's arguments; help, version and mistakes end it.
    #[must_use]
    pub fn of_process() -> Self {
        let matches = grouped().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// The program with its commands in groups, which clap has for options alone.
fn grouped() -> clap::Command {
    let command = Args::command();
    let mut text = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (group, names) in GROUPS {
        text += &format!("\n{group}:\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(|it| it.get_about());
            let about = about.map(ToString::to_string).unwrap_or_default();
            text += &format!("  {name:<11} {about}\n");
        }
    }
    command.help_template(text + "\nOptions of every command:\n{options}{after-help}")
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Show nodes with GPUs: available memory, largest piece, whole GPUs left
    #[command(
        after_help = "Examples:\n  kubectl gpustow nodes --sort-by -largest\n  kubectl gpustow nodes -o wide"
    )]
    Nodes {
        #[command(flatten)]
        output: Output,
    },
    /// Show GPUs: their pods, requested and available memory
    #[command(
        after_help = "Examples:\n  kubectl gpustow gpus --sort-by -available\n  kubectl gpustow gpus gpu-node-1 -o wide"
    )]
    Gpus {
        /// Only this node's
        node: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Show pods that request GPU memory: their GPUs, requests and use
    #[command(
        after_help = "Examples:\n  kubectl gpustow pods -A\n  kubectl gpustow pods -n team-a -l app=triton -o json"
    )]
    Pods {
        #[command(flatten)]
        output: Output,
    },
    /// Explain why a pod waits, or why it is on its GPU. Exit code 1 if it waits
    #[command(
        after_help = "Examples:\n  kubectl gpustow why trainer-0 -n team-a\n  kubectl gpustow why deploy/triton"
    )]
    Why {
        /// Name, namespace/name, or a workload's KIND/NAME: its oldest pod that waits
        pod: String,
        #[command(flatten)]
        answer: AnswerFormat,
    },
    /// Check whether a pod would fit now. Exit code 1 if not
    #[command(
        after_help = "Examples:\n  kubectl gpustow fit -f pod.yaml\n  kubectl gpustow fit -f - < job.yaml"
    )]
    Fit {
        /// A Pod or a workload with a pod template; - for stdin
        #[arg(short = 'f', long = "filename", value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        answer: AnswerFormat,
    },
    /// Rehearse the move from another GPU sharer. Exit code 1 if pods are refused or wait
    ///
    /// A row for each pod that requests GPUs of gpushare, HAMi, Volcano or NVIDIA's device plugin: its translation in a
    /// namespace with the label gpustow.dev/adopt, the reason of a refusal, and the parts that are left out. A namespace
    /// without the label is treated as if it had the label that fits most of its pods. Then all pods are placed again, as
    /// whatif does. Nothing is written to the cluster.
    #[command(
        after_help = "Examples:\n  kubectl gpustow adopt --dry-run\n  kubectl gpustow adopt --dry-run -n team-a --mib-per-gpu 40960 -o json"
    )]
    Adopt(AdoptArgs),
    /// Advise requests, based on past use
    ///
    /// A row for each container of a workload: its request, its peak, the advised request and limit, and the memory that
    /// these free. EMPTY-GPUS counts how many more GPUs are empty if all pods are placed again with the advised requests,
    /// as whatif does. Containers with a note against the advice do not count there. JSON and YAML have a patch. With
    /// --prometheus it works without gpustow: it advises containers that request nvidia.com/gpu. Nothing is written to
    /// the cluster.
    #[command(
        after_help = "Examples:\n  kubectl gpustow advise -A\n  kubectl gpustow advise deploy/web --quantile p95\n  kubectl gpustow advise -A --prometheus http://localhost:9090\n  kubectl patch deploy web --patch \"$(kubectl gpustow advise deploy/web -o json | jq -r '.items[0].patch')\""
    )]
    Advise(AdviseArgs),
    /// Place every pod again: other policies, more or fewer nodes
    ///
    /// Every pod that requests GPU memory is placed again, in the order of kube-scheduler (priority, then age). The
    /// command counts pods that would fit, pods that would wait, and nodes that you could remove without making more
    /// pods wait. Nothing is written to the cluster. Node selectors, required node affinity, taints,
    /// CPU and host memory count; affinity between pods, topology spread, volumes, quotas and preemption
    /// do not.
    #[command(
        after_help = "Examples:\n  kubectl gpustow whatif --policy tight,spread\n  kubectl gpustow whatif --add-nodes 2:gpu-node-1 --remove-nodes 1"
    )]
    Whatif(WhatifArgs),
    /// Plan evictions against fragmentation. Exit code 1 if they do not suffice for all waiting pods
    ///
    /// For the first pod of each kind that waits for fragmented GPU memory: which pods would move, and where to. Only pods
    /// with the annotation gpustow.dev/evictable and a controller that makes replacements can move. The plan moves the
    /// fewest MiB, each to memory that is free now. Each plan ignores the others. While no pod waits, and
    /// defragment.emptyNodes is true: how all pods would leave the nearly empty node that comes first. Nothing is written to the cluster. Node selectors, required node affinity, taints, CPU and
    /// host memory count; affinity between pods, topology spread, volumes, quotas and disruption budgets do not.
    #[command(
        after_help = "Examples:\n  kubectl gpustow defrag\n  kubectl gpustow defrag -n team-a -o json"
    )]
    Defrag {
        #[command(flatten)]
        output: Output,
    },
    /// Watch every GPU with its pods
    #[command(
        after_help = "Examples:\n  kubectl gpustow top --sort idle\n  kubectl gpustow top -1 --filter h100"
    )]
    Top(TopArgs),
    /// Sum up how much each team holds, uses and leaves idle
    #[command(
        after_help = "Examples:\n  kubectl gpustow report\n  kubectl gpustow report --by team -o csv"
    )]
    Report {
        /// `namespace`, or a label's key
        #[arg(long, default_value = "namespace", value_name = "namespace|LABEL")]
        by: String,
        #[command(flatten)]
        output: Output,
    },
    /// List problems and how to solve them. Exit code 1 if there are any
    #[command(
        after_help = "Examples:\n  kubectl gpustow check\n  kubectl gpustow check -o json | jq '.items[] | select(.level == \"error\")'\n  kubectl gpustow check --bundle gpustow.tar"
    )]
    Check {
        /// Write objects, Events and logs to this new tar file, for people who help: no Secret, no environment
        #[arg(long, value_name = "FILE", conflicts_with = "watch")]
        bundle: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Print the versions of this program, of gpustow in the cluster, and of Kubernetes
    #[command(after_help = "Examples:\n  kubectl gpustow version")]
    Version,
    /// Print the settings that autoscalers need for future nodes
    ///
    /// A row for each instance type of the cluster, and for each that you describe: how many MiB pods may hold of the
    /// smallest GPU and of all GPUs of a node. Nothing is written to the cluster.
    #[command(
        after_help = "Examples:\n  kubectl gpustow capacity\n  kubectl gpustow capacity --for karpenter --instance-type g5.xlarge=1x22731 | kubectl apply -f -\n  kubectl gpustow capacity --for cluster-autoscaler"
    )]
    Capacity(CapacityArgs),
    /// Serve a live web page on this machine, with your own permissions
    #[command(
        after_help = "Examples:\n  kubectl gpustow ui\n  kubectl gpustow ui --from cluster.json --listen 127.0.0.1:8080"
    )]
    Ui(UiArgs),
    /// Let kubectl complete names and flags of this command
    #[command(after_help = "Example:\n  kubectl gpustow completion install")]
    Completion(CompletionArgs),
    /// The command that kubectl calls to complete a word
    #[command(name = "__complete", hide = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

impl Command {
    /// The form of a list that is printed again as it changes.
    pub(crate) fn watched(&self) -> Option<&Format> {
        let output = match self {
            Self::Nodes { output }
            | Self::Gpus { output, .. }
            | Self::Pods { output }
            | Self::Defrag { output }
            | Self::Report { output, .. }
            | Self::Check { output, .. } => output,
            Self::Adopt(args) => &args.output,
            Self::Advise(args) => &args.output,
            Self::Whatif(args) => &args.output,
            Self::Capacity(args) => &args.output,
            _ => return None,
        };
        output.watch.then_some(&output.format)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group_and_has_an_example() {
        let command = Args::command();
        let mut named: Vec<_> = GROUPS
            .iter()
            .flat_map(|(_, names)| names.iter().copied())
            .collect();
        let mut all = Vec::new();
        for command in command.get_subcommands().filter(|it| !it.is_hide_set()) {
            let name = command.get_name();
            let examples = command.get_after_help().map(ToString::to_string);
            let example = format!("kubectl gpustow {name}");
            assert!(
                examples.is_some_and(|text| text.contains(&example)),
                "{name}"
            );
            all.push(name);
        }
        named.sort_unstable();
        all.sort_unstable();
        assert_eq!(named, all);
    }

    #[test]
    fn help_is_in_groups() {
        let help = grouped().render_help().to_string();
        let at = |text: &str| help.find(text);
        assert!(
            at("See nodes, GPUs and pods:").is_some() && at("Ask about a pod:") < at("  why "),
            "{help}"
        );
        assert!(at("  check ") < at("Options of every command:"), "{help}");
        assert!(help.contains("Exit codes: 0 yes"), "{help}");
    }
}
