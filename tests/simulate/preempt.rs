//! kube-scheduler's preemption. It chooses victims by the node's sum, and the extender answers whether that helps. Then
//! the pod is nominated, and its victims are deleted.

use std::cmp::Reverse;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cache::Cache;
use crate::check::rejects;
use crate::net::{self, locked};
use crate::scheduler::{Scheduler, asked, name, uid};
use crate::server::{Copy, Kind};

pub(crate) fn priority(pod: &Value) -> i64 {
    pod["spec"]["priority"].as_i64().unwrap_or(0)
}

pub(crate) fn nominated(pod: &Value) -> Option<&str> {
    pod["status"]["nominatedNodeName"].as_str()
}

/// The pods that must end for this pod by the node's sum; pods of high priority are spared first. None if it would not
/// fit without them either, or no pod could end.
fn victims(cache: &Cache, pod: &Value, node: &str) -> Option<Vec<Copy>> {
    let here = cache.here(node);
    let (mut lower, others): (Vec<_>, Vec<_>) =
        here.partition(|other| priority(other) < priority(pod));
    let nominated = cache.nominated(node, pod).map(|it| asked(it));
    let held: u64 = others.iter().map(|it| asked(it)).chain(nominated).sum();
    let mut left = cache.allocatable(node).checked_sub(held + asked(pod))?;
    if lower.is_empty() {
        return None;
    }
    lower.sort_by_key(|it| (Reverse(priority(it)), uid(it)));
    lower.retain(|it| match left.checked_sub(asked(it)) {
        Some(less) => {
            left = less;
            false
        }
        None => true,
    });
    Some(lower.into_iter().cloned().collect())
}

impl Scheduler {
    /// Has others make room for a pod that fits nowhere, on one of the nodes whose sum refused it. Kubernetes 1.38 also
    /// thinks of nodes that `failed` by the extender alone.
    pub(crate) async fn preempt(&self, pod: &Copy, passed: &[String], failed: &[String]) {
        let asks = locked(&self.server).is_1_38;
        let candidates: Vec<(String, Vec<Copy>)> = {
            let cache = locked(&self.cache);
            let waits = |node| {
                let ends = |it: &&Copy| it["metadata"]["deletionTimestamp"].is_string();
                let mut ending = cache.here(node).filter(ends);
                ending.any(|it| priority(it) < priority(pod))
            };
            if pod["spec"]["preemptionPolicy"] == "Never" || nominated(pod).is_some_and(waits) {
                return;
            }
            let nodes = cache.nodes.keys();
            let asked = |node: &String| asks && failed.contains(node);
            let nodes = nodes.filter(|node| asked(node) || !passed.contains(node));
            let nodes = nodes.filter(|node| !rejects(pod, node));
            let nodes = nodes.filter_map(|node| Some((node.clone(), victims(&cache, pod, node)?)));
            let nodes = nodes.filter(|(node, victims)| asked(node) || !victims.is_empty());
            nodes.collect()
        };
        let all = candidates.iter().map(|(node, victims)| {
            let pods: Vec<Value> = victims.iter().map(|it| json!({ "UID": uid(it) })).collect();
            (node.clone(), json!({ "Pods": pods, "NumPDBViolations": 0 }))
        });
        let all: serde_json::Map<String, Value> = all.collect();
        let chosen = match all.is_empty() {
            true => None,
            false => {
                let body = json!({ "Pod": **pod, "NodeNameToMetaVictims": all });
                let Some(answer) = self.beside().extender.call("preempt", &body).await else {
                    return;
                };
                self.choose(pod, &answer)
            }
        };
        match chosen {
            Some((node, victims)) => self.evict(pod, &node, &victims).await,
            None if self.clears && nominated(pod).is_some() => self.nominate(pod, None).await,
            None => {}
        }
    }

    /// The node whose victims matter least.
    fn choose(&self, pod: &Value, answer: &Value) -> Option<(String, Vec<Copy>)> {
        let cache = locked(&self.cache);
        let mut best = None;
        for (node, victims) in answer["NodeNameToMetaVictims"].as_object()? {
            let uids = victims["Pods"].as_array().into_iter().flatten();
            let uids = uids.filter_map(|it| it["UID"].as_str());
            // One that it does not know there, or none at all, voids the whole answer.
            let victims: Option<Vec<Copy>> = uids
                .map(|uid| cache.here(node).find(|it| it["metadata"]["uid"] == *uid))
                .map(|it| it.cloned())
                .collect();
            let victims = victims.filter(|it| !it.is_empty())?;
            let highest = victims.iter().map(|it| priority(it)).max();
            if highest >= Some(priority(pod)) {
                let text = format!("{} is to be evicted for {}", name(&victims[0]), name(pod));
                locked(&self.server).wrong.push(text);
            }
            let sum: i64 = victims.iter().map(|it| priority(it)).sum();
            let rank = (highest, sum, victims.len(), node.clone());
            if best.as_ref().is_none_or(|(other, _)| rank < *other) {
                best = Some((rank, victims));
            }
        }
        best.map(|((.., node), victims)| (node, victims))
    }

    async fn nominate(&self, pod: &Value, node: Option<&str>) {
        if self.beside().link.pass().await.is_err() {
            return;
        }
        let key = (Kind::Pod, net::NAMESPACE.to_owned(), name(pod));
        let patch = json!({
            "metadata": { "uid": uid(pod) }, "status": { "nominatedNodeName": node },
        });
        // It may be gone, or bound.
        let written = locked(&self.server).patch(key, &patch, false, true);
        if let Ok(copy) = written {
            locked(&self.cache).pods.insert(uid(pod), copy);
        }
    }

    /// Sets the condition that no node was found for the pod, unless the pod has it.
    pub(crate) async fn say_refused(&self, pod: &Value) {
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let said = conditions.any(|it| it["type"] == "PodScheduled" && it["status"] == "False");
        if said || self.beside().link.pass().await.is_err() {
            return;
        }
        let key = (Kind::Pod, net::NAMESPACE.to_owned(), name(pod));
        let refused = json!({
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0 nodes are available",
        });
        let patch = json!({
            "metadata": { "uid": uid(pod) }, "status": { "conditions": [refused] },
        });
        // It may be gone, or bound.
        let written = locked(&self.server).patch(key, &patch, true, true);
        if let Ok(copy) = written {
            locked(&self.cache).pods.insert(uid(pod), copy);
        }
    }

    async fn evict(&self, pod: &Value, node: &str, victims: &[Copy]) {
        self.story.tell(format!(
            "{} is nominated to {node}, for which {} must go",
            name(pod),
            victims
                .iter()
                .map(|it| name(it))
                .collect::<Vec<_>>()
                .join(" and ")
        ));
        let uids: Vec<String> = victims.iter().map(|it| uid(it)).collect();
        let link = self.beside().link;
        locked(&self.server).evicts(pod, node, &uids, &link);
        self.nominate(pod, Some(node)).await;
        for victim in victims {
            tokio::time::sleep(Duration::from_millis(self.random(50))).await;
            if self.beside().link.pass().await.is_err() {
                return;
            }
            let key = (Kind::Pod, net::NAMESPACE.to_owned(), name(victim));
            let precondition = json!({ "uid": uid(victim) });
            // It may have ended by itself.
            let _ = locked(&self.server).delete(key, &precondition);
        }
    }
}
