//! Notices to users about their pods: the cards where the agent really saw them, and their problems.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::faults::{self, NodeFault};
use gpustow_api::gpunode::Gpu;
use gpustow_api::limit::WHOLE;
use gpustow_api::names;
use gpustow_pack::Mib;

use crate::instances::Unmade;
use crate::pods::{NodePod, NodePods};
use crate::state::State;

/// The agent repeats a notice after this long, if the problem lasts.
const AGAIN: Duration = Duration::from_secs(600);

/// A MIG instance may take so long: another pod's may have to end first.
const MAKING: Duration = Duration::from_secs(10);

/// Length of a confirmation.
const MAX_CONFIRMED: usize = 4096;

/// Something to write about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The devices on which the pod was seen, as the annotation's value.
    Confirm {
        /// The pod's UID.
        uid: Arc<str>,
        /// Comma list of UUIDs.
        devices: String,
    },
    /// An Event on the node.
    WarnNode {
        /// One word.
        reason: &'static str,
        /// A sentence.
        note: String,
    },
    /// An Event that warns of nothing.
    Tell {
        /// The pod's UID.
        uid: Arc<str>,
        /// One word.
        reason: &'static str,
        /// A sentence.
        note: String,
    },
    /// An Event.
    Warn {
        /// The pod's UID.
        uid: Arc<str>,
        /// One word.
        reason: &'static str,
        /// A sentence.
        note: String,
    },
}

/// The data that a look sees, and the notices that follow from it.
struct Look<'a> {
    state: &'a State,
    pods: &'a NodePods,
    now: Duration,
    notices: Vec<Notice>,
}

/// The record of earlier notices, and of the observations behind them.
#[derive(Debug, Default)]
pub struct Notices {
    silent_after: Duration,
    /// Ages are the agent's.
    told: HashMap<(Arc<str>, String), Duration>,
    /// By UUID and reason: failed cards about which the node got an Event.
    failed: HashMap<(String, String), Duration>,
    /// The reason and the time of the last notice that none of the node's cards can be read.
    node_failed: Option<(NodeFault, Duration)>,
    seen_on: HashMap<Arc<str>, BTreeSet<String>>,
    active: HashSet<(Arc<str>, Arc<str>)>,
    /// Since when containers were seen to run.
    running: HashMap<(Arc<str>, Arc<str>), Duration>,
    /// Since when pods have waited for their MIG instances.
    unmade: HashMap<Arc<str>, Duration>,
}

impl Notices {
    /// Reports a container that has had no process on its GPU for `silent_after`.
    #[must_use]
    pub fn new(silent_after: Duration) -> Self {
        Self {
            silent_after,
            ..Self::default()
        }
    }

    /// The notices that are due now. `condemned` has the cards that have just failed.
    pub fn look(
        &mut self,
        state: &State,
        pods: &NodePods,
        condemned: &[String],
        now: Duration,
    ) -> Vec<Notice> {
        self.told.retain(|(uid, _), _| pods.get(uid).is_some());
        self.seen_on.retain(|uid, _| pods.get(uid).is_some());
        self.active.retain(|(uid, _)| pods.get(uid).is_some());
        self.running.retain(|(uid, _), _| pods.get(uid).is_some());
        let mut look = Look {
            state,
            pods,
            now,
            notices: Vec::new(),
        };
        self.node_failed(&mut look);
        let failed = self.failed(&mut look, condemned);
        for pod in pods.iter().filter(|pod| !pod.facts.released) {
            if pod.asks() && pod.facts.assignment.is_none() {
                self.unassigned(&mut look, pod);
                continue;
            }
            self.confirm(&mut look, pod);
            if state.error().is_none() {
                self.silent(&mut look, pod);
            }
            self.shared(&mut look, pod);
            self.past_mps(&mut look, pod);
            self.gone(&mut look, pod);
            on_failed(&mut look, pod, &failed);
        }
        self.unmade(&mut look);
        self.limits_missing(&mut look);
        self.limits_moved(&mut look);
        self.over_requests(&mut look);
        look.notices
    }

    /// Which GPU the pod may use is unknown.
    fn unassigned(&mut self, look: &mut Look<'_>, pod: &NodePod) {
        let note = format!(
            "It is unknown which GPU this pod may use: it was bound by something other than {}, or its annotation {} was lost. \
             Delete it and recreate it with schedulerName: {}.",
            names::EXTENDER,
            names::ASSIGNMENT,
            names::SCHEDULER
        );
        self.once(look, pod, "NoGpuAssignment", "", note);
    }

