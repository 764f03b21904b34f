//! Where the facts come from: an API server, or files that kubectl wrote.

pub(crate) mod files;

use std::collections::BTreeMap;
use std::path::PathBuf;

use gpustow_api::claim::{GROUP, RULE_VERSIONS};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::{GpuNode, GpuWorkload, GpustowConfig, PodGroup, PodObject, names};
use gpustow_policies::admission::{Expected, Weakness};
use gpustow_settings::Feature;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, LimitRange, Namespace, Node, ResourceQuota};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::Error;
use crate::cluster::Cluster;
use crate::system::{self, Seen};
use files::read_lists;

/// Objects per answer of a List, as kubectl asks for them.
const CHUNK: u32 = 500;

/// The hidden objects, for a user without the right to list the cluster.
const LEFT_OUT: &str = "pods of others and free GPU memory, because you may not list pods, nodes and gpunodes in the whole \
    cluster. The ClusterRole gpustow-viewer has these rights.";
const LEFT_OUT_WITH_GPUS: &str = "pods of others, free GPU memory and its use, because you may not list pods, nodes and \
    gpunodes in the whole cluster. The ClusterRole gpustow-viewer has these rights.";

/// Flags that say where a cluster's objects come from.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options of every command")]
pub struct Source {
    /// kubeconfig file; without it $KUBECONFIG or ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// User to act as
    #[arg(long = "as", global = true, value_name = "USER")]
    impersonate: Option<String>,
    /// Read `kubectl get nodes,gpunodes,pods -A -o json` from a file, or all such files of a
    /// folder, instead of a cluster
    #[arg(long, global = true, value_name = "PATH")]
    pub from: Option<PathBuf>,
    /// Extended resource that pods ask for
    #[arg(long, global = true, env = "GPUSTOW_RESOURCE_NAME", default_value = names::GPU_MEM)]
    pub resource_name: String,
}

/// A cluster's objects, as they were listed.
#[derive(Debug, Default)]
pub struct Lists {
    /// Every Node.
    pub nodes: Vec<Node>,
    /// Every GpuNode.
    pub gpunodes: Vec<GpuNode>,
    /// Every Pod.
    pub pods: Vec<PodObject>,
    /// PodGroups; none where the API server serves none, or they may not be read.
    pub pod_groups: Vec<PodGroup>,
    /// DeviceClasses that map an extended resource to devices, with that resource; empty if they may not be read.
    pub device_classes: Vec<(String, String)>,
    /// ResourceSlices and DeviceTaintRules where the fence between pods and claims is on; `None` if they may not be read.
    pub fence: Option<Vec<Value>>,
    /// ConfigMaps of gpustow's namespace; `None` if they may not be read.
    pub configs: Option<Vec<ConfigMap>>,
    /// The admission policies that do not hold, and why.
    pub policies: Seen<Vec<(&'static str, Weakness)>>,
    /// Those by which replicas agree who decides.
    pub leases: Seen<Vec<Lease>>,
    /// The cluster's configuration, if there is one.
    pub config: Seen<GpustowConfig>,
    /// The histories of workloads, from files alone: [`Source::workloads`] asks a cluster.
    workloads: Vec<GpuWorkload>,
    /// Of files alone: [`Source::bounds`] asks a cluster.
    bounds: Bounds,
    /// Events about places that the extender keeps for pods; empty if they may not be read.
    pub events: Vec<Event>,
    /// Minor version of the API server.
    pub minor: Option<u32>,
    /// The namespace of the context, if there is one.
    pub namespace: Option<String>,
}

/// The namespaces' rules for new pods.
#[derive(Clone, Debug, Default)]
pub struct Bounds {
    /// Their labels and annotations.
    pub namespaces: Vec<Namespace>,
    /// The limits on the sum of all requests in a namespace.
    pub quotas: Vec<ResourceQuota>,
    /// The limits on one pod or container, and the default requests.
    pub ranges: Vec<LimitRange>,
}

impl Source {
    /// Lists everything once.
    ///
    /// # Errors
    /// If the cluster cannot be reached, its objects not be listed, or a file not be read.
    pub async fn lists(&self) -> Result<Lists, Error> {
        if let Some(path) = &self.from {
            return read_lists(path);
        }
        let (client, namespace) = self.client().await?;
        let configs = Api::namespaced(client.clone(), names::NAMESPACE);
        let (nodes, gpunodes, pods, pod_groups, classes, configs, policies, leases, version) = tokio::join!(
            list(Api::<Node>::all(client.clone()), "nodes"),
            list(Api::<GpuNode>::all(client.clone()), "gpunodes"),
            list(Api::<PodObject>::all(client.clone()), "pods"),
            list(Api::<PodGroup>::all(client.clone()), "podgroups"),
            device_classes(&client),
            list(configs, "configmaps"),
            policies(&client, Expected::new(&self.resource_name)),
            leases(&client),
            client.apiserver_version(),
        );
        let (pods, mut policies) = (pods?, policies);
        let config = config(&client).await;
        let spec = match &config {
            Seen::Read(config) => config.spec.clone(),
            Seen::NotThere | Seen::Unreadable => GpustowConfigSpec::default(),
        };
        let fence = match Feature::Claims.is_on(&spec) {
            true => fence(&client).await.ok(),
            false => None,
        };
        let events = match Feature::Reserve.is_on(&spec) {
            true => kept_reservations(&client).await.unwrap_or_default(),
            false => Vec::new(),
        };
        // Only such an extender has the right that this policy bounds, and without a queue no pod has its gate.
        let resource = &self.resource_name;
        let more = [
            system::makes_certificate(pods.iter().map(|it| &it.pod))
                .then(|| Expected::of_certificate(resource)),
            Feature::Queue
                .is_on(&spec)
                .then(|| Expected::of_queue(resource)),
        ];
        if let (Ok(weak), Some(expected)) = (
            &mut policies,
            more.into_iter().flatten().reduce(Expected::and),
        ) {
            match self::policies(&client, expected).await {
                Ok(more) => weak.extend(more),
                Err(error) => policies = Err(error),
            }
        }
        Ok(Lists {
            nodes: nodes?,
            gpunodes: gpunodes?,
            pods,
            pod_groups: pod_groups.unwrap_or_default(),
            device_classes: classes.unwrap_or_default(),
            fence,
            configs: configs.ok(),
            policies: policies.map_or(Seen::Unreadable, Seen::Read),
            leases: leases.map_or(Seen::Unreadable, Seen::Read),
            config,
            workloads: Vec::new(),
            bounds: Bounds::default(),
            events,
            minor: version.ok().and_then(|version| minor(&version.minor)),
            namespace: Some(namespace),
        })
    }

