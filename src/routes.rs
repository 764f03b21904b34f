//! HTTP: kube-scheduler's four verbs on one router, health and metrics on another.
//!
//! Logical failures are answered with status 200 and an `Error`: kube-scheduler throws the text of
//! any other status away.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use gpustow_api::facts::{
    Taints, has_soft_preferences, tolerates_prefer_no_schedule, uses_volumes_or_claims,
};
use gpustow_api::{Asks, PodFacts};
use gpustow_ledger::{Ask, Filtered, NodeView, Reason};
use gpustow_pack::Refusal;
use gpustow_serve::exposition;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::app::App;
use crate::bind::bind;
use crate::call::Call;
use crate::failure::{ErrorKind, Failure};
use crate::metrics::{Totals, Verb};
use crate::preempt::{asked, preempt};
use crate::wire::{
    ExtenderArgs, ExtenderBindingArgs, ExtenderBindingResult, ExtenderFilterResult,
    ExtenderPreemptionArgs, ExtenderPreemptionResult, HostPriority,
};

/// Nodes looked at for a scrape at once, in about as long as a filter call takes.
const SCRAPED_AT_ONCE: usize = 64;
/// Between two such looks.
const SCRAPE_PAUSE: Duration = Duration::from_millis(1);

/// The verbs, for kube-scheduler alone.
pub(crate) fn scheduler(app: Arc<App>) -> Router {
    Router::new()
        .route("/filter", post(on_filter))
        .route("/prioritize", post(on_prioritize))
        .route("/preempt", post(on_preempt))
        .route("/bind", post(on_bind))
        .with_state(app)
}

/// Health, metrics, version.
pub(crate) fn health(app: Arc<App>) -> Router {
    let metrics = Router::new().route("/metrics", get(on_metrics));
    Router::new()
        .route("/healthz", get(on_healthz))
        .route("/readyz", get(on_readyz))
        .route(
            "/version",
            get(|| async { concat!(env!("CARGO_PKG_VERSION"), "\n") }),
        )
        .with_state(app.clone())
        .merge(
            app.args
                .serving
                .guarded(metrics.with_state(app.clone()), &app.client),
        )
}

/// Why no node takes a placeholder.
const PLACEHOLDER: &str = "a placeholder waits for a node that an autoscaler adds";

fn json(answer: &impl Serialize) -> Response {
    match serde_json::to_vec(answer) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Names of candidate nodes, or the error in the call.
fn candidates<'a>(args: &'a ExtenderArgs<'_>) -> Result<Vec<&'a str>, Failure> {
    match &args.node_names {
        None if args.has_nodes => Err(Failure::new(
            ErrorKind::Decode,
            "kube-scheduler sends whole Node objects: set nodeCacheCapable: true for this extender",
        )),
        None => Ok(Vec::new()),
        Some(names) => Ok(names.iter().map(|name| &*name.0).collect()),
    }
}

async fn on_filter(State(app): State<Arc<App>>, call: Call) -> Response {
    let began = Instant::now();
    let failed = |failure: Failure| {
        app.metrics
            .calls
            .answered(Verb::Filter, failure.kind, began.elapsed());
        tracing::warn!(error = failure.text, "filter failed");
        json(&ExtenderFilterResult {
            error: failure.text,
            ..ExtenderFilterResult::default()
        })
    };
    let args: ExtenderArgs<'_> = match call.read("filter") {
        Ok(args) => args,
        Err(error) => return failed(error),
    };
    let names = match candidates(&args) {
        Ok(names) => names,
        Err(error) => return failed(error),
    };
    let Some(pod) = args.pod.facts(&app.args.resource_name) else {
        return failed(Failure::new(
            ErrorKind::Decode,
            "gpustow: the pod lacks a UID",
        ));
    };
    let mut answer = ExtenderFilterResult::default();
    let (text, shortfall);
    match &pod.asks {
        Asks::Nothing { .. } if pod.stands_for.is_some() => {
            answer.node_names = Some(Vec::new());
            answer.failed_and_unresolvable_nodes =
                names.iter().map(|name| (*name, PLACEHOLDER)).collect();
        }
        Asks::Nothing { .. } => answer.node_names = Some(names),
        Asks::For { .. } => {
            if let Err(error) = app.may_decide().await {
                return failed(error);
            }
            let verdict = decide(&app, &args, &pod, &names);
            shortfall = verdict.shortfall.map(|it| it.to_string());
            if verdict.nodes.is_empty() {
                let text = |reason: Reason| shortfall.as_deref().unwrap_or(reason.text());
                let told = asked::part(&app, &pod, verdict.refused);
                [answer.failed_nodes, answer.failed_and_unresolvable_nodes] = told.map(|nodes| {
                    let nodes = nodes.into_iter();
                    nodes.map(|(name, reason)| (name, text(reason))).collect()
                });
            }
            answer.node_names = Some(verdict.nodes);
        }
        Asks::Unreadable(bad) => {
            text = bad.to_string();
            tracing::info!(namespace = %pod.namespace, pod = %pod.name, error = text, "bad request");
            answer.node_names = Some(Vec::new());
            answer.failed_and_unresolvable_nodes =
                names.iter().map(|name| (*name, text.as_str())).collect();
        }
    }
    let response = json(&answer);
    app.metrics
        .calls
        .answered(Verb::Filter, None, began.elapsed());
    response
}

