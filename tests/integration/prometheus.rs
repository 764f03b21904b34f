//! The history in a real Prometheus, and the advice that `kubectl gpustow advise --prometheus` has from it.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use gpustow_api::names;
use gpustow_testkit::{Case, eventually};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kubectl_gpustow::{Args, Screen, run};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::auto::pod;
use crate::observability::{prometheus, promtool};
use crate::support::{SOON, repository, rig};

/// A Prometheus of its own.
pub(crate) struct Prometheus {
    pub(crate) address: String,
    _child: Child,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    /// One that scrapes an extender and an agent.
    pub(crate) async fn start(extender: &str, agent: &str) -> Result<Self> {
        let scrape = |job: &str, target: &str| json!({ "job_name": job, "static_configs": [{ "targets": [target] }] });
        let extender = extender.trim_start_matches("http://").trim_end_matches('/');
        let settings = json!({
            "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
            "rule_files": [repository("manifests/alerts/gpustow.rules.yaml")],
            "scrape_configs": [scrape("gpustow-extender", extender), scrape("gpustow-agent", agent)],
        });
        Self::run(tempfile::tempdir()?, &settings).await
    }

    /// One that scrapes nothing and remembers these samples, written as OpenMetrics.
    async fn with(samples: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("samples");
        std::fs::write(&file, samples)?;
        let [file, data] = [file, folder.path().join("data")].map(|it| it.display().to_string());
        let words = ["tsdb", "create-blocks-from", "openmetrics", &file, &data];
        promtool(&words, "").await?;
        Self::run(folder, &json!({})).await
    }

    async fn run(folder: tempfile::TempDir, settings: &Value) -> Result<Self> {
        let config = folder.path().join("prometheus.yml");
        std::fs::write(&config, settings.to_string())?;
        let data = folder.path().join("data");
        let mut child = Command::new(prometheus().await?.join("prometheus"))
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", data.display()))
            .arg("--web.listen-address=127.0.0.1:0")
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut lines = BufReader::new(child.stderr.take().context("no log")?).lines();
        let address = loop {
            let line = lines
                .next_line()
                .await?
                .context("Prometheus ended at once")?;
            if line.contains("Listening on")
                && let Some((_, address)) = line.split_once("address=")
            {
                break address.to_owned();
            }
        };
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self {
            address,
            _child: child,
            _folder: folder,
        })
    }

    /// The answer to one expression; an error if there is a complaint.
    pub(crate) async fn ask(&self, expr: &str) -> Result<Vec<Value>> {
        let query: String = expr.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let mut stream = TcpStream::connect(&self.address).await?;
        let request = format!("GET /api/v1/query?query={query} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        let body: Value = serde_json::from_str(body).with_context(|| answer.clone())?;
        ensure!(body["status"] == "success", "{expr}: {body}");
        for complaint in ["warnings", "infos"] {
            ensure!(body[complaint].is_null(), "{expr}: {body}");
        }
        let result = body["data"]["result"].as_array();
        Ok(result.context("no result")?.clone())
    }

    /// The one row of `advise` in the case's namespace, from this Prometheus.
    async fn advice(&self, case: &Case) -> Result<Value> {
        let cluster = rig().await?.cluster;
        let kubeconfig = cluster.admin_kubeconfig().display().to_string();
        let url = format!("http://{}", self.address);
        let all = [
            "kubectl-gpustow",
            "--kubeconfig",
            &kubeconfig,
            "-n",
            &case.namespace,
        ];
        let all = all
            .into_iter()
            .chain(["advise", "-o", "json", "--prometheus", &url]);
        let mut out = Vec::new();
        run(Args::try_parse_from(all)?, &mut out, Screen::default()).await?;
        let list: Value = serde_json::from_slice(&out)?;
        let [row] = &list["items"].as_array().context("no list")?[..] else {
            anyhow::bail!("{list}");
        };
        Ok(row.clone())
    }
}

/// A day of a pod that is gone, in dcgm-exporter's metrics: 9000 MiB in one minute of fifty, 5000 in the others, on a
/// GPU of 80,000.
fn day(namespace: &str, pod: &str) -> String {
    let mut text = String::new();
    let end = Timestamp::now().as_second() / 60 * 60;
    let labels = format!(
        "UUID=\"GPU-n\",modelName=\"NVIDIA H100 80GB HBM3\",namespace=\"{namespace}\",pod=\"{pod}\",container=\"main\""
    );
    for (name, mib) in [
        ("DCGM_FI_DEV_FB_FREE", [71_000, 75_000]),
        ("DCGM_FI_DEV_FB_USED", [9000, 5000]),
    ] {
        text += &format!("# TYPE {name} gauge\n");
        for minute in 0..1440 {
            let mib = mib[usize::from(minute % 50 > 0)];
            let at = end - 60 * (1439 - minute);
            text += &format!("{name}{{{labels}}} {mib} {at}\n");
        }
    }
    text + "# EOF\n"
}

#[tokio::test]
async fn containers_with_whole_gpus_are_advised_by_the_day_that_prometheus_remembers() -> Result<()>
{
    let rig = rig().await?;
    let case = Case::new(rig.cluster, "remembers").await?;
    let mut there = pod(&case, "ReplicaSet", "web-5f9474c99c", "web:1");
    there.metadata.generate_name = Some("web-5f9474c99c-".to_owned());
    there.metadata.annotations = None;
    if let Some(spec) = &mut there.spec {
        let amount = json!({ "limits": { names::NVIDIA_GPU: "1" } });
        spec.containers[0].resources = serde_json::from_value(amount)?;
    }
    case.pods().create(&PostParams::default(), &there).await?;
    let samples = day(&case.namespace, "web-5f9474c99c-x2x2x");
    let prometheus = Prometheus::with(&samples).await?;

    let row = eventually(SOON, "Prometheus is ready", async || {
        prometheus.advice(&case).await
    })
    .await?;
    let mib = |key: &str| row[key].as_u64().unwrap_or_default() >> 20;
    assert_eq!(row["workload"], "deployment/web");
    assert_eq!((mib("requestedBytes"), mib("peakBytes")), (80_000, 9000));
    assert!((5000..5200).contains(&mib("advisedBytes")), "{row:#}");
    assert_eq!((&row["samples"], mib("limitBytes")), (&json!(1440), 9450));
    assert_eq!(mib("freesBytes"), 80_000 - mib("advisedBytes"));
    assert!(row["patch"].is_string(), "{row:#}");
    assert_eq!(row["notes"], json!([]));
    case.end().await
}
