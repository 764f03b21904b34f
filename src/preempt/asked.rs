//! About which nodes does kube-scheduler ask for victims? From Kubernetes 1.38 on also about nodes that its own filters
//! pass without one (kubernetes/kubernetes#135486), unless this filter refuses them for good.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::Reason;
use tokio::time::sleep;

use crate::app::App;
use crate::ask::within;

/// The first minor whose kube-scheduler asks.
const MINOR: u32 = 38;
/// Between two looks at the version, and for an answer: a cluster can be upgraded at any time.
const PERIOD: Duration = Duration::from_secs(60);

/// Follows the version for as long as the process runs. kube-scheduler is no newer than the API server. An older one would
/// search these nodes for nothing.
pub(crate) async fn run(app: Arc<App>) {
    loop {
        if let Ok(version) = within(PERIOD, app.client.apiserver_version()).await {
            let minor = version.minor.trim_end_matches('+').parse::<u32>();
            (app.asks).store(minor.is_ok_and(|it| it >= MINOR), Ordering::Relaxed);
        }
        sleep(PERIOD).await;
    }
}

type Refused<'a> = Vec<(&'a str, Reason)>;

/// The refused nodes about which kube-scheduler is to ask, and the others. None while pods that are leaving make the room.
pub(crate) fn part<'a>(app: &App, pod: &PodFacts, refused: Refused<'a>) -> [Refused<'a>; 2] {
    if !app.asks.load(Ordering::Relaxed) {
        return [Vec::new(), refused];
    }
    let (now, mut ledger) = (app.ledger.now(), app.ledger.lock());
    let is_cured = |(_, why): &(&str, Reason)| why.is_cured_by_evictions();
    let (mut cured, mut others): (Refused<'a>, Refused<'a>) =
        refused.into_iter().partition(is_cured);
    let may = ledger.may_preempt_fragmented(pod, now);
    if may && !ledger.room_comes(pod, cured.iter().map(|(name, _)| *name), now) {
        let stays = |it: &mut (&str, Reason)| ledger.evictable(it.0, pod.priority).is_empty();
        others.extend(cured.extract_if(.., stays));
        return [cured, others];
    }
    others.extend(cured);
    [Vec::new(), others]
}
