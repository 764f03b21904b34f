//! HTTP: kube-scheduler's four verbs on one router, health and metrics on another.
//!
//! Logical failures are answered with status 200 and an `Error`: kube-scheduler throws the text of
//! any other status away.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use gpustow_api::PodFacts;
use gpustow_api::facts::{
    Taints, has_soft_preferences, tolerates_prefer_no_schedule, uses_volumes_or_claims,
};
use gpustow_ledger::{Ask, Reason, Verdict};
use serde::Serialize;

use crate::App;
use crate::bind::{BindError, bind};
use crate::metrics::Totals;
use crate::preempt::preempt;
use crate::wire::{
    ExtenderArgs, ExtenderBindingArgs, ExtenderBindingResult, ExtenderFilterResult,
    ExtenderPreemptionArgs, ExtenderPreemptionResult, HostPriority,
};

/// Bodies with full Node objects are refused with a reason, not cut off.
const MAX_BODY: usize = 256 << 20;

/// The verbs, for kube-scheduler alone.
pub(crate) fn scheduler(app: Arc<App>) -> Router {
    Router::new()
        .route("/filter", post(on_filter))
        .route("/prioritize", post(on_prioritize))
        .route("/preempt", post(on_preempt))
        .route("/bind", post(on_bind))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(app)
}

/// Health, metrics, version.
pub(crate) fn health(app: Arc<App>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(on_readyz))
        .route("/metrics", get(on_metrics))
        .route(
            "/version",
            get(|| async { concat!(env!("CARGO_PKG_VERSION"), "\n") }),
        )
        .with_state(app)
}

fn json(answer: &impl Serialize) -> Response {
    match serde_json::to_vec(answer) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Names of candidate nodes, or what is wrong with the call.
fn candidates<'a>(args: &'a ExtenderArgs<'_>) -> Result<Vec<&'a str>, String> {
    match &args.node_names {
        None if args.has_nodes => Err(
            "kube-scheduler sends whole Node objects: set nodeCacheCapable: true for this extender"
                .to_owned(),
        ),
        names => Ok(names.iter().flatten().map(|name| &*name.0).collect()),
    }
}

async fn on_filter(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let began = Instant::now();
    let failed = |error: String| {
        app.metrics.answered("filter", false, began.elapsed());
        tracing::warn!(%error, "filter failed");
        json(&ExtenderFilterResult {
            error,
            ..ExtenderFilterResult::default()
        })
    };
    let args: ExtenderArgs<'_> = match serde_json::from_slice(&body) {
        Ok(args) => args,
        Err(error) => return failed(format!("cannot read the call of /filter: {error}")),
    };
    let names = match candidates(&args) {
        Ok(names) => names,
        Err(error) => return failed(error),
    };
    let Some(pod) = PodFacts::from_pod(&args.pod, &app.args.resource_name) else {
        return failed("the pod has no UID".to_owned());
    };
    let mut answer = ExtenderFilterResult::default();
    let text;
    match &pod.request {
        Ok(request) if request.is_empty() => answer.node_names = Some(names),
        Ok(_) => {
            if let Err(error) = app.may_decide().await {
                return failed(error);
            }
            let verdict = decide(&app, &args, &pod, &names);
            answer.node_names = Some(verdict.nodes);
            let refused = verdict.refused.into_iter();
            answer.failed_and_unresolvable_nodes = refused
                .map(|(name, reason)| (name, reason.text()))
                .collect();
        }
        Err(bad) => {
            text = bad.to_string();
            answer.node_names = Some(Vec::new());
            answer.failed_and_unresolvable_nodes =
                names.iter().map(|name| (*name, text.as_str())).collect();
        }
    }
    let response = json(&answer);
    app.metrics.answered("filter", true, began.elapsed());
    response
}

fn decide<'a>(
    app: &App,
    args: &ExtenderArgs<'_>,
    pod: &PodFacts,
    names: &[&'a str],
) -> Verdict<'a> {
    let tolerates = |taints: &Taints| tolerates_prefer_no_schedule(&args.pod, taints);
    let ask = Ask {
        pod,
        cooperative: has_soft_preferences(&args.pod),
        slow: uses_volumes_or_claims(&args.pod),
        tolerates: &tolerates,
    };
    let now = app.now();
    let verdict = app.ledger().filter(&ask, names, now);
    if let Some(node) = verdict.nodes.first() {
        tracing::info!(
            namespace = %pod.namespace, pod = %pod.name, node, feasible = verdict.nodes.len(),
            candidates = names.len(), "chose a node"
        );
    } else {
        refused(app, pod, names, &verdict.refused);
    }
    verdict
}

/// Says once, to everybody, that a pod fits nowhere.
fn refused(app: &App, pod: &PodFacts, names: &[&str], refused: &[(&str, Reason)]) {
    let mut counts: BTreeMap<Reason, usize> = BTreeMap::new();
    for (_, reason) in refused {
        *counts.entry(*reason).or_default() += 1;
    }
    let most = counts
        .iter()
        .max_by_key(|(_, count)| **count)
        .map(|(reason, _)| *reason);
    if let Some(reason) = most {
        app.metrics
            .refusals
            .with_label_values(&[reason.label()])
            .inc();
    }
    tracing::info!(
        namespace = %pod.namespace, pod = %pod.name, candidates = names.len(),
        reason = most.map_or("no candidates", Reason::label), "fits nowhere"
    );
    let mut kind = DefaultHasher::new();
    counts.keys().for_each(|reason| reason.hash(&mut kind));
    app.events.refused(pod, kind.finish(), || {
        let reasons = counts
            .iter()
            .map(|(reason, count)| format!("{count}× {}", reason.text()));
        let reasons = reasons.collect::<Vec<_>>().join(", ");
        let asks = pod
            .request
            .as_ref()
            .map_or_else(ToString::to_string, |request| {
                let claims = request.claims.iter().map(|claim| match claim.gpus {
                    1 => claim.mib.to_string(),
                    gpus => format!("{} on each of {gpus} GPUs", claim.mib),
                });
                claims.collect::<Vec<_>>().join(" + ")
            });
        let free = app.ledger().largest_free(names);
        let free = free.map_or_else(String::new, |(node, card, free)| {
            format!("; most free on one GPU: {free} (node {node}, GPU {card})")
        });
        format!(
            "asks for {asks} of GPU memory; {} nodes refused: {reasons}{free}",
            refused.len()
        )
    });
}

