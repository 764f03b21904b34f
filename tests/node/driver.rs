//! A driver without a card: its libraries, device nodes that nothing is behind, and the kernel's half, of which
//! containers get memory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use fake_nvml::{self as machine, Limit, Machine};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::kubelet::output;

/// Where its libraries are, below its root.
pub(crate) const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The calls that drivers before 615 lack.
const NEW: [&str; 2] = [
    "nvmlDeviceSetMemoryLimits_v1",
    "nvmlDeviceGetMemoryLimits_v1",
];

/// Puts the driver of such a machine where NVIDIA's toolkit looks for it.
pub(crate) async fn install(root: &Path, library: &Path, mut machine: Machine) -> Result<()> {
    let folder = root.join(LIBRARIES);
    std::fs::create_dir_all(&folder)?;
    for (gpu, number) in machine.gpus.iter_mut().zip(0..) {
        gpu.minor = Some(number);
        gpu.pci_bus_id = format!("00000000:{number:02x}:00.0");
    }
    machine::install(library, &folder, &machine)?;
    name(&folder, library, &machine.driver)?;
    let devices = root.join("dev");
    std::fs::create_dir_all(&devices)?;
    let cards = (0..machine.gpus.len()).map(|card| (format!("nvidia{card}"), 195, card));
    let others = [
        ("nvidiactl", 195, 255),
        ("nvidia-uvm", 511, 0),
        ("nvidia-uvm-tools", 511, 1),
    ];
    let others = others.map(|(name, major, minor)| (name.to_owned(), major, minor));
    // The minor numbers of the first instances of the first card; `apart.sh` gives them their major number.
    let capabilities = Path::new("/proc/driver/nvidia-caps");
    std::fs::create_dir_all(capabilities)?;
    let minors = |gi: u32| {
        let of = 3 + 2 * gi;
        format!(
            "gpu0/gi{gi}/access {of}\ngpu0/gi{gi}/ci0/access {}\n",
            of + 1
        )
    };
    let minors: String = (0..3).map(minors).collect();
    std::fs::write(capabilities.join("mig-minors"), minors)?;
    std::fs::create_dir_all(devices.join("nvidia-caps"))?;
    let instances = (3..9).map(|minor| (format!("nvidia-caps/nvidia-cap{minor}"), 236, minor));
    for (name, major, minor) in cards.chain(others).chain(instances) {
        let mut mknod = Command::new("mknod");
        mknod.args([
            "--mode=666".as_ref(),
            devices.join(name).as_os_str(),
            "c".as_ref(),
        ]);
        mknod.args([major.to_string(), minor.to_string()]);
        output(mknod).await?;
    }
    Ok(())
}

/// The toolkit looks for the driver's libraries by its version.
fn name(folder: &Path, library: &Path, version: &str) -> Result<()> {
    for name in ["libnvidia-ml", "libcuda"] {
        std::fs::copy(library, folder.join(format!("{name}.so.{version}")))?;
    }
    Ok(())
}

/// Puts the library of another version there: of a driver that limits memory, or of an older one.
pub(crate) fn replace(root: &Path, library: &Path, version: &str, limits: bool) -> Result<()> {
    name(&root.join(LIBRARIES), library, version)?;
    let mut bytes = std::fs::read(library)?;
    for name in NEW.iter().filter(|_| !limits) {
        for at in 0..bytes.len() - name.len() {
            if bytes[at..].starts_with(name.as_bytes()) {
                bytes[at + name.len() - 1] = b'0';
            }
        }
    }
    let there = root.join(LIBRARIES).join("libnvidia-ml.so.1");
    std::fs::write(there.with_extension("new"), bytes)?;
    Ok(std::fs::rename(there.with_extension("new"), there)?)
}

/// The kernel's half of the driver grants memory of the first card to its clients. Limits hold for a cgroup and all
/// cgroups below it, whichever program has set them. The socket identifies the client.
pub(crate) struct Kernel(JoinHandle<()>);

impl Kernel {
    /// Listens there for the card of the machine that a file describes.
    pub(crate) fn start(socket: &Path, machine: PathBuf) -> Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let card = Arc::new(Card(Mutex::new(machine)));
        let serve = async move {
            while let Ok((client, _)) = listener.accept().await {
                let card = card.clone();
                tokio::spawn(async move {
                    if let Err(problem) = card.serve(client).await {
                        eprintln!("node: the driver's client: {problem:#}");
                    }
                });
            }
        };
        Ok(Self(tokio::spawn(serve)))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The file that describes its machine, for one at a time.
struct Card(Mutex<PathBuf>);

impl Card {
    /// A line is a number of MiB; memory is given back when the client is gone.
    async fn serve(&self, mut client: UnixStream) -> Result<()> {
        let pid = client.peer_cred()?.pid().context("a client without id")?;
        let pid = u32::try_from(pid)?;
        let own = cgroup(pid)?;
        let (read, mut write) = client.split();
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let answer = match self.take(pid, &own, line.parse()?)? {
                true => "granted\n",
                false => "out of memory\n",
            };
            write.write_all(answer.as_bytes()).await?;
        }
        self.change(|machine, _| {
            for gpu in &mut machine.gpus {
                gpu.processes.retain(|process| process.pid != pid);
            }
            true
        })?;
        Ok(())
    }

    fn take(&self, pid: u32, own: &Path, mib: u64) -> Result<bool> {
        self.change(|machine, limits| {
            let Some(gpu) = machine.gpus.first_mut() else {
                return false;
            };
            let of = |group: &Path| {
                let all = gpu.processes.iter();
                let all = all.filter(|it| cgroup(it.pid).is_ok_and(|it| it.starts_with(group)));
                all.filter_map(|it| it.used_mib).sum::<u64>() + mib
            };
            let mut above = limits
                .iter()
                .filter(|limit| limit.gpu == gpu.uuid && own.starts_with(&limit.cgroup));
            let beyond = above.any(|limit| of(&limit.cgroup) > limit.hard >> 20);
            if beyond || of(Path::new("/")) > gpu.total_mib - gpu.reserved_mib {
                return false;
            }
            match gpu.processes.iter_mut().find(|it| it.pid == pid) {
                Some(it) => it.used_mib = it.used_mib.map(|used| used + mib),
                None => gpu.processes.push(machine::Process {
                    pid,
                    used_mib: Some(mib),
                    ..machine::Process::default()
                }),
            }
            true
        })
    }

    fn change(&self, change: impl FnOnce(&mut Machine, &[Limit]) -> bool) -> Result<bool> {
        let file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut machine = Machine::read(&file)?;
        // As it is: the cgroups have these names where version 2 is mounted.
        let limits = std::fs::read_to_string(file.with_extension("limits.yaml"));
        let limits: Vec<Limit> = serde_yaml::from_str(limits.as_deref().unwrap_or("[]"))?;
        let changed = change(&mut machine, &limits);
        if changed {
            machine.write(&file)?;
        }
        Ok(changed)
    }
}

/// The directory of a process's cgroup where version 2 is mounted at the usual place.
pub(crate) fn cgroup(pid: u32) -> Result<PathBuf> {
    let file = format!("/proc/{pid}/cgroup");
    let text = std::fs::read_to_string(&file).context(file)?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(Path::new("/sys/fs/cgroup").join(path.with_context(|| text.clone())?))
}
