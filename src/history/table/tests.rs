use super::*;

const HOUR: u64 = 3600;

fn workload(name: &str) -> Workload {
    Workload {
        namespace: "team".into(),
        owner: Owner {
            kind: "Deployment".to_owned(),
            name: name.to_owned(),
        },
    }
}

fn sample(name: &str, image: &str, mib: u64) -> Sample {
    Sample {
        workload: workload(name),
        container: Container {
            name: "main".into(),
            image: image.into(),
        },
        peak: Mib(mib),
        gpu: Mib(81_920),
        against: None,
        requested: Mib(16_384),
    }
}

fn at(second: u64) -> Duration {
    Duration::from_secs(second)
}

/// Looks every ten seconds of an hour and lets each write succeed; how many there are.
fn writes_of_an_hour(table: &mut Table, hour: u64, each_minute: impl Fn(&mut Table, u64)) -> usize {
    let mut writes = 0;
    for second in (hour * HOUR..(hour + 1) * HOUR).step_by(10) {
        if second % 60 == 0 {
            each_minute(table, second);
        }
        for (workload, _) in table.due(second as i64, at(second)) {
            table.wrote(&workload, Some(second.to_string()), at(second));
            writes += 1;
        }
    }
    writes
}

#[test]
fn writes_of_ten_thousand_pods_are_bounded() {
    for (workloads, most) in [(500, 500), (10_000, 3600)] {
        let mut table = Table::default();
        let names: Vec<String> = (0..workloads).map(|it| format!("w{it}")).collect();
        let pods = 10_000 / workloads;
        let report = |table: &mut Table, second: u64| {
            // All pods report every minute: the first hour's histories, and one pod of each later.
            let each = if second < 60 { pods.max(10) } else { 1 };
            for name in &names {
                for _ in 0..each {
                    table.add(sample(name, "a", 9000), second as i64, at(second));
                }
            }
        };
        for hour in 0..3 {
            let writes = writes_of_an_hour(&mut table, hour, |table, second| {
                if second % HOUR == 0 {
                    report(table, second);
                }
            });
            assert!(
                writes <= most,
                "{workloads} workloads: {writes} in hour {hour}"
            );
            assert!(writes >= most.min(workloads), "{writes} in hour {hour}");
        }
    }
}

#[test]
fn what_waited_longest_is_written_first_and_nothing_is_left_out() {
    let mut table = Table::default();
    for number in 0..100 {
        for _ in 0..FIRST {
            table.add(sample(&format!("w{number}"), "a", 9000), 0, at(number));
        }
    }
    let mut written = Vec::new();
    for look in 0..10 {
        for (workload, _) in table.due(0, at(100 + look)) {
            table.wrote(&workload, Some("1".to_owned()), at(100 + look));
            written.push(workload.owner.name);
        }
    }
    let expected: Vec<String> = (0..100).map(|number| format!("w{number}")).collect();
    assert_eq!(written, expected);
    assert!(table.due(0, at(HOUR)).is_empty());
}

#[test]
fn what_ends_within_minutes_leaves_no_object() {
    let mut table = Table::default();
    for minute in 0..FIRST - 1 {
        table.add(
            sample("short", "a", 9000),
            60 * minute as i64,
            at(60 * minute),
        );
    }
    assert!(table.due(0, at(HOUR)).is_empty());
    table.add(sample("short", "a", 9000), 600, at(HOUR));
    assert_eq!(table.due(600, at(HOUR)).len(), 1);
}

#[test]
fn new_image_starts_a_history_of_its_own_and_the_oldest_goes() {
    let mut table = Table::default();
    for (image, mib) in [("a", 30_000), ("b", 20_000), ("c", 10_000)] {
        for minute in 0..10 {
            let time = minute - mib as i64;
            table.add(sample("web", image, mib), time, at(0));
        }
    }
    let due = table.due(0, at(0));
    let [(_, Write::Put(object))] = &due[..] else {
        panic!("{due:?}");
    };
    let images = object.spec.containers.iter();
    let images: Vec<_> = images.map(|it| (&*it.image, it.history.peak_mib)).collect();
    assert_eq!(images, [("b", 20_000), ("c", 10_000)]);
}

