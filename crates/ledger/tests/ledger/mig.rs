//! MIG instances that agents make: pods with one of their own, and the slices that others have.

use std::sync::Arc;

use gpustow_api::assignment;
use gpustow_api::gpunode::Gpu;
use gpustow_api::instances::Instance;
use gpustow_api::{Assignment, PodFacts};
use gpustow_ledger::{BindRefusal, Ledger, Outcome, Reason, Victims};
use gpustow_pack::Refusal;

use crate::build::{
    at, bound, card, choose, exclusive, isolated, ledger, makes_instances, node, pod, refused,
    report,
};

const NO_SLICES: Option<Reason> = Some(Reason::Fit(Refusal::NoSlices));

/// A GPU of four slices of 10 MiB: instances of one, two and four.
fn pool(uuid: &str, instances: &[Instance]) -> Gpu {
    makes_instances(card(uuid, 40), instances)
}

fn instance(start: u8, slices: u8, pod: Option<&str>) -> Instance {
    Instance {
        profile: format!("{slices}g"),
        start,
        slices,
        pod: pod.map(str::to_owned),
    }
}

/// Node `a` with such a GPU, and node `b` with a whole one.
fn nodes() -> Ledger {
    let mut ledger = ledger(&[("b", &[100])]);
    ledger.apply_node(node("a"));
    reports(&mut ledger, &[]);
    ledger
}

fn reports(ledger: &mut Ledger, instances: &[Instance]) {
    ledger.apply_gpunode("a", report(&[pool("a-0", instances)]), at(0));
}

/// A pod bound to `a` that has these slices.
fn holder(uid: &str, start: u8, slices: u8) -> PodFacts {
    let pod = bound(uid, "a", "a-0", 10 * u64::from(slices));
    let known = pod.assignment.clone().and_then(Result::ok);
    let assignment = known.map(|known| {
        Ok(Arc::new(Assignment {
            instance: Some(assignment::Instance {
                profile: format!("{slices}g").into(),
                start,
                slices,
            }),
            ..(*known).clone()
        }))
    });
    PodFacts {
        assignment,
        ..isolated(pod)
    }
}

/// The instance that a pod is bound with.
fn bind(ledger: &mut Ledger, pod: &PodFacts) -> Result<(String, u8), Option<Reason>> {
    match ledger.begin_bind(pod, "a", at(1)) {
        Ok(assignment) => {
            let made = assignment.instance.clone().ok_or(None)?;
            Ok((made.profile.to_string(), made.start))
        }
        Err(BindRefusal::NoFit { reason, .. }) => Err(Some(reason)),
        Err(_) => Err(None),
    }
}

#[test]
fn pods_with_isolation_get_instances_and_all_others_go_elsewhere() {
    let mut ledger = nodes();
    let own = isolated(pod("own", 15));
    assert_eq!(choose(&mut ledger, &own, &["a", "b"], at(0)), ["a"]);
    let plain = pod("plain", 15);
    assert_eq!(choose(&mut ledger, &plain, &["a", "b"], at(0)), ["b"]);
    let whole = exclusive(pod("whole", 5));
    assert_eq!(choose(&mut ledger, &whole, &["a"], at(0)), [""; 0]);
    let why = |pod: &PodFacts, node| refused(&mut nodes(), pod, node);
    let large = isolated(pod("large", 41));
    assert_eq!(why(&own, "b"), Some(Reason::Fit(Refusal::NoMig)));
    assert_eq!(why(&large, "a"), Some(Reason::Fit(Refusal::NoMig)));
    assert_eq!(why(&plain, "a"), Some(Reason::Fit(Refusal::OnlyMig)));
    // The smallest profile that holds it.
    assert_eq!(bind(&mut ledger, &own), Ok(("2g".into(), 0)));
}

