//! The place of a node's programs and files, and its removal: their processes, the containers' processes, mounts,
//! cgroups, files.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Bound on the end of processes that were killed.
const GONE: Duration = Duration::from_secs(20);
/// Where a kubelet links the logs of its containers, independent of its configuration.
const LINKS: &str = "/var/log/containers";
/// Where a kubelet makes the folder for device plugins, and where pods expect its sockets, independent of its
/// configuration.
const KUBELET: &str = "/var/lib/kubelet";

/// A folder and a cgroup of the same name. Nothing of it is left when it is dropped, but for the
/// files where a case has failed.
pub(crate) struct Place {
    dir: PathBuf,
    cgroup: String,
    keep: bool,
    /// One node at a time: a second one waits.
    _lock: Option<File>,
}

impl Place {
    /// Waits for its turn, and clears the remains of earlier runs.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let lock = File::create(folder.with_extension("lock"))?;
        lock.lock()?;
        for entry in fs::read_dir(folder)? {
            drop(Place::at(entry?.path())?);
        }
        let dir = folder.join(format!("{:06x}", rand::random_range(0..0x100_0000_u32)));
        fs::create_dir(&dir)?;
        let mut place = Place::at(dir)?;
        place._lock = Some(lock);
        place.bind_kubelet()?;
        enable_controllers();
        for cgroup in place.cgroups()? {
            fs::create_dir(&cgroup).with_context(|| cgroup.display().to_string())?;
        }
        Ok(place)
    }

    fn at(dir: PathBuf) -> Result<Self> {
        let name = dir.file_name().context("a folder without a name")?;
        let cgroup = format!("gpustow-{}", name.display());
        Ok(Place {
            dir,
            cgroup,
            keep: false,
            _lock: None,
        })
    }

    /// Shows the kubelet's folder where pods expect it.
    fn bind_kubelet(&self) -> Result<()> {
        let folder = self.dir.join("kubelet");
        fs::create_dir(&folder)?;
        fs::create_dir_all(KUBELET)?;
        let mut mount = Command::new("mount");
        let status = mount.arg("--bind").arg(folder).arg(KUBELET).status()?;
        ensure!(status.success(), "mount --bind at {KUBELET}: {status}");
        Ok(())
    }

    /// The folder.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The cgroup below which pods are.
    pub(crate) fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// Leaves the files for a look, and shows the ends of the logs.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
        for name in ["containerd", "kubelet", "agent"] {
            let log = self.dir.join(name).with_extension("log");
            let text = fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            let tail = &lines[lines.len().saturating_sub(25)..];
            eprintln!("--- {} ends:\n{}", log.display(), tail.join("\n"));
        }
    }

    fn clear(&self) -> Result<()> {
        let end = Instant::now() + GONE;
        loop {
            let pids = self.processes()?;
            let cgroups = remove_cgroups(&self.cgroups()?);
            if pids.is_empty() && cgroups.is_ok() {
                break;
            }
            ensure!(
                Instant::now() < end,
                "processes {pids:?} do not end, or {cgroups:?}"
            );
            for pid in pids {
                // It may have ended by itself.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // A mount that is visible at two places disappears from both at once.
        while let Some(mount) = self.mounts()?.pop() {
            let status = Command::new("umount").arg("--lazy").arg(&mount).status()?;
            ensure!(status.success(), "umount {}: {status}", mount.display());
        }
        // A shim that was killed leaves its socket, and its address in the folder of its container.
        let tasks = "containerd/state/io.containerd.runtime.v2.task/k8s.io";
        for task in fs::read_dir(self.dir.join(tasks)).into_iter().flatten() {
            let address = fs::read_to_string(task?.path().join("address")).unwrap_or_default();
            let _ = fs::remove_file(address.trim_start_matches("unix://"));
        }
        for link in fs::read_dir(LINKS).into_iter().flatten() {
            let link = link?.path();
            if fs::read_link(&link).is_ok_and(|to| to.starts_with(&self.dir)) {
                fs::remove_file(link)?;
            }
        }
        let _ = fs::remove_dir(KUBELET);
        if !self.keep {
            fs::remove_dir_all(&self.dir)?;
        }
        Ok(())
    }

    /// The processes in the cgroup, and all processes started with a path of the folder: containerd, its shims, the
    /// kubelet, the agent.
    fn processes(&self) -> Result<Vec<i32>> {
        let mut found = Vec::new();
        for cgroup in self.cgroups()? {
            members(&cgroup, &mut found);
        }
        let folder = self.dir.display().to_string();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
                continue;
            };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&folder) {
                found.push(pid);
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    fn cgroups(&self) -> Result<Vec<PathBuf>> {
        let hierarchies = hierarchies()?.into_iter();
        Ok(hierarchies.map(|root| root.join(&self.cgroup)).collect())
    }

    /// The mounts below the folder or of a part of it, inner mounts after outer mounts.
    fn mounts(&self) -> Result<Vec<PathBuf>> {
        let mounts = mounts()?.into_iter().map(|(at, _)| at);
        let ours = |at: &PathBuf| at.starts_with(&self.dir) || at.starts_with(KUBELET);
        Ok(mounts.filter(ours).collect())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(problem) = self.clear() {
            eprintln!("node: {} is not cleared: {problem:#}", self.dir.display());
        }
    }
}

/// Every mount: where, and the kind of file system.
fn mounts() -> Result<Vec<(PathBuf, String)>> {
    let text = fs::read_to_string("/proc/self/mounts")?;
    let one = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next()?.replace("\\040", " ");
        Some((PathBuf::from(at), fields.next()?.to_owned()))
    };
    Ok(text.lines().filter_map(one).collect())
}

/// Where cgroups are: one hierarchy per controller, or one for all.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let cgroups = mounts()?.into_iter();
    let mut found: Vec<_> = cgroups
        .filter(|(_, kind)| kind.starts_with("cgroup"))
        .map(|(at, _)| at)
        .collect();
    found.sort_unstable();
    found.dedup();
    ensure!(
        !found.is_empty(),
        "no cgroups: mount them below /sys/fs/cgroup"
    );
    Ok(found)
}

/// A hierarchy with all controllers must pass them on to our cgroup. The kubelet names a controller that cannot be
/// passed on.
fn enable_controllers() {
    let root = Path::new("/sys/fs/cgroup");
    let there = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    for controller in there.split_whitespace() {
        let _ = fs::write(
            root.join("cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
}

fn members(cgroup: &Path, found: &mut Vec<i32>) {
    let procs = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    found.extend(procs.lines().filter_map(|pid| pid.parse::<i32>().ok()));
    for child in children(cgroup) {
        members(&child, found);
    }
}

fn children(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

fn remove_cgroups(cgroups: &[PathBuf]) -> Result<()> {
    for cgroup in cgroups.iter().filter(|cgroup| cgroup.exists()) {
        remove_cgroups(&children(cgroup))?;
        fs::remove_dir(cgroup).with_context(|| cgroup.display().to_string())?;
    }
    Ok(())
}