fn decide<'a>(
    app: &App,
    args: &ExtenderArgs<'_>,
    pod: &PodFacts,
    names: &[&'a str],
) -> Filtered<'a> {
    let tolerates = |taints: &Taints| tolerates_prefer_no_schedule(&args.pod, taints);
    let ask = Ask {
        pod,
        cooperative: has_soft_preferences(&args.pod),
        slow: uses_volumes_or_claims(&args.pod),
        tolerates: &tolerates,
    };
    let now = app.ledger.now();
    let (verdict, more) = {
        let mut ledger = app.ledger.lock();
        (ledger.filter(&ask, names, now), ledger.wakes_on())
    };
    if more {
        app.ledger.wake.notify_one();
    }
    if let Some(node) = verdict.nodes.first() {
        app.doubts.placed(pod);
        app.turns.placed(&pod.uid, &app.metrics);
        tracing::info!(
            namespace = %pod.namespace, pod = %pod.name, node, feasible = verdict.nodes.len(),
            candidates = names.len(), "chose a node"
        );
    } else {
        app.doubts.refused(app, pod, &verdict.refused);
        app.turns.refused(&pod.uid, &verdict.refused);
        refused(app, pod, names, &verdict);
    }
    verdict
}

/// Reports once, in all places, that a pod fits nowhere.
fn refused(app: &App, pod: &PodFacts, names: &[&str], verdict: &Filtered<'_>) {
    let mut counts: BTreeMap<Reason, usize> = BTreeMap::new();
    for (_, reason) in &verdict.refused {
        *counts.entry(*reason).or_default() += 1;
    }
    let most = counts
        .iter()
        .max_by_key(|(_, count)| **count)
        .map(|(reason, _)| *reason);
    if let Some(reason) = most {
        app.metrics.calls.refused(reason);
    }
    tracing::info!(
        namespace = %pod.namespace, pod = %pod.name, candidates = names.len(),
        reason = most.map_or("no candidates", Reason::label), "fits nowhere"
    );
    let mut kind = DefaultHasher::new();
    counts.keys().for_each(|reason| reason.hash(&mut kind));
    app.events.refused(pod, kind.finish(), || {
        let free = app.ledger.lock().largest_free(names);
        let free = free.map_or_else(String::new, |(node, card, free)| {
            format!(" Most free on one GPU: {free} (node {node}, GPU {card}).")
        });
        let starting = Reason::Fit(Refusal::Starting);
        let there = verdict.refused.iter().filter(|it| it.1 == starting);
        let there: Vec<&str> = there.map(|(name, _)| *name).collect();
        let free = match app.ledger.lock().starting_on(&there) {
            (0, _) => free,
            (1, first) => format!(" 1 pod starts there, since {first} s.{free}"),
            (count, first) => {
                format!(" {count} pods start there, the first since {first} s.{free}")
            }
        };
        let sampled = app.ledger.lock().is_sample(names.len());
        let text = refusal(pod, &counts, &free, sampled.then_some(names.len()));
        match &verdict.shortfall {
            Some(shortfall) => format!("The {shortfall} at the same time. {text}"),
            None => text,
        }
    });
}

