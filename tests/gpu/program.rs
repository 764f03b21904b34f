//! The CUDA program of `gpu.c`, in the cgroup of a pod's container or outside of every pod.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Compiles it into this folder.
pub(crate) fn build(folder: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/gpu.c");
    let program = folder.join("gpu");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-O1", "-o"]).args([&program, &source]);
    let status = command.arg("-ldl").status().context("run the C compiler")?;
    ensure!(status.success(), "{} does not compile", source.display());
    Ok(program)
}

/// The id of every container: each is the only one of its pod.
pub(crate) fn container_id() -> String {
    "ab".repeat(32)
}

/// A program that holds memory of the GPU. Dropped, it ends.
pub(crate) struct Program {
    process: Child,
    /// The container's and the pod's.
    cgroups: Vec<PathBuf>,
}

impl Program {
    /// Starts it and waits until it has its memory; in the cgroup of this pod's container if one is given.
    pub(crate) fn start(program: &Path, uuid: &str, mib: u64, pod: Option<&str>) -> Result<Self> {
        let mut command = Command::new(program);
        let mut cgroups = Vec::new();
        if let Some(uid) = pod {
            let root = Path::new("/sys/fs/cgroup");
            let memory = root.join("memory");
            let root = if memory.is_dir() {
                memory
            } else {
                root.to_owned()
            };
            let of_pod = root.join("kubepods").join(format!("pod{uid}"));
            let of_container = of_pod.join(container_id());
            let what = || format!("make {}; this needs root", of_container.display());
            fs::create_dir_all(&of_container).with_context(what)?;
            let procs = of_container.join("cgroup.procs");
            cgroups = vec![of_container, of_pod];
            command = Command::new("sh");
            command.args(["-c", r#"echo $$ >"$0" && exec "$@""#]);
            command.args([procs.as_path(), program]);
        }
        command.args(["hold", &mib.to_string()]);
        command.env("CUDA_VISIBLE_DEVICES", uuid);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        let mut process = command.spawn()?;
        let output = process.stdout.take().context("no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if !line.starts_with("holds") {
            let mut complaint = String::new();
            let errors = process.stderr.take().context("no errors")?;
            errors.take(4096).read_to_string(&mut complaint)?;
            anyhow::bail!("{mib} MiB: {complaint}");
        }
        Ok(Self { process, cgroups })
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        Ok(self.process.wait()?)
    }

    /// Whether it still runs.
    pub(crate) fn runs(&self) -> Result<bool> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        Ok(!stat.contains(") Z"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        for cgroup in &self.cgroups {
            let _ = fs::remove_dir(cgroup);
        }
    }
}
