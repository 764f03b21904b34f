//! Has autoscalers add nodes for pods that no present node can take: creates placeholder pods, and deletes them once
//! their need has ended. Which ones is the ledger's answer. A placeholder's owner is the pod that waits, so that it goes
//! with it; its name follows from the owner's UID, so that two leaders do not create two.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{PodFacts, names};
use gpustow_ledger::{Placeholder, Provision};
use k8s_openapi::api::core::v1::{NodeSelectorTerm, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::app::App;
use crate::ask::{AskError, within};
use crate::events::Kind;
use crate::leading::while_leading;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(250);
/// The same if there is no placeholder.
const RARE: Duration = Duration::from_secs(1);
/// A pod needs a node for so long before it has a placeholder: memory may come free, or be made free, first.
const SETTLES: Duration = Duration::from_secs(2);
/// Before a request that failed is tried again.
const PAUSE: Duration = Duration::from_secs(5);
/// The same if the API server would refuse it again.
const LONG_PAUSE: Duration = Duration::from_secs(60);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The result of a placeholder's creation; as a string, the `result` label.
pub(crate) const CREATED: &str = "created";
pub(crate) const REFUSED: &str = "refused";

/// Creates and deletes placeholders for as long as the process runs, while this replica leads.
pub(crate) async fn run(app: Arc<App>) {
    while_leading(app, LOOK, async |known: &mut Known, app, epoch| {
        known.look(app, epoch).await;
    })
    .await;
}

/// The state of one leadership.
#[derive(Default)]
struct Known {
    /// When the next look is due.
    next: Option<Instant>,
    /// Since when pods have needed a node, by UID.
    since: HashMap<Arc<str>, Instant>,
    /// When a failed action may be tried again, by UID.
    rests: HashMap<Arc<str>, Instant>,
    /// Placeholders that no node answers and whose owner has been notified, by UID.
    told: HashSet<Arc<str>>,
}

impl Known {
    async fn look(&mut self, app: &App, epoch: u64) {
        let now = Instant::now();
        // An unknown configuration does not mean that there are to be no placeholders.
        if self.next.is_some_and(|next| now < next) || !app.config.current().known {
            return;
        }
        let (wanted, present) = {
            let mut ledger = app.ledger.lock();
            ledger.tell_time(Timestamp::now().as_second());
            let wanted = ledger.provision(app.ledger.now());
            (wanted, ledger.placeholders())
        };
        let Provision {
            mut create,
            delete,
            unanswered,
        } = wanted;
        for placeholder in self.untold(&present, unanswered) {
            tell(app, &placeholder);
        }
        self.next = (present.is_empty() && create.is_empty()).then(|| now + RARE);
        let wants = |uid: &Arc<str>| create.iter().any(|it| it.pod.uid == *uid);
        self.since.retain(|uid, _| wants(uid));
        self.rests.retain(|_, until| *until > now);
        create.retain(|it| {
            let since = *self.since.entry(it.pod.uid.clone()).or_insert(now);
            now.duration_since(since) >= SETTLES && !self.rests.contains_key(&it.pod.uid)
        });
        if create.is_empty() && delete.is_empty() {
            return;
        }
        // It begins after every copy that this look rests on.
        if app.epoch.confirm(epoch).await.is_err() {
            return;
        }
        for pod in &delete {
            self.remove(app, pod).await;
        }
        for placeholder in &create {
            if let Err(error) = make(app, epoch, placeholder).await {
                self.failed(app, placeholder, &error);
            }
        }
    }

    /// The placeholders whose owner has not been notified yet that no node comes.
    fn untold(
        &mut self,
        present: &[Arc<PodFacts>],
        mut unanswered: Vec<Arc<PodFacts>>,
    ) -> Vec<Arc<PodFacts>> {
        self.told
            .retain(|uid| present.iter().any(|it| it.uid == *uid));
        unanswered.retain(|it| self.told.insert(it.uid.clone()));
        unanswered
    }

    async fn remove(&mut self, app: &App, pod: &PodFacts) {
        if self.rests.contains_key(&pod.uid) {
            return;
        }
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                resource_version: Some(pod.resource_version.to_string()),
                uid: Some(pod.uid.to_string()),
            }),
            ..DeleteParams::default()
        };
        let pods = Api::<Pod>::namespaced(app.client.clone(), &pod.namespace);
        match within(TIMEOUT, pods.delete(&pod.name, &params)).await {
            Ok(_) => {
                tracing::info!(namespace = %pod.namespace, pod = %pod.name, "deleted a placeholder: no pod needs it");
            }
            // The placeholder has changed: the watch shows the change.
            Err(error) if error.status() == Some(409) => return,
            Err(error) if error.status() == Some(404) => {}
            Err(error) => {
                tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "cannot delete a placeholder, and tries again");
                let until = Instant::now() + PAUSE.max(error.retry_after());
                self.rests.insert(pod.uid.clone(), until);
                return;
            }
        }
        app.ledger.lock().delete_pod(&pod.uid);
    }

    fn failed(&mut self, app: &App, placeholder: &Placeholder, error: &AskError) {
        let pod = &placeholder.pod;
        tracing::warn!(
            namespace = %pod.namespace, pod = %pod.name, %error,
            "cannot create a placeholder, and tries again"
        );
        let pause = match error.is_final() && error.status() != Some(409) {
            true => {
                let note = format!(
                    "Autoscalers do not learn that this pod needs a node, because its placeholder was refused: {error}"
                );
                app.events.warn(Kind::PlaceholderRefused, pod, note);
                app.metrics.provisioned(REFUSED);
                LONG_PAUSE
            }
            false => PAUSE.max(error.retry_after()),
        };
        self.rests.insert(pod.uid.clone(), Instant::now() + pause);
    }
}

