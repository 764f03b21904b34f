//! Wake-ups in virtual time, with a kube-scheduler whose own filters keep pods off nodes for reasons
//! that the ledger cannot know.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{NodeFacts, PodFacts};
use gpustow_ledger::{Ledger, Outcome};
use gpustow_pack::{Bytes, Mib};

use crate::build::{at, bound, card, choose, ledger, node, pod, report, requesting};
use crate::model::Random;

/// Between two calls of [`Ledger::wake`].
const STEP: Duration = Duration::from_millis(100);
/// A promise ends after this long.
const INTERVAL: Duration = Duration::from_secs(2);

/// A ledger, and who is kept off which nodes by something that it does not know.
struct World {
    ledger: Ledger,
    nodes: Vec<String>,
    pods: HashMap<Arc<str>, PodFacts>,
    bars: HashMap<Arc<str>, HashSet<String>>,
    now: Duration,
    woken: Vec<Arc<str>>,
}

impl World {
    /// Nodes with a card of 100 each, all of it in strangers' hands.
    fn new(nodes: usize) -> Self {
        let nodes: Vec<String> = (0..nodes).map(|index| format!("n{index}")).collect();
        let sizes: Vec<(&str, &[u64])> = nodes.iter().map(|name| (&**name, &[100][..])).collect();
        let mut world = Self {
            ledger: ledger(&sizes),
            nodes: nodes.clone(),
            pods: HashMap::new(),
            bars: HashMap::new(),
            now: at(1),
            woken: Vec::new(),
        };
        nodes.iter().for_each(|name| world.strangers(name, 100));
        world
    }

    /// Strangers hold so much on the node's card: no event of Kubernetes shows a change.
    fn strangers(&mut self, name: &str, mib: u64) {
        let mut gpu = card(&format!("{name}-0"), 100);
        gpu.unmanaged_mib = mib;
        self.ledger.apply_gpunode(name, report(&[gpu]), self.now);
    }

    /// A pod that was refused and sleeps.
    fn wait(&mut self, pod: PodFacts, bars: impl IntoIterator<Item = String>) {
        let pod = PodFacts {
            waiting: true,
            ..pod
        };
        self.bars
            .insert(pod.uid.clone(), bars.into_iter().collect());
        self.pods.insert(pod.uid.clone(), pod.clone());
        self.ledger.apply_pod(pod.clone());
        self.ask(&pod);
        assert!(self.ledger.is_waiting(&pod.uid));
    }

    /// kube-scheduler tries the pod: it asks about the nodes that its own filters let pass, if any.
    fn ask(&mut self, pod: &PodFacts) {
        let free = |name: &&String| !self.bars[&pod.uid].contains(*name);
        let candidates: Vec<&str> = self.nodes.iter().filter(free).map(|it| &**it).collect();
        if candidates.is_empty() {
            return;
        }
        if let [node] = *choose(&mut self.ledger, pod, &candidates, self.now) {
            let begun = self.ledger.begin_bind(pod, node, self.now);
            assert!(begun.is_ok(), "{begun:?}");
            self.ledger.end_bind(pod, Outcome::Bound, self.now);
            self.pods.remove(&pod.uid);
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        for pod in self.ledger.wake(10, self.now) {
            self.woken.push(pod.uid.clone());
            self.ask(&pod);
        }
    }

    fn steps(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step();
        }
    }

    /// How long it takes until `uid` is bound.
    fn until_bound(&mut self, uid: &str) -> Duration {
        let began = self.now;
        while self.pods.contains_key(uid) {
            self.step();
            assert!(self.now < began + at(4 * 3600), "{uid} is never bound");
        }
        self.now - began
    }

    /// Does a waiting pod fit on a node that nothing keeps it off?
    fn some_pod_fits(&self) -> bool {
        let free = self.ledger.snapshot(self.now);
        let fits = |pod: &PodFacts| {
            free.iter().any(|node| {
                !self.bars[&pod.uid].contains(&*node.name)
                    && self.ledger.explain(pod, &node.name, self.now).is_ok()
            })
        };
        self.pods.values().any(fits)
    }
}

/// The limit in ARCHITECTURE.md: the time until a pod that fits is bound while `others` wait that do not. The limit has
/// rounds of two seconds that double, and a tenth of a second for each pod beyond the burst.
fn limit(others: u32) -> Duration {
    let rounds = (others + 1).ilog2() + 2;
    INTERVAL * rounds + STEP * others.saturating_sub(256)
}

