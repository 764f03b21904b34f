//! containerd and a kubelet on a control plane: a node that runs containers. It knows nothing of GPUs.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::{ControlPlane, Launch, Process, built, eventually, free_port};
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use serde_json::{Value, json};

use crate::place::Place;

/// Bound on waits that end at once when all is well.
pub(crate) const SOON: Duration = Duration::from_secs(60);
/// A program that prints its visible GPUs; see `image.sh`.
pub(crate) const IMAGE: &str = "gpustow.test/workload:1";
/// The node's address, which `apart.sh` sets up.
const ADDRESS: &str = "192.0.2.1";

/// NVIDIA's container toolkit as the runtime of all containers, in CDI mode.
pub(crate) struct Toolkit {
    /// Where its programs are.
    pub(crate) bin: PathBuf,
    /// The root of the driver's files and device nodes.
    pub(crate) driver: PathBuf,
    /// The toolkit's hook, or a script that wraps it.
    pub(crate) hook: PathBuf,
}

impl Toolkit {
    /// Writes its configuration; the variable by which it finds that.
    fn configure(&self, dir: &Path) -> Result<(String, String)> {
        let folder = dir.join("etc/nvidia-container-runtime");
        std::fs::create_dir_all(&folder)?;
        let hook = json!(self.hook);
        let config = format!(
            r#"[nvidia-container-cli]
root = {}
[nvidia-container-runtime]
debug = {}
mode = "jit-cdi"
runtimes = ["runc"]
[nvidia-container-runtime-hook]
path = {hook}
[nvidia-ctk]
path = {hook}
"#,
            json!(self.driver),
            json!(dir.join("toolkit.log")),
        );
        std::fs::write(folder.join("config.toml"), config)?;
        let home = dir.join("etc").display().to_string();
        Ok(("XDG_CONFIG_HOME".to_owned(), home))
    }
}

/// A node of a control plane.
pub(crate) struct Kubelet {
    /// The kubelet itself.
    pub(crate) process: Process,
    /// Where it serves.
    pub(crate) url: String,
    _containerd: Process,
    socket: PathBuf,
}

impl Kubelet {
    /// Starts both, and returns when the node is registered and the images, OCI archives, can be run.
    pub(crate) async fn start(
        cluster: &ControlPlane,
        place: &Place,
        name: &str,
        labels: &str,
        images: &[&Path],
        toolkit: Option<Toolkit>,
    ) -> Result<Self> {
        let dir = place.dir();
        let run = |program: &Path, log: &str, args: Vec<String>, env: Vec<(String, String)>| {
            Process::start(Launch {
                program: program.to_owned(),
                args,
                env,
                log: dir.join(log),
            })
        };

        let socket = dir.join("containerd.sock");
        let config = dir.join("containerd.toml");
        std::fs::write(&config, containerd_config(dir, &socket, toolkit.as_ref()))?;
        std::fs::create_dir(dir.join("cni"))?;
        std::fs::write(
            dir.join("cni/pods.conflist"),
            network_config(dir).to_string(),
        )?;
        let env = match &toolkit {
            Some(toolkit) => vec![toolkit.configure(dir)?],
            None => Vec::new(),
        };
        let args = vec!["--config".to_owned(), config.display().to_string()];
        let containerd = run(Path::new("containerd"), "containerd.log", args, env)?;
        for image in images {
            import(&socket, image).await?;
        }

        let port = free_port()?;
        let config = dir.join("kubelet.json");
        let settings = kubelet_config(place, &socket, port);
        std::fs::write(&config, settings.to_string())?;
        let kubeconfig = kubelet_kubeconfig(cluster, name, dir)?;
        let args = vec![
            format!("--config={}", config.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--root-dir={}", dir.join("kubelet").display()),
            format!("--cert-dir={}", dir.join("kubelet-certs").display()),
            format!("--hostname-override={name}"),
            format!("--node-ip={ADDRESS}"),
            format!("--node-labels={labels}"),
            "--v=2".to_owned(),
        ];
        let process = run(
            &cluster.bin().join("kubelet"),
            "kubelet.log",
            args,
            Vec::new(),
        )?;
        let nodes = Api::<Node>::all(cluster.admin()?);
        eventually(SOON, "the kubelet registers its node", async || {
            Ok(nodes.get(name).await?)
        })
        .await?;
        Ok(Kubelet {
            process,
            url: format!("https://{ADDRESS}:{port}"),
            _containerd: containerd,
            socket,
        })
    }

    /// Where its files lie.
    pub(crate) fn dir(&self) -> &Path {
        self.socket.parent().unwrap_or(Path::new("/"))
    }

    /// Takes an image, an OCI archive.
    pub(crate) async fn import(&self, image: &Path) -> Result<()> {
        import(&self.socket, image).await
    }

    /// The first process of a container that runs, on the host.
    pub(crate) async fn pid(&self, container: &str) -> Result<u32> {
        let mut ctr = ctr(&self.socket);
        ctr.args(["tasks", "ls"]);
        let tasks = output(ctr).await?;
        let task = tasks.lines().find(|line| line.starts_with(container));
        let task = task.with_context(|| format!("no task {container} in\n{tasks}"))?;
        let mut fields = task.split_whitespace().skip(1);
        let (pid, state) = (fields.next().context(tasks.clone())?, fields.next());
        ensure!(state == Some("RUNNING"), "{task}");
        Ok(pid.parse()?)
    }
}

/// The image of every container, made if need be.
pub(crate) async fn image() -> Result<PathBuf> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/node/image.sh");
    output(tokio::process::Command::new(script))
        .await
        .map(|path| PathBuf::from(path.trim_end()))
}

