//! kube-scheduler, unmodified, with a configuration of ours.

use std::path::Path;

use anyhow::{Context as _, Result};
use gpustow_api::names;
use serde_yaml::Value;

use crate::binaries::Feature;
use crate::control_plane::ControlPlane;
use crate::extender::Extender;
use crate::net::{free_port, get};
use crate::process::Process;

/// In gpustow's repository.
const FILE: &str = "scheduler-config/gpustow-scheduler.yaml";

/// A KubeSchedulerConfiguration.
#[derive(Clone, Debug)]
pub struct SchedulerConfig(Value);

impl SchedulerConfig {
    /// Reads a file; without leader election, which takes seconds and which most tests do not need.
    pub fn load(path: &Path) -> Result<SchedulerConfig> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        SchedulerConfig::parse(&text)
    }

    /// That of gpustow's repository, without a limit on kube-scheduler's client.
    pub fn unlimited(repository: &Path) -> Result<SchedulerConfig> {
        SchedulerConfig::load(&repository.join(FILE))?
            .with("clientConnection.qps", 5000)?
            .with("clientConnection.burst", 5000)
    }

    /// The same from text.
    pub fn parse(yaml: &str) -> Result<SchedulerConfig> {
        SchedulerConfig(serde_yaml::from_str(yaml)?).with("leaderElection.leaderElect", false)
    }

    /// Sets a field by its path; maps on the way are made, list items are numbers and must exist:
    /// `extenders.0.urlPrefix`.
    pub fn with(mut self, path: &str, value: impl Into<Value>) -> Result<SchedulerConfig> {
        let mut place = &mut self.0;
        for step in path.split('.') {
            place = match place {
                Value::Sequence(items) => step.parse().ok().and_then(|i: usize| items.get_mut(i)),
                Value::Null => {
                    *place = Value::Mapping(Default::default());
                    place
                        .as_mapping_mut()
                        .map(|map| map.entry(step.into()).or_insert(Value::Null))
                }
                Value::Mapping(map) => Some(map.entry(step.into()).or_insert(Value::Null)),
                _ => None,
            }
            .with_context(|| format!("scheduler configuration: no {step} on the way of {path}"))?;
        }
        *place = value.into();
        Ok(self)
    }

    /// Adds an extender, in YAML, that is called after those there are.
    pub fn with_another_extender(mut self, yaml: &str) -> Result<SchedulerConfig> {
        let extender: Value = serde_yaml::from_str(yaml)?;
        let extenders = self.0.get_mut("extenders").and_then(Value::as_sequence_mut);
        extenders
            .context("scheduler configuration without extenders")?
            .push(extender);
        Ok(self)
    }

    /// Points the first extender at `url`.
    pub fn with_extender(self, url: &str) -> Result<SchedulerConfig> {
        self.with("extenders.0.urlPrefix", url)
    }

    /// Takes all extenders out.
    pub fn without_extender(self) -> Result<SchedulerConfig> {
        self.with("extenders", Vec::<String>::new())
    }
}

/// A running kube-scheduler.
#[derive(Debug)]
pub struct Scheduler {
    /// The process.
    pub process: Process,
    url: String,
}

impl Scheduler {
    /// Starts one with the identity in `kubeconfig` and waits until it is up.
    pub async fn start(
        cluster: &ControlPlane,
        config: SchedulerConfig,
        kubeconfig: &Path,
    ) -> Result<Scheduler> {
        let port = free_port()?;
        let kubeconfig = kubeconfig.display().to_string();
        let config = config.with("clientConnection.kubeconfig", kubeconfig.as_str())?;
        let file = cluster.dir().join(format!("scheduler-{port}.yaml"));
        std::fs::write(&file, serde_yaml::to_string(&config.0)?)?;
        let mut args = vec![
            format!("--config={}", file.display()),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!(
                "--cert-dir={}",
                cluster.dir().join(format!("scheduler-{port}")).display()
            ),
            "--v=2".to_owned(),
        ];
        args.extend(Feature::of_scheduler(cluster.minor()));
        let process = cluster.run("kube-scheduler", args)?;
        let scheduler = Scheduler {
            process,
            url: format!("https://127.0.0.1:{port}"),
        };
        scheduler.wait_ready().await?;
        Ok(scheduler)
    }

    /// Starts the one that gpustow's repository configures, which calls this extender.
    pub async fn calling(
        cluster: &ControlPlane,
        repository: &Path,
        extender: &Extender,
    ) -> Result<Scheduler> {
        let config = SchedulerConfig::load(&repository.join(FILE))?.with_extender(&extender.url)?;
        let kubeconfig = cluster.kubeconfig(names::NAMESPACE, names::SCHEDULER, None);
        Scheduler::start(cluster, config, &kubeconfig.await?).await
    }

    /// Waits until kube-scheduler reports that it is ready, after a restart for example.
    pub async fn wait_ready(&self) -> Result<()> {
        self.process
            .until_ready(async || get(&self.url, "/readyz").await)
            .await?;
        Ok(())
    }
}
