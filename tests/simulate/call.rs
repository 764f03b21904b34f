//! A request to a world's API server: judged as it is sent, and answered.

use std::time::Duration;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, Response};
use gpustow_simworld as simworld;
use serde_json::Value;

use crate::autoscaler::{admit, is_placeholder};
use crate::check;
use crate::disruptions;
use crate::scheduler::{asked, name};
use crate::server::{Kind, Refusal, Server};

/// A request, understood.
pub(crate) struct Call {
    pub(crate) asked: simworld::Call,
    /// Why it should not have been sent.
    unwanted: Vec<String>,
}

impl Call {
    pub(crate) fn of(head: &Parts, body: Value) -> Self {
        Self {
            asked: simworld::Call::of(head, body),
            unwanted: Vec::new(),
        }
    }

    fn is(&self, method: Method, kind: Kind, part: &str) -> bool {
        let Self { asked, .. } = self;
        asked.method == method && asked.kind == Some(kind) && asked.part == part
    }

    /// Does it write a pod's status?
    pub(crate) fn writes_status(&self) -> bool {
        self.is(Method::PATCH, Kind::Pod, "status")
    }

    /// Records the errors in the request as it is sent, by a process whose view may have this age.
    pub(crate) fn judge(&mut self, server: &Server, age: Duration) {
        let deletes = self.asked.method == Method::DELETE && self.asked.kind == Some(Kind::Pod);
        if !deletes && self.asked.part != "eviction" {
            return;
        }
        let key = self.asked.key();
        let pod = key.and_then(|key| server.get(&key).ok());
        let Some(pod) = pod.filter(|pod| !is_placeholder(pod)) else {
            return;
        };
        self.unwanted = disruptions::unwanted(server, &pod, age);
        let precondition = &self.asked.body["preconditions"];
        let views = disruptions::views(server, age);
        let wrong = views.map(|objects| match deletes {
            true => check::preempted(objects, &pod, precondition),
            false => check::evicted(objects, &pod).filter(|_| !server.uses_more(&pod)),
        });
        // It is right if it is by one of the views.
        self.unwanted.extend(wrong.reduce(Option::and).flatten());
    }

    pub(crate) fn answer(self, server: &mut Server) -> Response<Body> {
        let is_post = self.asked.method == Method::POST;
        simworld::Call::response(is_post, self.decide(server))
    }

    /// The answer, as it is sent.
    fn decide(mut self, server: &mut Server) -> Result<String, Refusal> {
        let Some(key) = self.asked.key() else {
            // Of policies and settings there are none.
            return server.write(|kept| self.asked.decide(kept));
        };
        if key.0 == Kind::PodGroup && !server.has_pod_groups {
            return Err(Refusal(404, "NotFound", "no PodGroups here".to_owned()));
        }
        let before = server.get(&key);
        if self.is(Method::POST, Kind::Pod, "eviction") {
            let evicted = server.evict(key, &self.asked.body, self.unwanted);
            return evicted.map(|status| status.to_string());
        }
        let disrupts = !before.as_ref().is_ok_and(|it| is_placeholder(it))
            && !self.asked.body["dryRun"].is_array();
        if self.is(Method::DELETE, Kind::Pod, "") && disrupts {
            let deleted = server.preempt(key, &self.asked.body, self.unwanted);
            return deleted.map(|pod| pod.to_string());
        }
        if self.is(Method::POST, Kind::Pod, "") {
            let pod = &mut self.asked.body;
            server.wrong.extend(admit(pod).err());
            let owner = &pod["metadata"]["ownerReferences"][0]["name"];
            let (name, mib) = (name(pod), asked(pod));
            let text = format!("{name} stands for {owner}, {mib} MiB");
            server.story.tell(text);
        }
        let binds = self.is(Method::POST, Kind::Pod, "binding");
        let patches = self.is(Method::PATCH, Kind::Pod, "") && !self.asked.tries;
        let answer = server.write(|kept| self.asked.decide(kept));
        let after = server.get(&key);
        match (&answer, before, after) {
            (Ok(_), _, Ok(bound)) if binds => server.tell_of_bind(&bound),
            (Ok(_), Ok(before), Ok(after)) if patches => {
                server.wrong.extend(check::ungate(&before, &after));
            }
            (Err(Refusal(405, _, text)), ..) => server.wrong.push(text.clone()),
            _ => {}
        }
        answer
    }
}
