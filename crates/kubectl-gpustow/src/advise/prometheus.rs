//! What containers used, as a Prometheus server remembers it: the same histories as those of the extender, from the
//! series that agents export.
//!
//! A series names a pod, and only the cluster knows the pod's workload and image. A pod that is gone counts if one with
//! the same template is there: one of the same ReplicaSet or Job, whose templates do not change. Of a pod that is there
//! nothing counts from before its creation, since others may have had its name.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_advice::History;
use gpustow_api::owner::{self, Owner};
use gpustow_api::workload::{ContainerHistory, MAX_HISTORIES, TargetRef, name_of};
use gpustow_api::{GpuWorkload, GpuWorkloadSpec};
use gpustow_inspect::{Cluster, PodInfo, Scope};
use gpustow_pack::Mib;
use http::{Request, Uri};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::{Client, ResourceExt as _};
use serde::Deserialize;
use serde_json::json;

/// What containers use of each GPU.
const USED: &str = "gpustow_pod_gpu_memory_used_bytes";
/// The size of each GPU.
const TOTAL: &str = "gpustow_gpu_memory_total_bytes";
const MINUTE: i64 = 60;
/// Minutes of one answer: 10,000 containers have 30 MB then.
const WINDOW: i64 = 120;
/// Bytes of one answer at most.
const MAX_ANSWER: usize = 64 << 20;
/// More than a GPU has, in MiB, is none of its sizes.
const MAX_MIB: f64 = 16_777_216.0;
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Where Prometheus is, and what it is asked for.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Flags {
    /// Read the history from this Prometheus server, not from GpuWorkloads
    #[arg(long = "prometheus", value_name = "URL")]
    url: Option<Uri>,
    /// File with the bearer token that Prometheus wants
    #[arg(long = "prometheus-token-file", value_name = "FILE", requires = "url")]
    token_file: Option<PathBuf>,
    /// File with the certificate authorities of Prometheus; without it the system's
    #[arg(long = "prometheus-ca-file", value_name = "FILE", requires = "url")]
    ca_file: Option<PathBuf>,
    /// Read only series with these labels, as cluster=prod
    #[arg(
        long = "prometheus-labels",
        value_name = "LABELS",
        value_delimiter = ',',
        requires = "url"
    )]
    labels: Vec<Label>,
    /// Number of days to read
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(i64).range(1..=90), requires = "url")]
    days: i64,
    /// Save what Prometheus knows as GpuWorkloads, so that gpustow.dev/gpu-mem: auto follows it
    #[arg(long, requires = "url")]
    pub(super) save: bool,
}

#[derive(Clone, Debug)]
struct Label {
    name: String,
    value: String,
}

impl FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').ok_or("write LABEL=VALUE")?;
        let may = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        match name.bytes().all(may) && !name.starts_with(|it: char| it.is_ascii_digit()) {
            true if !name.is_empty() => Ok(Self {
                name: name.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err(format!("{name:?} is no name of a label")),
        }
    }
}

#[derive(Deserialize)]
struct Answer {
    data: Option<Data>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Data {
    result: Vec<Series>,
}

#[derive(Deserialize)]
struct Series {
    metric: Labels,
    value: Option<(f64, String)>,
    #[serde(default)]
    values: Vec<(f64, String)>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Labels {
    namespace: String,
    pod: String,
    container: String,
    gpu_uuid: String,
}

/// A container with one image.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    namespace: String,
    workload: Owner,
    container: String,
    image: String,
}

/// A server that answers.
struct Server<'a> {
    client: Client,
    url: &'a Uri,
    flags: &'a Flags,
}

