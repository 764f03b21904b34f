//! A cluster of one node as an administrator finds it: only gpustow's images are there. Commands run in a copy of the
//! repository's manifests.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_testkit::{ControlPlane, Options, Scheduler, SchedulerConfig};
use kube::Client;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

use crate::driver;
use crate::kubelet::{Kubelet, Toolkit, image, output};
use crate::node::machine;
use crate::place::Place;

/// The Service of the API server, whose address `apart.sh` sets up.
const SERVICE: &str = "10.0.0.1:443";
/// Where NVIDIA's GPU Operator keeps a driver, and the agent finds it.
pub(crate) const DRIVER: &str = "/run/nvidia/driver";
/// The builds of gpustow's images, the one that the repository's manifests name first.
pub(crate) const TAGS: [&str; 2] = ["v0.1.0", "v0.1.1"];
/// The number of cards.
pub(crate) const CARDS: u32 = 4;
/// Bound on a command that ends soon when all is well.
const LIMIT: Duration = Duration::from_secs(240);

pub(crate) struct Site {
    pub(crate) cluster: ControlPlane,
    pub(crate) client: Client,
    pub(crate) kubelet: Kubelet,
    /// The administrator's checkout.
    pub(crate) checkout: PathBuf,
    /// The program of its pods.
    pub(crate) workload: PathBuf,
    /// Where `images.sh` puts its archives.
    images: PathBuf,
    path: String,
    _scheduler: Scheduler,
}

/// Runs a case on such a cluster whose node has four cards. If it fails, the ends of the logs are shown and the
/// files are left.
pub(crate) async fn on_site(body: impl AsyncFnOnce(&Site) -> Result<()>) -> Result<()> {
    on(DRIVER, body).await
}

/// As above, with the cards and the driver of this machine.
pub(crate) async fn on_own_cards(body: impl AsyncFnOnce(&Site) -> Result<()>) -> Result<()> {
    on("/", body).await
}

async fn on(driver: &str, body: impl AsyncFnOnce(&Site) -> Result<()>) -> Result<()> {
    let workload = image().await?;
    let mut place = Place::take(&workload.with_file_name("run"))?;
    let all = async {
        let site = Site::start(&place, &workload, Path::new(driver)).await?;
        body(&site).await
    };
    let done = all.await;
    if done.is_err() {
        place.keep();
    }
    done
}

impl Site {
    async fn start(place: &Place, workload: &Path, root: &Path) -> Result<Site> {
        let cluster = ControlPlane::start(Options {
            controllers: true,
            kubelets: true,
        })
        .await?;
        let to = cluster.url().trim_start_matches("https://").to_owned();
        let service = TcpListener::bind(SERVICE).await;
        let service = service.context("no address for the Service: run it by make test-node")?;
        tokio::spawn(forward(service, to));
        let default =
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration";
        let config = SchedulerConfig::parse(default)?;
        let scheduler = Scheduler::start(&cluster, config, cluster.admin_kubeconfig()).await?;

        let target = workload.parent().and_then(Path::parent);
        let target = target.context("no target folder")?;
        let images = target.join("images/test");
        // Of an earlier case.
        if Path::new(DRIVER).exists() {
            std::fs::remove_dir_all(DRIVER)?;
        }
        if root == Path::new(DRIVER) {
            let library = images.join("libnvidia-ml.so.1");
            driver::install(root, &library, machine((0..CARDS).map(uuid))).await?;
        }
        let scheduler_image = images.join("kube-scheduler.tar");
        let examples = workload.with_file_name("examples.tar");
        let archives: [&Path; 3] = [&scheduler_image, workload, &examples];
        let labels = "nvidia.com/gpu.present=true";
        let bin = target.join("toolkit/bin");
        let toolkit = Toolkit {
            hook: bin.join("nvidia-cdi-hook"),
            bin,
            driver: root.to_owned(),
        };
        let kubelet = Kubelet::start(
            &cluster,
            place,
            "gpu-node",
            labels,
            &archives,
            Some(toolkit),
        )
        .await?;

        let checkout = place.dir().join("checkout");
        std::fs::create_dir(&checkout)?;
        for folder in ["manifests", "scheduler-config"] {
            let from = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
            let mut copy = Command::new("cp");
            copy.arg("-rL").arg(from).arg(&checkout);
            output(copy).await?;
        }
        let helm = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/helm/build.sh");
        let helm = output(Command::new(helm)).await?;
        let helm = Path::new(helm.trim_end()).parent().context("no folder")?;
        let path = [helm, cluster.bin()].map(|it| it.display().to_string());
        let path = format!("{}:{}", path.join(":"), std::env::var("PATH")?);
        let site = Site {
            client: cluster.admin()?,
            cluster,
            kubelet,
            checkout,
            workload: workload.with_file_name("workload"),
            images,
            path,
            _scheduler: scheduler,
        };
        site.imports(TAGS[0]).await?;
        Ok(site)
    }

