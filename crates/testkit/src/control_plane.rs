//! etcd, kube-apiserver and kube-controller-manager on loopback ports, RBAC on.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::{GpuNode, names};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Node, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::conditions::is_crd_established;
use kube::runtime::wait::await_condition;
use kube::{Client, Config, CustomResourceExt as _};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use crate::binaries::{Binaries, Feature, admission, binaries, minor_of};
use crate::net::free_port;
use crate::process::{Launch, Process};
use crate::wait::eventually;

/// The controllers that our tests need. Node lifecycle is not among them: no kubelet posts leases for our nodes, and it
/// would taint them all.
const CONTROLLERS: &str = "clusterrole-aggregation-controller,cronjob-controller,daemonset-controller,deployment-controller,\
disruption-controller,endpointslice-controller,ephemeral-volume-controller,garbage-collector-controller,\
job-controller,namespace-controller,persistentvolume-binder-controller,\
persistentvolume-protection-controller,persistentvolumeclaim-protection-controller,\
pod-garbage-collector-controller,replicaset-controller,resourceclaim-controller,\
resourcequota-controller,root-ca-certificate-publisher-controller,serviceaccount-controller,\
statefulset-controller,\
validatingadmissionpolicy-status-controller";

/// The programs to run in addition to etcd and kube-apiserver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Run kube-controller-manager too: namespaces end, owners' objects go, Deployments and
    /// PodDisruptionBudgets work.
    pub controllers: bool,
    /// Kubelets run the pods: the pods get their accounts' tokens, and a kubelet has the rights that its node needs.
    pub kubelets: bool,
}

/// A running control plane. Dropping it ends it and removes its files, unless a test is failing.
#[derive(Debug)]
pub struct ControlPlane {
    dir: PathBuf,
    bin: PathBuf,
    minor: u32,
    url: String,
    pub(crate) etcd_url: String,
    admin_kubeconfig: PathBuf,
    admin_config: Config,
    /// etcd.
    pub etcd: Process,
    /// kube-apiserver.
    pub api_server: Process,
    /// kube-controller-manager, if asked for.
    pub controllers: Option<Process>,
    companions: Mutex<Vec<Process>>,
}

impl ControlPlane {
    /// Starts one and waits until it is ready. Builds Kubernetes first if that was not done yet.
    pub async fn start(options: Options) -> Result<ControlPlane> {
        let Binaries { bin, minor } = binaries().await?;
        let dir = run_dir()?;
        let (etcd_port, port) = (free_port()?, free_port()?);
        let etcd_url = format!("http://127.0.0.1:{etcd_port}");
        let url = format!("https://127.0.0.1:{port}");

        // etcd's main package is called `server`.
        let etcd = run(&bin, &dir, "server", etcd_flags(&dir, &etcd_url)?)?;

        let key = rcgen::KeyPair::generate()?;
        let (signing, public) = (dir.join("sa.key"), dir.join("sa.pub"));
        std::fs::write(&signing, key.serialize_pem())?;
        std::fs::write(&public, key.public_key_pem())?;
        // No client has a certificate of this authority. Without one the API server does not publish
        // how it authenticates, which kube-scheduler wants to read.
        let client_ca = dir.join("client-ca.crt");
        let certificate = rcgen::CertificateParams::default().self_signed(&key)?;
        std::fs::write(&client_ca, certificate.pem())?;
        let (tokens, token) = (
            dir.join("tokens.csv"),
            format!("{:032x}", rand::random::<u128>()),
        );
        std::fs::write(&tokens, format!("{token},admin,admin,\"system:masters\"\n"))?;
        let mut flags = vec![
            format!("--etcd-servers={etcd_url}"),
            format!("--cert-dir={}", dir.join("certs").display()),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--secure-port={port}"),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--allow-privileged=true".to_owned(),
            format!("--client-ca-file={}", client_ca.display()),
            format!("--token-auth-file={}", tokens.display()),
            format!("--service-account-issuer={url}/"),
            format!("--service-account-key-file={}", public.display()),
            format!("--service-account-signing-key-file={}", signing.display()),
        ];
        flags.extend(admission(options.kubelets));
        flags.extend(Feature::of_api_server(minor));
        let api_server = run(&bin, &dir, "kube-apiserver", flags)?;

        let admin_kubeconfig = dir.join("admin.kubeconfig");
        write_kubeconfig(&admin_kubeconfig, &url, &ca(&dir), &token)?;
        let admin_config = wait_ready(&api_server, &admin_kubeconfig).await?;

        let controllers = options.controllers.then(|| {
            let flags = controllers_flags(&dir, &admin_kubeconfig, &signing)?;
            run(&bin, &dir, "kube-controller-manager", flags)
        });
        let controllers = controllers.transpose()?;
        Ok(ControlPlane {
            dir,
            bin,
            minor,
            url,
            etcd_url,
            admin_kubeconfig,
            admin_config,
            etcd,
            api_server,
            controllers,
            companions: Mutex::default(),
        })
    }

