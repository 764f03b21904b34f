//! Commands and flags: kubectl's own where kubectl has one.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use kube::core::Selector;

use crate::cluster::Cluster;
use crate::output::{Format, Output};
use crate::selector;
use crate::source::Source;

/// See which pods sit on which GPU, and why a pod waits.
#[derive(Clone, Debug, Parser)]
#[command(name = "kubectl-gpustow", bin_name = "kubectl gpustow", version)]
pub struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Where to ask and for what.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Namespace; without it the context's own
    #[arg(short, long, global = true, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Pods of all namespaces
    #[arg(short = 'A', long, global = true)]
    pub(crate) all_namespaces: bool,
    /// Pods with these labels, as in kubectl
    #[arg(short = 'l', long, global = true, value_name = "LABELS", value_parser = selector::parse)]
    pub(crate) selector: Option<Selector>,
}

/// The pods that a command is about.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    /// None: all.
    pub(crate) namespace: Option<String>,
    pub(crate) selector: Option<Selector>,
}

impl Global {
    /// The pods asked for.
    pub(crate) fn scope(&self, cluster: &Cluster) -> Result<Scope> {
        let own = || self.namespace.clone().or_else(|| cluster.namespace.clone());
        Ok(Scope {
            namespace: if self.all_namespaces { None } else { own() },
            selector: self.selector.clone(),
        })
    }
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Nodes with GPUs: room, largest piece, whole cards left
    Nodes {
        #[command(flatten)]
        output: Output,
    },
    /// GPUs: who holds how much, what is left
    #[command(
        after_help = "Examples:\n  kubectl gpustow gpus --sort-by -room\n  kubectl gpustow gpus gpu-node-1 -o wide"
    )]
    Gpus {
        /// Only this node's
        node: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Pods that ask for GPU memory: on which GPU, how much, how much in use
    Pods {
        #[command(flatten)]
        output: Output,
    },
    /// Why a pod waits, or why it is on its GPU. Exit code 1 if it waits
    #[command(
        after_help = "Examples:\n  kubectl gpustow why trainer-0 -n team-a\n  kubectl gpustow why deploy/triton"
    )]
    Why {
        /// Name, namespace/name, or a workload's KIND/NAME: its oldest pod that waits
        pod: String,
        /// json or yaml; text otherwise, with the policy's costs if wide
        #[arg(
            short = 'o',
            long = "output",
            value_name = "FORMAT",
            default_value = "table"
        )]
        format: Format,
    },
    /// Would this pod fit now? Exit code 1 if not
    #[command(
        after_help = "Examples:\n  kubectl gpustow fit -f pod.yaml\n  kubectl gpustow fit -f - < job.yaml"
    )]
    Fit {
        /// A Pod or a workload with a pod template; - for stdin
        #[arg(short = 'f', long = "filename", value_name = "FILE")]
        file: PathBuf,
        /// json or yaml; text otherwise, with the policy's costs if wide
        #[arg(
            short = 'o',
            long = "output",
            value_name = "FORMAT",
            default_value = "table"
        )]
        format: Format,
    },
    /// Live view of every GPU with its pods
    Top(TopArgs),
    /// What each team holds, uses and leaves idle
    Report {
        /// `namespace`, or a label's key
        #[arg(long, default_value = "namespace", value_name = "namespace|LABEL")]
        by: String,
        #[command(flatten)]
        output: Output,
    },
    /// Find drift between assignments, GPUs and agents, and say the mend. Exit code 1 if any
    Check {
        #[command(flatten)]
        output: Output,
    },
    /// Live page on this machine, with your own rights
    Ui(UiArgs),
    /// Let kubectl complete this command's words
    Completion(CompletionArgs),
    /// What kubectl calls to complete a word
    #[command(name = "__complete", hide = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TopArgs {
    /// Print once, without colour or keys, and end
    #[arg(short = '1', long)]
    pub(crate) once: bool,
    /// Order of the GPUs
    #[arg(long, default_value = "node")]
    pub(crate) sort: TopSort,
    /// Only lines with this text in node, model or pod
    #[arg(long, default_value = "", value_name = "TEXT")]
    pub(crate) filter: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopSort {
    /// By node and index.
    Node,
    /// Most room first.
    Room,
    /// Most live use first.
    Used,
    /// Most requested and unused first.
    Idle,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UiArgs {
    /// Loopback address to listen on; port 0 for a free one
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDRESS")]
    pub(crate) listen: SocketAddr,
    /// Serve others, from a pod: over TLS, under these names alone, and to those alone whose token's
    /// user may get the non-resource URL /gpustow
    #[arg(long, requires_all = ["tls_cert", "tls_key", "hosts"])]
    pub(crate) in_cluster: bool,
    /// Certificate (PEM); read anew when it changes
    #[arg(long, value_name = "FILE", requires = "in_cluster")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key (PEM)
    #[arg(long, value_name = "FILE", requires = "in_cluster")]
    pub(crate) tls_key: Option<PathBuf>,
    /// A name under which people open it; may be repeated
    #[arg(long = "host", value_name = "NAME", requires = "in_cluster")]
    pub(crate) hosts: Vec<String>,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    #[command(subcommand)]
    pub(crate) action: CompletionAction,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum CompletionAction {
    /// Put `kubectl_complete-gpustow` beside this program, where kubectl 1.26 and later looks
    Install {
        /// Another folder of $PATH
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
    },
}
