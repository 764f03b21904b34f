//! The API server of the demo, over HTTP, with the kubelets of its nodes.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{Method, Response};
use futures::{Stream, stream};
use gpustow_simworld::{Call, Copy, Kind, Refusal, Server, line, locked, refused};
use serde_json::{Value, json};

pub(crate) type Shared = Arc<Mutex<Server>>;

/// All that it is asked.
pub(crate) fn router(server: Shared) -> Router {
    Router::new().fallback(answer).with_state(server)
}

/// The objects of a kind, as they are now.
pub(crate) fn all(server: &Shared, kind: Kind) -> Vec<Copy> {
    locked(server).all(kind).cloned().collect()
}

async fn answer(State(server): State<Shared>, head: Parts, body: Bytes) -> Response<Body> {
    let body = match body.is_empty() {
        true => Ok(Value::Null),
        false => serde_json::from_slice(&body),
    };
    let call = match body {
        Ok(body) => Call::of(&head, body),
        Err(error) => return refused(&Refusal(400, "BadRequest", error.to_string())),
    };
    if let Some(from) = call.watches {
        return Response::new(Body::from_stream(watch(server, call, from)));
    }
    let mut server = locked(&server);
    let is_post = call.method == Method::POST;
    let writes = call.method == Method::PATCH;
    let node = call.key().filter(|key| key.0 == Kind::Node && writes);
    let decided = match call.kind {
        // A list of an unknown kind is empty.
        None if call.method == Method::GET && call.name.is_empty() && !call.plural.is_empty() => {
            Ok(
                json!({ "kind": "List", "apiVersion": "v1", "metadata": {}, "items": [] })
                    .to_string(),
            )
        }
        _ => call.decide(&mut server),
    };
    if let Some(node) = node.filter(|_| decided.is_ok()) {
        // The allocatable resources of a node are its capacity.
        if let Ok(object) = server.get(&node) {
            let patch = json!({ "status": { "allocatable": object["status"]["capacity"] } });
            let _ = server.patch(node, &patch, false, true);
        }
    }
    Call::response(is_post, decided)
}

/// Watch events as lines of JSON, for as long as the client reads.
fn watch(server: Shared, call: Call, from: u64) -> impl Stream<Item = Result<Vec<u8>, Infallible>> {
    let news = locked(&server).news();
    stream::unfold(Some((server, call, from, news)), async |place| {
        let (server, call, mut seen, mut news) = place?;
        loop {
            news.borrow_and_update();
            let told = locked(&server).since(seen).map(<[_]>::to_vec);
            let changes = match told {
                Ok(changes) => changes,
                Err(refusal) => {
                    let text = refusal.status().to_string();
                    return Some((Ok(line("ERROR", &text)), None));
                }
            };
            seen = changes.last().map_or(seen, |change| change.version);
            let events = changes.iter().filter_map(|change| call.event(change));
            let lines: Vec<u8> = events
                .flat_map(|(kind, object)| line(kind, &object))
                .collect();
            if !lines.is_empty() {
                return Some((Ok(lines), Some((server, call, seen, news))));
            }
            news.changed().await.ok()?;
        }
    })
}