    /// Lists the objects that a user without cluster rights sees: the pods of a namespace, and the GPUs if she may.
    async fn own_lists(&self, namespace: Option<&str>) -> Result<Lists, Error> {
        let (client, own) = self.client().await?;
        let namespace = namespace.map_or(own, str::to_owned);
        let pods = Api::<PodObject>::namespaced(client.clone(), &namespace);
        Ok(Lists {
            pods: list(pods, "pods").await?,
            gpunodes: list(Api::all(client), "gpunodes").await.unwrap_or_default(),
            namespace: Some(namespace),
            ..Lists::default()
        })
    }

    /// Lists the histories of workloads.
    ///
    /// # Errors
    /// As [`Source::lists`].
    pub async fn workloads(&self) -> Result<Vec<GpuWorkload>, Error> {
        if let Some(path) = &self.from {
            return Ok(read_lists(path)?.workloads);
        }
        let (client, _) = self.client().await?;
        list(Api::all(client), "gpuworkloads").await
    }

    /// Lists the pods alone, as a cluster without gpustow has them too, and the namespace of the context.
    ///
    /// # Errors
    /// As [`Source::lists`].
    pub async fn pods(&self) -> Result<(Vec<PodObject>, Option<String>), Error> {
        if let Some(path) = &self.from {
            let lists = read_lists(path)?;
            return Ok((lists.pods, lists.namespace));
        }
        let (client, namespace) = self.client().await?;
        Ok((list(Api::all(client), "pods").await?, Some(namespace)))
    }

    /// Lists the namespaces.
    ///
    /// # Errors
    /// As [`Source::lists`].
    pub async fn namespaces(&self) -> Result<Vec<Namespace>, Error> {
        if let Some(path) = &self.from {
            return Ok(read_lists(path)?.bounds.namespaces);
        }
        let (client, _) = self.client().await?;
        list(Api::all(client), "namespaces").await
    }

