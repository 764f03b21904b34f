//! A request to the API server, understood and answered.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, Response, StatusCode};
use serde_json::{Value, json};

use crate::autoscaler::{admit, is_placeholder};
use crate::check;
use crate::disruptions;
use crate::net::refused;
use crate::scheduler::{asked, name};
use crate::server::{Change, Copy, Kind, Refusal, Server};

/// A request, understood.
pub(crate) struct Call {
    method: Method,
    pub(crate) kind: Option<Kind>,
    plural: String,
    namespace: String,
    name: String,
    part: String,
    /// Pods that have not ended, or those that are not bound, or those of one node.
    unfinished: bool,
    node: Option<String>,
    /// The one with this name.
    only: Option<String>,
    strategic: bool,
    /// Server-side.
    applies: bool,
    /// Only metadata is wanted.
    partial: bool,
    /// It is a question whether the write would be taken.
    tries: bool,
    /// It is a watch, from this version on.
    pub(crate) watches: Option<u64>,
    pub(crate) seconds: u64,
    body: Value,
    /// Why it should not have been sent.
    unwanted: Vec<String>,
}

impl Call {
    pub(crate) fn of(head: &Parts, body: Value) -> Self {
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
            watches: value("watch").map(|_| number("resourceVersion").unwrap_or(0)),
            seconds: number("timeoutSeconds").unwrap_or(300),
            body,
            unwanted: Vec::new(),
        }
    }

    /// Does it write a pod's status?
    pub(crate) fn writes_status(&self) -> bool {
        self.method == Method::PATCH && self.kind == Some(Kind::Pod) && self.part == "status"
    }

    /// Notes what is wrong with it as it is sent, by a process whose view may be so old.
    pub(crate) fn judge(&mut self, server: &Server, age: Duration) {
        let deletes = self.method == Method::DELETE && self.kind == Some(Kind::Pod);
        if !deletes && self.part != "eviction" {
            return;
        }
        let key = (Kind::Pod, self.namespace.clone(), self.name.clone());
        let Some(pod) = server.get(&key).ok().filter(|pod| !is_placeholder(pod)) else {
            return;
        };
        self.unwanted = disruptions::unwanted(server, &pod, age);
        if deletes {
            let preempted = check::preempted(server, &pod, &self.body["preconditions"]);
            self.unwanted.extend(preempted);
        }
    }

    fn wants(&self, object: &Value) -> bool {
        (self.namespace.is_empty() || object["metadata"]["namespace"] == *self.namespace)
            && !(self.unfinished && check::ended(object))
            && self
                .node
                .as_ref()
                .is_none_or(|node| object["spec"]["nodeName"].as_str().unwrap_or_default() == node)
            && (self.only.as_ref()).is_none_or(|only| object["metadata"]["name"] == **only)
    }

    /// What a watch tells of a change.
    pub(crate) fn event<'c>(&self, change: &'c Change) -> Option<(&'static str, Cow<'c, str>)> {
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

    pub(crate) fn answer(self, server: &mut Server) -> Response<Body> {
        let created = self.method == Method::POST;
        match self.decide(server) {
            Ok(answer) => {
                let mut response = Response::new(Body::from(answer));
                if created {
                    *response.status_mut() = StatusCode::CREATED;
                }
                response
            }
            Err(refusal) => refused(&refusal),
        }
    }

    /// What it is answered, as it is sent.
    fn decide(self, server: &mut Server) -> Result<String, Refusal> {
        let Some(kind) = self.kind else {
            // Events are told to nobody; of policies and settings there are none.
            return match self.plural.as_str() {
                "events" => Ok(self.body.to_string()),
                "poddisruptionbudgets" => Ok(server.budgets().to_string()),
                // Which API groups are served.
                "" => Ok(json!({ "groups": [] }).to_string()),
                other => Err(Refusal(404, "NotFound", format!("no {other} here"))),
            };
        };
        if kind == Kind::PodGroup && !server.has_pod_groups {
            return Err(Refusal(404, "NotFound", "no PodGroups here".to_owned()));
        }
        let key = (kind, self.namespace.clone(), self.name.clone());
        let partial = self.partial;
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
                server.bind(key, &self.body).map(|_| {
                    let done = json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {} });
                    Arc::new(done)
                })
            }
            (&Method::POST, "eviction") => server.evict(key, &self.body, self.unwanted),
            (&Method::POST, "") => {
                let mut object = self.body;
                if kind == Kind::Pod {
                    server.wrong.extend(admit(&mut object).err());
                    let (name, mib) = (name(&object), asked(&object));
                    let owner = &object["metadata"]["ownerReferences"][0]["name"];
                    let text = format!("{name} stands for {owner}, {mib} MiB");
                    server.story.tell(text);
                }
                server.create(kind, &self.namespace, object)
            }
            (&Method::DELETE, "") if self.body["dryRun"].is_array() => {
                server.may_delete(&key, &self.body["preconditions"])
            }
            (&Method::DELETE, "") if server.get(&key).is_ok_and(|it| is_placeholder(&it)) => {
                server.delete(key, &self.body["preconditions"])
            }
            (&Method::DELETE, "") if kind == Kind::Pod => {
                server.preempt(key, &self.body, self.unwanted)
            }
            (&Method::PUT, _) => server.replace(key, self.body),
            (&Method::PATCH, part) if self.applies => {
                server.apply(key, self.body, part == "status")
            }
            (&Method::PATCH, _) if self.tries => server.may_patch(&key, &self.body),
            (&Method::PATCH, part) => {
                let before = server.get(&key);
                let patched = server.patch(key, &self.body, self.strategic, part == "status");
                if let (Kind::Pod, "", Ok(before), Ok(after)) = (kind, part, before, &patched) {
                    server.wrong.extend(check::ungate(&before, after));
                }
                patched
            }
            (method, part) => {
                let text = format!("the simulated server has no {method} of {kind:?}/{part}");
                server.wrong.push(text.clone());
                Err(Refusal(405, "MethodNotAllowed", text))
            }
        };
        answer.map(|object| match partial {
            false => object.to_string(),
            true => json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
            })
            .to_string(),
        })
    }
}
