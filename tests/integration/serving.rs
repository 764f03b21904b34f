//! Metrics over TLS for clients that the API server lets in, the page served from a pod, and the
//! manifests for both, on a real API server.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use axum::http::{Request, header};
use clap::Parser as _;
use fake_nvml::Machine;
use gpustow_api::names;
use gpustow_testkit::{
    Case, ControlPlane, Extender, ExtenderOptions, Options, Scheduler, SchedulerConfig, eventually,
    wait_bound,
};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, PostParams};
use kube::client::Body;
use kube::{Client, Config};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::sync::OnceCell;

use crate::agent_token::{agent_client, policy_holds};
use crate::fault_rig::turn;
use crate::install::apply;
use crate::observability::operator_crds;
use crate::support::{ACCOUNT, SOON, SYSTEM, gpustow, repository};

/// A name that the certificates bear.
const NAME: &str = "127.0.0.1";

/// A certificate authority with one certificate, in two files.
struct Certificate {
    root: Vec<u8>,
}

impl Certificate {
    fn write(folder: &Path) -> Result<Self> {
        let root_key = rcgen::KeyPair::generate()?;
        let mut root = rcgen::CertificateParams::default();
        root.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer_of = rcgen::Issuer::from_params(&root, &root_key);
        let key = rcgen::KeyPair::generate()?;
        let leaf = rcgen::CertificateParams::new([NAME.to_owned()])?;
        let leaf = leaf.signed_by(&key, &issuer_of)?;
        let root = root.self_signed(&root_key)?.der().to_vec();
        // The certificate first: between the two, the pair makes no sense.
        std::fs::write(folder.join("tls.crt"), leaf.pem())?;
        std::fs::write(folder.join("tls.key"), key.serialize_pem())?;
        Ok(Self { root })
    }

    /// Status of the answer and its text, from a server that must have this certificate.
    async fn get(
        &self,
        url: &str,
        token: Option<&str>,
        host: Option<&str>,
    ) -> Result<(u16, String)> {
        let mut config = Config::new(url.parse()?);
        config.root_cert = Some(vec![self.root.clone()]);
        config.default_retry = false;
        let path = url.splitn(4, '/').nth(3).unwrap_or_default();
        let mut request = Request::get(format!("/{path}"));
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(host) = host {
            request = request.header(header::HOST, host);
        }
        config.cluster_url = url.strip_suffix(path).unwrap_or(url).parse()?;
        let answer = Client::try_from(config)?
            .send(request.body(Body::empty())?)
            .await?;
        let status = answer.status().as_u16();
        let text = answer.into_body().collect_bytes().await?;
        Ok((status, String::from_utf8_lossy(&text).into_owned()))
    }
}

/// A cluster with every manifest of monitoring and page.
async fn cluster() -> Result<&'static ControlPlane> {
    static MONITORED: OnceCell<ControlPlane> = OnceCell::const_new();
    MONITORED
        .get_or_try_init(async || {
            let cluster = ControlPlane::start(Options::default()).await?;
            let strict = [
                "apply",
                "--server-side",
                "--warnings-as-errors",
                "--validate=strict",
            ];
            let crds = operator_crds().await?.display().to_string();
            cluster
                .kubectl(&[&strict[..], &["-f", &crds]].concat())
                .await?;
            let monitors =
                "podmonitors.monitoring.coreos.com,prometheusrules.monitoring.coreos.com";
            let served = async || cluster.kubectl(&["get", "-A", monitors]).await;
            eventually(SOON, "the operator's resources are served", served).await?;
            apply(&cluster, "manifests/overlays/monitored", &strict[1..]).await?;
            let page = repository("manifests/page").display().to_string();
            cluster
                .kubectl(&[&strict[..], &["-k", &page]].concat())
                .await?;
            Ok(cluster)
        })
        .await
}

/// Tokens of two accounts in the manifests, with and without the right to read metrics.
struct Tokens {
    reader: String,
    stranger: String,
}

impl Tokens {
    async fn new(cluster: &ControlPlane) -> Result<Self> {
        Ok(Self {
            reader: cluster.token(SYSTEM, "gpustow-metrics-reader").await?,
            stranger: cluster.token(SYSTEM, "gpustow-page").await?,
        })
    }
}

