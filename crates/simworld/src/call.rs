//! A request to the API server, understood and answered.

use std::borrow::Cow;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, Response, StatusCode};
use serde_json::{Value, json};

use crate::objects::{Copy, Key, Kind, Refusal};
use crate::server::{Change, Server};

/// A request, understood.
#[derive(Debug)]
pub struct Call {
    /// GET, POST, PUT, PATCH or DELETE.
    pub method: Method,
    /// The kind of its objects, if the server knows the kind.
    pub kind: Option<Kind>,
    /// The plural of the kind in the path.
    pub plural: String,
    /// Empty for none, or all.
    pub namespace: String,
    /// Empty for all.
    pub name: String,
    /// The subresource.
    pub part: String,
    /// The body.
    pub body: Value,
    /// It is a watch, from this version on.
    pub watches: Option<u64>,
    /// How long a watch may last.
    pub seconds: u64,
    /// It is a question whether the write would be taken.
    pub tries: bool,
    /// The selectors: pods that have not ended, and the pods of one node. An empty node selects the unbound pods.
    unfinished: bool,
    node: Option<String>,
    /// The one with this name.
    only: Option<String>,
    strategic: bool,
    /// Server-side.
    applies: bool,
    /// Only metadata is wanted.
    partial: bool,
}

impl Call {
    /// Understands a request.
    #[must_use]
    pub fn of(head: &Parts, body: Value) -> Self {
        let path = head.uri.path().trim_matches('/').split('/');
        let mut path: Vec<&str> = path.collect();
        // /api/v1, /apis/GROUP/VERSION, or /apis alone.
        let version = match path.first() {
            Some(&"api") => 2,
            _ => 3,
        };
        path.drain(..version.min(path.len()));
        let namespace = match path.first() {
            Some(&"namespaces") if path.len() > 2 => path.drain(..2).nth(1),
            _ => None,
        };
        let part = |at: usize| path.get(at).copied().unwrap_or_default().to_owned();
        let query = head.uri.query().unwrap_or_default();
        let value = |key: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(it, _)| *it == key).map(|(_, value)| value)
        };
        let number = |key: &str| value(key).and_then(|text| text.parse().ok());
        let header = |name: &str| {
            let value = head.headers.get(name);
            value.and_then(|it| it.to_str().ok()).unwrap_or_default()
        };
        let selects = |field: &str| {
            let selector = value("fieldSelector").unwrap_or_default();
            let selector = selector.replace("%3D", "=").replace("%21", "!");
            let selector = selector.replace("%2C", ",");
            let mut parts = selector.split(',');
            parts.find_map(|part| part.strip_prefix(field).map(str::to_owned))
        };
        let watches = value("watch").is_some_and(|it| it != "false" && it != "0");
        Self {
            method: head.method.clone(),
            kind: Kind::of_plural(&part(0)),
            plural: part(0),
            namespace: namespace.unwrap_or_default().to_owned(),
            name: part(1),
            part: part(2),
            unfinished: selects("status.phase").is_some(),
            node: selects("spec.nodeName="),
            only: selects("metadata.name="),
            strategic: header("content-type").contains("strategic"),
            applies: header("content-type").contains("apply-patch"),
            partial: header("accept").contains("as=PartialObjectMetadata"),
            tries: value("dryRun").is_some(),
            watches: watches.then(|| number("resourceVersion").unwrap_or(0)),
            seconds: number("timeoutSeconds").unwrap_or(300),
            body,
        }
    }

    /// The object that it is about.
    #[must_use]
    pub fn key(&self) -> Option<Key> {
        Some((self.kind?, self.namespace.clone(), self.name.clone()))
    }

    /// Does it list or watch this object?
    fn wants(&self, object: &Value) -> bool {
        let ended = || {
            let phase = object["status"]["phase"].as_str();
            matches!(phase, Some("Succeeded" | "Failed"))
        };
        (self.namespace.is_empty() || object["metadata"]["namespace"] == *self.namespace)
            && !(self.unfinished && ended())
            && self
                .node
                .as_ref()
                .is_none_or(|node| object["spec"]["nodeName"].as_str().unwrap_or_default() == node)
            && (self.only.as_ref()).is_none_or(|only| object["metadata"]["name"] == **only)
    }

    /// The watch event for a change: objects come and go as they are selected.
    #[must_use]
    pub fn event<'c>(&self, change: &'c Change) -> Option<(&'static str, Cow<'c, str>)> {
        if Some(change.kind) != self.kind {
            return None;
        }
        let seen = |copy: &'c Option<Copy>| copy.as_ref().filter(|it| self.wants(it));
        match (seen(&change.before), seen(&change.after)) {
            (None, Some(after)) => Some(("ADDED", change.told(after).into())),
            (Some(_), Some(after)) => Some(("MODIFIED", change.told(after).into())),
            (Some(before), None) => {
                let last = change.after.as_ref().unwrap_or(before);
                let mut last = Value::clone(last);
                last["metadata"]["resourceVersion"] = json!(change.version.to_string());
                Some(("DELETED", last.to_string().into()))
            }
            (None, None) => None,
        }
    }

    /// The answer with that body, or with why it is refused.
    #[must_use]
    pub fn response(is_post: bool, decided: Result<String, Refusal>) -> Response<Body> {
        match decided {
            Ok(body) => {
                let mut response = Response::new(Body::from(body));
                if is_post {
                    *response.status_mut() = StatusCode::CREATED;
                }
                response
            }
            Err(refusal) => refused(&refusal),
        }
    }

    /// The body of its answer.
    ///
    /// # Errors
    /// If it is refused; status 405 means that this server does not support the call.
    pub fn decide(self, server: &mut Server) -> Result<String, Refusal> {
        let Some(key) = self.key() else {
            // Events are not kept.
            return match self.plural.as_str() {
                "events" => Ok(self.body.to_string()),
                // Which API groups are served.
                "" => Ok(json!({ "groups": [] }).to_string()),
                other => Err(Refusal(404, "NotFound", format!("no {other} here"))),
            };
        };
        let kind = key.0;
        let is_status = self.part == "status";
        let answer = match (&self.method, self.part.as_str()) {
            (&Method::GET, _) if self.name.is_empty() => {
                let items = server.all(kind).filter(|object| self.wants(object));
                let items: Vec<String> = items.map(|object| object.to_string()).collect();
                return Ok(format!(
                    r#"{{"kind":"{kind:?}List","apiVersion":"{}","metadata":{{"resourceVersion":"{}"}},"items":[{}]}}"#,
                    kind.api_version(),
                    server.version(),
                    items.join(",")
                ));
            }
            (&Method::GET, _) => server.get(&key),
            (&Method::POST, "binding") => {
                server.bind(key, &self.body)?;
                let done = json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {},
                });
                return Ok(done.to_string());
            }
            (&Method::POST, "") => server.create(kind, &self.namespace, self.body),
            (&Method::DELETE, "") if self.body["dryRun"].is_array() => {
                server.may_write(&key, &self.body["preconditions"])
            }
            (&Method::DELETE, "") => server.delete(key, &self.body["preconditions"]),
            (&Method::PUT, _) => server.replace(key, self.body),
            (&Method::PATCH, _) if self.applies => server.apply(key, self.body, is_status),
            (&Method::PATCH, _) if self.tries => server.may_write(&key, &self.body["metadata"]),
            (&Method::PATCH, _) => server.patch(key, &self.body, self.strategic, is_status),
            (method, part) => {
                let text = format!("the simulated server has no {method} of {kind:?}/{part}");
                Err(Refusal(405, "MethodNotAllowed", text))
            }
        };
        answer.map(|object| match self.partial {
            false => object.to_string(),
            true => json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
            })
            .to_string(),
        })
    }
}

/// A watch's event. The type comes first, as in the API server's lines, so that a reader can interpret the rest.
#[must_use]
pub fn line(kind: &str, object: &str) -> Vec<u8> {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n").into_bytes()
}

impl Refusal {
    /// The refusal as a Status.
    #[must_use]
    pub fn status(&self) -> Value {
        let Self(code, reason, message) = self;
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": code, "reason": reason, "message": message,
        })
    }
}

/// The answer to a request that is refused.
#[must_use]
pub fn refused(refusal: &Refusal) -> Response<Body> {
    let mut response = Response::new(Body::from(refusal.status().to_string()));
    *response.status_mut() =
        StatusCode::from_u16(refusal.0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}
