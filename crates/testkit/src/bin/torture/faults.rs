//! The faults of the processes, the network, the store and the clocks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use gpustow_testkit::{Action, ControlPlane, eventually};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::machine::Machine;

/// For the API server and etcd to serve again.
const SERVED: Duration = Duration::from_secs(120);

/// The faults of one of our machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Ours {
    ExtenderKilled,
    ExtenderFrozen,
    SchedulerKilled,
    SchedulerFrozen,
    BothKilled,
    BothFrozen,
    CutOff,
    RepliesLate,
    RepliesLost,
    Refused429,
    Refused500,
    ClockAhead,
    ClockBehind,
    OtherVersion,
}

/// The faults of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Theirs {
    ApiServerKilled,
    ApiServerFrozen,
    EtcdKilled,
    EtcdFrozen,
    EtcdFull,
    Compacted,
}

impl Ours {
    /// Each with its name.
    pub(crate) const ALL: [(Self, &'static str); 14] = [
        (Self::ExtenderKilled, "extender killed"),
        (Self::ExtenderFrozen, "extender frozen"),
        (Self::SchedulerKilled, "kube-scheduler killed"),
        (Self::SchedulerFrozen, "kube-scheduler frozen"),
        (Self::BothKilled, "both of a machine killed"),
        (Self::BothFrozen, "both of a machine frozen"),
        (Self::CutOff, "extender cut off the API server"),
        (Self::RepliesLate, "the API server 2 s slow to the extender"),
        (Self::RepliesLost, "replies to the extender's writes lost"),
        (Self::Refused429, "the extender's writes answered with 429"),
        (Self::Refused500, "the extender's writes answered with 500"),
        (Self::ClockAhead, "extender's clock an hour ahead"),
        (Self::ClockBehind, "extender's clock an hour behind"),
        (Self::OtherVersion, "an earlier version, and back"),
    ];

    /// Does it, lets it last, and undoes it.
    pub(crate) async fn happen(
        self,
        machine: &Machine,
        last: Duration,
        builds: &Builds,
    ) -> Result<()> {
        let (extender, scheduler) = (&machine.extender.process, &machine.scheduler.process);
        let write = |method: &Method, uri: &hyper::Uri| {
            method != Method::GET && !uri.path().contains("/leases/")
        };
        match self {
            Self::ExtenderKilled => extender.kill9(),
            Self::SchedulerKilled => scheduler.kill9(),
            Self::BothKilled => {
                extender.kill9();
                scheduler.kill9();
            }
            Self::ExtenderFrozen => extender.stop()?,
            Self::SchedulerFrozen => scheduler.stop()?,
            Self::BothFrozen => {
                extender.stop()?;
                scheduler.stop()?;
            }
            Self::ClockAhead => machine.set_clock(3_600)?,
            Self::ClockBehind => machine.set_clock(-3_600)?,
            Self::OtherVersion => {
                machine.install(&builds.earlier)?;
                extender.kill9();
                machine.up().await?;
            }
            Self::CutOff
            | Self::RepliesLate
            | Self::RepliesLost
            | Self::Refused429
            | Self::Refused500 => {}
        }
        let refused = |status| Some(machine.proxy.rule(write, Action::Answer(status, "")));
        let rule = match self {
            Self::CutOff => Some(machine.proxy.rule(|_, _| true, Action::Cut)),
            Self::RepliesLate => {
                let late = Action::DelayReply(Duration::from_secs(2));
                Some(machine.proxy.rule(|_, _| true, late))
            }
            Self::RepliesLost => Some(machine.proxy.rule(write, Action::DropReply)),
            Self::Refused429 => refused(StatusCode::TOO_MANY_REQUESTS),
            Self::Refused500 => refused(StatusCode::INTERNAL_SERVER_ERROR),
            _ => None,
        };
        if self == Self::CutOff {
            machine.proxy.cut_connections();
        }
        sleep(last).await;
        drop(rule);
        match self {
            Self::ExtenderFrozen => extender.cont()?,
            Self::SchedulerFrozen => scheduler.cont()?,
            Self::BothFrozen => {
                extender.cont()?;
                scheduler.cont()?;
            }
            Self::ClockAhead | Self::ClockBehind => machine.set_clock(0)?,
            Self::OtherVersion => {
                machine.install(&builds.today)?;
                extender.kill9();
            }
            _ => {}
        }
        machine.up().await
    }
}

/// The builds of the extender.
pub(crate) struct Builds {
    pub(crate) today: PathBuf,
    pub(crate) earlier: PathBuf,
}

impl Builds {
    /// This one alone.
    pub(crate) fn one(today: &Path) -> Self {
        Self {
            today: today.to_owned(),
            earlier: today.to_owned(),
        }
    }

