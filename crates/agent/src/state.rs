//! The agent's state: it turns readings into the report. No I/O and no clock of its own.

mod entry;
mod mps;
mod news;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::{
    Condition, Gpu, GpuNodeStatus, NO_GPUS, PROCESSES_READABLE, READY, Summary,
};
use gpustow_pack::Mib;

use crate::capacity::Cards;
use crate::claims::Held;
use crate::clock::Now;
use crate::devices::{Card, DeviceError, Reading};
use crate::health::Health;
use crate::history::History;
use crate::instances::Unmade;
use crate::limits::{self, Means};
use crate::pods::NodePods;
use crate::processes::Who;
use crate::sharers;
use crate::shares::CardUse;

/// The settings of an operator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The memory of a card that pods must not hold.
    pub headroom: Mib,
    /// Size to assume for a GPU that shares the host's memory and reports none of its own.
    pub unified_memory: Option<Mib>,
    /// Changes of foreign memory below this wait for the heartbeat.
    pub threshold: Mib,
    /// XIDs that are an application's fault.
    pub application_xids: BTreeSet<u64>,
    /// The time for which a failed card does not get pods.
    pub probation: Duration,
    /// How long a card that is not seen any more stays in the report.
    pub forget_after: Duration,
    /// The node's means to limit containers' memory.
    pub means: Means,
    /// Pods share the node's GPUs through NVIDIA's MPS.
    pub mps: bool,
}

/// A card and who uses it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Its entry in the report.
    pub gpu: Gpu,
    /// Bytes by user.
    pub used: CardUse,
    /// Bytes in use in all.
    pub used_bytes: u64,
    /// UIDs of pods that were seen here twice with a process that is no client of MPS, and should have none.
    pub past_mps: BTreeSet<Arc<str>>,
}

#[derive(Clone, Debug)]
struct Tracked {
    seen: Seen,
    /// The agent's age when it was last seen.
    when: Duration,
    /// The last answer of the driver showed it.
    there: bool,
    unmanaged_before: u64,
}

/// Everything that the agent knows of its cards.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    health: Health,
    limits: limits::Seen,
    history: History,
    known: BTreeMap<String, Tracked>,
    order: Vec<String>,
    driver: Option<String>,
    error: Option<DeviceError>,
    unseen: bool,
    unmade: Vec<Unmade>,
    /// Why no client of MPS could start here, if so.
    mps_fails: Option<String>,
}

impl State {
    /// A state that knows only the report of an earlier agent, if there is one.
    #[must_use]
    pub fn new(settings: Settings, before: Option<&GpuNodeStatus>, now: Now) -> Self {
        let mut health = Health::new(settings.application_xids.clone(), settings.probation);
        let mut known = BTreeMap::new();
        let mut order = Vec::new();
        if let Some(status) = before {
            health.resume(status, now);
            for gpu in &status.gpus {
                let gpu = Gpu {
                    pods: Vec::new(),
                    ..gpu.clone()
                };
                let uuid = gpu.uuid.clone();
                order.push(uuid.clone());
                let tracked = Tracked {
                    there: !gpu.missing,
                    seen: Seen {
                        gpu,
                        ..Seen::default()
                    },
                    when: now.age,
                    unmanaged_before: 0,
                };
                known.insert(uuid, tracked);
            }
        }
        Self {
            limits: limits::Seen::new(settings.means),
            history: History::resumed(before, now),
            mps_fails: Some("MPS's control daemon was not asked yet".to_owned()),
            settings,
            health,
            known,
            order,
            driver: None,
            error: None,
            unseen: false,
            unmade: Vec::new(),
        }
    }

    /// The agent has written the report of [`Self::status`].
    pub fn reported(&mut self) {
        self.history.reported();
    }

    /// The cards in the report's order, including missing cards.
    pub fn cards(&self) -> impl Iterator<Item = &Seen> {
        self.order
            .iter()
            .filter_map(|uuid| Some(&self.known.get(uuid)?.seen))
    }

