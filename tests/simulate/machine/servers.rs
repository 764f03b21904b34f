//! Inference servers: each looks at the free memory of its GPU, loads its model for some seconds, and looks again. If free
//! memory has changed by more than its own, it exits, and its kubelet starts it again after a pause that doubles.

use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use gpustow_api::names;
use gpustow_simworld::repeat;
use k8s_openapi::jiff::SignedDuration;
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Machine;
use crate::net::{NAMESPACE, locked};
use crate::scheduler::{name, uid};
use crate::server::Kind;

/// The label of their pods.
const SERVES: &str = "example.com/serves";
/// For so many seconds a server loads its model, each time another.
const LOADS: RangeInclusive<u64> = 15..=25;
/// As kubelet does it, which looks every few seconds.
const LOOK: Range<u64> = 0..5;
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

pub(crate) struct Server {
    pod: String,
    name: String,
    container: String,
    /// It loads from then on, or begins to.
    begins: Instant,
    loads: Duration,
    /// The usage of its GPU by others at its first look.
    saw: Option<u64>,
    restarts: u32,
}

/// A pod with a server that needs so many MiB, which starts alone or not.
pub(crate) fn server(name: &str, mib: u64, alone: bool) -> Value {
    let asks = json!({ names::GPU_MEM: mib.to_string() });
    let says = if alone { "alone" } else { "beside" };
    json!({
        "metadata": {
            "name": name, "labels": { SERVES: "yes" }, "annotations": { names::START: says },
        },
        "spec": { "schedulerName": names::SCHEDULER, "containers": [
            { "name": "main", "image": "i", "resources": { "limits": asks, "requests": asks } },
        ] },
        "status": { "phase": "Pending" },
    })
}

impl Machine {
    /// The pod's processes begin; it has a server if its label asks for one.
    pub(super) fn begin_server(&mut self, pod: &Value, container: &str) {
        if pod["metadata"]["labels"][SERVES] == "yes" {
            let server = Server {
                pod: uid(pod),
                name: name(pod),
                container: container.to_owned(),
                begins: Instant::now(),
                loads: Duration::from_secs(self.random.random_range(LOADS)),
                saw: None,
                restarts: 0,
            };
            self.servers.push(server);
        }
    }

    /// Time passes for servers that are not Ready.
    pub(super) fn serve(&mut self) {
        let running = &self.running;
        let lives = |it: &Server| {
            running
                .iter()
                .any(|process| process.pod.as_ref() == Some(&it.pod))
        };
        self.servers.retain(lives);
        for mut server in std::mem::take(&mut self.servers) {
            if self.goes_on(&mut server) {
                self.servers.push(server);
            }
        }
    }

    /// False once it is Ready.
    fn goes_on(&mut self, server: &mut Server) -> bool {
        let loaded = Instant::now().checked_duration_since(server.begins);
        let of_pod = |process: &&mut super::Running| process.pod.as_ref() == Some(&server.pod);
        let Some(loaded) = loaded else {
            return true;
        };
        let card = self.running.iter_mut().find(of_pod).map(|process| {
            let part = loaded.as_secs_f64() / server.loads.as_secs_f64();
            process.mib = (process.asked as f64 * part.min(1.0)) as u64;
            process.card
        });
        let others = self.running.iter().filter(|process| {
            Some(process.card) == card && process.pod.as_ref() != Some(&server.pod)
        });
        let others: u64 = others.map(|process| process.mib).sum();
        match server.saw {
            None => {
                server.saw = Some(others);
                self.say(server, false);
            }
            Some(_) if loaded < server.loads => {}
            Some(saw) if saw == others => {
                self.say(server, true);
                return false;
            }
            Some(_) => {
                self.failed += 1;
                self.crash(server);
            }
        }
        true
    }

    /// The server exits.
    fn crash(&mut self, server: &mut Server) {
        let of_pod = |process: &&mut super::Running| process.pod.as_ref() == Some(&server.pod);
        if let Some(process) = self.running.iter_mut().find(of_pod) {
            process.mib = 0;
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << server.restarts.min(5));
        server.restarts += 1;
        server.saw = None;
        let look = Duration::from_secs(self.random.random_range(LOOK));
        server.begins = Instant::now() + pause.min(LONGEST_PAUSE) + look;
        server.loads = Duration::from_secs(self.random.random_range(LOADS));
        self.say(server, false);
    }

    /// One of the servers that load is killed.
    pub(crate) fn kill_server(&mut self) {
        if let Some(mut server) = self.servers.pop() {
            self.crash(&mut server);
            self.servers.push(server);
        }
    }

    /// Writes the pod's status as the kubelet does.
    fn say(&self, server: &Server, is_ready: bool) {
        let now = repeat::time(SignedDuration::ZERO);
        let pauses = server.begins > Instant::now();
        let state = match pauses {
            true => json!({ "waiting": { "reason": "CrashLoopBackOff" } }),
            false => json!({ "running": { "startedAt": now } }),
        };
        let last = match server.restarts {
            0 => json!({}),
            _ => json!({ "terminated": { "exitCode": 1, "finishedAt": now } }),
        };
        let ready = if is_ready { "True" } else { "False" };
        let status = json!({ "metadata": { "uid": server.pod }, "status": {
            "conditions": [
                { "type": "PodScheduled", "status": "True" },
                { "type": "Ready", "status": ready },
            ],
            "containerStatuses": [{
                "name": "main", "containerID": server.container, "image": "i", "imageID": "i",
                "ready": is_ready, "restartCount": server.restarts, "state": state, "lastState": last,
            }],
        } });
        let key = (Kind::Pod, NAMESPACE.to_owned(), server.name.clone());
        // It may have gone.
        let _ = locked(&self.server).patch(key, &status, false, true);
    }
}