    /// Warns, on the node, that none of its GPUs can be read: once, and again while the fault lasts.
    fn node_failed(&mut self, look: &mut Look<'_>) {
        let Some(error) = look.state.error() else {
            self.node_failed = self.node_failed.filter(|(_, at)| is_recent(*at, look.now));
            return;
        };
        let fault = error.fault();
        let told = self.node_failed;
        if told.is_some_and(|(before, at)| before == fault && is_recent(at, look.now)) {
            return;
        }
        self.node_failed = Some((fault, look.now));
        let note = format!(
            "No GPU of this node takes new pods: {error}. Pods that run here are left alone. To fix it: {}.",
            fault.fix()
        );
        look.notices.push(Notice::WarnNode {
            reason: "GpuNodeFailed",
            note,
        });
    }

    /// Warns, on the node, of the cards that have just failed, each reason of a card once in a while. Returns the cards
    /// in these warnings, each with a sentence.
    fn failed(&mut self, look: &mut Look<'_>, condemned: &[String]) -> Vec<(String, String)> {
        let mut told = Vec::new();
        self.failed.retain(|_, at| is_recent(*at, look.now));
        for uuid in condemned {
            let mut gpus = look.state.cards().map(|seen| &seen.gpu);
            let gpu = gpus.find(|gpu| gpu.uuid == *uuid || parent(gpu) == Some(uuid));
            let reason = gpu
                .and_then(|gpu| gpu.reason.as_deref())
                .unwrap_or("it failed");
            let key = (uuid.clone(), reason.to_owned());
            if self.failed.contains_key(&key) {
                continue;
            }
            let index = gpu
                .filter(|gpu| gpu.uuid == *uuid)
                .map(|gpu| format!("{} ", gpu.index));
            let what = format!(
                "GPU {}{uuid} gets no new pods: {}",
                index.unwrap_or_default(),
                faults::in_words(reason)
            );
            self.failed.insert(key, look.now);
            look.notices.push(Notice::WarnNode {
                reason: "GpuFailed",
                note: format!(
                    "{what}. Pods that run on it are left alone. It takes pods again by itself once it has \
                     shown no error for the time of --probation; if it fails on, drain the node and reset or \
                     replace the GPU: docs/reference/messages.md."
                ),
            });
            told.push((uuid.clone(), what));
        }
        told
    }

    /// The other holder came later: the component that gave it the card does not know of gpustow.
    fn shared(&mut self, look: &mut Look<'_>, pod: &NodePod) {
        for gpu in look.state.cards().map(|seen| &seen.gpu) {
            if let Some(by) = gpu
                .held_by
                .as_ref()
                .filter(|_| pod.assigned(&gpu.uuid) > Mib::ZERO)
            {
                let note = format!(
                    "GPU {} was also given to pod {} through {}, which does not know of this pod. Keep one of the two \
                     off the node: see docs/platforms.md.",
                    gpu.uuid, by.pod, by.through
                );
                self.once(look, pod, "GpuSharedUnknowingly", &gpu.uuid, note);
            }
        }
    }

    /// A GPU that the driver shows no more is of no use to its pods, whatever is in its place.
    fn gone(&mut self, look: &mut Look<'_>, pod: &NodePod) {
        let all = look.state.cards().map(|seen| &seen.gpu);
        let (gone, there): (Vec<&Gpu>, Vec<_>) = all.partition(|gpu| gpu.missing);
        // A driver that shows no GPU at all is about to be replaced.
        let gone = gone.into_iter().filter(|_| !there.is_empty());
        for uuid in gone
            .map(|gpu| &gpu.uuid)
            .filter(|uuid| pod.assigned(uuid) > Mib::ZERO)
        {
            let note = format!(
                "GPU {uuid} of this pod is no longer there: it was replaced, divided into MIG instances or made whole, or has failed. \
                 Its node's other GPUs are well. Delete the pod; its owner makes a new one."
            );
            self.once(look, pod, "GpuGone", uuid, note);
        }
    }