    /// Address of the API server, `https://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Where the logs and kubeconfigs of this control plane lie.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where kubectl and the other programs of this Kubernetes lie.
    #[must_use]
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// The minor version of this Kubernetes 1.
    #[must_use]
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// That of its kube-scheduler, which can be a minor newer in the tests.
    ///
    /// # Errors
    /// If the program does not run.
    pub async fn scheduler_minor(&self) -> Result<u32> {
        minor_of(&self.bin, "kube-scheduler").await
    }

    /// Has `process` end with this control plane.
    pub fn keep(&self, process: Process) {
        self.companions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(process);
    }

    /// A client that may do anything. Its connections live on the caller's runtime: do not hand it
    /// from one test to another.
    pub fn admin(&self) -> Result<Client> {
        Ok(Client::try_from(self.admin_config.clone())?)
    }

    /// A client that may do anything, by the name of this node's kubelet.
    pub fn kubelet(&self, node: &str) -> Result<Client> {
        let mut config = self.admin_config.clone();
        config.auth_info.impersonate = Some(format!("system:node:{node}"));
        config.auth_info.impersonate_groups = Some(vec!["system:masters".to_owned()]);
        Ok(Client::try_from(config)?)
    }

    /// The administrator's kubeconfig.
    #[must_use]
    pub fn admin_kubeconfig(&self) -> &Path {
        &self.admin_kubeconfig
    }

    /// The administrator's configuration of a client, for the proxy.
    pub(crate) fn admin_config(&self) -> &Config {
        &self.admin_config
    }

    /// A token for a ServiceAccount that exists, good for a day.
    pub async fn token(&self, namespace: &str, service_account: &str) -> Result<String> {
        self.bound_token(namespace, service_account, None).await
    }

    /// A token that may be bound to an object: the API server sees both in every request.
    async fn bound_token(
        &self,
        namespace: &str,
        service_account: &str,
        to: Option<BoundObjectReference>,
    ) -> Result<String> {
        let accounts = Api::<ServiceAccount>::namespaced(self.admin()?, namespace);
        let spec = TokenRequestSpec {
            bound_object_ref: to,
            expiration_seconds: Some(86_400),
            ..Default::default()
        };
        let request = TokenRequest {
            spec,
            ..Default::default()
        };
        let answer = accounts
            .create_token_request(service_account, &PostParams::default(), &request)
            .await
            .with_context(|| format!("token of {namespace}/{service_account}"))?;
        Ok(answer
            .status
            .context("TokenRequest without a status")?
            .token)
    }

    /// A kubeconfig with a ServiceAccount's token; `server` instead of the API server's own address
    /// where given, a proxy's for example.
    pub async fn kubeconfig(
        &self,
        namespace: &str,
        service_account: &str,
        server: Option<&str>,
    ) -> Result<PathBuf> {
        let token = self.token(namespace, service_account).await?;
        self.write_kubeconfig(service_account, server, &token)
    }

