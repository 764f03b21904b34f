//! The next state of the fence, from the known state: no I/O and no clock.
//!
//! A GPU is the pods' or the claims'. It is the pods' if a pod holds something of it, or no claim does and none waits for it.
//! Then each of its devices has a rule, and pods get the GPU once kube-scheduler has heard of these. A claim that is on its way
//! meanwhile makes it the claims' again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use gpustow_api::claim::{Consumed, Device, Rule};
use gpustow_ledger::Fenced;

/// So many devices of one GPU are fenced at most: the GPU is the claims' if it has more.
const MAX_DEVICES: usize = 256;

/// A GPU of a node, and its devices in DRA drivers.
#[derive(Clone, Debug)]
pub(super) struct Gpu {
    pub(super) node: Arc<str>,
    pub(super) is: Fenced,
    /// Itself and its parts, by each driver.
    pub(super) devices: Vec<Device>,
}

/// Node and UUID.
pub(super) type Name = (Arc<str>, Arc<str>);

impl Gpu {
    pub(super) fn name(&self) -> Name {
        (self.node.clone(), self.is.uuid.clone())
    }
}

/// A change of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Keep claims off a device of this GPU.
    Create(Device, Name),
    /// This leader confirms that kube-scheduler respects the rule.
    Stamp(Rule),
    /// Let claims have the device.
    Remove(Rule),
}

/// The input of the plan.
pub(super) struct World<'w> {
    /// The rules that count, by device.
    pub(super) rules: HashMap<Device, Vec<&'w Rule>>,
    /// The consumption of claims.
    pub(super) claims: HashMap<Device, Consumed>,
    /// GPUs that are released to claims that wait.
    pub(super) released: HashSet<Name>,
    /// This leader.
    pub(super) epoch: u64,
    /// UIDs of the rules that kube-scheduler must have heard of.
    pub(super) settled: HashSet<String>,
}

/// The decision about a GPU.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Pods may get it.
    pub(super) open: bool,
    /// It is the claims': first no pod may get it any more.
    pub(super) close: bool,
    pub(super) steps: Vec<Step>,
}

impl World<'_> {
    /// Of all its devices; none if none holds anything.
    pub(super) fn consumed(&self, gpu: &Gpu) -> Option<Consumed> {
        let all = gpu.devices.iter().filter_map(|it| self.claims.get(it));
        all.copied().reduce(Consumed::and)
    }

    fn rules(&self, device: &Device) -> &[&Rule] {
        self.rules.get(device).map_or(&[], Vec::as_slice)
    }

    /// Does this leader confirm, in a rule, that kube-scheduler keeps claims off the device?
    fn holds(&self, device: &Device) -> bool {
        let mut rules = self.rules(device).iter();
        rules.any(|rule| rule.epoch == Some(self.epoch))
    }

    pub(super) fn of(&self, gpu: &Gpu) -> Verdict {
        let consumed = self.consumed(gpu);
        let all = || gpu.devices.iter().flat_map(|device| self.rules(device));
        let claims = self.released.contains(&gpu.name()) || gpu.devices.len() > MAX_DEVICES;
        if !gpu.is.held && (claims || consumed.is_some()) {
            return Verdict {
                open: false,
                close: true,
                steps: all().map(|rule| Step::Remove((*rule).clone())).collect(),
            };
        }
        // On a GPU with both, pods get the memory that claims leave, by the agent's report.
        let counted = match consumed {
            None => true,
            Some(Consumed::Mib(mib)) => mib <= gpu.is.claimed,
            Some(Consumed::Nothing | Consumed::Whole) => false,
        };
        let mut verdict = Verdict {
            open: counted && gpu.devices.iter().all(|device| self.holds(device)),
            ..Verdict::default()
        };
        for device in &gpu.devices {
            self.fence(device, gpu, &mut verdict.steps);
        }
        verdict
    }

    /// A rule that is being deleted keeps its effect until another one has taken its place.
    fn fence(&self, device: &Device, gpu: &Gpu, steps: &mut Vec<Step>) {
        let rules = self.rules(device);
        let is_mine = |rule: &Rule| rule.epoch == Some(self.epoch);
        let mut alive: Vec<&Rule> = rules.iter().copied().filter(|it| !it.terminating).collect();
        // The surest first, then by name.
        alive.sort_by_key(|rule| (!is_mine(rule), rule.epoch.is_none(), rule.name.clone()));
        let is_due = |rule: &Rule| match rule.epoch {
            Some(epoch) => epoch != self.epoch,
            None => self.settled.contains(&rule.uid),
        };
        let leaving = rules.iter().filter(|rule| rule.terminating);
        match alive.first() {
            None => steps.push(Step::Create(device.clone(), gpu.name())),
            Some(rule) if is_mine(rule) => {
                let needless = alive.iter().skip(1).chain(leaving);
                steps.extend(needless.map(|rule| Step::Remove((*rule).clone())));
                return;
            }
            Some(rule) if is_due(rule) => steps.push(Step::Stamp((*rule).clone())),
            Some(_) => {}
        }
        let late = leaving.filter(|rule| rule.epoch.is_some_and(|epoch| epoch != self.epoch));
        steps.extend(late.map(|rule| Step::Stamp((*rule).clone())));
    }
}