/// Notifies the owner of a placeholder that no node comes.
fn tell(app: &App, placeholder: &PodFacts) {
    let owner = placeholder.placeholder_owner();
    let owner = owner.and_then(|uid| app.ledger.lock().pod(uid));
    if let Some(owner) = owner {
        app.events.unanswered(&owner, placeholder);
    }
}

/// Creates a placeholder, unless its owner is bound or gone by now.
async fn make(app: &App, epoch: u64, placeholder: &Placeholder) -> Result<(), AskError> {
    let facts = &placeholder.pod;
    let pods = Api::<Pod>::namespaced(app.client.clone(), &facts.namespace);
    let Some(owner) = within(TIMEOUT, pods.get_opt(&facts.name)).await? else {
        return Ok(());
    };
    let is_bound = owner.spec.as_ref().is_some_and(|it| it.node_name.is_some());
    let is_same = owner.metadata.uid.as_deref() == Some(&*facts.uid);
    let is_over = is_bound || !is_same || owner.metadata.deletion_timestamp.is_some();
    if is_over || app.epoch.confirm(epoch).await.is_err() {
        return Ok(());
    }
    let names_hosts = !placeholder.present.is_empty() && !serves_karpenter(app).await?;
    let wanted = object(placeholder, &owner, &app.args.resource_name, names_hosts);
    let wanted: Pod = match serde_json::from_value(wanted) {
        Ok(wanted) => wanted,
        Err(error) => {
            tracing::error!(%error, "cannot describe a placeholder");
            return Ok(());
        }
    };
    let asked = app.ledger.lock().copies();
    let made = within(TIMEOUT, pods.create(&PostParams::default(), &wanted)).await?;
    if let Some(made) = PodFacts::from_pod(&made, &app.args.resource_name) {
        let now = app.ledger.now();
        app.ledger.lock().read_back(made, asked, now);
    }
    app.metrics.provisioned(CREATED);
    let waits = placeholder.pods.len();
    tracing::info!(
        namespace = %facts.namespace, pod = %facts.name, pods = waits, mib = placeholder.mib.0,
        "created a placeholder: an autoscaler must add a node"
    );
    let pods = match waits {
        1 => "it".to_owned(),
        more => format!("{more} waiting pods"),
    };
    let note = format!(
        "No present node can take this pod. A placeholder requests {} for {pods}, so that an autoscaler adds a node.",
        placeholder.mib
    );
    app.events.tell(Kind::PlaceholderCreated, facts, note);
    Ok(())
}

/// Karpenter looks at no pod with a required affinity to host names.
async fn serves_karpenter(app: &App) -> Result<bool, AskError> {
    let served = within(TIMEOUT, app.client.list_api_groups()).await?;
    Ok(served
        .groups
        .iter()
        .any(|group| group.name == names::KARPENTER_API_GROUP))
}

