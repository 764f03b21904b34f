use gpustow_pack::{Claim, ClaimKind, Request};
use proptest::prelude::*;

use super::*;
use crate::allowances;

fn sample() -> Assignment {
    let placement = Placement {
        cards: vec![vec![1], vec![0, 2]],
        charges: vec![(0, Mib(4096)), (1, Mib(8192)), (2, Mib(4096))],
        piece: None,
    };
    let containers = ["main", "init"].map(Box::from);
    Assignment::from_placement(
        &placement,
        &containers,
        &["GPU-a", "GPU-b", "GPU-c"],
        false,
        0,
    )
    .unwrap()
}

#[test]
fn the_written_form_is_this() {
    let json = |text| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let expected = r#"{
        "version": 1,
        "gpus": [
            {"uuid": "GPU-a", "mib": 4096},
            {"uuid": "GPU-b", "mib": 8192},
            {"uuid": "GPU-c", "mib": 4096}
        ],
        "containers": {"init": ["GPU-a", "GPU-c"], "main": ["GPU-b"]},
        "exclusive": false
    }"#;
    assert_eq!(json(&sample().encode()), json(expected));
    assert_eq!(Assignment::decode(expected), Ok(sample()));
}

/// An annotation of a version without the field `exclusive`, and an annotation with an unknown field, are readable.
#[test]
fn an_assignment_that_does_not_say_whether_it_is_exclusive_is_read() {
    let old = r#"{"version":1,"gpus":[{"uuid":"GPU-a","mib":1}],"containers":{}}"#;
    assert_eq!(Assignment::decode(old).map(|read| read.exclusive), Ok(None));
    let unknown = old.replace("}]", r#"}],"later":1"#);
    assert!(Assignment::decode(&unknown).is_ok());
    let wrong = old.replace("}]", r#"}],"exclusive":"yes""#);
    assert!(Assignment::decode(&wrong).is_err());
}

#[test]
fn an_instance_is_written_down_and_its_device_called_by_the_pods_uid() {
    let isolated = Assignment {
        charges: vec![("GPU-a".into(), Mib(20))],
        containers: vec![("main".into(), vec!["GPU-a".into()])],
        exclusive: Some(false),
        compute: 0,
        instance: Some(super::Instance {
            profile: "2g.20gb".into(),
            start: 4,
            slices: 2,
        }),
    };
    let text = isolated.encode();
    assert!(
        text.contains(r#""mig":{"profile":"2g.20gb","slices":2,"start":4}"#),
        "{text}"
    );
    assert_eq!(Assignment::decode(&text), Ok(isolated.clone()));
    let notes = isolated.annotations("u-1");
    assert_eq!(notes["devices.gpustow.dev/main"], "gpustow.dev/mig=u-1");
    assert_eq!(
        notes["nvidia.cdi.k8s.io/container.main"],
        "gpustow.dev/mig=u-1"
    );
    // No GPU has slices beyond the eighth.
    let broken = text.replace(r#""start":4"#, r#""start":7"#);
    assert!(Assignment::decode(&broken).is_err());
}

#[test]
fn a_binding_bears_the_devices_of_every_container() {
    let annotations = sample().annotations("u");
    let pairs: Vec<_> = annotations
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(
        pairs,
        [
            ("devices.gpustow.dev/init", "GPU-a,GPU-c"),
            ("devices.gpustow.dev/main", "GPU-b"),
            ("gpustow.dev/assignment", sample().encode().as_str()),
            (
                "nvidia.cdi.k8s.io/container.init",
                "nvidia.com/gpu=GPU-a,nvidia.com/gpu=GPU-c"
            ),
            ("nvidia.cdi.k8s.io/container.main", "nvidia.com/gpu=GPU-b"),
        ]
    );
}

#[test]
fn a_placement_beyond_the_names_is_no_assignment() {
    let placement = Placement {
        cards: vec![vec![0]],
        charges: vec![(0, Mib(1))],
        piece: None,
    };
    let container = [Box::from("a")];
    assert!(Assignment::from_placement(&placement, &container, &["GPU-a"], false, 0).is_some());
    assert!(Assignment::from_placement(&placement, &container, &[""; 0], false, 0).is_none());
    assert!(Assignment::from_placement(&placement, &[], &["GPU-a"], false, 0).is_none());
}

#[test]
fn what_cannot_be_used_says_why() {
    for (text, expected) in [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("{}", "missing field `version` at line 1 column 2"),
        (
            r#"{"version":2,"cards":{}}"#,
            "version 2, and this gpustow reads version 1",
        ),
        (r#"{"version":1,"gpus":[],"containers":{}}"#, "no GPUs"),
        (
            r#"{"version":1,"gpus":[{"uuid":"","mib":1}],"containers":{}}"#,
            "a GPU without UUID or MiB",
        ),
        (
            r#"{"version":1,"gpus":[{"uuid":"G","mib":0}],"containers":{}}"#,
            "a GPU without UUID or MiB",
        ),
        (
            r#"{"version":1,"gpus":[{"uuid":"G","mib":1},{"uuid":"G","mib":1}],"containers":{}}"#,
            "GPU G twice",
        ),
        (
            r#"{"version":1,"gpus":[{"uuid":"G","mib":1}],"containers":{"a":["H"]}}"#,
            "GPU H of a container is not charged",
        ),
    ] {
        assert_eq!(
            Assignment::decode(text),
            Err(BrokenAssignment(expected.into())),
            "{text}"
        );
    }
    let text = Assignment::decode(r#"{"version":2}"#)
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "annotation gpustow.dev/assignment: version 2, and this gpustow reads version 1"
    );
}

#[test]
fn the_bound_on_annotations_counts_the_longest_that_an_assignment_can_be() {
    let room = |bytes| BTreeMap::from([("k".to_owned(), "v".repeat(bytes))]);
    for gpus in [1, 64] {
        let uuids: Vec<Arc<str>> = (0..gpus).map(|gpu| format!("{gpu:0>96}").into()).collect();
        let longest = Assignment {
            charges: uuids
                .iter()
                .map(|uuid| (uuid.clone(), Mib(u64::MAX)))
                .collect(),
            containers: vec![("c".repeat(53).into(), uuids)],
            exclusive: Some(false),
            compute: 0,
            instance: None,
        };
        let claim = Claim::new(ClaimKind::Main, gpus, Mib(u64::MAX));
        let request = Request {
            claims: vec![claim],
            ..Request::default()
        };
        let name = [longest.containers[0].0.clone()];
        let mut all = longest.annotations("u");
        all.extend(allowances(&request, &name, &longest, |_| {
            Some((Mib(u64::MAX), Mib(u64::MAX)))
        }));
        assert_eq!(all.len(), 6);
        let added: usize = all.iter().map(|(k, v)| k.len() + v.len()).sum();
        let free = ANNOTATIONS_LIMIT - ANNOTATIONS_SPARE;
        let fits = |bytes| {
            let container = [(&*longest.containers[0].0, gpus)];
            Assignment::fits_beside(&room(bytes), container.into_iter()).is_ok()
        };
        assert!(!fits(free - added));
        assert!(fits(200 << 10));
    }
}

proptest! {
    #[test]
    fn rubbish_does_not_panic(text in "\\PC{0,60}|\\{\"version\":1,\"gpus\":\\[[^x]{0,40}\\],\"containers\":\\{\\}\\}") {
        if let Ok(assignment) = Assignment::decode(&text) {
            prop_assert_eq!(Assignment::decode(&assignment.encode()), Ok(assignment));
        }
    }

    #[test]
    fn what_is_written_is_read_back(
        gpus in prop::collection::btree_map("[A-Z]{1,3}-[a-f0-9]{1,8}", 1..u64::MAX, 1..9),
        containers in prop::collection::btree_map("[a-z]{1,9}", any::<prop::sample::Index>(), 0..5),
        exclusive in any::<Option<bool>>(),
    ) {
        let uuids: Vec<Arc<str>> = gpus.keys().map(|uuid| Arc::from(uuid.as_str())).collect();
        let assignment = Assignment {
            charges: gpus.iter().map(|(uuid, mib)| (Arc::from(uuid.as_str()), Mib(*mib))).collect(),
            containers: containers
                .iter()
                .map(|(name, gpu)| (Box::from(name.as_str()), vec![gpu.get(&uuids).clone()]))
                .collect(),
            exclusive,
            compute: 0,
            instance: None,
        };
        prop_assert_eq!(Assignment::decode(&assignment.encode()), Ok(assignment));
    }
}