async fn on_prioritize(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let began = Instant::now();
    let args: Result<ExtenderArgs<'_>, _> = serde_json::from_slice(&body);
    let args = match args {
        Ok(args) => args,
        Err(error) => {
            tracing::warn!(%error, "cannot read the call of /prioritize");
            app.metrics.answered("prioritize", false, began.elapsed());
            return json(&[(); 0]);
        }
    };
    let names = candidates(&args).unwrap_or_default();
    let pod = PodFacts::from_pod(&args.pod, &app.args.resource_name);
    let asks = |pod: &PodFacts| {
        pod.request
            .as_ref()
            .is_ok_and(|request| !request.is_empty())
    };
    let scores = match pod.filter(asks) {
        Some(pod) if app.may_decide().await.is_ok() => {
            let tolerates = |taints: &Taints| tolerates_prefer_no_schedule(&args.pod, taints);
            let ask = Ask {
                pod: &pod,
                cooperative: true,
                slow: false,
                tolerates: &tolerates,
            };
            let now = app.now();
            app.ledger().rank(&ask, &names, now)
        }
        _ => vec![0; names.len()],
    };
    let scored = names.iter().zip(scores);
    let answer: Vec<_> = scored
        .map(|(host, score)| HostPriority { host, score })
        .collect();
    let response = json(&answer);
    app.metrics.answered("prioritize", true, began.elapsed());
    response
}

async fn on_preempt(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let began = Instant::now();
    let args: Result<ExtenderPreemptionArgs, _> = serde_json::from_slice(&body);
    let answer = match args {
        Ok(args) => preempt(&app, args).await,
        Err(error) => Err(format!("cannot read the call of /preempt: {error}")),
    };
    app.metrics
        .answered("preempt", answer.is_ok(), began.elapsed());
    json(&answer.unwrap_or_else(|error| {
        tracing::warn!(%error, "preempt failed: no node offered");
        ExtenderPreemptionResult::default()
    }))
}

async fn on_bind(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let began = Instant::now();
    let args: Result<ExtenderBindingArgs, _> = serde_json::from_slice(&body);
    let error = match args {
        Ok(args) if app.ready.missing().is_empty() => bound(&app, args).await.err(),
        Ok(_) => Some("gpustow is still reading the cluster's state".to_owned()),
        Err(error) => Some(format!("cannot read the call of /bind: {error}")),
    };
    let took = began.elapsed();
    app.metrics.answered("bind", error.is_none(), took);
    app.metrics.bind_seconds.observe(took.as_secs_f64());
    json(&ExtenderBindingResult {
        error: error.unwrap_or_default(),
    })
}

/// Binds, and says so.
async fn bound(app: &Arc<App>, args: ExtenderBindingArgs) -> Result<(), String> {
    let (namespace, name) = (args.pod_namespace.clone(), args.pod_name.clone());
    let node = args.node.clone();
    match bind(app, args).await {
        Ok((_, None)) => {
            tracing::info!(%namespace, pod = %name, %node, "bound without GPU memory");
            Ok(())
        }
        Ok((pod, Some(assignment))) => {
            let gpus = assignment
                .charges
                .iter()
                .map(|(uuid, mib)| format!("{mib} on {uuid}"));
            let gpus = gpus.collect::<Vec<_>>().join(", ");
            tracing::info!(%namespace, pod = %name, %node, %gpus, "bound");
            app.events
                .assigned(&pod, format!("assigned {gpus} of node {node}"));
            Ok(())
        }
        Err(error) => {
            app.metrics
                .bind_failures
                .with_label_values(&[error.label()])
                .inc();
            tracing::warn!(%namespace, pod = %name, %node, %error, "not bound");
            let hint = match &error {
                BindError::Refused(_) => "; the pod is tried again",
                _ => "",
            };
            Err(format!("gpustow: {error}{hint}"))
        }
    }
}

async fn on_readyz(State(app): State<Arc<App>>) -> Response {
    let missing = app.ready.missing();
    if app.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n").into_response()
    } else if missing.is_empty() {
        "ok\n".into_response()
    } else {
        let text = format!("still reading {}\n", missing.join(", "));
        (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
    }
}

async fn on_metrics(State(app): State<Arc<App>>) -> Response {
    let now = app.now();
    let (nodes, reservations, waiting) = {
        let ledger = app.ledger();
        (
            ledger.snapshot(now),
            ledger.reservations(),
            ledger.waiting(),
        )
    };
    let per_gpu = app.args.metrics_per_gpu;
    match app.metrics.render(&Totals {
        nodes: &nodes,
        reservations,
        waiting,
        per_gpu,
    }) {
        Ok(text) => (
            [(
                header::CONTENT_TYPE,
                "text/plain; version=0.0.4; charset=utf-8",
            )],
            text,
        )
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
