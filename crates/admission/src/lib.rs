//! The changes to a pod when it is created, the warnings for its author, and the reason to refuse it. The extender's
//! webhook and the plugin call one function for them. That function does not know a client, a clock, or a policy of the
//! API server.
//!
//! It works on the pod as it came, so that fields stay that this version does not know.

pub mod adopt;
pub mod auto;
mod containers;
mod gate;
mod give;
mod judge;
pub mod keys;
mod mps;
mod patch;
mod strangers;
pub mod template;
mod update;

use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::{BadRequest, GpuWorkload, QueueFrom};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use containers::asks;
pub use patch::Patch;

/// The most containers of all kinds that are looked at.
pub const MAX_CONTAINERS: usize = 256;
/// The most environment variables and limits in all of them.
pub const MAX_VARIABLES: usize = 2048;
/// The most annotations of a pod that requests GPU memory.
pub const MAX_ANNOTATIONS: usize = 256;

/// How this cluster admits pods.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// The name of the resource for GPU memory.
    pub resource: &'a str,
    /// The administrator's settings.
    pub spec: &'a GpustowConfigSpec,
    /// Which new pods are queued.
    pub queue_from: &'a [QueueFrom],
}

/// The act that the API server is asked to do.
#[derive(Clone, Copy, Debug)]
pub enum Act<'a> {
    /// Create the pod.
    Create,
    /// Change annotations of a pod.
    Annotate {
        /// The pod as it is.
        before: &'a Value,
        /// The user may change the limits of pods that run.
        resizes: bool,
    },
    /// Add ephemeral containers to a pod.
    Debug {
        /// The pod as it is.
        before: &'a Value,
    },
}

/// One request to the API server.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The pod as it would be.
    pub pod: &'a Value,
    /// The requested act.
    pub act: Act<'a>,
    /// Who asks.
    pub user: &'a str,
}

/// A pod that is admitted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Admitted {
    /// The pod with all changes.
    pub pod: Value,
    /// The changes, as a JSON patch.
    pub patch: Vec<Value>,
    /// For its author.
    pub warnings: Vec<String>,
}

/// Does the answer depend on the labels and annotations of the pod's namespace?
#[must_use]
pub fn reads_namespace(pod: &Value, cluster: Cluster<'_>) -> bool {
    let gated = gate::is_gated(pod) || !cluster.queue_from.is_empty();
    gated || auto::wants(pod, cluster.resource) || adopt::has_foreign_keys(pod)
}

/// Admits the pod to this namespace. The name of the namespace suffices unless [`reads_namespace`]. `history` is the
/// history of the pod's workload ([`auto::workload`]).
///
/// # Errors
/// [`BadRequest`] names the field, its error, and the fix.
pub fn admit(
    ask: Ask<'_>,
    cluster: Cluster<'_>,
    namespace: &ObjectMeta,
    history: Option<&GpuWorkload>,
) -> Result<Admitted, BadRequest> {
    let mut patch = Patch::new(ask.pod);
    let mut warnings = Vec::new();
    match ask.act {
        Act::Create => {
            judge::forged(ask.pod, cluster.resource)?;
            judge::bounded(ask.pod)?;
            judge::limited(ask.pod, cluster.resource)?;
            if let Some(terms) = adopt::Terms::of(namespace)? {
                adopt::translate(&mut patch, &mut warnings, terms, cluster.resource)?;
                if terms.sharer == adopt::Sharer::TimeSlicing {
                    auto::leave(&mut patch, namespace, history, cluster.resource);
                }
            }
            strangers::of_ours(&patch.pod, cluster.resource, &mut warnings)?;
            auto::admit(&mut patch, namespace, history, cluster.resource)?;
            if asks(&patch.pod, cluster.resource) {
                give::devices(&mut patch, cluster.resource);
                warnings.extend(judge::starts_unseen(&patch.pod, cluster.resource));
                give::defaults(&mut patch, namespace, cluster);
                judge::created(&patch.pod, ask.user, cluster)?;
                gate::give(&mut patch, namespace, cluster);
            } else {
                gate::refuse(&patch.pod, namespace)?;
                warnings.extend(keys::idle(&patch.pod, cluster.resource));
            }
            let notes = containers::notes(&patch.pod);
            let ahead = keys::ahead(&notes).into_iter();
            warnings.extend(ahead.map(|key| {
                format!("metadata.annotations[{key}]: this version of gpustow does not know it")
            }));
        }
        Act::Annotate { before, resizes } => {
            update::judge(ask.pod, before, resizes, cluster)?;
        }
        Act::Debug { before } if asks(ask.pod, cluster.resource) => {
            judge::bounded(ask.pod)?;
            give::void(&mut patch, before);
            judge::debugged(&patch.pod, before, cluster.resource)?;
        }
        Act::Debug { .. } => {}
    }
    Ok(Admitted {
        pod: patch.pod,
        patch: patch.operations,
        warnings,
    })
}