/// The placeholder as the API server gets it.
fn object(placeholder: &Placeholder, owner: &Pod, resource: &str, names_hosts: bool) -> Value {
    let facts = &placeholder.pod;
    let spec = owner.spec.clone().unwrap_or_default();
    let mib = placeholder.mib.0.to_string();
    let counted = if placeholder.is_counted {
        "counted"
    } else {
        "alone"
    };
    let apart = json!({ "requiredDuringSchedulingIgnoredDuringExecution": [{
        "labelSelector": { "matchLabels": { names::PLACEHOLDER: counted } },
        "topologyKey": names::HOSTNAME,
    }] });
    let mut affinity = json!({ "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms(placeholder, owner, names_hosts) },
    } });
    if placeholder.is_counted {
        affinity["podAntiAffinity"] = apart;
    }
    json!({
        "metadata": {
            "name": format!("{}-{}", names::PLACEHOLDER_CLASS, facts.uid),
            "namespace": &*facts.namespace,
            "labels": { names::PLACEHOLDER: counted },
            "annotations": { names::PLACEHOLDER_FOR: placeholder.pods.join(",") },
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Pod", "name": &*facts.name, "uid": &*facts.uid,
            }],
        },
        "spec": {
            "schedulerName": spec.scheduler_name,
            "priorityClassName": names::PLACEHOLDER_CLASS,
            "nodeSelector": spec.node_selector,
            "tolerations": spec.tolerations,
            "affinity": affinity,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 65534, "seccompProfile": { "type": "RuntimeDefault" },
            },
            "containers": [{
                "name": "placeholder",
                "image": names::PLACEHOLDER_IMAGE,
                "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
                "resources": {
                    "limits": { resource: &mib },
                    "requests": {
                        resource: &mib,
                        "cpu": format!("{}m", placeholder.cpu_milli),
                        "memory": placeholder.ram.0.to_string(),
                    },
                },
            }],
        },
    })
}

/// Nodes that gpustow does not know, to which the owner may go, and with GPUs that are large enough. Cluster Autoscaler
/// imagines a new node of a group with the labels of one that is there, but for its host name: so the present nodes are
/// named as well, if they are few.
fn terms(placeholder: &Placeholder, owner: &Pod, names_hosts: bool) -> Vec<Value> {
    let is = |key: &str, operator: &str, values: &[Box<str>]| json!({ "key": key, "operator": operator, "values": values });
    let more = |key: &str, least: u64| {
        let below = least.saturating_sub(1).to_string();
        is(key, "Gt", &[below.into()])
    };
    let mut sizes: Vec<Vec<Value>> = Vec::new();
    if !placeholder.types.is_empty() {
        sizes.push(vec![is(names::INSTANCE_TYPE, "In", &placeholder.types)]);
    }
    for (memory, count) in [
        (names::GPU_MEMORY_LABEL, names::GPU_COUNT_LABEL),
        (names::NVIDIA_MEMORY_LABEL, names::NVIDIA_COUNT_LABEL),
    ] {
        let mut size = vec![more(memory, placeholder.gpu_mib.0)];
        if placeholder.gpus > 1 {
            size.push(more(count, placeholder.gpus.into()));
        }
        if !placeholder.others.is_empty() {
            size.push(is(names::INSTANCE_TYPE, "NotIn", &placeholder.others));
        }
        sizes.push(size);
    }
    let spec = owner.spec.as_ref();
    let affinity = spec.and_then(|spec| spec.affinity.as_ref()?.node_affinity.as_ref());
    let required = affinity.and_then(|it| {
        it.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let of_owner = match required {
        Some(required) => required.node_selector_terms.clone(),
        None => vec![NodeSelectorTerm::default()],
    };
    let mut unknown = vec![json!({ "key": names::KNOWN_LABEL, "operator": "DoesNotExist" })];
    if names_hosts {
        unknown.push(is(names::HOSTNAME, "NotIn", &placeholder.present));
    }
    let mut all = Vec::new();
    for unknown in &unknown {
        for (size, term) in sizes
            .iter()
            .flat_map(|size| of_owner.iter().map(move |it| (size, it)))
        {
            let own = term.match_expressions.iter().flatten().map(|it| json!(it));
            let expressions = [unknown.clone()].into_iter().chain(own).chain(size.clone());
            let mut term = json!({ "matchFields": term.match_fields });
            term["matchExpressions"] = expressions.collect();
            all.push(term);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_told_once_while_its_placeholder_is_there() {
        let placeholder = |uid: &str| Arc::new(PodFacts::new("default", uid, uid));
        let (a, b) = (placeholder("a"), placeholder("b"));
        let both = [a.clone(), b.clone()];
        let mut known = Known::default();
        for (present, unanswered, told) in [
            (&both[..], vec![a.clone()], vec![a.clone()]),
            (&both, vec![a.clone(), b.clone()], vec![b.clone()]),
            // A node arrives, and does not report.
            (&both, vec![], vec![]),
            (&both, vec![a.clone()], vec![]),
            (&both[1..], vec![], vec![]),
            (&both, vec![a.clone()], vec![a.clone()]),
        ] {
            assert_eq!(known.untold(present, unanswered), told);
        }
    }
}