    /// Why nothing can be seen, if so.
    #[must_use]
    pub fn error(&self) -> Option<&DeviceError> {
        self.error.as_ref()
    }

    /// The cards that were there when the driver last answered, healthy or not.
    #[must_use]
    pub fn present(&self) -> Cards {
        let there = self.known.values().filter(|known| known.there);
        let gpus = there.map(|known| &known.seen.gpu);
        gpus.map(|gpu| (gpu.uuid.clone(), gpu.capacity(self.settings.headroom)))
            .collect()
    }

    /// The memory of each GPU that is kept free of pods.
    pub(crate) fn headroom(&self) -> Mib {
        self.settings.headroom
    }

    /// The limits that the agent has seen since its start.
    #[must_use]
    pub fn limits(&self) -> &limits::Seen {
        &self.limits
    }

    /// Pods whose MIG instances could not be made when the driver last answered.
    #[must_use]
    pub fn unmade(&self) -> &[Unmade] {
        &self.unmade
    }

    /// Takes in a reading. `held` has the cards that other components have given away, by UUID. Returns the cards that
    /// this reading condemned.
    pub fn read(
        &mut self,
        reading: Result<&Reading, &DeviceError>,
        pods: &NodePods,
        held: &HashMap<String, Held>,
        mut who: impl FnMut(u32) -> Who,
        now: Now,
    ) -> Vec<String> {
        self.error = reading.err().cloned();
        let mut condemned = Vec::new();
        if let Ok(reading) = reading {
            self.driver.clone_from(&reading.driver);
            self.limits.read(pods, &reading.limits);
            self.unmade.clone_from(&reading.unmade);
            for fault in &reading.faults {
                if self.health.fault(fault, now) {
                    condemned.push(fault.uuid.clone());
                }
            }
            self.order.clear();
            self.known.values_mut().for_each(|card| card.there = false);
            let (mut unseen, mut shown) = (0, 0);
            for card in &reading.cards {
                if self.order.contains(&card.uuid) || !is_uuid(&card.uuid) {
                    continue;
                }
                self.order.push(card.uuid.clone());
                let mut used = CardUse::of(card, pods, &reading.limits, &mut who);
                let held = held.get(&card.uuid);
                if let Some(held) = held.filter(|held| !held.claims.is_empty()) {
                    used.charge(&held.claims, pods);
                }
                unseen += used.unseen;
                shown += card.processes.as_ref().map_or(0, Vec::len);
                if self.condemn(card, now) {
                    condemned.push(card.uuid.clone());
                }
                self.see(card, used, pods, held, now);
            }
            self.unseen = shown > 0 && unseen == shown;
        }
        self.history.keep(pods);
        self.miss(pods, now.age);
        condemned
    }

    /// Notes that the driver shows no healthy card. True if the card was healthy before.
    fn condemn(&mut self, card: &Card, now: Now) -> bool {
        let Some(failure) = &card.failure else {
            return false;
        };
        self.health.condemn(&card.uuid, failure.clone(), now);
        let before = self.known.get(&card.uuid);
        before.is_none_or(|known| known.seen.gpu.healthy)
    }

    /// Cards that this reading did not show.
    fn miss(&mut self, pods: &NodePods, now: Duration) {
        let Self {
            known,
            order,
            error,
            settings,
            ..
        } = self;
        known.retain(|uuid, card| {
            let missing = now.saturating_sub(card.when);
            let in_use = || pods.iter().any(|pod| pod.assigned(uuid) > Mib::ZERO);
            card.when == now || error.is_some() || missing < settings.forget_after || in_use()
        });
        for (uuid, card) in known.iter_mut().filter(|(_, card)| card.when != now) {
            let gpu = &mut card.seen.gpu;
            let before = gpu.reason.take().filter(|_| !gpu.healthy);
            let reason = match error {
                Some(error) => error.to_string(),
                None => before.unwrap_or_else(|| "not there any more".to_owned()),
            };
            (gpu.healthy, gpu.reason) = (false, Some(shortened(&reason, 256)));
            gpu.missing = !card.there;
            if !order.contains(uuid) {
                order.push(uuid.clone());
            }
        }
    }