/// The text for the pod. If no node could hold it, however empty it were, nothing that becomes free helps. `sample` is
/// the number of these nodes, if they are a sample.
fn refusal(
    pod: &PodFacts,
    counts: &BTreeMap<Reason, usize>,
    free: &str,
    sample: Option<usize>,
) -> String {
    let lasts = |reason: &Reason| {
        use Refusal::{NoLimit, TooFewCards, TooLarge, Unselected};
        matches!(
            reason,
            Reason::Fit(TooLarge | TooFewCards | Unselected | NoLimit)
        )
    };
    let lasts = !counts.is_empty() && counts.keys().all(lasts);
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| Reverse(**count));
    let reasons = counts.iter().map(|(reason, count)| {
        let nodes = if **count == 1 { "node" } else { "nodes" };
        format!("{} ({count} {nodes})", reason.text())
    });
    let reasons = reasons.collect::<Vec<_>>().join("; ");
    let claims = pod.asks.claims().iter().map(ToString::to_string);
    let asks = claims.collect::<Vec<_>>().join(" and ");
    let (namespace, name) = (&pod.namespace, &pod.name);
    if lasts {
        return format!(
            "None of the nodes that kube-scheduler offers can hold this pod as it is, which asks for {asks}: {reasons}. \
             Waiting does not help: `kubectl gpustow why {namespace}/{name}` shows the necessary changes."
        );
    }
    let none = match sample {
        Some(nodes) => format!("None of the {nodes} nodes that kube-scheduler showed has"),
        None => "No node has".to_owned(),
    };
    format!(
        "{none} GPU memory for this pod now, which asks for {asks}: {reasons}.{free} \
         `kubectl gpustow why {namespace}/{name}` lists the pods that must finish."
    )
}

/// Answers zeros where it cannot score nodes: the protocol lacks a field for an error.
async fn on_prioritize(State(app): State<Arc<App>>, call: Call) -> Response {
    let began = Instant::now();
    let args: Result<ExtenderArgs<'_>, _> = call.read("prioritize");
    let names = args.as_ref().map_err(Failure::clone).and_then(candidates);
    let scores = match (&args, &names) {
        (Ok(args), Ok(names)) => scores(&app, args, names).await,
        (Err(failure), _) | (_, Err(failure)) => Err(failure.clone()),
    };
    let error = scores.as_ref().err().and_then(|failure| failure.kind);
    app.metrics
        .calls
        .answered(Verb::Prioritize, error, began.elapsed());
    let names = names.unwrap_or_default();
    let scores = scores.unwrap_or_else(|failure| {
        tracing::warn!(
            error = failure.text,
            "prioritize failed: every node is given 0"
        );
        vec![0; names.len()]
    });
    let scored = names.iter().zip(scores);
    let answer = scored.map(|(host, score)| HostPriority { host, score });
    json(&answer.collect::<Vec<_>>())
}

async fn scores(
    app: &Arc<App>,
    args: &ExtenderArgs<'_>,
    names: &[&str],
) -> Result<Vec<i64>, Failure> {
    let pod = args.pod.facts(&app.args.resource_name);
    let asks = |pod: &PodFacts| pod.requests_memory();
    let Some(pod) = pod.filter(asks) else {
        return Ok(vec![0; names.len()]);
    };
    app.may_decide().await?;
    let tolerates = |taints: &Taints| tolerates_prefer_no_schedule(&args.pod, taints);
    let now = app.ledger.now();
    Ok(app.ledger.lock().rank(&pod, &tolerates, names, now))
}

async fn on_preempt(State(app): State<Arc<App>>, call: Call) -> Response {
    let began = Instant::now();
    let answer = match call.read::<ExtenderPreemptionArgs>("preempt") {
        Ok(args) => preempt(&app, args).await,
        Err(error) => Err(error),
    };
    let error = answer.as_ref().err().and_then(|failure| failure.kind);
    app.metrics
        .calls
        .answered(Verb::Preempt, error, began.elapsed());
    json(&answer.unwrap_or_else(|failure| {
        tracing::warn!(error = failure.text, "preempt failed: no node offered");
        ExtenderPreemptionResult::default()
    }))
}