    /// Lists namespaces, quotas and LimitRanges.
    ///
    /// # Errors
    /// As [`Source::lists`].
    pub async fn bounds(&self) -> Result<Bounds, Error> {
        if let Some(path) = &self.from {
            return Ok(read_lists(path)?.bounds);
        }
        let (client, _) = self.client().await?;
        Ok(Bounds {
            namespaces: list(Api::all(client.clone()), "namespaces").await?,
            quotas: list(Api::all(client.clone()), "resourcequotas").await?,
            ranges: list(Api::all(client), "limitranges").await?,
        })
    }

    /// A client with the user's own rights, and the namespace of the context.
    ///
    /// # Errors
    /// If there is no way to the cluster.
    pub async fn client(&self) -> Result<(Client, String), Error> {
        let options = KubeConfigOptions {
            context: self.context.clone(),
            ..Default::default()
        };
        let mut config = match &self.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(unreachable)?;
                Config::from_custom_kubeconfig(file, &options).await
            }
            None if options.context.is_none() => match Config::from_kubeconfig(&options).await {
                // In a pod there is no file.
                Err(error) => Config::incluster().map_err(|_| error),
                found => found,
            },
            None => Config::from_kubeconfig(&options).await,
        }
        .map_err(unreachable)?;
        if self.impersonate.is_some() {
            config.auth_info.impersonate = self.impersonate.clone();
        }
        let namespace = config.default_namespace.clone();
        Ok((Client::try_from(config).map_err(Error::Client)?, namespace))
    }
}

/// kube's texts name their cause themselves.
fn unreachable(error: KubeconfigError) -> Error {
    let cause = match error {
        KubeconfigError::ReadConfig(cause, path) => format!("{}: {cause}", path.display()),
        other => other.to_string(),
    };
    Error::Kubeconfig(cause)
}

/// The cluster that `source` shows.
///
/// # Errors
/// If it cannot be listed or read.
pub async fn load(source: &Source) -> Result<Cluster, Error> {
    let lists = source.lists().await?;
    Ok(cluster(lists, &source.resource_name))
}

/// The part of the cluster that a user without cluster rights sees: the pods of one namespace, by default the
/// context's.
///
/// # Errors
/// If it cannot be listed.
pub async fn load_own(source: &Source, namespace: Option<&str>) -> Result<Cluster, Error> {
    let lists = source.own_lists(namespace).await?;
    let mut own = cluster(lists, &source.resource_name);
    own.left_out = Some(match own.reports.is_empty() {
        true => LEFT_OUT_WITH_GPUS,
        false => LEFT_OUT,
    });
    Ok(own)
}

/// The cluster that was listed.
#[must_use]
pub fn cluster(lists: Lists, resource: &str) -> Cluster {
    let mut cluster = Cluster::new(resource);
    if lists.namespace.is_none() {
        // The files' own time: ages do not depend on when they are read.
        let heartbeats = lists.gpunodes.iter().filter_map(|node| {
            let heartbeat = node.status.as_ref()?.heartbeat.as_ref()?;
            heartbeat.parse::<Timestamp>().ok()
        });
        cluster.wall = heartbeats.max().unwrap_or(cluster.wall);
    }
    cluster.namespace = lists.namespace;
    cluster.set_config(lists.config);
    cluster.set_fence(lists.fence.as_deref());
    cluster.reset_nodes(lists.nodes);
    cluster.reset_gpunodes(lists.gpunodes);
    cluster.reset_pod_groups(&lists.pod_groups);
    cluster.reset_pods(lists.pods);
    cluster.advised.reset(lists.workloads);
    cluster.kept_reservations = said_of_reservations(lists.events);
    cluster.device_classes = lists.device_classes;
    cluster.configs = lists.configs;
    cluster.policies = lists.policies;
    cluster.system.leases = lists.leases;
    cluster.system.minor = lists.minor;
    cluster
}

/// The admission policies of gpustow that do not hold.
async fn policies(
    client: &Client,
    expected: Expected,
) -> kube::Result<Vec<(&'static str, Weakness)>> {
    let read = async |name: &'static str| {
        let policies = Api::all(client.clone());
        let bindings = Api::all(client.clone());
        tokio::try_join!(policies.get_opt(name), bindings.get_opt(name))
    };
    let looked = expected.look(read).await.into_iter();
    let looked = looked.filter_map(|(name, weak)| Some(weak.transpose()?.map(|weak| (name, weak))));
    looked.collect()
}

