//! Errors, in words that a user can act on.

use std::io;
use std::path::PathBuf;

/// Why a cluster cannot be shown, or a pod not be found in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No kubeconfig leads to a cluster, for this reason.
    #[error("cannot reach the cluster: kubeconfig: {0}; does `kubectl get nodes` work?")]
    Kubeconfig(String),
    /// The configuration is there, and no client can be made of it.
    #[error("cannot set up the client")]
    Client(#[source] kube::Error),
    /// Objects of a kind cannot be listed.
    #[error("cannot list {what}{}", advice(source, what))]
    List {
        /// The resource.
        what: &'static str,
        /// The error of the API server.
        source: kube::Error,
    },
    /// A file or folder cannot be read.
    #[error("{}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A folder has nothing to read.
    #[error("{}: no JSON or YAML file in it", .0.display())]
    Empty(PathBuf),
    /// The content of a file is not kubectl's output.
    #[error("{}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The error in it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Several pods are called so.
    #[error("pod {0} is in several namespaces: add -n NAMESPACE")]
    Several(String),
    /// No such pod asks for GPU memory; the text describes the next step.
    #[error("{0}")]
    NotFound(String),
}

impl Error {
    /// Is this the answer to a user without the right to list something?
    #[must_use]
    pub fn is_forbidden(&self) -> bool {
        use kube::Error::Api;
        matches!(self, Self::List { source: Api(status), .. } if status.code == 403)
    }
}

fn advice(error: &kube::Error, what: &str) -> &'static str {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            ": you need the right to list pods, nodes and gpunodes in the whole cluster, as the \
             ClusterRole gpustow-viewer has it. Without it, why, pods, fit and top answer about pods of one namespace"
        }
        kube::Error::Api(status) if status.code == 404 && what == "gpunodes" => {
            ": gpustow is not installed in this cluster"
        }
        _ => "",
    }
}