    /// A program that does not find a daemon of MPS runs without limits, and does not report that.
    fn past_mps(&mut self, look: &mut Look<'_>, pod: &NodePod) {
        let uid = &pod.facts.uid;
        let cards = look.state.cards();
        for seen in cards.filter(|seen| seen.past_mps.contains(uid)) {
            let note = format!(
                "Uses GPU {} without MPS, so nothing limits its compute and memory there, and the GPU gets no new pods until \
                 it ends. Delete the pod. If another one does so too, see whether its program sets CUDA_MPS_PIPE_DIRECTORY.",
                seen.gpu.uuid
            );
            self.once(look, pod, "MpsMissing", &seen.gpu.uuid, note);
        }
    }

    /// For a container without its instance, the kubelet only reports that a device is missing.
    fn unmade(&mut self, look: &mut Look<'_>) {
        let waits = |uid: &Arc<str>| look.state.unmade().iter().any(|it| it.order.uid == *uid);
        self.unmade.retain(|uid, _| waits(uid));
        for Unmade { order, problem } in look.state.unmade() {
            let since = *self.unmade.entry(order.uid.clone()).or_insert(look.now);
            let pod = look.pods.get(&order.uid);
            if let Some(pod) = pod.filter(|_| look.now.saturating_sub(since) >= MAKING) {
                let note = format!(
                    "Its container cannot start, because its MIG instance {} on GPU {} is not there: {problem}. The agent tries \
                     on. Delete the pod to have it placed again: docs/compute-share.md.",
                    order.instance.profile, order.gpu
                );
                self.again(look, pod, "MigInstanceMissing", &order.gpu, note);
            }
        }
    }

    /// The cards on which a process of the pod was ever seen.
    fn confirm(&mut self, look: &mut Look<'_>, pod: &NodePod) {
        let uid = &pod.facts.uid;
        let seen = look.state.cards();
        let on = seen.filter(|seen| seen.used.has(uid, None));
        let on: BTreeSet<String> = on.map(|seen| seen.gpu.uuid.clone()).collect();
        if on.is_empty() {
            return;
        }
        for uuid in on.iter().filter(|uuid| pod.assigned(uuid) == Mib::ZERO) {
            let mine: Vec<&str> = pod.charges().map(|(uuid, _)| uuid).collect();
            let note = format!(
                "Runs on GPU {uuid}, which is not its own; its own is {}. See whether the NVIDIA container toolkit obeys {}.",
                mine.join(", "),
                names::VISIBLE_DEVICES
            );
            self.once(look, pod, "WrongGpu", uuid, note);
        }
        let written = pod
            .confirmed
            .iter()
            .flat_map(|text| text.split(','))
            .map(str::to_owned);
        let all = self
            .seen_on
            .entry(uid.clone())
            .or_insert_with(|| written.collect());
        let before = all.len();
        all.extend(on);
        let mut devices = String::new();
        for uuid in all.iter().filter(|uuid| !uuid.is_empty()) {
            // The admission policy refuses longer texts.
            if devices.len() + uuid.len() >= MAX_CONFIRMED {
                break;
            }
            let comma = if devices.is_empty() { "" } else { "," };
            devices.extend([comma, uuid]);
        }
        if all.len() > before || pod.confirmed.as_ref() != Some(&devices) {
            look.notices.push(Notice::Confirm {
                uid: uid.clone(),
                devices,
            });
        }
    }

    fn silent(&mut self, look: &mut Look<'_>, pod: &NodePod) {
        let Some(Ok(assignment)) = &pod.facts.assignment else {
            return;
        };
        let uid = &pod.facts.uid;
        for (name, uuids) in &assignment.containers {
            let Some(container) = pod
                .containers
                .iter()
                .find(|container| *container.name == **name)
            else {
                continue;
            };
            let key = (uid.clone(), container.id.clone());
            let mut cards = look.state.cards();
            if cards.any(|seen| seen.used.has(uid, Some(name))) {
                self.active.insert(key);
                continue;
            }
            if !container.running {
                continue;
            }
            let since = *self.running.entry(key.clone()).or_insert(look.now);
            let long = look.now.saturating_sub(since) >= self.silent_after;
            if long && !self.active.contains(&key) && pod.confirmed.is_none() {
                let note = format!(
                    "Container {name} runs without a process on GPU {}. If it should use it: does its image have CUDA, is the NVIDIA \
                     runtime used (runtimeClassName), and does the toolkit accept {} of unprivileged containers \
                     (accept-nvidia-visible-devices-envvar-when-unprivileged)?",
                    uuids.join(", "),
                    names::VISIBLE_DEVICES
                );
                self.once(look, pod, "NoGpuProcess", &container.id, note);
            }
        }
    }