#[test]
fn sizes_of_gpus_have_histories_of_their_own_and_the_last_sample_tells_of_mps() {
    let mut table = Table::default();
    for minute in 0..10 {
        for (gpu, mib) in [(81_920, 30_000), (81_559, 31_000), (46_068, 20_000)] {
            let sample = Sample {
                gpu: Mib(gpu),
                against: (gpu == 46_068).then_some(Against::Mps),
                ..sample("web", "a", mib)
            };
            table.add(sample, 60 * minute, at(0));
        }
    }
    let stored = |table: &Table| -> Vec<(u64, u64, Vec<Against>)> {
        let due = table.due(600, at(HOUR));
        let [(_, Write::Put(object))] = &due[..] else {
            panic!("{due:?}");
        };
        let all = object.spec.containers.iter();
        all.map(|it| (it.gpu_mib, it.history.peak_mib, it.advice.against.clone()))
            .collect()
    };
    let of_both = |mps: &[Against]| vec![(81_920, 31_000, vec![]), (46_068, 20_000, mps.to_vec())];
    assert_eq!(stored(&table), of_both(&[Against::Mps]));
    // The object remembers it, until a sample without MPS comes.
    let due = table.due(600, at(HOUR));
    let [(_, Write::Put(object))] = &due[..] else {
        panic!("{due:?}");
    };
    let mut next = Table::stored(vec![(**object).clone()], at(0));
    next.add(sample("web", "a", 31_000), 600, at(0));
    assert_eq!(stored(&next), of_both(&[Against::Mps]));
    let plain = Sample {
        gpu: Mib(46_068),
        ..sample("web", "a", 20_000)
    };
    next.add(plain, 660, at(0));
    assert_eq!(stored(&next), of_both(&[]));
}

#[test]
fn history_goes_on_from_its_object_and_is_deleted_two_weeks_after_the_last_sample() {
    let mut table = Table::default();
    for minute in 0..20 {
        table.add(sample("web", "a", 9000), 60 * minute, at(0));
    }
    let due = table.due(1200, at(0));
    let [(_, Write::Put(object))] = &due[..] else {
        panic!("{due:?}");
    };
    let mut object = object.clone();
    object.metadata.resource_version = Some("7".to_owned());
    let mut next = Table::stored(vec![*object], at(0));
    next.add(sample("web", "a", 9000), 1260, at(0));
    let due = next.due(1260, at(HOUR));
    let [(_, Write::Put(object))] = &due[..] else {
        panic!("{due:?}");
    };
    assert_eq!(object.spec.containers[0].history.samples, 21);
    assert_eq!(object.metadata.resource_version.as_deref(), Some("7"));
    assert!(next.due(1260 + FORGET, at(0)).is_empty());
    let due = next.due(1261 + FORGET, at(0));
    assert!(matches!(&due[..], [(it, Write::Delete)] if *it == workload("web")));
    next.forget(&workload("web"));
    assert!(next.due(1261 + FORGET, at(HOUR)).is_empty());
}

#[test]
fn workloads_beyond_the_most_lose_those_that_ended_first() {
    let mut table = Table::default();
    for number in 0..=MAX_WORKLOADS {
        for _ in 0..FIRST {
            table.add(
                sample(&format!("job-{number}"), "a", 9000),
                number as i64,
                at(0),
            );
        }
    }
    let due = table.due(0, at(0));
    assert!(matches!(&due[0], (it, Write::Delete) if *it == workload("job-0")));
    assert!(
        due[1..]
            .iter()
            .all(|(_, write)| matches!(write, Write::Put(_)))
    );
}

#[test]
fn figures_name_what_requests_most_beyond_the_advice() {
    let mut table = Table::default();
    for number in 0..FIGURES as u64 + 10 {
        table.add(sample(&format!("w{number}"), "a", 1000 + number), 0, at(0));
    }
    let figures = table.figures();
    assert_eq!(figures.len(), FIGURES);
    assert_eq!(figures[0].workload, workload("w0"));
    assert_eq!(figures[0].requested, Mib(16_384));
    assert!((1000..1100).contains(&figures[0].advised.0));
    let stored = Table::stored(vec![object(&workload("w0"), &Entry::default())], at(0));
    assert!(stored.figures().is_empty());
}

#[test]
fn namespace_with_many_histories_drives_out_its_own_alone() {
    let mut table = Table::default();
    let of = |namespace: &str, name: &str| {
        let mut sample = sample(name, "a", 9000);
        sample.workload.namespace = namespace.into();
        sample
    };
    // A nightly workload is older than all jobs of the other tenant.
    table.add(of("nightly", "report"), 0, at(0));
    for job in 0..MAX_WORKLOADS + 50 {
        table.add(of("jobs", &job.to_string()), 60 + job as i64, at(60));
    }
    for _ in 0..10 {
        for (workload, write) in table.due(100_000, at(100)) {
            assert!(
                matches!(write, Write::Delete) && &*workload.namespace == "jobs",
                "{workload:?}"
            );
            table.forget(&workload);
        }
    }
    assert_eq!(table.all.len(), MAX_WORKLOADS);
}
