//! The acts of users: they create pods, change them, and end them.

use gpustow_admission::{Act, Ask, Cluster, admit};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::{QueueFrom, config, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use rand::RngExt as _;
use serde_json::{Value, json};

use crate::autoscaler::is_placeholder;
use crate::check::{self, CARD, gated, gated_by_others};
use crate::disruptions::waits;
use crate::net::{NAMESPACE, locked};
use crate::scheduler::name;
use crate::server::{Copy, Kind};
use crate::world::{World, key};

/// The UID of the controller that made the pod.
pub(crate) fn owner(pod: &Value) -> Option<String> {
    let owner = &pod["metadata"]["ownerReferences"][0]["uid"];
    owner.as_str().map(str::to_owned)
}

impl World {
    /// One of the pods, by its name, and whether it is bound.
    fn any_pod(&mut self, bound: bool) -> Option<String> {
        let server = locked(&self.server);
        let all = server.all(Kind::Pod);
        let all =
            all.filter(|pod| pod["spec"]["nodeName"].is_string() == bound && !is_placeholder(pod));
        let names: Vec<&str> = all
            .filter_map(|pod| pod["metadata"]["name"].as_str())
            .collect();
        let index = self.random.random_range(0..names.len().max(1));
        names.get(index).map(|name| (*name).to_owned())
    }

    /// Creates a pod, or now and then a group of which all are scheduled or none.
    pub(crate) fn create(&mut self) {
        let members = match self.random.random_range(0..12) {
            0 => self.random.random_range(2..=3),
            _ => 1,
        };
        let gpus = [1, 1, 1, 1, 2, 2, 4][self.random.random_range(0..7)];
        let gpus = if members > 1 { 1 } else { gpus };
        let mib = [5_000, 10_000, 20_000, 40_000, 60_000, 80_000][self.random.random_range(0..6)];
        let asks = json!({ names::GPU_MEM: (mib * gpus).to_string() });
        let mut pod = json!({
            "metadata": { "annotations": { names::GPU_COUNT: gpus.to_string() } },
            "spec": {
                "schedulerName": names::SCHEDULER,
                "containers": [{ "name": "main", "image": "i", "resources": { "limits": asks, "requests": asks } }],
            },
            "status": { "phase": "Pending" },
        });
        if let Some(other) = self.on.other
            && self.random.random_bool(0.3)
        {
            pod["spec"]["schedulerName"] = json!(other);
        }
        pod["spec"]["priority"] = json!([0, 0, 0, 0, 100, 1000][self.random.random_range(0..6)]);
        if self.random.random_bool(0.3) {
            pod["metadata"]["labels"][check::GUARDED] = json!("yes");
        }
        if self.random.random_bool(0.1) {
            pod["spec"]["preemptionPolicy"] = json!("Never");
        }
        let mut gates = Vec::new();
        if self.random.random_bool(0.1) {
            gates.push(json!({ "name": "example.com/wait" }));
        }
        if mib < CARD && self.random.random_bool(0.5) {
            let limit = self.random.random_range(mib..=CARD) * gpus;
            pod["metadata"]["annotations"][names::MEM_LIMIT] = json!(limit.to_string());
        }
        if mib == CARD {
            pod["metadata"]["annotations"][names::EXCLUSIVE] = json!("true");
        }
        if self.on.hangs && self.random.random_bool(0.05) {
            pod["metadata"]["labels"][check::HANGS] = json!("yes");
        }
        // A gang that starts alone needs a GPU for each pod, which the check of pods that fit does not know.
        if self.on.starts && members == 1 && self.random.random_bool(0.3) {
            pod["metadata"]["annotations"][names::START] = json!("alone");
        }
        if self.on.rejects && self.random.random_bool(0.3) {
            let names = self.machines.iter().map(|it| it.name.clone());
            let names: Vec<String> = names.filter(|_| self.random.random_bool(0.4)).collect();
            pod["metadata"]["labels"][check::REJECTS] = json!(names.join("_"));
        }
        if members > 1 && self.on.gangs {
            self.gang(&mut pod, members);
        } else if members > 1 {
            let group = format!("of-p{}", self.pods + 1);
            pod["metadata"]["labels"][names::POD_GROUP_LABELS[0]] = json!(group);
            pod["metadata"]["labels"][check::MEMBERS] = json!(members.to_string());
        }
        if self.on.defragment && members == 1 && self.random.random_bool(0.4) {
            let owner = format!("maker-of-p{}", self.pods + 1);
            pod["metadata"]["annotations"][names::EVICTABLE] = json!("true");
            pod["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": true,
            }]);
            self.owners.insert(owner, pod.clone());
        }
        // By the admission policy, but for the few that it leaves out.
        if self.random.random_bool(0.9) && self.is_queued(&pod) {
            gates.push(json!({ "name": names::GATE }));
        }
        pod["spec"]["schedulingGates"] = json!(gates);
        for _ in 0..members {
            self.make(&mut pod);
        }
    }

    pub(crate) fn make(&mut self, pod: &mut Value) -> String {
        self.pods += 1;
        let name = format!("p{}", self.pods);
        let members = check::group(pod).map_or(1, |(_, members)| members);
        let (mib, gpus) = check::asks(pod);
        pod["metadata"]["name"] = json!(name);
        let labels = &pod["metadata"]["labels"];
        self.tell(format!(
            "{name} is created: {gpus} x {mib} MiB, priority {}, by {}{}{}{}{}",
            pod["spec"]["priority"],
            pod["spec"]["schedulerName"],
            if gated(pod) { ", gated" } else { "" },
            if members > 1 { ", one of a group" } else { "" },
            labels[check::REJECTS]
                .as_str()
                .map_or_else(String::new, |it| format!(", rejects {it}")),
            if check::hangs(pod) { ", hangs" } else { "" },
        ));
        // No other has its name.
        let _ = locked(&self.server).create(Kind::Pod, NAMESPACE, pod.clone());
        name
    }

    /// Controllers create pods in place of pods that are gone, and PodGroups that do not exist.
    pub(crate) fn control(&mut self) {
        self.make_pod_groups();
        let lives: Vec<String> = {
            let server = locked(&self.server);
            let all = server.all(Kind::Pod);
            let all = all.filter(|pod| !pod["metadata"]["deletionTimestamp"].is_string());
            all.filter_map(|pod| owner(pod)).collect()
        };
        let gone = self
            .owners
            .iter()
            .filter(|(owner, _)| !lives.contains(owner));
        let gone: Vec<Value> = gone.map(|(_, pod)| pod.clone()).collect();
        for mut pod in gone {
            self.make(&mut pod);
        }
    }

    /// Deletes the pods of groups of which some have ended: they would be tried again and again, and keep others off
    /// while they are.
    pub(crate) fn give_up_groups(&self) {
        let mut server = locked(&self.server);
        let left = check::broken_groups(&server);
        for name in left {
            self.story
                .tell(format!("{name} is deleted, as its group is broken"));
            let _ = server.delete(key(Kind::Pod, &name), &json!({}));
        }
    }

    pub(crate) fn end(&mut self, bound: bool) {
        if let Some(name) = self.any_pod(bound) {
            self.end_pod(&name, bound);
        }
    }

    /// A waiting pod is deleted for which others are disrupted, if there is one.
    pub(crate) fn give_up(&mut self) {
        let kept = {
            let server = locked(&self.server);
            let kept = |pod: &&Copy| check::says(pod, names::RESERVED_CONDITION).is_some();
            let mut all = server.all(Kind::Pod).filter(kept);
            all.find(|pod| waits(pod)).map(|pod| name(pod))
        };
        match kept {
            Some(name) => self.end_pod(&name, false),
            None => self.end(false),
        }
    }

    pub(crate) fn end_pod(&mut self, name: &str, bound: bool) {
        let key = key(Kind::Pod, name);
        let owner = locked(&self.server)
            .get(&key)
            .ok()
            .and_then(|pod| owner(&pod));
        if let Some(owner) = owner {
            self.owners.remove(&owner);
        }
        if bound && self.random.random_bool(0.5) {
            self.tell(format!("{name} succeeds"));
            let done = json!({ "status": { "phase": "Succeeded" } });
            let _ = locked(&self.server).patch(key, &done, false, true);
        } else {
            self.tell(format!("{name} is deleted"));
            // Its kubelet ends it.
            let _ = locked(&self.server).delete(key, &json!({}));
        }
    }

    /// Is a new pod queued, as admission would have it?
    pub(crate) fn is_queued(&self, pod: &Value) -> bool {
        let config = locked(&self.server).get(&key(Kind::GpustowConfig, config::NAME));
        config.is_ok_and(|config| {
            let from = config["status"]["queueFrom"].clone();
            let from: Vec<QueueFrom> = serde_json::from_value(from).unwrap_or_default();
            let cluster = Cluster {
                resource: names::GPU_MEM,
                spec: &GpustowConfigSpec::default(),
                queue_from: &from,
            };
            let ask = Ask {
                pod,
                act: Act::Create,
                user: "",
            };
            let made = admit(ask, cluster, &ObjectMeta::default(), None);
            let gates = made.map(|made| made.pod["spec"]["schedulingGates"].clone());
            let gated = gates.is_ok_and(|gates| {
                let mut gates = gates.as_array().into_iter().flatten();
                gates.any(|gate| gate["name"] == names::GATE)
            });
            config["spec"]["queue"]["mode"] != "Off" && gated
        })
    }

    /// Takes another controller's gate off.
    pub(crate) fn ungate(&mut self) {
        let pod = {
            let server = locked(&self.server);
            let mut all = server.all(Kind::Pod);
            all.find(|pod| gated_by_others(pod)).cloned()
        };
        if let Some(pod) = pod {
            let name = name(&pod);
            self.tell(format!("the gate of {name} is taken off"));
            let patch = json!({ "spec": { "schedulingGates": [{ "name": "example.com/wait" }] } });
            let _ = locked(&self.server).patch(key(Kind::Pod, &name), &patch, true, false);
        }
    }

    pub(crate) fn annotate(&mut self) {
        if let Some(name) = self.any_pod(false) {
            self.tell(format!("{name} is annotated"));
            let note = self.random.random_range(0..1000).to_string();
            let patch = json!({ "metadata": { "annotations": { "example.com/note": note } } });
            let _ = locked(&self.server).patch(key(Kind::Pod, &name), &patch, false, false);
        }
    }
}