    /// The report, without a heartbeat.
    #[must_use]
    pub fn status(&self, pods: &NodePods) -> GpuNodeStatus {
        let gpus: Vec<Gpu> = self
            .cards()
            .map(|seen| seen.gpu.clone())
            .take(256)
            .collect();
        let healthy = || gpus.iter().filter(|gpu| gpu.healthy);
        let models: BTreeSet<&str> = gpus.iter().map(|gpu| gpu.model.as_str()).collect();
        let models: Vec<&str> = models
            .into_iter()
            .filter(|model| !model.is_empty())
            .collect();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        GpuNodeStatus {
            heartbeat: None,
            driver: self.driver.as_deref().map(|driver| shortened(driver, 64)),
            summary: Summary {
                gpus: count(gpus.len()),
                healthy: count(healthy().count()),
                models: shortened(&models.join(","), 1024),
                capacity_mib: healthy()
                    .map(|gpu| gpu.capacity(self.settings.headroom))
                    .sum::<Mib>()
                    .0,
                used_mib: ceil(
                    self.cards()
                        .map(|seen| seen.used_bytes)
                        .fold(0, u64::saturating_add),
                )
                .0,
            },
            headroom_mib: self.settings.headroom.0,
            conditions: self.conditions(pods),
            gpus,
        }
    }

    fn conditions(&self, pods: &NodePods) -> Vec<Condition> {
        let is = |r#type: &str, status: bool, reason: &str, message: &str| Condition {
            r#type: r#type.to_owned(),
            status: if status { "True" } else { "False" }.to_owned(),
            reason: reason.to_owned(),
            message: shortened(message, 1024),
        };
        let ready = match &self.error {
            Some(error) => is(READY, false, error.reason(), &error.to_string()),
            None if self.known.is_empty() => is(READY, false, NO_GPUS, "The driver shows no GPU."),
            None => is(READY, true, "Reading", "The cards are being read."),
        };
        let unmeasured = self
            .cards()
            .any(|seen| !seen.used.measured && seen.gpu.healthy);
        let processes = if self.unseen {
            let advice = "No GPU process is in /proc: run the agent with hostPID, or with --proc of the host.";
            is(PROCESSES_READABLE, false, "HostProcessesHidden", advice)
        } else if unmeasured {
            let advice = "The driver does not report the memory of each process: memory within what a card's pods were \
                          promised counts as theirs.";
            is(PROCESSES_READABLE, false, "NotMeasured", advice)
        } else {
            is(
                PROCESSES_READABLE,
                true,
                "Measured",
                "Memory is known per process.",
            )
        };
        let over: BTreeSet<String> = self.over_users(pods).map(|over| over.pod).collect();
        let within = if over.is_empty() {
            is(
                "PodsWithinRequest",
                true,
                "Within",
                "No pod uses more than it asked for.",
            )
        } else {
            let over: Vec<String> = over.into_iter().collect();
            is("PodsWithinRequest", false, "OverRequest", &over.join(", "))
        };
        let others = self
            .limits
            .condition()
            .into_iter()
            .chain(sharers::condition(pods));
        let others = others.map(|condition| Condition {
            message: shortened(&condition.message, 1024),
            ..condition
        });
        [ready, processes, within]
            .into_iter()
            .chain(others)
            .collect()
    }
}

/// The API server refuses more for a card.
pub(crate) const MAX_CARD: Mib = Mib(16_777_216);

fn floor(bytes: u64) -> Mib {
    Mib(bytes >> 20).min(MAX_CARD)
}

fn ceil(bytes: u64) -> Mib {
    Mib(bytes.div_ceil(1 << 20)).min(MAX_CARD)
}

/// The API server refuses others.
fn is_uuid(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    let starts_well = text
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphanumeric());
    starts_well && text.len() <= 96 && text.bytes().all(is_plain)
}

/// The API server refuses longer texts.
fn shortened(text: &str, characters: usize) -> String {
    text.chars().take(characters).collect()
}