    /// A kubeconfig for the agent of a node that exists, with the token that its kubelet would give
    /// it.
    pub async fn agent_kubeconfig(&self, node: &str) -> Result<PathBuf> {
        let object = Api::<Node>::all(self.admin()?).get(node).await?;
        let node = BoundObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: object.metadata.name,
            uid: object.metadata.uid,
        };
        let token = self
            .bound_token(names::NAMESPACE, names::AGENT, Some(node))
            .await?;
        self.write_kubeconfig(names::AGENT, None, &token)
    }

    fn write_kubeconfig(&self, who: &str, server: Option<&str>, token: &str) -> Result<PathBuf> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("{who}-{number}.kubeconfig"));
        write_kubeconfig(&path, server.unwrap_or(&self.url), &ca(&self.dir), token)?;
        Ok(path)
    }

    /// Runs kubectl as administrator and returns its output. The error contains kubectl's complaint.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_with_input(args, "").await
    }

    /// `kubectl apply` of YAML or JSON text.
    pub async fn apply(&self, manifest: &str) -> Result<String> {
        self.kubectl_with_input(&["apply", "-f", "-"], manifest)
            .await
    }

    async fn kubectl_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let mut child = tokio::process::Command::new(self.bin.join("kubectl"))
            .args(args)
            .env("KUBECONFIG", &self.admin_kubeconfig)
            .env("HOME", &self.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut stdin = child.stdin.take().context("kubectl without stdin")?;
        stdin.write_all(input.as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "kubectl {}: {complaint}",
            args.join(" ")
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Installs the minimum for our programs: their namespace, and the GpuNode resource. Returns when the API server
    /// serves the resource.
    pub async fn install_bare(&self) -> Result<()> {
        let client = self.admin()?;
        let apply = PatchParams::apply("testkit").force();
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": names::NAMESPACE},
        });
        Api::<Namespace>::all(client.clone())
            .patch(names::NAMESPACE, &apply, &Patch::Apply(namespace))
            .await?;
        let crds = Api::<CustomResourceDefinition>::all(client);
        let name = GpuNode::crd_name();
        crds.patch(name, &apply, &Patch::Apply(GpuNode::crd()))
            .await?;
        tokio::time::timeout(
            Duration::from_secs(30),
            await_condition(crds, name, is_crd_established()),
        )
        .await
        .with_context(|| format!("{name} is not served"))??;
        Ok(())
    }

    /// Kills the API server: every connection to it ends at once, new ones are refused.
    pub fn stop_api_server(&self) {
        self.api_server.kill9();
    }

    /// Starts the API server again on the same port and waits until it is ready.
    pub async fn start_api_server(&self) -> Result<()> {
        self.api_server.restart()?;
        wait_ready(&self.api_server, &self.admin_kubeconfig).await?;
        Ok(())
    }

    /// A copy of all that is stored now, for [`ControlPlane::restore`]. The API server is away for
    /// as long as that takes.
    pub async fn snapshot(&self) -> Result<PathBuf> {
        let copy = self.dir.join(format!("etcd-{:08x}", rand::random::<u32>()));
        self.replace_data(&self.dir.join("etcd"), &copy).await?;
        Ok(copy)
    }

    /// Restores the data of the snapshot, resourceVersions included, and starts the API server again.
    pub async fn restore(&self, snapshot: &Path) -> Result<()> {
        self.replace_data(snapshot, &self.dir.join("etcd")).await
    }

    async fn replace_data(&self, from: &Path, to: &Path) -> Result<()> {
        self.stop_api_server();
        self.etcd.kill9();
        if to.exists() {
            std::fs::remove_dir_all(to)?;
        }
        let copied = tokio::process::Command::new("cp")
            .arg("-r")
            .args([from, to])
            .status()
            .await?;
        ensure!(copied.success(), "cannot copy {}", from.display());
        self.etcd.restart()?;
        self.start_api_server().await?;
        // Ready, it still answers some requests with status 429.
        let all = ["get", "pods,nodes,gpunodes,namespaces", "--all-namespaces"];
        let served = async || self.kubectl(&all).await;
        let what = "everything is served again";
        eventually(Duration::from_secs(60), what, served).await?;
        Ok(())
    }

    /// Starts a program of this control plane, with its log in its folder.
    pub(crate) fn run(&self, program: &str, args: Vec<String>) -> Result<Process> {
        run(&self.bin, &self.dir, program, args)
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        for process in [
            Some(&self.api_server),
            Some(&self.etcd),
            self.controllers.as_ref(),
        ] {
            process.into_iter().for_each(Process::kill9);
        }
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

fn etcd_flags(dir: &Path, url: &str) -> Result<Vec<String>> {
    Ok(vec![
        format!("--data-dir={}", dir.join("etcd").display()),
        format!("--listen-client-urls={url}"),
        format!("--advertise-client-urls={url}"),
        format!("--listen-peer-urls=http://127.0.0.1:{}", free_port()?),
        "--unsafe-no-fsync=true".to_owned(),
        "--log-level=warn".to_owned(),
    ])
}

fn controllers_flags(dir: &Path, kubeconfig: &Path, signing: &Path) -> Result<Vec<String>> {
    Ok(vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--controllers={CONTROLLERS}"),
        "--use-service-account-credentials=true".to_owned(),
        format!("--service-account-private-key-file={}", signing.display()),
        format!("--root-ca-file={}", ca(dir).display()),
        "--leader-elect=false".to_owned(),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={}", free_port()?),
        format!("--cert-dir={}", dir.join("kcm-certs").display()),
        "--kube-api-qps=200".to_owned(),
        "--kube-api-burst=400".to_owned(),
    ])
}