async fn on_bind(State(app): State<Arc<App>>, call: Call) -> Response {
    let began = Instant::now();
    let bound = match call.read::<ExtenderBindingArgs>("bind") {
        Ok(args) if app.lists.missing().is_empty() => bind(&app, args).await,
        Ok(_) => {
            let text = "gpustow is still reading the cluster's state";
            Err(Failure::new(ErrorKind::Internal, text))
        }
        Err(failure) => Err(failure),
    };
    let took = began.elapsed();
    let error = bound.as_ref().err().and_then(|failure| failure.kind);
    app.metrics.calls.answered(Verb::Bind, error, took);
    json(&ExtenderBindingResult {
        error: bound.err().map(|failure| failure.text).unwrap_or_default(),
    })
}

async fn on_healthz(State(app): State<Arc<App>>) -> Response {
    match app.panics.what() {
        None => "ok".into_response(),
        Some(part) => {
            let text = format!("{part} panicked: see the log\n");
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        }
    }
}

async fn on_readyz(State(app): State<Arc<App>>) -> Response {
    let missing = app.lists.missing();
    if app.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n").into_response()
    } else if !app.webhook.load(Ordering::Acquire) {
        let text = "the webhook does not have a certificate yet: see the log\n";
        (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
    } else if missing.is_empty() {
        // Weak policies are reported, and are not a reason to stop scheduling.
        format!("ok\n{}", app.policies.warnings()).into_response()
    } else {
        let text = format!("still reading {}\n", missing.join(", "));
        (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
    }
}

/// Every node, a few at a time: between them filter has its turn.
async fn node_views(app: &App) -> Vec<NodeView> {
    let now = app.ledger.now();
    let names = app.ledger.lock().node_names();
    let mut nodes = Vec::with_capacity(names.len());
    for few in names.chunks(SCRAPED_AT_ONCE) {
        {
            let ledger = app.ledger.lock();
            nodes.extend(few.iter().filter_map(|name| ledger.node_view(name, now)));
        }
        sleep(SCRAPE_PAUSE).await;
    }
    nodes
}

async fn on_metrics(State(app): State<Arc<App>>) -> Response {
    let mut nodes = node_views(&app).await;
    gpustow_ledger::twice(&mut nodes);
    let leads = app.leads().is_some();
    let totals = {
        let ledger = app.ledger.lock();
        Totals {
            nodes,
            assumed: ledger.assumed(),
            expirations: ledger.expirations(),
            earmarks: ledger
                .earmarks()
                .map(|(cause, count)| (cause, if leads { count } else { 0 }))
                .collect(),
            earmarks_ended: ledger.earmarks_ended().collect(),
            unfenced: ledger.unfenced(),
            waiting: ledger.waiting_requests().collect(),
            oldest: ledger.oldest_waiting(),
            queued: ledger.queued(),
            placeholders: ledger.placeholders().len(),
            policies: app.policies.all(),
            figures: app.uses.figures(),
            leads,
            per_gpu: app.args.metrics_per_gpu,
        }
    };
    exposition(app.metrics.gather(&totals))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_refusal_promises_room_only_where_the_end_of_pods_makes_some() {
        let limits = json!({ "gpustow.dev/gpu-mem": "200000" });
        let pod: Pod = from_value(json!({
            "metadata": { "namespace": "a", "name": "p", "uid": "u" },
            "spec": { "containers": [{ "name": "c", "resources": { "limits": limits } }] },
        }))
        .unwrap();
        let pod = PodFacts::from_pod(&pod, "gpustow.dev/gpu-mem").unwrap();
        let free = " Most free on one GPU: 81920 MiB (node n, GPU 0).";
        use Refusal::{NoLimit, NoRoom, TooFewCards, TooLarge};
        for (reasons, lasts) in [
            (&[TooLarge][..], true),
            (&[NoLimit, TooFewCards], true),
            (&[NoRoom], false),
            (&[TooLarge, NoRoom], false),
        ] {
            let counts = reasons.iter().map(|it| (Reason::Fit(*it), 2));
            let note = refusal(&pod, &counts.collect(), free, None);
            assert_eq!(
                note.contains("shows the necessary changes"),
                lasts,
                "{note}"
            );
            assert_eq!(
                note.contains("lists the pods that must finish"),
                !lasts,
                "{note}"
            );
            assert_eq!(note.contains(free), !lasts, "{note}");
        }
    }
}
