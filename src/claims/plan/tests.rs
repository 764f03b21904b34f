use super::*;

use gpustow_pack::Mib;

const EPOCH: u64 = 7;

fn device(name: &str) -> Device {
    Device {
        driver: "d".to_owned(),
        pool: "n".to_owned(),
        name: name.to_owned(),
    }
}

fn gpu(held: bool, devices: &[&str]) -> Gpu {
    Gpu {
        node: "n".into(),
        is: Fenced {
            uuid: "GPU-0".into(),
            held,
            kept: false,
            claimed: Mib(1024),
        },
        devices: devices.iter().copied().map(device).collect(),
    }
}

fn rule(name: &str, of: &str, epoch: Option<u64>) -> Rule {
    Rule {
        name: name.to_owned(),
        uid: name.to_owned(),
        version: "1".to_owned(),
        epoch,
        terminating: false,
        device: Some(device(of)),
        gpu: "GPU-0".to_owned(),
    }
}

fn world(rules: &[Rule]) -> World<'_> {
    let mut by_device: HashMap<Device, Vec<&Rule>> = HashMap::new();
    for rule in rules {
        by_device
            .entry(rule.device.clone().unwrap())
            .or_default()
            .push(rule);
    }
    World {
        rules: by_device,
        claims: HashMap::new(),
        released: HashSet::new(),
        epoch: EPOCH,
        settled: HashSet::new(),
    }
}

fn create(of: &str) -> Step {
    Step::Create(device(of), ("n".into(), "GPU-0".into()))
}

#[test]
fn gpu_without_devices_is_open_and_has_no_rule() {
    let verdict = world(&[]).of(&gpu(false, &[]));
    assert_eq!((verdict.open, verdict.steps), (true, vec![]));
}

#[test]
fn gpu_opens_once_each_device_has_a_rule_that_this_leader_stamped() {
    let gpu = gpu(false, &["a", "b"]);
    let verdict = world(&[]).of(&gpu);
    assert_eq!(
        (verdict.open, verdict.steps),
        (false, vec![create("a"), create("b")])
    );
    let new = [rule("r", "a", None), rule("s", "b", Some(EPOCH - 1))];
    let mut early = world(&new);
    let verdict = early.of(&gpu);
    assert_eq!(
        (verdict.open, verdict.steps),
        (false, vec![Step::Stamp(new[1].clone())])
    );
    early.settled.insert("r".to_owned());
    let stamps: Vec<_> = new.iter().cloned().map(Step::Stamp).collect();
    assert_eq!(early.of(&gpu).steps, stamps);
    let stamped = [rule("r", "a", Some(EPOCH)), rule("s", "b", Some(EPOCH))];
    let verdict = world(&stamped).of(&gpu);
    assert_eq!((verdict.open, verdict.steps), (true, vec![]));
}

#[test]
fn rule_that_is_deleted_by_hand_stays_until_another_has_taken_its_place() {
    let gpu = gpu(true, &["a"]);
    let mut old = rule("old", "a", Some(EPOCH));
    old.terminating = true;
    let mut rules = vec![old.clone()];
    let verdict = world(&rules).of(&gpu);
    assert_eq!((verdict.open, verdict.steps), (true, vec![create("a")]));
    rules.push(rule("new", "a", None));
    assert_eq!(world(&rules).of(&gpu).steps, vec![]);
    rules[1].epoch = Some(EPOCH);
    let verdict = world(&rules).of(&gpu);
    assert_eq!(
        (verdict.open, verdict.steps),
        (true, vec![Step::Remove(old)])
    );
    // A leader before this one may be about to take its finalizer off.
    rules[0].epoch = Some(EPOCH - 1);
    rules.pop();
    let verdict = world(&rules).of(&gpu);
    let stamp = Step::Stamp(rules[0].clone());
    assert_eq!(
        (verdict.open, verdict.steps),
        (false, vec![create("a"), stamp])
    );
}

#[test]
fn of_two_rules_for_a_device_one_is_removed() {
    let rules = [rule("s", "a", None), rule("r", "a", Some(EPOCH))];
    let verdict = world(&rules).of(&gpu(false, &["a"]));
    assert_eq!(
        (verdict.open, verdict.steps),
        (true, vec![Step::Remove(rules[0].clone())])
    );
}

#[test]
fn gpu_with_claims_and_no_pod_and_one_that_is_released_are_the_claims() {
    let rules = [rule("r", "a", Some(EPOCH))];
    let removed = || vec![Step::Remove(rules[0].clone())];
    let mut world = world(&rules);
    world.released.insert(("n".into(), "GPU-0".into()));
    let verdict = world.of(&gpu(false, &["a"]));
    assert_eq!(
        (verdict.open, verdict.close, verdict.steps),
        (false, true, removed())
    );
    // A pod came first.
    let verdict = world.of(&gpu(true, &["a"]));
    assert_eq!(
        (verdict.open, verdict.close, verdict.steps),
        (true, false, vec![])
    );
    world.released.clear();
    world.claims.insert(device("a"), Consumed::Mib(Mib(1)));
    let verdict = world.of(&gpu(false, &["a"]));
    assert_eq!(
        (verdict.open, verdict.close, verdict.steps),
        (false, true, removed())
    );
}

#[test]
fn gpu_with_both_is_fenced_and_open_if_the_agent_counts_the_claims() {
    let rules = [rule("r", "a", Some(EPOCH)), rule("s", "b", Some(EPOCH))];
    let gpu = gpu(true, &["a", "b"]);
    let mut world = world(&rules);
    for (one, two, open) in [(1024, 0, true), (1000, 24, true), (1000, 25, false)] {
        world.claims.insert(device("a"), Consumed::Mib(Mib(one)));
        world.claims.insert(device("b"), Consumed::Mib(Mib(two)));
        let verdict = world.of(&gpu);
        assert_eq!(
            (verdict.open, verdict.close, verdict.steps),
            (open, false, vec![])
        );
    }
    world.claims.insert(device("b"), Consumed::Whole);
    assert!(!world.of(&gpu).open);
}

#[test]
fn devices_of_a_gpu_stay_while_their_driver_publishes_nothing() {
    let uuid = || vec!["GPU-0".to_owned()];
    let mut published = HashMap::from([(device("a"), uuid()), (device(""), uuid())]);
    let (own, renamed) = (rule("r", "a", None), rule("s", "b", None));
    let of = |published: &HashMap<Device, Vec<String>>| devices(published, &[&own, &renamed]);
    assert_eq!(of(&published)["GPU-0"], [device("a")]);
    published.clear();
    assert_eq!(of(&published)["GPU-0"], [device("a"), device("b")]);
}
