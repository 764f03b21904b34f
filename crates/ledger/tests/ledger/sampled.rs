//! kube-scheduler shows the extender some of the nodes that pass its own filters: a pod that fits elsewhere is still
//! placed.

use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Config, Ledger, Reason};

use crate::act::Act as _;
use crate::build::{ask, at, bound, card, choose, ledger, node, pod, report, used, waiting};

const NODES: usize = 300;

/// Nodes with one GPU of 100 MiB, where these have all of it free and the others 40.
struct Cluster {
    ledger: Ledger,
    names: Vec<String>,
}

impl Cluster {
    fn new(free: &[usize]) -> Self {
        let names: Vec<String> = (0..NODES).map(|index| format!("n{index:03}")).collect();
        let sizes: Vec<(&str, &[u64])> = names.iter().map(|name| (&**name, &[100][..])).collect();
        let mut ledger = ledger(&sizes);
        for (index, name) in names.iter().enumerate() {
            if !free.contains(&index) {
                ledger.apply_pod(bound(
                    &format!("old-{index}"),
                    name,
                    &format!("{name}-0"),
                    60,
                ));
            }
        }
        Self { ledger, names }
    }

    /// kube-scheduler shows these nodes; where the pod is placed.
    fn shows(
        &mut self,
        pod: &PodFacts,
        nodes: std::ops::Range<usize>,
        now: Duration,
    ) -> Vec<String> {
        let shown: Vec<&str> = self.names[nodes].iter().map(String::as_str).collect();
        let chosen = choose(&mut self.ledger, pod, &shown, now);
        chosen.iter().map(ToString::to_string).collect()
    }

    /// The pods that are woken now, and where they are nominated.
    fn woken(&mut self, now: Duration) -> Vec<(String, Option<String>)> {
        let pods = self.ledger.wake(100, now);
        let nomination = |pod: &PodFacts| {
            let node = self.ledger.nomination(&pod.uid);
            (pod.uid.to_string(), node.map(|node| node.to_string()))
        };
        pods.iter().map(|pod| nomination(pod)).collect()
    }

    fn void(&self) -> Vec<String> {
        let void = self.ledger.void_nominations();
        void.iter().map(|pod| pod.uid.to_string()).collect()
    }
}

fn named(pod: &str, node: &str) -> (String, Option<String>) {
    (pod.to_owned(), Some(node.to_owned()))
}

/// The API server has taken the nomination.
fn nominated(name: &str, mib: u64, node: &str) -> PodFacts {
    PodFacts {
        nominated: Some(node.into()),
        own_nomination: true,
        waiting: true,
        ..pod(name, mib)
    }
}

#[test]
fn node_that_was_not_shown_is_found_before_others_are_evicted() {
    let mut cluster = Cluster::new(&[250]);
    let p = pod("p", 60);
    cluster.ledger.apply_pod(p.clone());
    let unshown = |cluster: &Cluster, now| cluster.ledger.fits_unshown(&p, now);
    assert!(cluster.shows(&p, 0..100, at(1)).is_empty());
    assert_eq!(unshown(&cluster, at(1)).as_deref(), Some("n250"));
    // Of a pod that was not refused nothing is known.
    assert_eq!(cluster.ledger.fits_unshown(&pod("q", 60), at(1)), None);
    // The pod was woken for the node, and kube-scheduler has other reasons not to take it.
    assert_eq!(cluster.woken(at(1)), [named("p", "n250")]);
    let own = nominated("p", 60, "n250");
    cluster.ledger.apply_pod(own.clone());
    assert!(cluster.shows(&own, 100..200, at(2)).is_empty());
    assert_eq!(unshown(&cluster, at(2)), None);
    // All that pass are shown.
    let mut small = Cluster::new(&[250]);
    small.ledger.apply_pod(p.clone());
    assert!(small.shows(&p, 0..99, at(1)).is_empty());
    assert_eq!(small.ledger.fits_unshown(&p, at(1)), None);
}