    /// Brings a build of gpustow's images onto the node.
    pub(crate) async fn imports(&self, tag: &str) -> Result<()> {
        for image in ["gpustow", "gpustow-agent", "kubectl-gpustow"] {
            let archive = self.images.join(tag).join(image).with_extension("tar");
            self.kubelet.import(&archive).await?;
        }
        Ok(())
    }

    /// Types a script, as an administrator in his checkout.
    pub(crate) async fn types(&self, script: &str) -> Result<String> {
        let command = Command::new("bash")
            .args(["-euo", "pipefail", "-c", script])
            .current_dir(&self.checkout)
            .env("PATH", &self.path)
            .env("HOME", &self.checkout)
            .env("KUBECONFIG", self.cluster.admin_kubeconfig())
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timeout(LIMIT, command).await;
        let Ok(output) = output else {
            let mut all = Command::new(self.cluster.bin().join("kubectl"));
            all.args(["get", "pods,events", "--all-namespaces"]);
            all.env("KUBECONFIG", self.cluster.admin_kubeconfig());
            let all = crate::kubelet::output(all).await?;
            bail!("not done after {LIMIT:?}: {script}\n{all}");
        };
        let output = output?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{script}\n{complaint}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Replaces a text in files of the checkout, in each of which it must be.
    pub(crate) fn edits(&self, files: &[&str], from: &str, to: &str) -> Result<()> {
        for file in files {
            let file = self.checkout.join(file);
            let text = std::fs::read_to_string(&file)?;
            ensure!(text.contains(from), "no {from} in {}", file.display());
            std::fs::write(&file, text.replace(from, to))?;
        }
        Ok(())
    }
}

/// The UUID of a card, by the number of its device node.
pub(crate) fn uuid(card: u32) -> String {
    format!("GPU-00000000-0000-4000-8000-{card:012}")
}

/// Passes connections on, as long as the runtime is there.
async fn forward(from: TcpListener, to: String) {
    while let Ok((mut client, _)) = from.accept().await {
        let to = to.clone();
        tokio::spawn(async move {
            if let Ok(mut server) = TcpStream::connect(to).await {
                // Either may hang up at any time.
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            }
        });
    }
}

/// The first commands of a page of the documentation after a text.
pub(crate) fn block(page: &str, after: &str) -> Result<String> {
    let text = read(page)?;
    let rest = text
        .split_once(after)
        .with_context(|| format!("{page}: no {after:?}"))?
        .1;
    let block = rest
        .split("```sh\n")
        .nth(1)
        .and_then(|it| it.split("```").next());
    let block = block.with_context(|| format!("{page}: no commands after {after:?}"))?;
    let lines = block.lines().map(str::trim);
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// A command in a sentence of a page, by its beginning.
pub(crate) fn inline(page: &str, begin: &str) -> Result<String> {
    let text = read(page)?;
    let mut codes = text.split('`').skip(1).step_by(2);
    let code = codes.find(|code| code.starts_with(begin));
    Ok(code
        .with_context(|| format!("{page}: no `{begin}…`"))?
        .to_owned())
}

fn read(page: &str) -> Result<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    Ok(std::fs::read_to_string(page)?)
}
