use std::time::Duration;

use anyhow::Result;
use gpustow_testkit::{Case, Scheduler, SchedulerConfig, shared, wait_bound};

const SOON: Duration = Duration::from_secs(20);

const CONFIG: &str = "
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles: [{schedulerName: testkit-scheduler}]
extenders: [{urlPrefix: 'http://127.0.0.1:1', filterVerb: filter, ignorable: true,
             managedResources: [{name: example.com/nothing}]}]
";

#[tokio::test]
async fn the_scheduler_binds_and_comes_back() -> Result<()> {
    let cluster = shared().await?;
    let case = Case::new(cluster, "sched").await?;
    let config = SchedulerConfig::parse(CONFIG)?.with_extender("http://127.0.0.1:9")?;
    let scheduler = Scheduler::start(cluster, config, cluster.admin_kubeconfig()).await?;
    case.node("n", &[8192]).create(&case.client).await?;
    let first = case
        .pod("a")
        .scheduler("testkit-scheduler")
        .create(&case.client)
        .await?;
    wait_bound(&case.client, &first, SOON).await?;

    scheduler.process.kill9();
    scheduler.process.restart()?;
    scheduler.wait_ready().await?;
    let second = case
        .pod("b")
        .scheduler("testkit-scheduler")
        .create(&case.client)
        .await?;
    wait_bound(&case.client, &second, SOON).await?;
    case.end().await
}

#[test]
fn a_path_that_leads_nowhere_is_an_error() -> Result<()> {
    let config = SchedulerConfig::parse("extenders: []")?;
    assert!(config.clone().with_extender("http://127.0.0.1:9").is_err());
    assert!(config.with("clientConnection.qps", 5).is_ok());
    Ok(())
}