    /// The driver does not hold a container to its limit.
    fn limits_missing(&mut self, look: &mut Look<'_>) {
        for it in look.state.limits().missing() {
            let is = it
                .found
                .map_or("no limit".to_owned(), |found| format!("a limit of {found}"));
            let note = format!(
                "Container {} has {is} on GPU {} and should have one of {}: the driver keeps it from its neighbours' memory \
                 no more than any other program. No pod that needs a limit comes to this node until limits hold: see \
                 docs/runbooks/GpustowLimitMissing.md.",
                it.names[2], it.uuid, it.limit
            );
            if let Some(pod) = look.pods.get(&it.uid) {
                let of = format!("{} {}", it.container, it.uuid);
                self.once(look, pod, "LimitMissing", &of, note);
            }
        }
    }

    /// The limit of a container was raised or lowered.
    fn limits_moved(&mut self, look: &mut Look<'_>) {
        for it in look.state.limits().moved() {
            let (is, found) = (&it.now, it.now.found.unwrap_or_default());
            let reason = "GpuMemoryLimitChanged";
            let key = (
                is.uid.clone(),
                format!("{reason} {} {}", is.container, is.uuid),
            );
            let told = self.told.get(&key);
            let more = match found == is.limit {
                true => String::new(),
                // It grows step by step.
                false if told.is_some_and(|at| is_recent(*at, look.now)) => continue,
                false if is.limit == WHOLE => {
                    ", and the rest of the GPU as memory there becomes free".to_owned()
                }
                false => format!(", and up to {} as memory there becomes free", is.limit.0),
            };
            self.told.insert(key, look.now);
            let note = format!(
                "Container {} may use {found} of GPU {} now, {} before{more}.",
                is.names[2], is.uuid, it.before.0
            );
            look.notices.push(Notice::Tell {
                uid: is.uid.clone(),
                reason,
                note,
            });
        }
    }

    /// A pod uses more than it may.
    fn over_requests(&mut self, look: &mut Look<'_>) {
        for over in look.state.over_users(look.pods) {
            let may = match over.allowed == over.assigned {
                true => format!("asked for {}", over.assigned.0),
                false => format!("may use {}", over.allowed.0),
            };
            let note = format!(
                "Uses {} of GPU {} and {may}: ask for more, or limit the program's memory.",
                over.used, over.uuid
            );
            if let Some(pod) = look.pods.get(&over.uid) {
                self.again(look, pod, "OverGpuMemory", &over.uuid, note);
            }
        }
    }

    fn once(
        &mut self,
        look: &mut Look<'_>,
        pod: &NodePod,
        reason: &'static str,
        of: &str,
        note: String,
    ) {
        let key = (pod.facts.uid.clone(), format!("{reason} {of}"));
        if self.told.insert(key, look.now).is_none() {
            look.notices.push(Notice::Warn {
                uid: pod.facts.uid.clone(),
                reason,
                note,
            });
        }
    }

    fn again(
        &mut self,
        look: &mut Look<'_>,
        pod: &NodePod,
        reason: &'static str,
        of: &str,
        note: String,
    ) {
        let key = (pod.facts.uid.clone(), format!("{reason} {of}"));
        let told = self.told.get(&key);
        if !told.is_some_and(|at| is_recent(*at, look.now)) {
            self.told.remove(&key);
            self.once(look, pod, reason, of, note);
        }
    }
}

/// Warns the pod of each GPU that has just failed, if it holds memory there or on an instance of that GPU.
fn on_failed(look: &mut Look<'_>, pod: &NodePod, failed: &[(String, String)]) {
    for (uuid, what) in failed {
        let gpus = look.state.cards().map(|seen| &seen.gpu);
        let parts = gpus.filter(|gpu| parent(gpu) == Some(uuid));
        let mut uuids = parts.map(|gpu| &gpu.uuid).chain([uuid]);
        if uuids.any(|uuid| pod.assigned(uuid) > Mib::ZERO) {
            look.notices.push(Notice::Warn {
                uid: pod.facts.uid.clone(),
                reason: "GpuFailed",
                note: format!("{what}. This pod is left alone: see whether it still works."),
            });
        }
    }
}

/// The UUID of the GPU of which this is an instance.
fn parent(gpu: &Gpu) -> Option<&String> {
    gpu.place.as_ref().and_then(|place| place.parent.as_ref())
}

fn is_recent(at: Duration, now: Duration) -> bool {
    now.saturating_sub(at) < AGAIN
}
