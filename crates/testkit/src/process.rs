//! Child processes that certainly die with the test process, each with its output in a file.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::wait::eventually;

/// Bound on starting anything, on a machine that is busy with other tests.
const START: Duration = Duration::from_secs(60);

/// The program to run.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Path of the program, or its name on `PATH`.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment set on top of this process's own.
    pub env: Vec<(String, String)>,
    /// Where both output streams go, appended.
    pub log: PathBuf,
}

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    launch: Launch,
    child: Mutex<Child>,
}

impl Process {
    /// Starts it.
    pub fn start(launch: Launch) -> Result<Process> {
        let child = Mutex::new(spawn(&launch)?);
        Ok(Process { launch, child })
    }

    /// Kills it if it runs, and starts it again with the same arguments and the same log.
    pub fn restart(&self) -> Result<()> {
        self.kill9();
        *self.child() = spawn(&self.launch)?;
        Ok(())
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child().id()
    }

    /// Where its output goes.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.launch.log
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill9(&self) {
        let mut child = self.child();
        // An error means that it is gone already.
        if child.kill().is_ok() {
            let _ = child.wait();
        }
    }

    /// SIGTERM.
    pub fn term(&self) -> Result<()> {
        self.signal(Signal::SIGTERM)
    }

    /// SIGSTOP: frozen until [`Process::cont`].
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// SIGCONT.
    pub fn cont(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let mut child = self.child();
        // Only a child that was not reaped yet still owns its process id.
        ensure!(child.try_wait()?.is_none(), "{} has exited", self.name());
        kill(Pid::from_raw(child.id().try_into()?), signal)?;
        Ok(())
    }

    /// Its exit status, if it has exited.
    pub fn exited(&self) -> Result<Option<ExitStatus>> {
        Ok(self.child().try_wait()?)
    }

    /// Waits until it exits by itself.
    pub async fn wait_exit(&self, deadline: Duration) -> Result<ExitStatus> {
        let what = format!("{} exits", self.name());
        eventually(deadline, &what, async || self.exited()?.context("running")).await
    }

    /// Waits for a line of its log that has `text` in it, and returns the line.
    pub async fn wait_for_log_line(&self, text: &str, deadline: Duration) -> Result<String> {
        let what = format!("{} logs {text:?}", self.name());
        eventually(deadline, &what, async || {
            let log = self.read_log()?;
            let line = log.lines().find(|line| line.contains(text));
            line.map(str::to_owned)
                .ok_or_else(|| self.with_tail("no such line"))
        })
        .await
    }

    /// CPU that it has used so far, in seconds.
    pub fn cpu(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id()))?;
        // The name, in parentheses, may have blanks.
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let mut ticks = 0.0;
        for field in fields.split_whitespace().skip(11).take(2) {
            ticks += field.parse::<f64>()?;
        }
        // USER_HZ is 100 wherever Linux runs.
        Ok(ticks / 100.0)
    }

    /// Its resident memory in MiB.
    pub fn resident(&self) -> Result<f64> {
        self.memory("VmRSS:")
    }

    /// The most that it has been, in MiB.
    pub fn most_resident(&self) -> Result<f64> {
        self.memory("VmHWM:")
    }

    /// How many descriptors it has open.
    pub fn open_files(&self) -> Result<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.id()))?.count())
    }

    fn memory(&self, key: &str) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let line = line.with_context(|| format!("no {key} in its status"))?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024.0)
    }

    /// All that it has written so far.
    pub fn read_log(&self) -> Result<String> {
        let bytes = std::fs::read(self.log())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Asks `probe` until it succeeds or the process ends; the error has the end of its log.
    pub(crate) async fn until_ready<T>(&self, probe: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let what = format!("{} is ready", self.name());
        let ready = tokio::select! {
            ready = eventually(START, &what, probe) => ready,
            _ = self.wait_exit(START) => Err(anyhow!("{what}: not any more")),
        };
        ready.map_err(|problem| self.with_tail(&format!("{problem:#}")))
    }

    fn with_tail(&self, problem: &str) -> anyhow::Error {
        let log = self.read_log().unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(15)..].join("\n");
        let state = match self.exited() {
            Ok(Some(status)) => format!("exited with {status}"),
            _ => "running".to_owned(),
        };
        anyhow!(
            "{problem}; {} is {state}; {} ends:\n{tail}",
            self.name(),
            self.log().display()
        )
    }

    fn name(&self) -> String {
        self.launch
            .program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill9();
    }
}

type Job = (Command, mpsc::SyncSender<std::io::Result<Child>>);

/// The parent-death signal fires when the spawning *thread* ends, and a test's thread ends long
/// before a shared control plane should: one thread that lives as long as the process spawns all.
fn spawn(launch: &Launch) -> Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, reply) in queue {
                let _ = reply.send(command.spawn());
            }
        });
        jobs
    });

    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&launch.log);
    let log: File = log.with_context(|| format!("log {}", launch.log.display()))?;
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(&launch.program)
        .args(&launch.args)
        .envs(launch.env.iter().map(|(key, value)| (key, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let (reply, answer) = mpsc::sync_channel(1);
    spawner.send((command, reply))?;
    answer
        .recv()?
        .context("start setpriv (util-linux), which ties a child's life to ours")
}

/// Refuses to go on without a program; `build` names the command that builds it.
///
/// # Errors
/// If it is not there.
pub fn built(program: &Path, build: &str) -> Result<()> {
    ensure!(program.exists(), "no {}: {build}", program.display());
    Ok(())
}