/// The histories of all workloads that have pods of this scope, if Prometheus is to be asked.
pub(super) async fn workloads(
    flags: &Flags,
    cluster: &Cluster,
    scope: &Scope,
) -> Result<Option<Vec<GpuWorkload>>> {
    let Some(url) = &flags.url else {
        return Ok(None);
    };
    let client = flags.client(url).await?;
    let server = Server { client, url, flags };
    let sizes = server.sizes().await?;
    let pods = Pods::of(cluster, scope);
    // The minute that is not over yet counts as it is.
    let end = (cluster.wall.as_second() / MINUTE + 1) * MINUTE;
    let mut histories: BTreeMap<Key, (History, Mib)> = BTreeMap::new();
    let windows = flags.days * 24 * 60 / WINDOW;
    for window in (0..windows).rev() {
        let last = end - window * WINDOW * MINUTE;
        let first = last - (WINDOW - 1) * MINUTE;
        for (labels, peaks) in server.peaks(scope, first, last, &sizes).await? {
            let Some((key, since)) = pods.key(labels) else {
                continue;
            };
            let (history, gpu) = histories.entry(key).or_default();
            for (at, (peak, size)) in peaks.range(since..) {
                history.add(*peak, *at);
                *gpu = (*size).max(*gpu);
            }
        }
    }
    histories.retain(|_, (history, gpu)| history.samples() > 0 && *gpu > Mib::ZERO);
    if histories.is_empty() {
        server.check_labels().await?;
    }
    Ok(Some(objects(histories)))
}

/// An object for each workload, as the extender writes it.
fn objects(histories: BTreeMap<Key, (History, Mib)>) -> Vec<GpuWorkload> {
    let mut all: BTreeMap<(String, Owner), Vec<ContainerHistory>> = BTreeMap::new();
    for (key, (history, gpu)) in histories {
        let container = ContainerHistory::new(&key.container, &key.image, gpu, &history);
        let containers = all.entry((key.namespace, key.workload)).or_default();
        containers.push(container);
    }
    let object = |((namespace, owner), containers): ((String, Owner), _)| {
        let mut object = GpuWorkload::new(&name_of(&owner), GpuWorkloadSpec::default());
        object.metadata.namespace = Some(namespace);
        object.spec.containers = newest(containers);
        object.spec.target_ref = TargetRef {
            kind: owner.kind,
            name: owner.name,
        };
        object
    };
    all.into_iter().map(object).collect()
}

/// No more of these than an object may have.
fn newest(mut containers: Vec<ContainerHistory>) -> Vec<ContainerHistory> {
    containers.sort_by_key(|it| std::cmp::Reverse(it.history.last));
    containers.truncate(MAX_HISTORIES);
    containers
}

/// The object that is stored, with those histories of another that have seen more. None if it knows all that.
pub(super) fn merged(stored: Option<GpuWorkload>, known: &GpuWorkload) -> Option<GpuWorkload> {
    let Some(mut stored) = stored else {
        return Some(known.clone());
    };
    let mut changed = false;
    for container in &known.spec.containers {
        let containers = &mut stored.spec.containers;
        let is_it =
            |it: &&mut ContainerHistory| it.name == container.name && it.image == container.image;
        match containers.iter_mut().find(is_it) {
            Some(it) if it.history.samples >= container.history.samples => continue,
            Some(it) => it.clone_from(container),
            None => containers.push(container.clone()),
        }
        changed = true;
    }
    stored.spec.containers = newest(stored.spec.containers);
    changed.then_some(stored)
}

impl Flags {
    async fn client(&self, url: &Uri) -> Result<Client> {
        let scheme = url.scheme_str().unwrap_or_default();
        ensure!(
            ["http", "https"].contains(&scheme) && url.query().is_none(),
            "{url} is no address of Prometheus: write one like http://localhost:9090"
        );
        let user = url.authority().is_some_and(|it| it.as_str().contains('@'));
        ensure!(
            !user,
            "the address of Prometheus has a user: use --prometheus-token-file instead"
        );
        let read = |file: &PathBuf| {
            let text = std::fs::read_to_string(file);
            text.with_context(|| format!("cannot read {}", file.display()))
        };
        let token = self.token_file.as_ref().map(read).transpose()?;
        self.ca_file.as_ref().map(read).transpose()?;
        // The client for API servers can do all that is needed here.
        let kubeconfig: Kubeconfig = serde_json::from_value(json!({
            "clusters": [{ "name": "", "cluster": { "server": url.to_string(), "certificate-authority": self.ca_file } }],
            "users": [{ "name": "", "user": { "token": token.as_deref().map(str::trim) } }],
            "contexts": [{ "name": "", "context": { "cluster": "", "user": "" } }],
            "current-context": "",
        }))?;
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
        let mut config = config.context("cannot use the files of --prometheus")?;
        (config.read_timeout, config.reset_reader_on_write) = (Some(TIMEOUT), true);
        config.default_retry = false;
        Client::try_from(config).context("cannot use the files of --prometheus")
    }
}

