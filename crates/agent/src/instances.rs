//! MIG instances that the agent makes for pods, and ends after them.
//!
//! The agent notes each instance in a file before it makes it, one file for each pod. So an agent that starts again can
//! distinguish its own instances from instances of others, which it never changes. A pod's container finds its instance
//! by a CDI specification with the pod's UID in its name. The specification exists only while the instance does.

mod cdi;

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpustow_api::assignment;
use gpustow_api::instances::{Instance, OnDemand, Profile};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::pods::{NodePod, NodePods};

/// The API server refuses more for a profile.
const MAX_MIB: u32 = 16_777_216;

/// The instances that the agent makes, once it knows the node's pods.
#[derive(Clone, Debug)]
pub struct Makes {
    /// Where it writes.
    pub places: Places,
    /// The pods' instances; none while the pods are not known.
    pub orders: Option<Vec<Order>>,
}

/// The instances of pods that have not ended.
#[must_use]
pub fn orders(pods: &NodePods) -> Vec<Order> {
    let order = |pod: &NodePod| {
        let facts = &pod.facts;
        let assigned = facts.assignment.as_ref()?.as_ref().ok();
        let assigned = assigned.filter(|_| !facts.released)?;
        // It becomes the name of a file.
        let is_plain = facts
            .uid
            .bytes()
            .all(|it| it.is_ascii_alphanumeric() || it == b'-');
        Some(Order {
            uid: Some(facts.uid.clone()).filter(|_| is_plain)?,
            gpu: assigned.charges.first()?.0.as_ref().into(),
            instance: assigned.instance.clone()?,
        })
    };
    let mut orders: Vec<Order> = pods.iter().filter_map(order).collect();
    orders.sort_by(|one, other| one.uid.cmp(&other.uid));
    orders
}

/// A pod whose instance must be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Its UID.
    pub uid: Arc<str>,
    /// The GPU.
    pub gpu: Box<str>,
    /// Where the instance lies.
    pub instance: assignment::Instance,
}

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{call}: NVML's error {code}")]
pub struct MakeError {
    /// Its name.
    pub call: &'static str,
    /// NVML's code.
    pub code: u32,
}

/// An instance could not be made or ended.
#[derive(Clone, Debug, Error)]
pub enum Problem {
    /// The driver refused it.
    #[error(transparent)]
    Driver(#[from] MakeError),
    /// A file cannot be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, String),
    /// The slices belong to an instance that is not the pod's.
    #[error("another instance has its slices")]
    Others,
    /// Nothing can be made there.
    #[error("the GPU is not in MIG mode, or is not there")]
    NoMig,
    /// The kernel names no device for it.
    #[error("{0} does not name its device: is MIG on, and the driver loaded?")]
    NoDevice(PathBuf),
    /// No CDI file lists the needs of a container apart from the device.
    #[error(
        "no file in {0} has CDI's kind nvidia.com/gpu: run nvidia-ctk cdi generate --device-id=none on the node, as in docs/compute-share.md"
    )]
    NoBase(String),
}

/// An instance as the driver shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The driver's number of it, on its GPU.
    pub id: u32,
    /// The name of its profile.
    pub profile: String,
    /// Its first memory slice.
    pub start: u8,
    /// How many it has.
    pub slices: u8,
    /// It has a compute instance, so that programs can run in it.
    pub whole: bool,
}

/// The driver's view of a GPU in MIG mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// The profiles that pods may get.
    pub profiles: Vec<Profile>,
    /// All instances by their first slices, including instances of others.
    pub instances: Vec<Found>,
}

/// Who makes instances on one GPU.
pub trait Driver {
    /// The profiles and the instances that are there now.
    ///
    /// # Errors
    /// [`MakeError`] if the driver does not list them.
    fn shown(&self) -> Result<Shown, MakeError>;
    /// Makes a GPU instance.
    ///
    /// # Errors
    /// [`MakeError`] if the driver does not.
    fn make(&self, profile: &str, start: u8) -> Result<(), MakeError>;
    /// Gives it a compute instance that takes all of it.
    ///
    /// # Errors
    /// [`MakeError`] if the driver does not.
    fn complete(&self, instance: &Found) -> Result<(), MakeError>;
    /// Ends an instance in which no program runs.
    ///
    /// # Errors
    /// [`MakeError`] if the driver does not.
    fn end(&self, instance: &Found) -> Result<(), MakeError>;
}

/// The agent's note about an instance that it makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    gpu: Box<str>,
    instance: assignment::Instance,
    /// The driver's number of it, once it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<u32>,
}

impl Record {
    /// Is this the instance? One without a number may have been made just before the agent ended.
    fn is(&self, found: &Found) -> bool {
        self.id.is_none_or(|id| id == found.id)
            && *self.instance.profile == *found.profile
            && self.instance.start == found.start
    }
}