/// The DeviceClasses, where the API server serves them.
async fn device_classes(client: &Client) -> Result<Vec<(String, String)>, Error> {
    let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", "DeviceClass");
    let api = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::from_gvk(&kind));
    let classes = list(api, "deviceclasses").await?.into_iter();
    Ok(classes
        .filter_map(|it| device_class(&it.data, it.metadata.name?))
        .collect())
}

/// The ResourceSlices of drivers, and the extender's rules that fence their devices.
async fn fence(client: &Client) -> Result<Vec<Value>, Error> {
    let all = async |version: &str, kind: &str, plural: &'static str, params: ListParams| {
        let kind = GroupVersionKind::gvk(GROUP, version, kind);
        let api = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::from_gvk(&kind));
        list_by(api, params, plural).await
    };
    let mut found = all(
        "v1",
        "ResourceSlice",
        "resourceslices",
        ListParams::default(),
    )
    .await?;
    let mut refused = None;
    for version in RULE_VERSIONS {
        let labelled = ListParams::default().labels(names::CLAIMS_FENCE);
        match all(version, "DeviceTaintRule", "devicetaintrules", labelled).await {
            Ok(rules) => {
                found.extend(rules);
                let found = found
                    .into_iter()
                    .map(|it| serde_json::to_value(it).unwrap_or_default());
                return Ok(found.collect());
            }
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    refused.map_or(Ok(Vec::new()), Err)
}

/// The name of a DeviceClass, and the extended resource that it maps, if it maps one.
fn device_class(object: &Value, name: String) -> Option<(String, String)> {
    let resource = object["spec"]["extendedResourceName"].as_str()?;
    Some((name, resource.to_owned()))
}

/// The GpustowConfig, unless the user may not read it. Without its kind there is none.
async fn config(client: &Client) -> Seen<GpustowConfig> {
    let api: Api<GpustowConfig> = Api::all(client.clone());
    match api.get_opt(gpustow_api::config::NAME).await {
        Ok(found) => found.map_or(Seen::NotThere, Seen::Read),
        Err(_) => Seen::Unreadable,
    }
}

/// The Leases of the extender and of its scheduler, as far as they are there.
async fn leases(client: &Client) -> kube::Result<Vec<Lease>> {
    let api: Api<Lease> = Api::namespaced(client.clone(), names::NAMESPACE);
    let mut leases = Vec::new();
    for name in [names::EXTENDER, names::SCHEDULER] {
        leases.extend(api.get_opt(name).await?);
    }
    Ok(leases)
}

/// The Events about memory that is reserved for pods.
async fn kept_reservations(client: &Client) -> Result<Vec<Event>, Error> {
    let fields = format!("reason={}", names::MEMORY_RESERVED);
    list_by(
        Api::all(client.clone()),
        ListParams::default().fields(&fields),
        "events",
    )
    .await
}

/// When an Event happened last.
#[must_use]
pub fn last_seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref();
    let last = series.and_then(|it| it.last_observed_time.as_ref());
    let last = last.or(event.event_time.as_ref()).map(|it| it.0);
    last.or_else(|| Some(event.last_timestamp.as_ref()?.0))
}

/// The last reservation event of each pod.
fn said_of_reservations(events: Vec<Event>) -> BTreeMap<String, (Timestamp, String)> {
    let mut said: BTreeMap<String, (Timestamp, String)> = BTreeMap::new();
    for event in events {
        let time = last_seen(&event);
        let (Some(time), Some(uid), Some(note)) = (time, event.involved_object.uid, event.message)
        else {
            continue;
        };
        let is_news = said.get(&uid).is_none_or(|(before, _)| *before <= time);
        if is_news && event.reason.as_deref() == Some(names::MEMORY_RESERVED) {
            said.insert(uid, (time, note));
        }
    }
    said
}

/// Some providers write `36+`.
fn minor(text: &str) -> Option<u32> {
    text.trim_end_matches('+').parse().ok()
}

async fn list<K>(api: Api<K>, what: &'static str) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    list_by(api, ListParams::default(), what).await
}

async fn list_by<K>(api: Api<K>, params: ListParams, what: &'static str) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = params.limit(CHUNK);
    let mut all = Vec::new();
    loop {
        let chunk = api
            .list(&params)
            .await
            .map_err(|source| Error::List { what, source })?;
        all.extend(chunk.items);
        match chunk.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}
