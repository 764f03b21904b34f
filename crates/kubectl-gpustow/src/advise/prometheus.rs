//! The past use of containers with whole GPUs, from NVIDIA's dcgm-exporter by way of a Prometheus server: advice before
//! gpustow is installed.
//!
//! A series names the pod that has the GPU, and only the cluster knows the pod's workload and image. A pod that is gone counts
//! if one with the same template is there: one of the same ReplicaSet or Job, whose templates do not change. Of a pod that is
//! there nothing counts from before its creation, since others may have had its name.
//!
//! dcgm-exporter reports the use of a GPU by all programs. So a minute in which a GPU had several pods does not count.
//!
//! Source of names and units: `etc/default-counters.csv` and `internal/pkg/transformation/kubernetes.go` of
//! github.com/NVIDIA/dcgm-exporter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::take;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_advice::History;
use gpustow_api::workload::{ContainerHistory, same_size};
use gpustow_api::{names, quantity};
use gpustow_inspect::Scope;
use gpustow_pack::Mib;
use http::{Request, Uri};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::{Client, ResourceExt as _};
use serde::Deserialize;
use serde_json::json;

use super::{Histories, Key, key};

/// The memory of each GPU that all programs use, and its free memory, in MiB.
const USED: &str = "DCGM_FI_DEV_FB_USED";
const FREE: &str = "DCGM_FI_DEV_FB_FREE";
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
    /// Advise containers with whole GPUs, by the series of NVIDIA's dcgm-exporter in this Prometheus server
    #[arg(long = "prometheus", value_name = "URL")]
    url: Option<Uri>,
    /// File with the bearer token that Prometheus wants
    #[arg(long = "prometheus-token-file", value_name = "FILE", requires = "url")]
    token_file: Option<PathBuf>,
    /// File with the certificate authorities of Prometheus; without it the system's
    #[arg(long = "prometheus-ca-file", value_name = "FILE", requires = "url")]
    ca_file: Option<PathBuf>,
    /// Read only series with these labels, as PromQL has them: cluster="prod",region="eu"
    #[arg(long = "prometheus-labels", value_name = "LABELS", requires = "url")]
    labels: Option<String>,
    /// Number of days to read
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(i64).range(1..=90), requires = "url")]
    days: i64,
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

/// Of the pod that has the GPU. Where Prometheus keeps the labels of the exporter's own pod, they are called `exported`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default)]
struct Labels {
    namespace: String,
    pod: String,
    container: String,
    exported_namespace: String,
    exported_pod: String,
    exported_container: String,
    #[serde(rename = "UUID")]
    uuid: String,
    #[serde(rename = "GPU_I_ID")]
    instance: String,
}

impl Labels {
    fn of_pod(mut self) -> Self {
        if !self.exported_pod.is_empty() {
            self.namespace = take(&mut self.exported_namespace);
            self.pod = take(&mut self.exported_pod);
            self.container = take(&mut self.exported_container);
        }
        self
    }

    fn gpu(&self) -> (String, String) {
        (self.uuid.clone(), self.instance.clone())
    }
}

/// A GPU's UUID, and the number of its MIG instance if there is one.
type Gpu = (String, String);

/// By minute, the used memory and the size of the GPU.
type Minutes = BTreeMap<i64, (Mib, Mib)>;

/// When something was used, how much, and the size of the GPU.
type Sample = (i64, Mib, Mib);

/// The data of Prometheus.
#[derive(Default)]
pub(super) struct Found {
    pub(super) histories: Histories,
    /// Containers that had other pods on their GPUs at that time.
    pub(super) shared: BTreeSet<Key>,
}

/// A server that answers.
pub(super) struct Server<'a> {
    client: Client,
    url: &'a Uri,
    flags: &'a Flags,
}