/// The folders by which the agent makes instances and keeps track of them.
#[derive(Clone, Debug)]
pub struct Places {
    /// Its own notes.
    pub records: PathBuf,
    /// CDI specifications that containers' runtimes read; the first is where its own go.
    pub cdi: Vec<PathBuf>,
    /// The host's processes, with the driver's half of the kernel.
    pub proc: PathBuf,
}

/// A GPU in MIG mode as the reconciliation needs it.
pub struct Card<'a> {
    /// Its UUID.
    pub uuid: &'a str,
    /// Number of its device file.
    pub minor: Option<u32>,
    /// Who makes instances there.
    pub driver: &'a dyn Driver,
}

/// A pod whose instance its container cannot find yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmade {
    /// The pod and the instance that it must have.
    pub order: Order,
    /// Why it is not there.
    pub problem: String,
}

/// The result of [`reconcile`].
#[derive(Debug, Default)]
pub struct Reconciled {
    /// The instances and profiles of each card now, or the reason why they are unknown.
    pub cards: Vec<Result<OnDemand, String>>,
    /// The pods that must wait.
    pub unmade: Vec<Unmade>,
}

/// Makes the instances that pods of the node must have on these cards, and ends its own instances without a pod.
/// `lives` is true if a pod's containers may still run. While the pods are not known, it only looks.
pub fn reconcile(
    places: &Places,
    cards: &[Card<'_>],
    orders: Option<&[Order]>,
    lives: impl Fn(&str) -> bool,
) -> Reconciled {
    let mut records = match places.records() {
        Ok(records) => records,
        Err(problem) => {
            return Reconciled {
                cards: cards.iter().map(|_| Err(problem.to_string())).collect(),
                ..Reconciled::default()
            };
        }
    };
    let base = LazyCell::new(|| places.base());
    let all = || orders.into_iter().flatten();
    let mut unmade = Vec::new();
    let mut fails = |order: &Order, problem: &Problem| {
        tracing::debug!(uid = &*order.uid, %problem, "cannot make a pod's MIG instance; trying again");
        unmade.push(Unmade {
            order: order.clone(),
            problem: problem.to_string(),
        });
    };
    for order in all().filter(|order| cards.iter().all(|card| *card.uuid != *order.gpu)) {
        fails(order, &Problem::NoMig);
    }
    let cards = cards
        .iter()
        .map(|card| {
            let look = || card.driver.shown().map_err(|error| error.to_string());
            let mut shown = look()?;
            let wanted = || all().filter(|order| *order.gpu == *card.uuid);
            let own: Vec<String> = records
                .iter()
                .filter(|(_, record)| *record.gpu == *card.uuid)
                .map(|(uid, _)| uid.clone())
                .collect();
            let is_wanted = |uid: &str| wanted().any(|order| *order.uid == *uid);
            let is_over = |uid: &&String| orders.is_some() && !is_wanted(uid) && !lives(uid);
            for uid in own.iter().filter(is_over) {
                match places.end(card, uid, &records, &shown) {
                    Ok(()) => {
                        records.remove(uid);
                        shown = look()?;
                    }
                    Err(problem) => {
                        tracing::warn!(uid, %problem, "cannot end a MIG instance; trying again")
                    }
                }
            }
            for order in wanted() {
                if let Err(problem) = places.make(card, order, &mut records, &mut shown, &base) {
                    fails(order, &problem);
                }
            }
            reportable(shown, |found| {
                let mut own = records.iter();
                let own = own.find(|(_, record)| *record.gpu == *card.uuid && record.is(found));
                own.map(|(uid, _)| uid.clone())
            })
        })
        .collect();
    Reconciled { cards, unmade }
}

/// The report of a card's instances, whose pods `pod_of` finds, without profiles that the API server would refuse.
/// An instance cannot be left out: its slices would look free.
fn reportable(shown: Shown, pod_of: impl Fn(&Found) -> Option<String>) -> Result<OnDemand, String> {
    let instances = shown.instances.into_iter().map(|found| Instance {
        pod: pod_of(&found),
        profile: found.profile,
        start: found.start,
        slices: found.slices,
    });
    let mut told = OnDemand {
        instances: instances.collect(),
        profiles: shown.profiles,
    };
    let mut names = BTreeSet::new();
    told.profiles.retain(|it| {
        let sizes = [it.slices, it.compute_slices];
        (1..=64).contains(&it.name.chars().count())
            && it.memory_mib <= MAX_MIB
            && sizes.iter().all(|size| (1..=8).contains(size))
            && it.starts.len() <= 8
            && it.starts.iter().all(|start| *start < 8)
            && names.insert(it.name.clone())
    });
    told.profiles.truncate(32);
    let mut starts = BTreeSet::new();
    let is_known = |it: &Instance| {
        it.mask() != 0 && it.profile.chars().count() <= 64 && starts.insert(it.start)
    };
    match told.instances.iter().all(is_known) {
        true => Ok(told),
        false => Err("the driver shows an instance where none can be".to_owned()),
    }
}

impl Places {
    fn record(&self, uid: &str) -> PathBuf {
        self.records.join(format!("{uid}.json"))
    }

    /// The notes in the files, by pods' UIDs.
    fn records(&self) -> Result<BTreeMap<String, Record>, Problem> {
        let bad = |path: &Path, error: &dyn std::fmt::Display| {
            Problem::File(path.to_owned(), error.to_string())
        };
        std::fs::create_dir_all(&self.records).map_err(|error| bad(&self.records, &error))?;
        let list = std::fs::read_dir(&self.records).map_err(|error| bad(&self.records, &error))?;
        let mut records = BTreeMap::new();
        for path in list.filter_map(|entry| Some(entry.ok()?.path())) {
            let is_ours = path.extension().is_some_and(|it| it == "json");
            let Some(uid) = path
                .file_stem()
                .and_then(|it| it.to_str())
                .filter(|_| is_ours)
            else {
                continue;
            };
            let text = std::fs::read_to_string(&path).map_err(|error| bad(&path, &error))?;
            let record = serde_json::from_str(&text).map_err(|error| bad(&path, &error))?;
            records.insert(uid.to_owned(), record);
        }
        Ok(records)
    }

    /// Makes a pod's instance, as far as it is not there yet: notes it, has it made, then lets the container find it.
    fn make(
        &self,
        card: &Card<'_>,
        order: &Order,
        records: &mut BTreeMap<String, Record>,
        shown: &mut Shown,
        base: &Result<Value, Problem>,
    ) -> Result<(), Problem> {
        let uid = &*order.uid;
        let same = |own: &&Record| own.instance == order.instance && own.gpu == order.gpu;
        let own = records.get(uid).filter(same);
        let there = own.and_then(|own| shown.instances.iter().find(|it| own.is(it)));
        let found = match there.cloned() {
            Some(found) => found,
            None => {
                let mask = |found: &Found| {
                    gpustow_pack::mig::mask(found.start.into(), found.slices.into())
                };
                if shown
                    .instances
                    .iter()
                    .any(|it| mask(it) & order.instance.mask() != 0)
                {
                    self.forget(uid, records)?;
                    return Err(Problem::Others);
                }
                let record = Record {
                    gpu: order.gpu.clone(),
                    instance: order.instance.clone(),
                    id: None,
                };
                self.note(uid, &record)?;
                let (profile, start) = (&order.instance.profile, order.instance.start);
                if let Err(error) = card.driver.make(profile, start) {
                    // An instance that lies there later is not the agent's.
                    self.forget(uid, records)?;
                    return Err(error.into());
                }
                records.insert(uid.to_owned(), record.clone());
                *shown = card.driver.shown()?;
                let made = shown.instances.iter().find(|it| record.is(it));
                made.cloned().ok_or(Problem::Others)?
            }
        };
        if let Some(record) = records.get_mut(uid).filter(|it| it.id != Some(found.id)) {
            record.id = Some(found.id);
            self.note(uid, record)?;
        }
        if !found.whole {
            card.driver.complete(&found)?;
        }
        self.show(card, uid, &found, base)
    }

    /// Ends a pod's instance: first no container can find it any more, last it is forgotten.
    fn end(
        &self,
        card: &Card<'_>,
        uid: &str,
        records: &BTreeMap<String, Record>,
        shown: &Shown,
    ) -> Result<(), Problem> {
        if let Some(path) = self.specification(uid) {
            remove(&path)?;
        }
        let own = records.get(uid);
        let mut all = shown.instances.iter();
        if let Some(found) = own.and_then(|own| all.find(|it| own.is(it))) {
            card.driver.end(found)?;
        }
        remove(&self.record(uid))
    }

    fn forget(&self, uid: &str, records: &mut BTreeMap<String, Record>) -> Result<(), Problem> {
        records.remove(uid);
        remove(&self.record(uid))
    }

    fn note(&self, uid: &str, record: &Record) -> Result<(), Problem> {
        write(&self.record(uid), &json!(record))
    }
}

/// Writes a file so that no reader sees half of it.
fn write(path: &Path, value: &Value) -> Result<(), Problem> {
    let aside = path.with_extension("new");
    let done =
        std::fs::write(&aside, value.to_string()).and_then(|()| std::fs::rename(&aside, path));
    done.map_err(|error| Problem::File(path.to_owned(), error.to_string()))
}

fn remove(path: &Path) -> Result<(), Problem> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Problem::File(path.to_owned(), error.to_string()))
        }
        _ => Ok(()),
    }
}
