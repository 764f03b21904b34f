use super::*;

fn at(day: u64) -> Timestamp {
    let since = Duration::from_secs(1_800_000_000 + day * DAY);
    Timestamp::UNIX_EPOCH.checked_add(since).unwrap()
}

/// Secret and configuration, both absent at first, and a replica that has seen nothing.
#[derive(Default)]
struct World {
    secret: Option<Secret>,
    bundle: String,
    kept: Option<Kept>,
    settled: bool,
    forgotten: bool,
}

impl World {
    fn found(&self) -> Option<Kept> {
        Kept::of(self.secret.as_ref()?, None)
    }

    /// Steps until nothing is left to do, and returns the number of steps. At every step but the first, the served
    /// certificate is trusted.
    fn run(&mut self, day: u64) -> usize {
        for steps in 0.. {
            let found = self.found();
            self.kept = found.clone().or(self.kept.take());
            let step = next(&Seen {
                found: found.as_ref(),
                kept: self.kept.as_ref(),
                bundle: Some(&self.bundle),
                settled: self.settled,
                forgotten: self.forgotten,
                now: at(day),
            });
            match step.unwrap() {
                Step::Wait => return steps,
                Step::Write(kept) => {
                    self.settled = false;
                    kept.fill(self.secret.get_or_insert_default());
                    assert_eq!(self.found(), Some(kept));
                }
                Step::Trust(bundle) => self.bundle = bundle,
            }
            let served = self.found().unwrap().now.cert;
            assert!(steps == 0 || self.bundle.contains(served.trim()));
            assert!(steps < 10, "without end");
        }
        0
    }
}

#[test]
fn a_certificate_is_made_and_trusted_and_then_left_alone() {
    let mut world = World::default();
    assert_eq!(world.run(0), 2);
    assert_eq!(world.run(59), 0);
    assert_eq!(certificates(&world.bundle).count(), 1);
}

#[test]
fn another_is_served_only_once_it_has_been_trusted_for_a_while() {
    let mut world = World::default();
    world.run(0);
    let old = world.found().unwrap().now;
    world.run(61);
    let renewed = world.found().unwrap();
    let new = renewed.next.unwrap();
    assert_eq!(renewed.now, old);
    assert!(world.bundle.contains(new.cert.trim()));
    assert_eq!(world.run(61), 0);
    world.settled = true;
    world.run(61);
    let renewed = world.found().unwrap();
    assert_eq!((renewed.now, renewed.next), (new, None));
    // Replicas that have not heard of it serve the old one.
    assert!(world.bundle.contains(old.cert.trim()));
}

#[test]
fn those_long_gone_are_not_trusted_for_ever() {
    let mut world = World::default();
    world.run(0);
    let first = world.found().unwrap().now;
    for renewal in 1..5 {
        world.run(renewal * 61);
        world.settled = true;
        world.run(renewal * 61);
        assert!(certificates(&world.bundle).count() <= TRUSTED);
    }
    assert!(!world.bundle.contains(first.cert.trim()));
}

#[test]
fn a_secret_that_is_lost_or_spoilt_comes_back_as_it_was() {
    let mut world = World::default();
    world.run(0);
    world.run(61);
    let before = world.found();
    world.secret = None;
    world.run(61);
    assert_eq!(world.found(), before);
    if let Some(data) = world.secret.as_mut().and_then(|it| it.data.as_mut()) {
        data.insert(KEY.to_owned(), ByteString(b"x".to_vec()));
    }
    world.run(61);
    assert_eq!(world.found(), before);
    // This replica never saw it: another one may have.
    (world.secret, world.kept) = (None, None);
    assert_eq!(world.run(61), 0);
    world.forgotten = true;
    world.run(61);
    assert_ne!(world.found(), before);
}

#[test]
fn a_certificate_that_is_not_ours_is_served_until_ours_is_trusted() {
    let (theirs, authority) = (Pair::new(at(0)).unwrap(), Pair::new(at(0)).unwrap());
    let mut kept = Kept::of_pair(theirs.clone(), at(0));
    (kept.authority, kept.renew_after) = (authority.cert.clone(), None);
    let mut world = World::default();
    kept.fill(world.secret.insert(Secret::default()));
    world.bundle = authority.cert.clone();
    // Their certificate stands for itself in no bundle: its authority does.
    let due = next(&Seen {
        found: world.found().as_ref(),
        kept: None,
        bundle: Some(&world.bundle),
        settled: false,
        forgotten: false,
        now: at(0),
    });
    let Ok(Step::Write(renewed)) = due else {
        panic!("{due:?}");
    };
    assert_eq!(renewed.now, theirs);
    let trusted: Vec<_> = renewed.trusted().collect();
    assert_eq!(
        trusted,
        [
            renewed.next.as_ref().unwrap().cert.trim(),
            authority.cert.trim()
        ]
    );
}

#[test]
fn a_bundle_that_is_removed_is_written_again() {
    let mut world = World::default();
    world.run(0);
    let before = world.bundle.clone();
    world.bundle = "-----BEGIN CERTIFICATE-----\nnonsense".to_owned();
    assert_eq!(world.run(0), 1);
    assert_eq!(world.bundle, before);
}