#[test]
fn pod_refused_in_a_sample_is_nominated_to_the_node_that_fits() {
    let mut cluster = Cluster::new(&[250]);
    let p = pod("p", 60);
    cluster.ledger.apply_pod(p.clone());
    assert!(cluster.shows(&p, 0..100, at(1)).is_empty());
    assert_eq!(cluster.woken(at(1)), [named("p", "n250")]);
    let p = nominated("p", 60, "n250");
    cluster.ledger.apply_pod(p.clone());
    assert!(cluster.void().is_empty());
    // The room is kept from its equals.
    let other = pod("other", 60);
    let refused = cluster
        .ledger
        .filter(&ask(&other), &["n250"], at(1))
        .refused;
    assert_eq!(refused, [("n250", Reason::Nominated)]);
    assert_eq!(cluster.shows(&p, 250..251, at(1)), ["n250"]);
    assert!(cluster.void().is_empty());
}

#[test]
fn pods_refused_in_samples_at_once_are_all_nominated_at_once() {
    let free: Vec<usize> = (200..230).collect();
    let mut cluster = Cluster::new(&free);
    let pods: Vec<PodFacts> = (0..30)
        .map(|number| pod(&format!("p{number}"), 60))
        .collect();
    for pod in &pods {
        cluster.ledger.apply_pod(pod.clone());
        assert!(cluster.shows(pod, 0..100, at(1)).is_empty());
    }
    let mut woken = Vec::new();
    (0..5).for_each(|_| woken.extend(cluster.woken(at(1))));
    woken.sort_unstable();
    assert_eq!(woken.len(), 30, "{woken:?}");
    let mut nodes: Vec<_> = woken.into_iter().filter_map(|(_, node)| node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    assert_eq!(nodes.len(), 30, "each has its own node");
}

#[test]
fn pod_that_saw_all_nodes_is_nominated_nowhere() {
    // Of 99 nodes kube-scheduler has looked at all the others, and its own filters refused these.
    for shown in [0..99, 0..NODES] {
        let mut cluster = Cluster::new(&[]);
        let p = pod("p", 60);
        cluster.ledger.apply_pod(p.clone());
        assert!(cluster.shows(&p, shown, at(1)).is_empty());
        cluster.ledger.delete_pod("old-250");
        assert_eq!(cluster.woken(at(1)), [("p".to_owned(), None)]);
    }
}

#[test]
fn nomination_that_kube_scheduler_rejects_is_void_and_another_node_is_tried() {
    let mut cluster = Cluster::new(&[250, 251]);
    let p = pod("p", 60);
    cluster.ledger.apply_pod(p.clone());
    assert!(cluster.shows(&p, 0..100, at(1)).is_empty());
    let woken = cluster.woken(at(1));
    let [(_, Some(first))] = &woken[..] else {
        panic!("{woken:?}");
    };
    let p = nominated("p", 60, first);
    cluster.ledger.apply_pod(p.clone());
    // Its own filters refuse the node, and it shows the next window.
    assert!(cluster.shows(&p, 100..200, at(1)).is_empty());
    assert_eq!(cluster.void(), ["p"]);
    cluster.ledger.apply_pod(waiting(0, pod("p", 60)));
    assert!(cluster.void().is_empty());
    let mut then = Vec::new();
    for tenth in 10..30 {
        then.extend(cluster.woken(Duration::from_millis(tenth * 100)));
    }
    let other = if first == "n250" { "n251" } else { "n250" };
    assert_eq!(then, [named("p", other)], "within two seconds");
}

#[test]
fn attempt_that_began_before_the_nomination_does_not_end_it() {
    let mut cluster = Cluster::new(&[250]);
    let p = pod("p", 60);
    cluster.ledger.apply_pod(p.clone());
    assert!(cluster.shows(&p, 0..100, at(1)).is_empty());
    assert_eq!(cluster.woken(at(1)), [named("p", "n250")]);
    for _ in 0..3 {
        assert!(cluster.shows(&p, 100..200, at(2)).is_empty());
        assert_eq!(cluster.woken(at(2)), [named("p", "n250")]);
    }
    assert!(cluster.shows(&p, 100..200, at(2)).is_empty());
    assert_eq!(
        cluster.woken(at(2)),
        [],
        "after so many attempts the write seems to be of no use"
    );
    let p = nominated("p", 60, "n250");
    assert_eq!(cluster.shows(&p, 250..251, at(2)), ["n250"]);
}

#[test]
fn nomination_ends_when_the_pod_lost_its_reservation() {
    let mut cluster = Cluster::new(&[250]);
    let p = pod("p", 60);
    cluster.ledger.apply_pod(p.clone());
    assert!(cluster.shows(&p, 0..100, at(1)).is_empty());
    cluster.woken(at(1));
    let p = nominated("p", 60, "n250");
    cluster.ledger.apply_pod(p.clone());
    assert_eq!(cluster.shows(&p, 250..251, at(1)), ["n250"]);
    // Something after the extender refuses the node; with the nomination it would be tried first for ever.
    cluster.ledger.expire(at(100));
    assert_eq!(cluster.void(), ["p"]);
}

#[test]
fn nomination_of_kube_scheduler_keeps_room_for_a_time() {
    for (grace, lasts) in [(None, 300), (Some(600), 900), (Some(31_536_000), 3900)] {
        let mut ledger = ledger(&[("a", &[100])]);
        if let Some(grace) = grace {
            ledger.apply_pod(PodFacts {
                deleting: true,
                grace,
                ..bound("victim", "a", "a-0", 10)
            });
        }
        ledger.apply_pod(PodFacts {
            nominated: Some("a".into()),
            priority: 5,
            ..pod("first", 90)
        });
        let rival = pod("rival", 60);
        ledger.apply_pod(rival.clone());
        let report = |ledger: &mut Ledger, now| {
            let status = crate::build::report(&[crate::build::card("a-0", 100)]);
            let status = gpustow_api::gpunode::GpuNodeStatus {
                heartbeat: Some(format!("{now:?}")),
                ..status
            };
            ledger.apply_gpunode("a", status, now);
        };
        ledger.wake(9, at(1));
        report(&mut ledger, at(lasts));
        ledger.wake(9, at(lasts));
        assert!(
            choose(&mut ledger, &rival, &["a"], at(lasts)).is_empty(),
            "{grace:?}"
        );
        ledger.wake(9, at(lasts + 1));
        assert_eq!(
            choose(&mut ledger, &rival, &["a"], at(lasts + 1)),
            ["a"],
            "{grace:?}"
        );
    }
}

#[test]
fn memory_that_is_reclaimed_on_one_node_keeps_no_pod_from_a_node_where_it_fits() {
    let mut ledger = Ledger::new(Config {
        reclaim: true,
        least_nodes: 1,
        ..Config::default()
    });
    ledger.apply_node(node("a"));
    ledger.apply_node(node("b"));
    let mut lent = card("a-0", 100);
    lent.pods = vec![used("greedy", 100)];
    ledger.apply_gpunode("a", report(&[lent]), at(0));
    ledger.apply_gpunode("b", report(&[card("b-0", 100)]), at(0));
    ledger.apply_pod(bound("greedy", "a", "a-0", 10));
    let p = pod("p", 60);
    ledger.apply_pod(p.clone());
    assert!(ledger.filter(&ask(&p), &["a"], at(0)).nodes.is_empty());
    assert_eq!(ledger.reclaims(at(0)).len(), 1);
    let woken = ledger.wake(10, at(0)).pop();
    assert_eq!(woken.map(|pod| pod.uid.to_string()).as_deref(), Some("p"));
    assert_eq!(ledger.nomination("p").as_deref(), Some("b"));
}
