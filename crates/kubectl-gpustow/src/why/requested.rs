//! The request of a pod: values for programs, words for people.

use gpustow_api::PodFacts;
use gpustow_inspect::memory;
use gpustow_pack::Mib;
use serde::Serialize;

/// The request of the pod.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Requested {
    containers: Vec<OfContainer>,
    exclusive: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
    /// Where the amount is from, if admission gave it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) origin: Option<String>,
}

/// The request of a container.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct OfContainer {
    container: String,
    gpus: u32,
    bytes_per_gpu: u64,
    /// Of a GPU, and at least that many bytes; zero if an amount is requested.
    percentage: u64,
    /// Zero if the driver does not limit it.
    driver_limit_bytes: u64,
}

impl Requested {
    pub(super) fn of(facts: &PodFacts) -> Self {
        let claims = facts.containers.iter().zip(facts.asks.claims());
        let containers = claims.map(|(container, claim)| OfContainer {
            container: container.to_string(),
            gpus: claim.gpus,
            bytes_per_gpu: claim.mib.bytes(),
            percentage: claim.percentage.into(),
            driver_limit_bytes: claim.driver_limit.bytes(),
        });
        let request = facts.asks.request();
        Self {
            containers: containers.collect(),
            exclusive: request.is_some_and(|it| it.exclusive),
            policy: request.and_then(|it| Some(it.policy?.to_string())),
            origin: None,
        }
    }

    /// In words, one part after the other.
    pub(super) fn parts(&self) -> Vec<String> {
        let containers = self.containers.iter().map(|it| {
            let text = |bytes: u64| memory(Mib(bytes >> 20));
            let gpus = match it.gpus {
                1 => String::new(),
                gpus => format!(" on each of {gpus} GPUs"),
            };
            let part = match it.percentage {
                0 => String::new(),
                part => format!("{part} % of a GPU, at least "),
            };
            let limit = match it.driver_limit_bytes {
                0 => String::new(),
                limit => format!(", held by the driver to {}", text(limit)),
            };
            let amount = text(it.bytes_per_gpu);
            format!("{}: {part}{amount}{gpus}{limit}", it.container)
        });
        let whole = self.exclusive.then(|| "whole GPUs (exclusive)".to_owned());
        let policy = self.policy.iter().map(|it| format!("policy {it}"));
        let rest = whole.into_iter().chain(policy).chain(self.origin.clone());
        containers.chain(rest).collect()
    }
}
