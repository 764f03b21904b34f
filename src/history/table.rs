//! The histories of all workloads, and which of them are to be written or deleted. No I/O and no clock of its own.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use gpustow_advice::{History, advise};
use gpustow_api::owner::Owner;
use gpustow_api::workload::{
    Against, ContainerHistory, GpuWorkload, MAX_HISTORIES, TargetRef, same_size,
};
use gpustow_api::{GpuWorkloadSpec, workload};
use gpustow_pack::Mib;
use kube::ResourceExt as _;
use kube::api::ObjectMeta;

use super::uses::{Container, Figure, Sample, Workload};

/// Between two writes of one workload.
pub(super) const EVERY: Duration = Duration::from_secs(3600);
/// Samples of a workload before its object is created. A workload that ends sooner does not leave an object.
const FIRST: u64 = 10;
/// Before a write that failed is tried again.
const AGAIN: Duration = Duration::from_secs(600);
/// Writes and deletions of one [`Table::due`].
pub(super) const BATCH: usize = 10;
/// An object is deleted so many seconds after the last sample.
const FORGET: i64 = 14 * 86_400;
/// Workloads at most. The namespace with most workloads loses some first, and of these the one whose last sample is
/// oldest.
const MAX_WORKLOADS: usize = 10_000;
/// Containers at most of which metrics show advice.
const FIGURES: usize = 500;
/// Images of a container at most: during a roll-out there are two.
const IMAGES: usize = 2;

/// The record of a workload.
#[derive(Debug, Default)]
struct Entry {
    containers: Vec<(Container, Kept)>,
    /// The version of its object, if there is one.
    version: Option<String>,
    /// When it may be written next.
    due: Duration,
    changed: bool,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    history: History,
    gpu: Mib,
    /// Why the last sample does not show the program's need.
    against: Option<Against>,
    /// The last pod's request on each GPU; none if no pod was seen since this replica leads.
    requested: Option<Mib>,
}

impl Entry {
    fn last(&self) -> i64 {
        let all = self.containers.iter().map(|(_, kept)| kept.history.last());
        all.max().unwrap_or(i64::MIN)
    }

    fn is_due(&self, now: Duration) -> bool {
        let samples = || -> u64 {
            let all = self.containers.iter();
            all.map(|(_, kept)| kept.history.samples())
                .fold(0, u64::saturating_add)
        };
        self.changed && self.due <= now && (self.version.is_some() || samples() >= FIRST)
    }
}

/// One write.
#[derive(Debug)]
pub(super) enum Write {
    /// Create the object, or replace the version that it names.
    Put(Box<GpuWorkload>),
    /// Delete it.
    Delete,
}

/// The histories by workload.
#[derive(Debug, Default)]
pub(super) struct Table {
    all: HashMap<Workload, Entry>,
}

impl Table {
    /// The table from the objects of an earlier leader.
    pub(super) fn stored(objects: Vec<GpuWorkload>, now: Duration) -> Self {
        let mut table = Self::default();
        for object in objects {
            table.restore(object, now);
        }
        table
    }

    /// Takes in an object as it is stored, in place of the former record of its workload.
    pub(super) fn restore(&mut self, object: GpuWorkload, now: Duration) {
        let workload = Workload {
            namespace: object.namespace().unwrap_or_default().into(),
            owner: Owner {
                kind: object.spec.target_ref.kind,
                name: object.spec.target_ref.name,
            },
        };
        let containers = object.spec.containers.into_iter().map(|it| {
            let container = Container {
                name: it.name.into(),
                image: it.image.into(),
            };
            let kept = Kept {
                history: History::of(&it.history),
                gpu: Mib(it.gpu_mib),
                against: it
                    .advice
                    .against
                    .into_iter()
                    .find(|it| *it != Against::TakesEverything),
                requested: None,
            };
            (container, kept)
        });
        let entry = Entry {
            containers: containers.collect(),
            version: object.metadata.resource_version,
            due: now + EVERY,
            changed: false,
        };
        self.all.insert(workload, entry);
    }

    /// Adds a sample, at this time in seconds since 1970.
    pub(super) fn add(&mut self, sample: Sample, at: i64, now: Duration) {
        let entry = self
            .all
            .entry(sample.workload.clone())
            .or_insert_with(|| Entry {
                due: now,
                ..Entry::default()
            });
        entry.changed = true;
        let known = entry.containers.iter_mut();
        let mut known =
            known.filter(|(it, kept)| *it == sample.container && same_size(kept.gpu, sample.gpu));
        if let Some((_, kept)) = known.next() {
            kept.add(&sample, at);
            return;
        }
        let mut kept = Kept::default();
        kept.add(&sample, at);
        let name = sample.container.name.clone();
        entry.containers.push((sample.container, kept));
        // The oldest image goes.
        let same = |(it, _): &(Container, Kept)| it.name == name;
        let images = |all: &[(Container, Kept)]| {
            let all = all.iter().filter(|it| same(it));
            all.map(|(it, _)| it.image.clone()).collect::<BTreeSet<_>>()
        };
        while images(&entry.containers).len() > IMAGES {
            forget_oldest(&mut entry.containers, same);
        }
        while entry.containers.len() > MAX_HISTORIES {
            forget_oldest(&mut entry.containers, |_| true);
        }
    }

