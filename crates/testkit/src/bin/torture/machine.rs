//! A replica of ours as a machine of the control plane runs it: kube-scheduler and its extender, whose network, program
//! and clock can be changed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{ApiProxy, ControlPlane, Extender, ExtenderOptions, Scheduler, eventually};
use tokio::sync::Mutex;

/// For a process that was restarted while others are being tortured.
const READY: Duration = Duration::from_secs(120);

pub(crate) struct Machine {
    pub(crate) proxy: ApiProxy,
    pub(crate) extender: Extender,
    pub(crate) scheduler: Scheduler,
    /// The extender's program, which an upgrade replaces.
    program: PathBuf,
    /// Seconds by which its wall clock is ahead.
    clock: PathBuf,
    /// Held while something is done to it.
    pub(crate) busy: Mutex<()>,
}

impl Machine {
    pub(crate) async fn start(
        cluster: &ControlPlane,
        name: &str,
        program: &Path,
        config: &[String],
        clock: &Path,
    ) -> Result<Self> {
        let own = cluster.dir().join(format!("gpustow-{name}"));
        std::fs::copy(program, &own).with_context(|| program.display().to_string())?;
        let ahead = cluster.dir().join(format!("clock-{name}"));
        std::fs::write(&ahead, 0_i64.to_ne_bytes())?;
        let proxy = ApiProxy::start(cluster).await?;
        let kubeconfig = cluster
            .kubeconfig(names::NAMESPACE, names::SCHEDULER, Some(proxy.url()))
            .await?;
        let options = ExtenderOptions {
            env: vec![
                ("LD_PRELOAD".to_owned(), clock.display().to_string()),
                ("TORTURE_CLOCK".to_owned(), ahead.display().to_string()),
            ],
            args: vec![format!("--identity={name}"), "--log=info".to_owned()],
            config: Some(config.to_vec()),
        };
        let extender = Extender::start(cluster, &own, &kubeconfig, options).await?;
        let scheduler = Scheduler::calling(cluster, Path::new("."), &extender).await?;
        Ok(Self {
            proxy,
            extender,
            scheduler,
            program: own,
            clock: ahead,
            busy: Mutex::default(),
        })
    }

    /// Has the extender be this build from its next start on.
    pub(crate) fn install(&self, program: &Path) -> Result<()> {
        let new = self.program.with_extension("new");
        std::fs::copy(program, &new).with_context(|| program.display().to_string())?;
        std::fs::rename(&new, &self.program)?;
        Ok(())
    }

    /// Sets the wall clock so many seconds ahead of the true time.
    pub(crate) fn set_clock(&self, ahead: i64) -> Result<()> {
        use std::io::Write as _;
        // Written in place: the extender has it mapped.
        let mut file = std::fs::OpenOptions::new().write(true).open(&self.clock)?;
        file.write_all(&ahead.to_ne_bytes())?;
        Ok(())
    }

    /// Has both processes run; whichever has ended is started again.
    pub(crate) async fn up(&self) -> Result<()> {
        eventually(READY, "kube-scheduler and extender run", async || {
            self.restart()?;
            self.extender.wait_ready().await?;
            self.scheduler.wait_ready().await
        })
        .await
    }

    /// Restarts the processes that have ended.
    pub(crate) fn restart(&self) -> Result<()> {
        for process in [&self.extender.process, &self.scheduler.process] {
            if process.exited()?.is_some() {
                process.restart()?;
            }
        }
        Ok(())
    }

    /// Resident MiB and open descriptors of the extender.
    pub(crate) fn size(&self) -> Result<(f64, usize)> {
        let process = &self.extender.process;
        Ok((process.resident()?, process.open_files()?))
    }
}

/// Builds the library that shifts a program's clock.
pub(crate) fn clock(dir: &Path) -> Result<PathBuf> {
    let (source, library) = (dir.join("clock.c"), dir.join("clock.so"));
    std::fs::write(&source, include_str!("clock.c"))?;
    let built = std::process::Command::new("cc")
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status()
        .context("cannot run cc, a C compiler")?;
    ensure!(built.success(), "cc failed on {}", source.display());
    Ok(library)
}
