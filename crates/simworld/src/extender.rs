//! An extender as kube-scheduler calls it, for the programs that play kube-scheduler.

use std::cmp::Reverse;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};
use tokio::time::timeout;
use tower::ServiceExt as _;

/// `httpTimeout` in scheduler-config.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An extender, as kube-scheduler reaches it.
#[derive(Clone, Debug)]
pub struct Extender(pub Router);

impl Extender {
    /// The answer of a verb; none if there is none in time.
    pub async fn call(&self, verb: &str, body: &Value) -> Option<Value> {
        let request = Request::post(format!("/{verb}"))
            .header("host", "127.0.0.1:32766")
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .ok()?;
        let call = async {
            let answer = self.0.clone().oneshot(request).await.ok()?;
            let body = to_bytes(answer.into_body(), usize::MAX).await.ok()?;
            serde_json::from_slice(&body).ok()
        };
        timeout(TIMEOUT, call).await.ok().flatten()
    }

    /// The nodes that pass its filter, and refused nodes on which victims may help. None if the extender does not answer,
    /// or answers with an error.
    pub async fn filter(&self, pod: &Value, nodes: &[String]) -> Option<[Vec<String>; 2]> {
        let body = json!({ "Pod": pod, "NodeNames": nodes });
        let answer = self.call("filter", &body).await?;
        let passed = answer["NodeNames"].as_array().into_iter().flatten();
        let passed = passed.filter_map(|it| it.as_str().map(str::to_owned));
        let failed = answer["FailedNodes"].as_object().into_iter().flatten();
        let failed = failed.map(|(node, _)| node.clone());
        (answer["Error"] == "").then(|| [passed.collect(), failed.collect()])
    }

    /// The best of these nodes by the sum of its score and `own`. The first name wins among equals. Without scores the
    /// first node wins. The extender is not asked about a single node.
    pub async fn best(
        &self,
        pod: &Value,
        mut nodes: Vec<String>,
        own: impl Fn(&str) -> i64,
    ) -> Option<String> {
        if nodes.len() > 1 {
            let body = json!({ "Pod": pod, "NodeNames": nodes });
            let scores = self.call("prioritize", &body).await.unwrap_or_default();
            let scores = scores.as_array().into_iter().flatten();
            let scores =
                scores.filter_map(|it| Some((it["Host"].as_str()?, it["Score"].as_i64()?)));
            let best = scores.max_by_key(|(node, score)| (score + own(node), Reverse(*node)));
            if let Some((node, _)) = best {
                return Some(node.to_owned());
            }
        }
        (!nodes.is_empty()).then(|| nodes.swap_remove(0))
    }

    /// Has it bind the pod; false if it did not.
    pub async fn bind(&self, pod: &Value, node: &str) -> bool {
        let meta = &pod["metadata"];
        let body = json!({
            "PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node,
        });
        let answer = self.call("bind", &body).await;
        answer.is_some_and(|answer| answer["Error"] == "")
    }
}
