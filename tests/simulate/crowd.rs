//! Nodes whose sum suffices and whose GPU others use: kube-scheduler shows them, and no pod fits there. Where there are
//! many, it shows only some of all nodes.

use anyhow::{Result, anyhow};
use gpustow_api::names;
use gpustow_simworld::repeat;
use k8s_openapi::jiff::SignedDuration;
use serde_json::json;
use tokio::time::{Duration, Instant};

use crate::check::CARD;
use crate::net::{Shared, locked};
use crate::server::Kind;

/// Between two reports of one of their agents.
const HEARTBEAT: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Crowd {
    names: Vec<String>,
    told: Option<Instant>,
}

impl Crowd {
    pub(crate) fn build(server: &Shared, count: usize) -> Result<Self> {
        let names: Vec<String> = (0..count).map(|number| format!("crowd{number}")).collect();
        let mut server = locked(server);
        for name in &names {
            let sum = json!({ "cpu": "64", "memory": "1Ti", "pods": "1000", names::GPU_MEM: CARD.to_string() });
            let node = json!({
                "metadata": { "name": name }, "spec": {},
                "status": { "capacity": sum, "allocatable": sum, "conditions": [{ "type": "Ready", "status": "True" }] },
            });
            let report = json!({
                "metadata": { "name": name }, "spec": {},
                "status": {
                    "heartbeat": repeat::time(SignedDuration::ZERO),
                    "summary": { "gpus": 1, "healthy": 1, "models": "Simulated", "capacityMiB": CARD, "usedMiB": CARD },
                    "gpus": [{
                        "uuid": format!("GPU-{name}-0"), "index": 0, "model": "Simulated", "totalMiB": CARD,
                        "healthy": true, "unmanagedMiB": CARD, "hostMiB": CARD,
                    }],
                },
            });
            for (kind, object) in [(Kind::Node, node), (Kind::GpuNode, report)] {
                let made = server.create(kind, "", object);
                made.map_err(|refusal| anyhow!("{refusal:?}"))?;
            }
        }
        let told = Some(Instant::now());
        Ok(Self { names, told })
    }

    /// The agents of these nodes repeat their reports.
    pub(crate) fn live(&mut self, server: &Shared) {
        if self.told.is_some_and(|at| at.elapsed() < HEARTBEAT) {
            return;
        }
        self.told = Some(Instant::now());
        for name in &self.names {
            let heartbeat = repeat::time(SignedDuration::ZERO);
            let patch = json!({ "status": { "heartbeat": heartbeat } });
            let key = (Kind::GpuNode, String::new(), name.clone());
            // A restored etcd may date from before these nodes.
            let _ = locked(server).patch(key, &patch, false, true);
        }
    }
}
