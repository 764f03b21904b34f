//! The history of each workload: how much of their GPUs its pods used. Agents report the peak of each container since
//! their last report. The leader adds the largest peak of each minute to a histogram. It keeps the histograms in
//! `GpuWorkload`s, one for each workload. It writes each at most once an hour, and 3,600 objects an hour in all.
//!
//! Samples that the leader has not written when it ends are lost: an hour of a history whose half-life is a day.

mod table;
mod uses;

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{GpuWorkload, workload};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use tokio::time::{Instant, sleep};

use crate::app::App;
use crate::ask::{AskError, within};
use crate::decode::Each;
use table::{Table, Write};
pub(crate) use uses::{Figure, Uses, Workload};

/// Between two looks for due writes. Ten objects each: 3,600 an hour.
const LOOK: Duration = Duration::from_secs(10);
/// Between two samples of a container.
const MINUTE: Duration = Duration::from_secs(60);
/// Before objects that could not be read are read again.
const READ_AGAIN: Duration = Duration::from_secs(300);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Objects of one page of the list.
const PAGE: u32 = 500;

/// Keeps the histories for as long as the process runs, while this replica leads.
pub(crate) async fn run(app: Arc<App>) {
    let began = Instant::now();
    let mut kept: Option<(u64, Table)> = None;
    let mut sampled = Instant::now();
    let mut unreadable: Option<Instant> = None;
    loop {
        sleep(LOOK).await;
        let now = began.elapsed();
        let samples = match sampled.elapsed() >= MINUTE {
            true => {
                sampled = Instant::now();
                app.uses.take()
            }
            false => Vec::new(),
        };
        let Some(epoch) = app.epoch.held().filter(|_| !app.is_draining()) else {
            kept = None;
            app.uses.show(Arc::default());
            continue;
        };
        if kept.as_ref().is_none_or(|(of, _)| *of != epoch) {
            if unreadable.is_some_and(|at| at.elapsed() < READ_AGAIN) {
                continue;
            }
            match stored(&app).await {
                Ok(objects) => kept = Some((epoch, Table::stored(objects, now))),
                Err(error) => {
                    unreadable = Some(Instant::now());
                    tracing::warn!(%error, "cannot read the GpuWorkloads: no history of GPU memory is kept");
                }
            }
        }
        let Some((_, table)) = &mut kept else {
            continue;
        };
        let at = Timestamp::now().as_second();
        if !samples.is_empty() {
            samples
                .into_iter()
                .for_each(|sample| table.add(sample, at, now));
            app.uses.show(table.figures());
        }
        let due = table.due(at, now);
        if due.is_empty() || app.epoch.confirm(epoch).await.is_err() {
            continue;
        }
        for (workload, what) in due {
            if let Err(error) = write(&app, table, &workload, what, now).await {
                table.failed(&workload, now);
                tracing::warn!(
                    namespace = %workload.namespace, kind = workload.owner.kind, workload = workload.owner.name, %error,
                    "cannot write the history of a workload"
                );
            }
        }
    }
}

/// Every object that can be read.
async fn stored(app: &App) -> Result<Vec<GpuWorkload>, AskError> {
    let api = Api::<Each<GpuWorkload>>::all(app.client.clone());
    let mut params = ListParams::default().limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = within(TIMEOUT, api.list(&params)).await?;
        objects.extend(page.items.into_iter().filter_map(Each::whole));
        match page.metadata.continue_.filter(|it| !it.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

async fn write(
    app: &App,
    table: &mut Table,
    workload: &Workload,
    what: Write,
    now: Duration,
) -> Result<(), AskError> {
    let api = Api::<GpuWorkload>::namespaced(app.client.clone(), &workload.namespace);
    let name = workload::name_of(&workload.owner);
    let params = PostParams::default();
    let written = match what {
        Write::Put(object) if table.is_stored(workload) => {
            within(TIMEOUT, api.replace(&name, &params, &object)).await
        }
        Write::Put(object) => within(TIMEOUT, api.create(&params, &object)).await,
        Write::Delete if table.is_stored(workload) => {
            match within(TIMEOUT, api.delete(&name, &DeleteParams::default())).await {
                Err(error) if error.status() != Some(404) => return Err(error),
                Ok(_) | Err(_) => table.forget(workload),
            }
            return Ok(());
        }
        Write::Delete => {
            table.forget(workload);
            return Ok(());
        }
    };
    match written {
        Ok(object) => {
            table.wrote(workload, object.metadata.resource_version, now);
            Ok(())
        }
        // The object or its namespace was deleted.
        Err(error) if error.status() == Some(404) => {
            table.forget(workload);
            Ok(())
        }
        // Another replica wrote it: the stored object counts.
        Err(error) if error.status() == Some(409) => {
            if let Some(object) = within(TIMEOUT, api.get_opt(&name)).await? {
                table.restore(object, now);
            }
            Ok(())
        }
        Err(error) => Err(error),
    }
}