impl Server<'_> {
    /// What is in the braces of a query; a namespace too, if one is given.
    fn matchers(&self, namespace: Option<&str>, more: &str) -> String {
        let labels = self.flags.labels.iter();
        let labels = labels.map(|it| (it.name.as_str(), it.value.as_str()));
        let all = labels.chain(namespace.map(|it| ("namespace", it)));
        let each = all.map(|(name, value)| format!("{name}={},", json!(value)));
        each.collect::<String>() + more
    }

    /// The bytes of each GPU, those included that are gone.
    async fn sizes(&self) -> Result<HashMap<String, Mib>> {
        let (days, matchers) = (self.flags.days, self.matchers(None, ""));
        let query = format!(
            "max by (gpu_uuid) (max_over_time({TOTAL}{{{matchers}}}[{days}d:1h]) or {TOTAL}{{{matchers}}})"
        );
        let series = self.ask("query", &[("query", &query)]).await?.into_iter();
        let sizes = series.filter_map(|it| Some((it.metric.gpu_uuid, mib(&it.value?.1)?)));
        let sizes: HashMap<String, Mib> = sizes.collect();
        ensure!(
            !sizes.is_empty(),
            "Prometheus at {} has no {TOTAL}{{{matchers}}}: let it scrape the agents, job gpustow-agent \
             (docs/metrics.md#scraping)",
            self.url
        );
        Ok(sizes)
    }

    /// By container: the most that it used of one GPU in each minute that ends between these times, and that GPU's size.
    async fn peaks(
        &self,
        scope: &Scope,
        first: i64,
        last: i64,
        sizes: &HashMap<String, Mib>,
    ) -> Result<Vec<(Labels, BTreeMap<i64, (Mib, Mib)>)>> {
        let matchers = self.matchers(scope.namespace.as_deref(), "");
        let query = format!(
            "max by (namespace, pod, container, gpu_uuid) (max_over_time({USED}{{{matchers}}}[1m])) > 0"
        );
        let (start, end) = (first.to_string(), last.to_string());
        let words = [
            ("query", &*query),
            ("start", &start),
            ("end", &end),
            ("step", "60"),
        ];
        let mut found = BTreeMap::new();
        for series in self.ask("query_range", &words).await? {
            let it = series.metric;
            let size = sizes.get(&it.gpu_uuid).copied().unwrap_or_default();
            let name = (it.namespace.clone(), it.pod.clone(), it.container.clone());
            let (_, minutes) = found.entry(name).or_insert_with(|| (it, BTreeMap::new()));
            for (at, bytes) in series.values {
                let at = at as i64;
                let Some(peak) = mib(&bytes).filter(|_| (first..=last).contains(&at)) else {
                    continue;
                };
                let most: &mut (Mib, Mib) = minutes.entry(at).or_default();
                *most = (peak, size).max(*most);
            }
        }
        Ok(found.into_values().collect())
    }

    /// Nothing was found: that may be because Prometheus gave the labels of agents other names.
    async fn check_labels(&self) -> Result<()> {
        let matchers = self.matchers(None, "exported_pod!=\"\"");
        let query = format!("count(last_over_time({USED}{{{matchers}}}[1h]))");
        let renamed = self.ask("query", &[("query", &query)]).await?;
        ensure!(
            renamed.is_empty(),
            "{USED} has the label exported_pod in Prometheus at {}: scrape the agents with honor_labels: true \
             (docs/metrics.md#scraping)",
            self.url
        );
        Ok(())
    }

    async fn ask(&self, path: &str, words: &[(&str, &str)]) -> Result<Vec<Series>> {
        let url = self.url;
        let mut query = String::new();
        for (name, value) in words {
            let value: String = value.bytes().map(|byte| format!("%{byte:02X}")).collect();
            query += &format!("{name}={value}&");
        }
        let request = Request::get(format!("/api/v1/{path}?{query}")).body(Body::empty())?;
        let lost = || format!("cannot reach Prometheus at {url}: check the address");
        let answer = self.client.send(request).await.with_context(lost)?;
        let status = answer.status();
        if [401, 403].contains(&status.as_u16()) {
            bail!(
                "Prometheus at {url} answers {status}: use --prometheus-token-file with a token that may query it"
            );
        }
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let body = match body {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => bail!(
                "Prometheus at {url} answers more than {} MiB at once: read one namespace with -n",
                MAX_ANSWER >> 20
            ),
            Err(error) => return Err(anyhow::Error::from_boxed(error)).with_context(lost),
        };
        match serde_json::from_slice(&body) {
            Ok(Answer {
                error: Some(error), ..
            }) => bail!("Prometheus at {url} answers {status}: {error}"),
            Ok(Answer {
                data: Some(data), ..
            }) => Ok(data.result),
            Ok(_) | Err(_) => bail!(
                "{url} answers {status} to /api/v1/{path}, and not as Prometheus does: check the address"
            ),
        }
    }
}