async fn keeps_metrics_from_strangers(url: &str, folder: &Path, tokens: &Tokens) -> Result<()> {
    let certificate = Certificate::write(folder)?;
    for open in ["healthz", "readyz"] {
        let url = format!("{url}/{open}");
        eventually(SOON, &url, async || {
            let (status, text) = certificate.get(&url, None, None).await?;
            ensure!(status == 200, "{status} {text}");
            Ok(())
        })
        .await?;
    }
    let url = format!("{url}/metrics");
    let get = async |token: Option<&str>| certificate.get(&url, token, None).await;
    let (status, text) = get(None).await?;
    ensure!(
        status == 401 && !text.contains("gpustow_"),
        "{status} {text}"
    );
    let (status, text) = get(Some("made.up.token")).await?;
    ensure!(
        status == 401 && !text.contains("gpustow_"),
        "{status} {text}"
    );
    let (status, text) = get(Some(&tokens.stranger)).await?;
    ensure!(
        status == 403 && !text.contains("gpustow_"),
        "{status} {text}"
    );
    for _ in 0..2 {
        let (status, text) = get(Some(&tokens.reader)).await?;
        ensure!(
            status == 200 && text.contains("build_info{"),
            "{status} {text}"
        );
    }
    // The next connection has the new certificate; one that trusts the old one alone has none.
    let renewed = Certificate::write(folder)?;
    let (status, _) = renewed.get(&url, Some(&tokens.reader), None).await?;
    ensure!(status == 200, "{status}");
    ensure!(
        get(Some(&tokens.reader)).await.is_err(),
        "the old certificate"
    );
    // A pair that makes no sense changes nothing.
    std::fs::write(folder.join("tls.crt"), "none")?;
    let (status, _) = renewed.get(&url, Some(&tokens.reader), None).await?;
    ensure!(status == 200, "{status}");
    Ok(())
}

fn tls_args(folder: &Path) -> Vec<String> {
    vec![
        format!("--metrics-tls={}", folder.display()),
        "--metrics-auth".to_owned(),
    ]
}

#[tokio::test]
async fn the_extender_shows_metrics_to_clients_that_the_api_server_lets_in() -> Result<()> {
    let cluster = cluster().await?;
    let folder = tempfile::tempdir()?;
    Certificate::write(folder.path())?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let options = ExtenderOptions {
        args: tls_args(folder.path()),
        ..ExtenderOptions::default()
    };
    let mut extender = Extender::launch(cluster, gpustow(), &kubeconfig, options)?;
    extender.health_url = extender.health_url.replace("http:", "https:");
    extender.wait_ready().await?;
    let tokens = Tokens::new(cluster).await?;
    keeps_metrics_from_strangers(&extender.health_url, folder.path(), &tokens).await
}

#[tokio::test]
async fn the_agent_shows_metrics_to_clients_that_the_api_server_lets_in() -> Result<()> {
    let cluster = cluster().await?;
    policy_holds(cluster).await?;
    let case = Case::new(cluster, "agent-tls").await?;
    let name = case.node_name("n");
    Api::<Node>::all(case.client.clone())
        .create(&PostParams::default(), &case.node("n", &[]).node)
        .await?;
    let folder = tempfile::tempdir()?;
    Certificate::write(folder.path())?;
    fake_nvml::install(&fake_nvml::library()?, folder.path(), &Machine::default())?;
    let mut words = vec![
        "gpustow-agent".to_owned(),
        format!("--node-name={name}"),
        format!("--nvml-path={}", folder.path().display()),
    ];
    words.extend(tls_args(folder.path()));
    let args = gpustow_agent::Args::try_parse_from(words)?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("https://{}", listener.local_addr()?);
    let client = agent_client(cluster, &name).await?;
    let agent = gpustow_agent::serve(args, client, listener, std::future::pending());
    let agent = tokio::spawn(agent);
    let tokens = Tokens::new(cluster).await?;
    keeps_metrics_from_strangers(&url, folder.path(), &tokens).await?;
    agent.abort();
    case.end().await
}

#[test]
fn a_token_is_not_taken_in_the_clear() {
    let words = ["gpustow", "--metrics-auth"];
    assert!(gpustow::Args::try_parse_from(words).is_err());
    let words = ["gpustow-agent", "--node-name=n", "--metrics-auth"];
    assert!(gpustow_agent::Args::try_parse_from(words).is_err());
}

/// A command's output, as the command prints it.
struct Printed(tokio::io::DuplexStream);

