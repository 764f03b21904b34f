//! The flags of every command, and of answers that are no list.

use gpustow_inspect::{Cluster, Error, Scope, Source, load, load_own};
use kube::core::Selector;

use crate::output::{Format, Formats};
use crate::selector;

/// The cluster and the pods to ask about.
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

impl Global {
    /// The cluster, or of a user without rights in it the pods of `namespace`, of -n or of the context.
    pub(crate) async fn cluster_or_own(&self, namespace: Option<&str>) -> Result<Cluster, Error> {
        match load(&self.source).await {
            Err(error) if error.is_forbidden() && !self.all_namespaces => {
                load_own(&self.source, namespace.or(self.namespace.as_deref())).await
            }
            cluster => cluster,
        }
    }

    /// The pods asked for.
    pub(crate) fn scope(&self, cluster: &Cluster) -> Scope {
        self.scope_in(cluster.namespace.as_ref())
    }

    /// The scope, if the context has this namespace.
    pub(crate) fn scope_in(&self, own: Option<&String>) -> Scope {
        let own = || self.namespace.clone().or_else(|| own.cloned());
        Scope {
            namespace: if self.all_namespaces { None } else { own() },
            selector: self.selector.clone(),
        }
    }
}

/// How a command prints an answer that is not a list.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AnswerFormat {
    /// json, yaml or jsonpath=TEMPLATE; text otherwise, with the policy's costs if wide
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        value_parser = Formats(&["table", "wide", "json", "yaml"])
    )]
    pub(crate) format: Format,
}
