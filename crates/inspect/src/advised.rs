//! Advised requests of pods, from the histories of their workloads.

use std::collections::HashMap;

use gpustow_api::GpuWorkload;
use gpustow_api::owner::{self, Owner};
use gpustow_api::workload::{Basis, ContainerHistory};
use gpustow_pack::Mib;
use kube::ResourceExt as _;

use crate::PodInfo;

/// The advice that may be followed, by namespace and workload.
#[derive(Debug, Default)]
pub struct Advised(HashMap<(String, Owner), Vec<ContainerHistory>>);

impl Advised {
    /// A history is new or has changed.
    pub(crate) fn apply(&mut self, workload: GpuWorkload) {
        self.0.insert(key(&workload), workload.spec.containers);
    }

    /// A history is gone.
    pub(crate) fn delete(&mut self, workload: &GpuWorkload) {
        self.0.remove(&key(workload));
    }

    /// These are all histories.
    pub(crate) fn reset(&mut self, workloads: Vec<GpuWorkload>) {
        self.0.clear();
        workloads.into_iter().for_each(|it| self.apply(it));
    }

    /// The sum of the advised requests of a pod's containers with this GPU; none if one of them lacks advice.
    pub fn on(&self, pod: &PodInfo, uuid: &str) -> Option<Mib> {
        let key = (
            pod.facts.namespace.to_string(),
            owner::workload(&pod.object),
        );
        let advised = self.0.get(&key)?;
        let assignment = pod.facts.assignment.as_ref()?.as_ref().ok()?;
        let here = assignment.containers.iter();
        let mut here = here.filter(|(_, uuids)| uuids.iter().any(|it| **it == *uuid));
        let spec = pod.object.spec.as_ref()?;
        here.try_fold(Mib::ZERO, |sum, (name, _)| {
            let image = spec.containers.iter().find(|it| *it.name == **name)?;
            let image = image.image.as_deref().unwrap_or_default();
            let own = advised.iter().filter(|it| *it.name == **name);
            let of = Basis::new(own, image).follow(|it| it.request_mib)?;
            Some(sum + Mib(of))
        })
    }
}

fn key(workload: &GpuWorkload) -> (String, Owner) {
    let target = &workload.spec.target_ref;
    let owner = Owner {
        kind: target.kind.clone(),
        name: target.name.clone(),
    };
    (workload.namespace().unwrap_or_default(), owner)
}