fn aged(uid: &str, mib: u64, created: i64) -> PodFacts {
    PodFacts {
        created,
        ..pod(uid, mib)
    }
}

#[test]
fn the_pod_that_fits_is_woken_in_time_whichever_pods_wait_before_it() {
    for others in [1, 5, 10, 20, 30, 40, 100, 1000] {
        // They may run on n1 alone, which stays full, or nowhere.
        for also in [None, Some("n1".to_owned())] {
            let mut world = World::new(2);
            for index in 0..others {
                let older = aged(&format!("o{index}"), 60, index.into());
                world.wait(older, ["n0".to_owned()].into_iter().chain(also.clone()));
            }
            world.wait(aged("p", 60, 1 << 20), ["n1".to_owned()]);
            world.strangers("n0", 0);
            let took = world.until_bound("p");
            assert!(took <= limit(others), "{others} others: {took:?}");
            assert!(
                world.woken.len() <= 2 * others as usize + 2,
                "{others}: {}",
                world.woken.len()
            );
        }
    }
}

#[test]
fn some_pod_is_bound_within_the_bound_as_long_as_one_fits() {
    for seed in 0..60 {
        let random = &mut Random::new(seed);
        let mut world = World::new(1 + random.below(5) as usize);
        let count = 1 + random.below(60);
        for index in 0..count {
            let mib = [10, 30, 50, 60, 100][random.below(5) as usize];
            let pod = PodFacts {
                priority: random.below(3) as i32,
                ..aged(&format!("p{index}"), mib, random.below(9) as i64)
            };
            let mostly = random.below(4) > 0;
            let nodes = world.nodes.clone();
            let bars = nodes.into_iter().filter(|_| mostly && random.below(5) > 0);
            let bars: Vec<String> = bars.collect();
            world.wait(pod, bars);
        }
        let mut since = world.now;
        for round in 0..200 {
            if round % 20 == 0 {
                let name = world.nodes[random.below(world.nodes.len() as u64) as usize].clone();
                world.strangers(&name, [0, 0, 40, 100][random.below(4) as usize]);
                since = world.now;
            }
            let before = world.pods.len();
            world.steps(at(1));
            if world.pods.len() < before || !world.some_pod_fits() {
                since = world.now;
            }
            // A pod that the node was offered to before is offered it once more.
            let limit = limit(count as u32) * 2;
            assert!(world.now - since <= limit, "seed {seed}, round {round}");
        }
    }
}

#[test]
fn no_pod_is_woken_for_a_node_that_is_known_to_refuse_it() {
    let needs = |uid, cpu_milli, ram| {
        requesting(pod(uid, 10), |it| (it.cpu_milli, it.ram) = (cpu_milli, ram))
    };
    let cordoned = NodeFacts {
        cordoned: true,
        ..node("n0")
    };
    let full = NodeFacts {
        pods: Some(0),
        ..node("n0")
    };
    let cases = [
        (node("n0"), needs("cpu", 65_000, Bytes(1))),
        (node("n0"), needs("ram", 1, Mib(1 << 21).into())),
        (cordoned, pod("cordon", 10)),
        (full, pod("pods", 10)),
    ];
    for (facts, pod) in cases {
        let mut world = World::new(1);
        world.ledger.apply_node(facts);
        world.wait(pod, ["n0".to_owned()]);
        world.strangers("n0", 0);
        world.steps(at(100));
        assert_eq!(world.woken, Vec::<Arc<str>>::new());
        // Then the node has the resources that the pod wants.
        world.bars.values_mut().for_each(HashSet::clear);
        world.ledger.apply_node(NodeFacts {
            cpu_milli: 1 << 20,
            ram: Mib(1 << 24).into(),
            ..node("n0")
        });
        world.steps(at(1));
        assert!(world.pods.is_empty());
    }
}