/// The GPUs that can be released, by node: nothing is on them, nothing is kept for a pod on their node, and claims can have
/// them.
pub(super) fn free(world: &World<'_>, gpus: &[Gpu]) -> HashMap<Arc<str>, Vec<Name>> {
    let mut free: HashMap<Arc<str>, Vec<Name>> = HashMap::new();
    let is_free = |gpu: &&Gpu| {
        let is = &gpu.is;
        !is.held && !is.kept && !gpu.devices.is_empty() && world.consumed(gpu).is_none()
    };
    for gpu in gpus.iter().filter(is_free) {
        free.entry(gpu.node.clone()).or_default().push(gpu.name());
    }
    free
}

/// Rules of GPUs that are gone, and of devices that are none of a GPU's.
pub(super) fn orphans<'r>(rules: &'r [Rule], gpus: &[Gpu]) -> impl Iterator<Item = Rule> + use<'r> {
    let devices: HashSet<Device> = gpus
        .iter()
        .flat_map(|gpu| gpu.devices.iter().cloned())
        .collect();
    let is_orphan = move |rule: &&Rule| rule.device.as_ref().is_none_or(|it| !devices.contains(it));
    rules.iter().filter(is_orphan).cloned()
}

pub(super) fn by_device(rules: &[Rule]) -> HashMap<Device, Vec<&Rule>> {
    let mut by_device: HashMap<Device, Vec<&Rule>> = HashMap::new();
    for rule in rules {
        if let Some(device) = &rule.device {
            by_device.entry(device.clone()).or_default().push(rule);
        }
    }
    by_device
}

/// The devices of each GPU. Drivers publish some with its UUID. Its rules name others: they count as long as no driver
/// publishes their pool without them. A driver that restarts publishes nothing for a while.
pub(super) fn devices(
    published: &HashMap<Device, Vec<String>>,
    rules: &[&Rule],
) -> HashMap<String, Vec<Device>> {
    let mut of: HashMap<String, Vec<Device>> = HashMap::new();
    for (device, uuids) in published.iter().filter(|(device, _)| device.is_named()) {
        for uuid in uuids {
            of.entry(uuid.clone()).or_default().push(device.clone());
        }
    }
    let pools: HashSet<(&str, &str)> = published
        .keys()
        .map(|it| (&*it.driver, &*it.pool))
        .collect();
    for rule in rules {
        let device = rule.device.as_ref();
        if let Some(device) = device.filter(|it| !pools.contains(&(&*it.driver, &*it.pool))) {
            of.entry(rule.gpu.clone()).or_default().push(device.clone());
        }
    }
    for devices in of.values_mut() {
        devices.sort_unstable();
        devices.dedup();
    }
    of
}

#[cfg(test)]
mod tests;