impl Server<'_> {
    /// The histories of these pods, by container and image.
    pub(super) async fn histories(&self, pods: &[WholeGpus<'_>], scope: &Scope) -> Result<Found> {
        let sizes = self.sizes().await?;
        let pods = Pods::of(pods);
        // The minute that is not over yet counts as it is.
        let end = (Timestamp::now().as_second() / MINUTE + 1) * MINUTE;
        let mut found = Found::default();
        let mut all: BTreeMap<(Key, String), Vec<(History, Mib)>> = BTreeMap::new();
        let mut named = false;
        for window in (0..self.flags.days * 24 * 60 / WINDOW).rev() {
            let last = end - window * WINDOW * MINUTE;
            let first = last - (WINDOW - 1) * MINUTE;
            let series = self.used(scope, first, last).await?;
            named |= series.iter().any(|(labels, _)| !labels.pod.is_empty());
            let mut samples: BTreeMap<(Key, String), Vec<Sample>> = BTreeMap::new();
            for (labels, minutes, shared) in alone(series, &sizes) {
                let Some((key, image, since)) = pods.container(&labels) else {
                    continue;
                };
                if shared {
                    found.shared.insert(key.clone());
                }
                let minutes = minutes.range(since..);
                let minutes = minutes.map(|(at, (used, size))| (*at, *used, *size));
                samples.entry((key, image)).or_default().extend(minutes);
            }
            for (of, mut samples) in samples {
                // Of all pods together, in the order in which an extender would see them.
                samples.sort_unstable();
                let sizes = all.entry(of).or_default();
                samples
                    .iter()
                    .for_each(|(at, used, size)| history(sizes, *size).add(*used, *at));
            }
        }
        ensure!(
            named,
            "{USED} names no pods in Prometheus at {}: run dcgm-exporter with DCGM_EXPORTER_KUBERNETES=true",
            self.url
        );
        for ((key, image), sizes) in all {
            for (history, gpu) in sizes.iter().filter(|(_, gpu)| *gpu > Mib::ZERO) {
                let history = ContainerHistory::new(&key.container, &image, *gpu, history);
                let known = found.histories.entry(key.clone()).or_default();
                known.push(history);
            }
        }
        Ok(found)
    }
}

/// The history of GPUs of this size.
fn history(sizes: &mut Vec<(History, Mib)>, size: Mib) -> &mut History {
    let known = sizes.iter().position(|(_, gpu)| same_size(*gpu, size));
    let at = known.unwrap_or_else(|| {
        sizes.push((History::default(), size));
        sizes.len() - 1
    });
    let (history, gpu) = &mut sizes[at];
    *gpu = (*gpu).max(size);
    history
}

/// The series without the minutes in which others were on the same GPU, and whether there were any.
fn alone(
    series: Vec<(Labels, BTreeMap<i64, Mib>)>,
    sizes: &HashMap<Gpu, Mib>,
) -> Vec<(Labels, Minutes, bool)> {
    let mut pods: HashMap<(Gpu, i64), usize> = HashMap::new();
    for (labels, minutes) in &series {
        for at in minutes.keys() {
            *pods.entry((labels.gpu(), *at)).or_default() += 1;
        }
    }
    let alone = series.into_iter().map(|(labels, minutes)| {
        let all = minutes.len();
        let size = sizes.get(&labels.gpu()).copied().unwrap_or_default();
        let is_alone = |at: i64| pods.get(&(labels.gpu(), at)) == Some(&1);
        let minutes = minutes.into_iter().filter(|(at, _)| is_alone(*at));
        let minutes: Minutes = minutes.map(|(at, used)| (at, (used, size))).collect();
        let shared = minutes.len() < all;
        (labels, minutes, shared)
    });
    alone.collect()
}