#[test]
fn a_pod_that_woke_without_result_is_not_offered_that_nodes_room_until_the_node_changes() {
    let mut world = World::new(2);
    world.wait(pod("p", 60), ["n0".to_owned()]);
    world.strangers("n0", 0);
    world.steps(at(1));
    assert_eq!(world.woken.len(), 1);
    // Room that comes and goes there is none for it, and its pauses double.
    for second in 0..60 {
        world.strangers("n0", second % 2);
        world.steps(at(1));
    }
    assert!(world.woken.len() <= 5, "{}", world.woken.len());
    // A pod leaves the node: the obstacle for the first pod may have gone with it.
    let before = world.woken.len();
    world.strangers("n0", 0);
    world.ledger.apply_pod(bound("other", "n0", "n0-0", 1));
    world.steps(at(1));
    world.ledger.delete_pod("other");
    world.steps(at(1));
    assert_eq!(world.woken.len(), before + 1);
    // Room elsewhere is room.
    world.strangers("n1", 0);
    world.steps(at(1));
    assert!(world.pods.is_empty());
}

#[test]
fn ten_thousand_that_cannot_use_the_room_are_woken_at_a_bounded_rate() {
    let mut world = World::new(20);
    let nodes = world.nodes.clone();
    for index in 0..10_000 {
        let size = 10 + index as u64 % 50;
        world.wait(aged(&format!("p{index}"), size, index), nodes.clone());
    }
    nodes.iter().for_each(|name| world.strangers(name, 0));
    world.steps(at(60));
    assert!(world.woken.len() <= 256 + 600, "{}", world.woken.len());
    world.woken.clear();
    world.steps(at(60));
    assert!(world.woken.len() <= 600, "{}", world.woken.len());
}

#[test]
fn wake_ups_that_succeed_are_bounded_by_the_callers_limit_alone() {
    let mut world = World::new(40);
    for index in 0..2000 {
        world.wait(aged(&format!("p{index}"), 2, index), []);
    }
    let nodes = world.nodes.clone();
    nodes.iter().for_each(|name| world.strangers(name, 0));
    // Ten in each step.
    world.steps(STEP * 202);
    assert!(world.pods.is_empty());
    assert_eq!(world.woken.len(), 2000);
}

#[test]
fn nodes_that_gain_too_little_do_not_keep_others_waiting() {
    let mut world = World::new(21);
    for index in 0..5000 {
        let pod = aged(&format!("p{index}"), 50, index);
        let pod = requesting(pod, |request| request.cpu_milli = 1 + index as u64);
        world.wait(pod, []);
    }
    for second in 0..60 {
        for index in 0..20 {
            world.strangers(&format!("n{index}"), 60 + second % 2);
        }
        if second == 30 {
            world.strangers("n20", 50);
        }
        world.steps(at(1));
    }
    assert_eq!(world.woken, ["p0".into()]);
}

#[test]
fn pods_of_schedulers_that_do_not_ask_us_are_not_woken() {
    let mut world = World::new(1);
    let foreign = |uid| PodFacts {
        scheduler: "other".into(),
        waiting: true,
        ..pod(uid, 30)
    };
    world.ledger.apply_pod(foreign("p"));
    world.strangers("n0", 0);
    world.steps(at(60));
    assert_eq!(world.woken, Vec::<Arc<str>>::new());
    // It does ask: after a restart a pod that it bound with our help shows it as well.
    let bound = PodFacts {
        scheduler: "other".into(),
        ..bound("b", "n0", "n0-0", 1)
    };
    world.ledger.apply_pod(bound);
    world.bars.insert("p".into(), HashSet::new());
    world.steps(at(10));
    assert_eq!(world.woken, ["p".into()]);
}

#[test]
fn a_wake_up_that_failed_is_given_to_the_next() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("old", "a", "a-0", 100));
    for uid in ["p", "q"] {
        ledger.apply_pod(pod(uid, 60));
        assert!(choose(&mut ledger, &pod(uid, 60), &["a"], at(0)).is_empty());
    }
    ledger.delete_pod("old");
    let woken = ledger.wake(1, at(1));
    assert_eq!(&*woken[0].uid, "p");
    ledger.wake_failed("p");
    ledger.delete_pod("p");
    assert_eq!(&*ledger.wake(1, at(1))[0].uid, "q");
}

#[test]
fn pod_is_woken_whose_scheduler_has_asked_about_it() {
    let mut ledger = ledger(&[("a", &[100])]);
    ledger.apply_pod(bound("old", "a", "a-0", 100));
    let foreign = |uid| PodFacts {
        scheduler: "other".into(),
        ..pod(uid, 60)
    };
    ledger.apply_pod(foreign("p"));
    assert!(choose(&mut ledger, &foreign("p"), &["a"], at(0)).is_empty());
    ledger.delete_pod("old");
    assert_eq!(&*ledger.wake(1, at(1))[0].uid, "p");
}