/// A client with the identity in a kubeconfig, retries off. Its connections live on the caller's
/// runtime.
pub async fn client(kubeconfig: &Path) -> Result<Client> {
    Ok(Client::try_from(config(kubeconfig).await?)?)
}

async fn config(kubeconfig: &Path) -> Result<Config> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(config)
}

async fn wait_ready(api_server: &Process, kubeconfig: &Path) -> Result<Config> {
    let probe = async || {
        // The certificate authority is a file that the API server itself writes.
        let config = config(kubeconfig).await?;
        let request = hyper::Request::get("/readyz").body(Vec::new())?;
        Client::try_from(config.clone())?
            .request_text(request)
            .await?;
        Ok(config)
    };
    api_server.until_ready(probe).await
}

/// Self-signed by kube-apiserver at its first start.
fn ca(dir: &Path) -> PathBuf {
    dir.join("certs/apiserver.crt")
}

fn write_kubeconfig(path: &Path, server: &str, ca: &Path, token: &str) -> Result<()> {
    let mut cluster = json!({ "server": server });
    if server.starts_with("https:") {
        cluster["certificate-authority"] = json!(ca);
    }
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "test", "cluster": cluster }],
        "users": [{ "name": "test", "user": { "token": token } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        "current-context": "test",
    });
    Ok(std::fs::write(path, kubeconfig.to_string())?)
}

fn run(bin: &Path, dir: &Path, program: &str, args: Vec<String>) -> Result<Process> {
    let log = dir.join(format!("{program}-{:08x}.log", rand::random::<u32>()));
    Process::start(Launch {
        program: bin.join(program),
        args,
        env: Vec::new(),
        log,
    })
}

/// A fresh folder next to the binaries, named after this process. Folders of processes that are gone are removed: a
/// static control plane is never dropped, and a failed one is worth a look.
fn run_dir() -> Result<PathBuf> {
    let runs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/run"));
    std::fs::create_dir_all(runs)?;
    for entry in std::fs::read_dir(runs)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(pid).exists() {
            // Another test process may be sweeping too.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    let dir = runs.join(format!("{}-{number}", std::process::id()));
    // One of an earlier process of this number.
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir)?;
    Ok(dir)
}