impl Flags {
    /// The server, if one is to be asked.
    pub(super) async fn server(&self) -> Result<Option<Server<'_>>> {
        let Some(url) = &self.url else {
            return Ok(None);
        };
        let (client, flags) = (self.client(url).await?, self);
        Ok(Some(Server { client, url, flags }))
    }

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
    /// The text in the braces of a query, with this label too.
    fn matchers(&self, more: Option<(&str, &str)>) -> String {
        let more = more.map(|(name, value)| format!("{name}={}", json!(value)));
        let all = more.into_iter().chain(self.flags.labels.clone());
        all.collect::<Vec<_>>().join(",")
    }

    /// The size of each GPU, those included that are gone.
    async fn sizes(&self) -> Result<HashMap<Gpu, Mib>> {
        let (days, matchers) = (self.flags.days, self.matchers(None));
        let size = format!("({USED}{{{matchers}}} + {FREE}{{{matchers}}})");
        let query =
            format!("max by (UUID, GPU_I_ID) (max_over_time({size}[{days}d:1h]) or {size})");
        let series = self.ask("query", &[("query", &query)]).await?.into_iter();
        let sizes = series.filter_map(|it| Some((it.metric.gpu(), mib(&it.value?.1)?)));
        let sizes: HashMap<Gpu, Mib> = sizes.collect();
        ensure!(
            !sizes.is_empty(),
            "Prometheus at {} has no {USED}{{{matchers}}}: let it scrape NVIDIA's dcgm-exporter",
            self.url
        );
        Ok(sizes)
    }

    /// By pod, container and GPU: the most that was used of the GPU in each minute that ends between these times.
    async fn used(
        &self,
        scope: &Scope,
        first: i64,
        last: i64,
    ) -> Result<Vec<(Labels, BTreeMap<i64, Mib>)>> {
        let used = |matchers| format!("max_over_time({USED}{{{matchers}}}[1m])");
        let used = match &scope.namespace {
            None => used(self.matchers(None)),
            Some(namespace) => {
                let of = |label| used(self.matchers(Some((label, namespace))));
                format!("({} or {})", of("exported_namespace"), of("namespace"))
            }
        };
        let query = format!(
            "max by (namespace, pod, container, exported_namespace, exported_pod, exported_container, UUID, GPU_I_ID) \
             ({used}) > 0"
        );
        let (start, end) = (first.to_string(), last.to_string());
        let words = [
            ("query", &*query),
            ("start", &start),
            ("end", &end),
            ("step", "60"),
        ];
        let series = self.ask("query_range", &words).await?.into_iter();
        let found = series.map(|series| {
            let minutes = series.values.into_iter();
            let minutes = minutes.filter_map(|(at, used)| Some((at as i64, mib(&used)?)));
            let minutes = minutes.filter(|(at, _)| (first..=last).contains(at));
            (series.metric.of_pod(), minutes.collect())
        });
        Ok(found.collect())
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

/// An amount in MiB, rounded up; none if it is no amount or zero.
fn mib(amount: &str) -> Option<Mib> {
    let mib = amount.parse::<f64>().ok()?.ceil();
    (1.0..=MAX_MIB).contains(&mib).then_some(Mib(mib as u64))
}

/// A pod that has whole GPUs.
pub(super) struct WholeGpus<'a> {
    pub(super) object: &'a Pod,
    /// Its containers with GPUs, and how many each has.
    pub(super) containers: Vec<(&'a Container, u64)>,
}

impl<'a> WholeGpus<'a> {
    /// None if it has ended, lacks whole GPUs, or already requests memory as `resource`.
    pub(super) fn of(object: &'a Pod, resource: &str) -> Option<Self> {
        let phase = object.status.as_ref().and_then(|it| it.phase.as_deref());
        let amount = |container: &Container, name: &str| {
            let limits = container.resources.as_ref()?.limits.as_ref()?;
            Some(quantity::rounded_up(limits.get(name)?, 1)).filter(|gpus| *gpus > 0)
        };
        let all = object.spec.iter().flat_map(|spec| &spec.containers);
        let whole = all.filter(|it| amount(it, resource).is_none());
        let whole = whole.filter_map(|it| Some((it, amount(it, names::NVIDIA_GPU)?)));
        let containers: Vec<_> = whole.collect();
        let ended = matches!(phase, Some("Succeeded" | "Failed"));
        (!ended && !containers.is_empty()).then_some(Self { object, containers })
    }
}

/// The pods that are there, by namespace and name, and by the name from which that of others was made.
struct Pods<'a> {
    named: HashMap<(String, String), &'a WholeGpus<'a>>,
    templates: HashMap<(String, String), &'a WholeGpus<'a>>,
}

impl<'a> Pods<'a> {
    fn of(pods: &'a [WholeGpus<'a>]) -> Self {
        let (mut named, mut templates) = (HashMap::new(), HashMap::new());
        for pod in pods {
            let namespace = pod.object.namespace().unwrap_or_default();
            named.insert((namespace.clone(), pod.object.name_any()), pod);
            let owners = pod.object.owner_references().iter();
            let mut owners = owners.filter(|it| it.controller == Some(true));
            let same = owners.any(|it| it.kind == "ReplicaSet" || it.kind == "Job");
            if let Some(prefix) = pod.object.metadata.generate_name.clone()
                && same
            {
                templates.insert((namespace, prefix), pod);
            }
        }
        Self { named, templates }
    }

    /// The container of a series, its image, and the time from which the series describes it.
    fn container(&self, labels: &Labels) -> Option<(Key, String, i64)> {
        let named = |name: &str| (labels.namespace.clone(), name.to_owned());
        let (pod, since) = match self.named.get(&named(&labels.pod)) {
            Some(pod) => {
                let created = pod.object.metadata.creation_timestamp.as_ref();
                (pod, created.map_or(0, |it| it.0.as_second()))
            }
            None => {
                // The API server adds five letters and digits.
                let at = labels.pod.len().checked_sub(5)?;
                let (prefix, random) = labels.pod.split_at_checked(at)?;
                let plain = random.bytes().all(|byte| byte.is_ascii_alphanumeric());
                (self.templates.get(&named(prefix)).filter(|_| plain)?, 0)
            }
        };
        let mut containers = pod.containers.iter();
        let (container, _) = containers.find(|(it, _)| it.name == labels.container)?;
        let image = container.image.clone().unwrap_or_default();
        Some((key(pod.object, &container.name), image, since))
    }
}