    /// This one, and the earlier one that tests/previous builds.
    pub(crate) async fn both(today: &Path) -> Result<Self> {
        let built = tokio::process::Command::new("tests/previous/build.sh")
            .stderr(std::process::Stdio::inherit())
            .output()
            .await?;
        ensure!(built.status.success(), "tests/previous/build.sh failed");
        let folder = String::from_utf8(built.stdout)?;
        Ok(Self {
            today: today.to_owned(),
            earlier: Path::new(folder.trim()).join("gpustow"),
        })
    }
}

impl Theirs {
    /// Each with its name.
    pub(crate) const ALL: [(Self, &'static str); 6] = [
        (Self::ApiServerKilled, "API server killed"),
        (Self::ApiServerFrozen, "API server frozen"),
        (Self::EtcdKilled, "etcd killed"),
        (Self::EtcdFrozen, "etcd frozen"),
        (Self::EtcdFull, "etcd out of space"),
        (Self::Compacted, "etcd compacted to now"),
    ];

    /// Does it, lets it last, and undoes it.
    pub(crate) async fn happen(self, cluster: &ControlPlane, last: Duration) -> Result<()> {
        let (api_server, etcd) = (&cluster.api_server, &cluster.etcd);
        match self {
            Self::ApiServerKilled => cluster.stop_api_server(),
            Self::ApiServerFrozen => api_server.stop()?,
            Self::EtcdKilled => etcd.kill9(),
            Self::EtcdFrozen => etcd.stop()?,
            Self::EtcdFull => alarm(cluster, "ACTIVATE").await?,
            Self::Compacted => compact(cluster).await?,
        }
        sleep(last).await;
        match self {
            Self::ApiServerKilled => {}
            Self::ApiServerFrozen => api_server.cont()?,
            Self::EtcdKilled => etcd.restart()?,
            Self::EtcdFrozen => etcd.cont()?,
            Self::EtcdFull => alarm(cluster, "DEACTIVATE").await?,
            Self::Compacted => {}
        }
        // It ends itself when etcd is away for long.
        eventually(SERVED, "the API server serves", async || {
            match api_server.exited()?.is_some() {
                true => cluster.start_api_server().await,
                false => cluster
                    .kubectl(&["get", "--raw", "/readyz"])
                    .await
                    .map(drop),
            }
        })
        .await
    }
}

/// The alarm that a store out of space raises by itself, and which refuses writes.
async fn alarm(cluster: &ControlPlane, action: &str) -> Result<()> {
    let alarm = json!({"action": action, "memberID": "0", "alarm": "NOSPACE"});
    cluster
        .etcd_call("/v3/maintenance/alarm", &alarm)
        .await
        .map(drop)
}

/// Forgets every revision but the last, so that a client that watches from an older one has to list.
async fn compact(cluster: &ControlPlane) -> Result<()> {
    let status: Value = cluster
        .etcd_call("/v3/maintenance/status", &json!({}))
        .await?;
    let revision = status
        .pointer("/header/revision")
        .context("a status without its revision")?;
    let compaction = json!({"revision": revision, "physical": true});
    cluster
        .etcd_call("/v3/kv/compaction", &compaction)
        .await
        .map(drop)
}

/// When something happened.
pub(crate) struct Happened {
    pub(crate) what: &'static str,
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}