impl std::io::Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let all = futures::FutureExt::now_or_never(self.0.write_all(bytes));
        all.unwrap_or(Err(std::io::ErrorKind::WouldBlock.into()))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn the_page_is_shown_to_clients_that_the_api_server_lets_in() -> Result<()> {
    let cluster = cluster().await?;
    let folder = tempfile::tempdir()?;
    let certificate = Certificate::write(folder.path())?;
    let kubeconfig = cluster.kubeconfig(SYSTEM, "gpustow-page", None).await?;
    let words = [
        "kubectl-gpustow",
        &format!("--kubeconfig={}", kubeconfig.display()),
        "ui",
        "--in-cluster",
        &format!("--tls={}", folder.path().display()),
        &format!("--host={NAME}"),
    ];
    let args = kubectl_gpustow::Args::try_parse_from(words)?;
    let (send, printed) = tokio::io::duplex(4096);
    let page = tokio::spawn(async move {
        let mut out = Printed(send);
        kubectl_gpustow::run(args, &mut out, kubectl_gpustow::Screen::default()).await
    });
    let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(printed));
    let Some(url) = lines.next_line().await? else {
        bail!("no address: {:?}", page.await?);
    };

    let case = Case::new(cluster, "page").await?;
    case.pod("shown").gpu_mem(1024).create(&case.client).await?;
    let role = "--clusterrole=gpustow-page-reader";
    let user = format!("--serviceaccount={}:reader", case.namespace);
    for words in [
        &["serviceaccount", "reader", "-n", &case.namespace][..],
        &["clusterrolebinding", "page-reader", role, &user],
    ] {
        let words: Vec<_> = ["create"]
            .into_iter()
            .chain(words.iter().copied())
            .collect();
        cluster.kubectl(&words).await?;
    }
    let allowed = cluster.token(&case.namespace, "reader").await?;
    let stranger = cluster.token(SYSTEM, "gpustow-metrics-reader").await?;
    let why = format!("{url}why?pod={}/shown", case.namespace);

    let (status, text) = certificate.get(&url, None, None).await?;
    ensure!(status == 200 && text.contains("Sign in"), "{status} {text}");
    for data in [&format!("{url}events"), &why] {
        for (token, expected) in [(None, 401), (Some("made.up"), 401), (Some(&*stranger), 403)] {
            let (status, text) = certificate.get(data, token, None).await?;
            ensure!(status == expected, "{data} {token:?}: {status} {text}");
            ensure!(!text.contains("shown"), "{text}");
        }
    }
    eventually(SOON, "the page tells of the pod", async || {
        let (status, text) = certificate.get(&why, Some(&allowed), None).await?;
        ensure!(status == 200 && text.contains("shown"), "{status} {text}");
        Ok(())
    })
    .await?;
    for host in ["evil.example", "evil.example:443", "localhost"] {
        let (status, text) = certificate.get(&why, Some(&allowed), Some(host)).await?;
        ensure!(
            status == 400 && !text.contains("shown"),
            "{host}: {status} {text}"
        );
    }
    // It may read, and ask who a user is, and no more.
    let as_page = format!(
        "--as=system:serviceaccount:{}:gpustow-page",
        names::NAMESPACE
    );
    for (verb, what, expected) in [
        ("list", "pods", "yes"),
        ("create", "subjectaccessreviews.authorization.k8s.io", "yes"),
        ("patch", "pods", "no"),
        ("create", "pods/binding", "no"),
        ("get", "secrets", "no"),
    ] {
        let asked = cluster
            .kubectl(&["auth", "can-i", verb, what, "-A", &as_page])
            .await;
        let answer = asked.unwrap_or_else(|_| "no".to_owned());
        ensure!(answer.trim() == expected, "{verb} {what}: {answer}");
    }
    page.abort();
    cluster
        .kubectl(&["delete", "clusterrolebinding", "page-reader"])
        .await
        .context("the test's own binding")?;
    case.end().await
}

#[test]
fn the_page_serves_others_over_tls_alone() {
    for words in [
        &["ui", "--in-cluster"][..],
        &["ui", "--in-cluster", "--host=x"],
        &["ui", "--host=x"],
        &["ui", "--tls=a"],
    ] {
        let words = ["kubectl-gpustow"].into_iter().chain(words.iter().copied());
        assert!(kubectl_gpustow::Args::try_parse_from(words).is_err());
    }
}

#[tokio::test]
async fn kube_scheduler_shows_its_certificate_where_one_is_wanted() -> Result<()> {
    let turn = turn().await?;
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name).display().to_string();
    let authority = rcgen::KeyPair::generate()?;
    let mut root = rcgen::CertificateParams::default();
    root.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let issuer = rcgen::Issuer::from_params(&root, &authority);
    for (who, name) in [("tls", NAME), ("client", "kube-scheduler")] {
        let key = rcgen::KeyPair::generate()?;
        let leaf = rcgen::CertificateParams::new([name.to_owned()])?.signed_by(&key, &issuer)?;
        std::fs::write(file(&format!("{who}.crt")), leaf.pem())?;
        std::fs::write(file(&format!("{who}.key")), key.serialize_pem())?;
    }
    std::fs::write(file("ca.crt"), root.self_signed(&authority)?.pem())?;

    let kubeconfig = turn.cluster.kubeconfig(SYSTEM, ACCOUNT, None).await?;
    let options = ExtenderOptions {
        args: vec![format!("--tls={}", folder.path().display())],
        ..ExtenderOptions::default()
    };
    let mut extender = Extender::start(turn.cluster, gpustow(), &kubeconfig, options).await?;
    extender.url = extender.url.replace("http:", "https:");
    let stranger = extender.call("bind", "{}").await;
    ensure!(stranger.is_err(), "{stranger:?}");

    let config = SchedulerConfig::load(&repository("scheduler-config/default-scheduler.yaml"))?
        .with_extender(&extender.url)?
        .with("extenders.0.enableHTTPS", true)?
        .with("extenders.0.tlsConfig.caFile", file("ca.crt"))?
        .with("extenders.0.tlsConfig.certFile", file("client.crt"))?
        .with("extenders.0.tlsConfig.keyFile", file("client.key"))?;
    let _scheduler = Scheduler::start(turn.cluster, config, &kubeconfig).await?;
    let case = Case::new(turn.cluster, "shown").await?;
    case.node("n", &[8192]).create(&case.client).await?;
    let pod = case.pod("p").gpu_mem(8192).create(&case.client).await?;
    wait_bound(&case.client, &pod, SOON).await?;
    case.end().await
}