    /// The writes and deletions that are due now, in order. The longest wait is first.
    pub(super) fn due(&self, at: i64, now: Duration) -> Vec<(Workload, Write)> {
        let surplus = self.all.len().saturating_sub(MAX_WORKLOADS);
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for workload in self.all.keys().filter(|_| surplus > 0) {
            *counts.entry(&workload.namespace).or_default() += 1;
        }
        let crowd = |it: &Workload| Reverse(counts.get(&*it.namespace).copied());
        let all = self.all.iter();
        let mut old: Vec<_> = all
            .map(|(it, entry)| (crowd(it), entry.last(), it))
            .collect();
        if surplus > 0 {
            first(&mut old, surplus);
        } else {
            old.retain(|(_, last, _)| at.saturating_sub(*last) > FORGET);
            first(&mut old, BATCH);
        }
        let old: BTreeSet<&Workload> = old.into_iter().map(|(.., workload)| workload).collect();
        let all = self.all.iter();
        let changed = all.filter(|(it, entry)| entry.is_due(now) && !old.contains(it));
        let mut changed: Vec<_> = changed.map(|(it, entry)| (entry.due, it)).collect();
        first(&mut changed, BATCH);
        let changed = changed.into_iter().filter_map(|(_, workload)| {
            let object = object(workload, self.all.get(workload)?);
            Some((workload.clone(), Write::Put(object.into())))
        });
        let gone = old.into_iter().map(|it| (it.clone(), Write::Delete));
        gone.chain(changed).take(BATCH).collect()
    }

    /// The containers that request most beyond the advice, those first, in images that were seen lately.
    pub(super) fn figures(&self) -> Arc<[Figure]> {
        let containers = self
            .all
            .iter()
            .flat_map(|(workload, entry)| entry.containers.iter().map(move |it| (workload, it)));
        let figures = containers.filter_map(|(workload, (container, kept))| {
            let requested = kept.requested?;
            Some(Figure {
                workload: workload.clone(),
                container: container.name.clone(),
                requested,
                advised: advise(&kept.history, kept.gpu)?.request,
            })
        });
        let mut figures: Vec<_> = figures.collect();
        // Of several images and sizes of GPU the one that needs most.
        figures.sort_by(|a, b| {
            let order = |it: &Figure| (Reverse(it.advised), Reverse(it.requested));
            (&a.workload, &a.container, order(a)).cmp(&(&b.workload, &b.container, order(b)))
        });
        figures.dedup_by(|a, b| a.workload == b.workload && a.container == b.container);
        figures.sort_by_key(|it| Reverse(it.requested.minus(it.advised)));
        figures.truncate(FIGURES);
        figures.into()
    }

    /// A write succeeded; the version of the object now.
    pub(super) fn wrote(&mut self, workload: &Workload, version: Option<String>, now: Duration) {
        if let Some(entry) = self.all.get_mut(workload) {
            (entry.version, entry.due, entry.changed) = (version, now + EVERY, false);
        }
    }

    /// A write failed: it is tried again, but after the others.
    pub(super) fn failed(&mut self, workload: &Workload, now: Duration) {
        if let Some(entry) = self.all.get_mut(workload) {
            entry.due = now + AGAIN;
        }
    }

    /// Forgets a workload whose object is gone.
    pub(super) fn forget(&mut self, workload: &Workload) {
        self.all.remove(workload);
    }

    /// Has it an object?
    pub(super) fn is_stored(&self, workload: &Workload) -> bool {
        let entry = self.all.get(workload);
        entry.is_some_and(|entry| entry.version.is_some())
    }
}

impl Kept {
    fn add(&mut self, sample: &Sample, at: i64) {
        self.history.add(sample.peak, at);
        self.gpu = self.gpu.max(sample.gpu);
        self.against = sample.against;
        self.requested = Some(sample.requested);
    }
}

/// The first of these in order, and no more than so many.
fn first<T: Ord>(all: &mut Vec<T>, count: usize) {
    if all.len() > count {
        all.select_nth_unstable(count);
        all.truncate(count);
    }
    all.sort_unstable();
}

fn forget_oldest(containers: &mut Vec<(Container, Kept)>, of: impl Fn(&(Container, Kept)) -> bool) {
    let all = containers.iter().enumerate().filter(|(_, it)| of(it));
    let oldest = all.min_by_key(|(_, (_, kept))| kept.history.last());
    if let Some((place, _)) = oldest {
        containers.remove(place);
    }
}

fn object(workload: &Workload, entry: &Entry) -> GpuWorkload {
    let each = entry.containers.iter();
    let each = each.map(|(it, kept)| {
        let mut all = ContainerHistory::new(&it.name, &it.image, kept.gpu, &kept.history);
        all.advice.against.extend(kept.against);
        all
    });
    GpuWorkload {
        metadata: ObjectMeta {
            namespace: Some(workload.namespace.to_string()),
            name: Some(workload::name_of(&workload.owner)),
            resource_version: entry.version.clone(),
            ..ObjectMeta::default()
        },
        spec: GpuWorkloadSpec {
            target_ref: TargetRef {
                kind: workload.owner.kind.clone(),
                name: workload.owner.name.clone(),
            },
            containers: each.collect(),
        },
    }
}

#[cfg(test)]
mod tests;