#[test]
fn slices_are_given_once_whether_assumed_bound_or_of_others() {
    let mut ledger = nodes();
    reports(&mut ledger, &[instance(0, 1, None)]);
    ledger.apply_pod(holder("bound", 1, 1));
    let assumed = isolated(pod("assumed", 10));
    assert_eq!(choose(&mut ledger, &assumed, &["a"], at(0)), ["a"]);
    let waits = isolated(pod("waits", 20));
    ledger.apply_pod(waits.clone());
    assert_eq!(refused(&mut ledger, &waits, "a"), NO_SLICES);
    let last = isolated(pod("last", 10));
    assert_eq!(choose(&mut ledger, &last, &["a"], at(0)), ["a"]);
    let next = isolated(pod("next", 1));
    assert_eq!(refused(&mut ledger, &next, "a"), NO_SLICES);
    let starts: Vec<_> = [&assumed, &last]
        .map(|pod| bind(&mut ledger, pod).map(|(_, start)| start))
        .into();
    assert_eq!(starts, [Ok(2), Ok(3)]);
    // A bind that fails wakes the pod that waits for its slices.
    for (pod, outcome) in [(&assumed, Outcome::Failed), (&last, Outcome::Failed)] {
        ledger.end_bind(pod, outcome, at(1));
    }
    let woken = ledger.wake(9, at(1));
    assert_eq!(
        woken.iter().map(|it| &*it.uid).collect::<Vec<_>>(),
        ["waits"]
    );
}

#[test]
fn an_instance_is_in_the_way_until_the_agent_has_ended_it() {
    let mut ledger = nodes();
    reports(&mut ledger, &[instance(0, 4, Some("gone"))]);
    let waits = isolated(pod("waits", 20));
    ledger.apply_pod(waits.clone());
    assert_eq!(refused(&mut ledger, &waits, "a"), NO_SLICES);
    reports(&mut ledger, &[]);
    let woken = ledger.wake(9, at(1));
    assert_eq!(
        woken.iter().map(|it| &*it.uid).collect::<Vec<_>>(),
        ["waits"]
    );
}

#[test]
fn bind_is_refused_if_others_made_an_instance_there_since_filter() {
    let mut ledger = nodes();
    let own = isolated(pod("own", 20));
    choose(&mut ledger, &own, &["a"], at(0));
    reports(&mut ledger, &[instance(1, 1, None)]);
    assert_eq!(bind(&mut ledger, &own), Err(NO_SLICES));
    // The next attempt finds slices that are free.
    assert_eq!(bind(&mut ledger, &own), Ok(("2g".into(), 2)));
    let plain = pod("plain", 20);
    choose(&mut ledger, &plain, &["b"], at(0));
    ledger.apply_gpunode("b", report(&[pool("b-0", &[])]), at(1));
    let refused = ledger.begin_bind(&plain, "b", at(1));
    let only = Reason::Fit(Refusal::OnlyMig);
    assert!(matches!(refused, Err(BindRefusal::NoFit { reason, .. }) if reason == only));
}

#[test]
fn profiles_that_fit_nowhere_make_a_gpu_that_takes_no_pods() {
    let mut ledger = nodes();
    let mut gpu = pool("a-0", &[]);
    if let Some(mig) = &mut gpu.mig {
        mig.profiles.clear();
    }
    ledger.apply_gpunode("a", report(&[gpu]), at(0));
    for pod in [pod("plain", 1), isolated(pod("own", 1))] {
        assert!(refused(&mut ledger, &pod, "a").is_some());
    }
}

#[test]
fn slices_that_are_held_through_one_node_are_not_free_on_another() {
    let mut ledger = nodes();
    ledger.apply_node(node("c"));
    ledger.apply_gpunode("c", report(&[pool("a-0", &[])]), at(0));
    ledger.apply_pod(holder("bound", 0, 2));
    let other = isolated(pod("other", 40));
    assert_eq!(refused(&mut ledger, &other, "c"), NO_SLICES);
}

#[test]
fn preemption_ends_the_pod_whose_slices_are_in_the_way() {
    let mut ledger = nodes();
    ledger.apply_pod(holder("left", 0, 1));
    ledger.apply_pod(holder("right", 3, 1));
    ledger.apply_pod(holder("middle", 2, 1));
    let high = PodFacts {
        priority: 10,
        ..isolated(pod("high", 20))
    };
    let victims = ledger.preempt(&high, "a", &[], &mut ledger.budget(), at(0));
    let uids = victims.map(|victims: Victims| victims.uids);
    assert_eq!(uids, Some(vec!["left".into()]));
}