pub(crate) async fn output(mut command: tokio::process::Command) -> Result<String> {
    let output = command.stderr(Stdio::piped()).kill_on_drop(true).output();
    let output = output.await?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{:?}: {complaint}",
        command.as_std()
    );
    Ok(String::from_utf8(output.stdout)?)
}

async fn import(socket: &Path, image: &Path) -> Result<()> {
    built(image, "make test-node makes it")?;
    eventually(SOON, "containerd takes the image", async || {
        let mut ctr = ctr(socket);
        ctr.args(["images", "import", "--snapshotter=native"]);
        ctr.arg(image);
        output(ctr).await
    })
    .await
    .map(drop)
}

fn ctr(socket: &Path) -> tokio::process::Command {
    let mut ctr = tokio::process::Command::new("ctr");
    ctr.arg("--address").arg(socket).args(["-n", "k8s.io"]);
    ctr
}

fn containerd_config(dir: &Path, socket: &Path, toolkit: Option<&Toolkit>) -> String {
    let path = |name: &str| json!(dir.join(name)).to_string();
    let runtime = match toolkit {
        Some(toolkit) => toolkit.bin.join("nvidia-container-runtime"),
        None => PathBuf::from("runc"),
    };
    format!(
        r#"version = 2
root = {}
state = {}
[grpc]
address = {}
[plugins."io.containerd.internal.v1.opt"]
path = {}
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
disable_apparmor = true
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = {}
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = {}
"#,
        path("containerd/root"),
        path("containerd/state"),
        json!(socket),
        path("containerd/opt"),
        path("cni"),
        json!(runtime),
    )
}

/// A bridge, through which pods reach the node and each other.
fn network_config(dir: &Path) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "dataDir": dir.join("addresses"),
                "ranges": [[{ "subnet": "10.0.1.0/24" }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    })
}

/// Everything that a kubelet would keep elsewhere is in the place; nothing makes it evict.
fn kubelet_config(place: &Place, socket: &Path, port: u16) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", place.cgroup()),
        "failCgroupV1": false,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "address": ADDRESS,
        "port": port,
        "healthzPort": 0,
        "readOnlyPort": 0,
        "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
        "authorization": { "mode": "AlwaysAllow" },
        "evictionHard": {
            "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "podLogsDir": place.dir().join("logs"),
        "volumePluginDir": place.dir().join("plugins"),
        // Ten seconds by default: how soon the capacity can be allocated.
        "nodeStatusUpdateFrequency": "1s",
    })
}

/// The administrator's, who acts as the kubelet of this node.
fn kubelet_kubeconfig(cluster: &ControlPlane, node: &str, dir: &Path) -> Result<PathBuf> {
    let admin = std::fs::read_to_string(cluster.admin_kubeconfig())?;
    let mut kubeconfig: Value = serde_json::from_str(&admin)?;
    let user = &mut kubeconfig["users"][0]["user"];
    user["as"] = json!(format!("system:node:{node}"));
    user["as-groups"] = json!(["system:nodes"]);
    let path = dir.join("kubelet.kubeconfig");
    std::fs::write(&path, kubeconfig.to_string())?;
    Ok(path)
}