/// An amount in bytes, rounded up to whole MiB; none if it is no amount or zero.
fn mib(bytes: &str) -> Option<Mib> {
    let mib = (bytes.parse::<f64>().ok()? / f64::from(1 << 20)).ceil();
    (1.0..=MAX_MIB).contains(&mib).then_some(Mib(mib as u64))
}

/// The pods that are there, by namespace and name, and by the name from which that of others was made.
struct Pods<'a> {
    named: HashMap<(&'a str, &'a str), &'a PodInfo>,
    templates: HashMap<(&'a str, &'a str), &'a PodInfo>,
}

impl<'a> Pods<'a> {
    fn of(cluster: &'a Cluster, scope: &Scope) -> Self {
        let (mut named, mut templates) = (HashMap::new(), HashMap::new());
        for pod in cluster.pods_in(scope) {
            let namespace = &*pod.facts.namespace;
            named.insert((namespace, &*pod.facts.name), pod);
            let owners = pod.object.owner_references().iter();
            let mut owners = owners.filter(|it| it.controller == Some(true));
            let same = owners.any(|it| it.kind == "ReplicaSet" || it.kind == "Job");
            if let Some(prefix) = pod.object.metadata.generate_name.as_deref()
                && same
            {
                templates.insert((namespace, prefix), pod);
            }
        }
        Self { named, templates }
    }

    /// The container of a series, and since when what it says is of that.
    fn key(&self, labels: Labels) -> Option<(Key, i64)> {
        let namespace = labels.namespace.as_str();
        let (pod, since) = match self.named.get(&(namespace, &*labels.pod)) {
            Some(pod) => {
                let created = pod.object.metadata.creation_timestamp.as_ref();
                (pod, created.map_or(0, |it| it.0.as_second()))
            }
            None => {
                // The API server adds five letters and digits.
                let (prefix, random) = labels
                    .pod
                    .split_at_checked(labels.pod.len().checked_sub(5)?)?;
                let plain = random.bytes().all(|byte| byte.is_ascii_alphanumeric());
                let pod = self.templates.get(&(namespace, prefix));
                (pod.filter(|_| plain)?, 0)
            }
        };
        // An agent that does not know the container of a process yet says of which pod it is.
        let name = match &*pod.facts.containers {
            [only] if labels.container.is_empty() => only,
            all => all.iter().find(|it| ***it == *labels.container)?,
        };
        let spec = pod.object.spec.as_ref()?;
        let init = spec.init_containers.iter().flatten();
        let mut all = init.chain(&spec.containers);
        let container = all.find(|it| *it.name == **name)?;
        let key = Key {
            workload: owner::workload(&pod.object),
            namespace: labels.namespace,
            image: container.image.clone().unwrap_or_default(),
            container: name.to_string(),
        };
        Some((key, since))
    }
}
