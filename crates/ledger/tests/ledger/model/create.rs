//! New pods in the model.

use std::iter;
use std::sync::Arc;

use gpustow_api::limit::Enforce;
use gpustow_api::{PodFacts, Regards, Sleep, names};
use gpustow_pack::{Mib, Rules};

use super::event::{Event, Limit, Neighbours};
use super::gangs::group;
use super::world::{World, pick};
use crate::build::{asking, exclusive, limited, placed_by, required};

const NAMES: [&str; 6] = ["p0", "p1", "p2", "p3", "p4", "p5"];

impl World {
    /// A pod is created, if one of the names is free.
    pub(super) fn create(&mut self, event: &Event) {
        let Event::Create {
            size,
            gpus,
            exclusive: whole,
            limited: held,
            limit,
            priority,
            gated,
            queued,
            pod: traits,
        } = *event
        else {
            return;
        };
        let number = self.server.number();
        let mut pod = asking(&format!("u{number}"), &[(gpus, size)]);
        if whole {
            pod = exclusive(pod);
        } else if held {
            pod = limited(pod);
        } else if let Limit::Unwatched = limit {
            pod.enforce = Enforce::None;
        }
        let isolated = traits.isolated && !whole && gpus == 1;
        // Neither whole GPUs nor the driver's limits go with a percentage, nor limits of its own, nor an instance.
        let part = match whole || held || isolated {
            true => 0,
            false => traits.percentage,
        };
        let more = |mib| iter::repeat_n(Mib(mib), 1).collect();
        match limit {
            _ if whole || part > 0 => {}
            Limit::More(mib) => pod.limits = more(size + mib),
            Limit::Whole => pod.limits = more(u64::MAX),
            Limit::Same | Limit::Unwatched => {}
        }
        if let Some(name) = self.free_name() {
            pod.name = name.into();
            pod.created = number as i64 / 3;
            (pod.priority, pod.gated) = (priority, gated);
            pod.queued = queued;
            pod.preempts = !traits.never;
            pod.group = traits.group.map(group);
            pod.action = traits.action;
            pod.evictable = traits.evictable.then(|| "rs".into());
            if self.switches.empties {
                // It has run for long once it is bound.
                pod.started = 0;
            }
            pod.sleep = traits.asleep.map(|asleep| Sleep { asleep, told: None });
            pod.asks.change(|request| {
                request.cpu_milli = traits.cpu_milli;
                request.isolated = isolated;
                request.rules = traits.neighbours.map(|it| Arc::new(rules(it)));
                request.compute = if whole || isolated { 0 } else { traits.compute };
                let claims = request.claims.iter_mut();
                claims.for_each(|claim| claim.percentage = part);
            });
            pod = regarding(pod, traits.regards);
            self.reject(&pod.uid, traits.rejects);
            self.server.create(pod);
        }
    }

    /// A name that no pod has.
    fn free_name(&self) -> Option<&'static str> {
        let mut names = NAMES.into_iter();
        names.find(|name| self.server.pods.iter().all(|pod| *pod.name != **name))
    }

    /// The controller of a pod that is being deleted makes another.
    pub(super) fn replace(&mut self, number: usize) {
        let pods = self.server.pods.iter();
        let leaving: Vec<&PodFacts> = pods.filter(|pod| pod.deleting).collect();
        let Some(index) = pick(&leaving, number) else {
            return;
        };
        let Some(name) = self.free_name() else { return };
        let number = self.server.number();
        let pod = PodFacts {
            uid: format!("u{number}").into(),
            name: name.into(),
            created: number as i64 / 3,
            node: None,
            nominated: None,
            assignment: None,
            deleting: false,
            released: false,
            waiting: false,
            preempted: false,
            asked_back: None,
            tied: false,
            reserved_on: None,
            refusal: 0,
            sleep: leaving[index].sleep.map(|it| Sleep { told: None, ..it }),
            ..leaving[index].clone()
        };
        if pod.group.is_some() {
            let uid = leaving[index].uid.clone();
            self.reject_as(&pod.uid, &uid);
        }
        self.server.create(pod);
    }
}

/// The pod's rules about the pods that it shares GPUs with.
fn rules(neighbours: Neighbours) -> Rules {
    let group = |number| Some(format!("default/{number}").into());
    match neighbours {
        Neighbours::Together(number) => Rules {
            affinity: group(number),
            ..Rules::default()
        },
        Neighbours::Apart(number) => Rules {
            anti_affinity: group(number),
            ..Rules::default()
        },
    }
}

/// The same pod with anti-affinity that reaches so far.
fn regarding(pod: PodFacts, regards: Regards) -> PodFacts {
    match regards {
        Regards::NoPod => pod,
        Regards::PodsOfNode => placed_by(pod, required("podAntiAffinity", names::HOSTNAME)),
        Regards::AllPods => placed_by(pod, required("podAntiAffinity", "zone")),
    }
}
