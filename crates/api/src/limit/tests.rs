use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;
use crate::request;

/// A pod whose containers `a` and `b` ask for these MiB.
fn pod(annotations: &Value, a: u64, b: u64, env: &Value) -> Pod {
    let asks = |name: &str, mib: u64| {
        let limits = json!({ names::GPU_MEM: mib.to_string() });
        json!({ "name": name, "resources": { "limits": limits }, "env": env })
    };
    serde_json::from_value(json!({
        "metadata": { "annotations": annotations },
        "spec": { "containers": [asks("a", a), asks("b", b)] },
    }))
    .unwrap()
}

fn limits(pod: &Pod) -> Result<[u64; 2], String> {
    let (request, _) = request(pod, names::GPU_MEM).map_err(|bad| bad.to_string())?;
    Ok([0, 1].map(|index| request.claims[index].driver_limit.0))
}

#[test]
fn the_driver_holds_what_annotations_say_or_else_the_request() {
    let own = "gpu-mem-limit.gpustow.dev/b";
    for (annotations, expected) in [
        (json!({}), [0, 0]),
        (
            json!({ names::ENFORCE: "watch", names::MEM_LIMIT: "9000" }),
            [0, 0],
        ),
        (json!({ names::ENFORCE: "none" }), [0, 0]),
        (json!({ names::ENFORCE: "driver" }), [8192, 4096]),
        (
            json!({ names::ENFORCE: "driver", names::MEM_LIMIT: "9000" }),
            [9000, 9000],
        ),
        (
            json!({ names::ENFORCE: "driver", names::MEM_LIMIT: "9000", own: "max" }),
            [9000, 0],
        ),
        (
            json!({ names::ENFORCE: "driver", names::MEM_LIMIT: "max" }),
            [0, 0],
        ),
        (
            json!({ names::ENFORCE: "driver", names::GPU_COUNT: "2", own: "6000" }),
            [4096, 3000],
        ),
        (
            json!({ names::ENFORCE: "driver", names::EXCLUSIVE: "true" }),
            [0, 0],
        ),
    ] {
        let pod = pod(&annotations, 8192, 4096, &json!([]));
        assert_eq!(limits(&pod), Ok(expected), "{annotations}");
    }
}

#[test]
fn a_limit_that_cannot_be_is_refused_with_the_mend() {
    let limit = |text: &str| json!({ names::MEM_LIMIT: text });
    for (annotations, expected) in [
        (
            limit("8Gi"),
            "[gpustow.dev/gpu-mem-limit]: \"8Gi\" is no amount: the unit is MiB already, write 8192, or max",
        ),
        (
            limit("9000Mi"),
            "the unit is MiB already, write 9000, or max",
        ),
        (limit("1.5Gi"), "\"1.5Gi\" is no amount: write MiB over"),
        (limit("0Gi"), "\"0Gi\" is no amount: write MiB over"),
        (limit("+8Gi"), "\"+8Gi\" is no amount: write MiB over"),
        (limit("0"), "\"0\" is no amount"),
        (limit(""), "\"\" is no amount"),
        (limit("1000000000"), "is no amount"),
        (
            limit("4096"),
            "4096 MiB are less than the 8192 that container a asks for: write at least 8192, or max",
        ),
        (limit("999999999"), "no GPU has 999999999 MiB: write max"),
        (
            json!({ names::GPU_COUNT: "2", names::MEM_LIMIT: "8193" }),
            "8193 MiB do not split evenly over 2 GPUs: write 8194",
        ),
        (
            json!({ "gpu-mem-limit.gpustow.dev/c": "9000" }),
            "no container \"c\" asks for gpustow.dev/gpu-mem",
        ),
        (
            json!({ names::EXCLUSIVE: "true", names::MEM_LIMIT: "max" }),
            "exclusive pods cannot set a limit: remove it",
        ),
        (
            json!({ names::ENFORCE: "on" }),
            "[gpustow.dev/enforce]: \"on\" is none of driver, watch, none",
        ),
        (
            json!({ names::ENFORCE: "driver", names::GPU_COUNT: "16" }),
            "spec.containers[0].resources.limits[gpustow.dev/gpu-mem]: 8192 MiB over 16 GPUs is below the minimum of 1024 on \
             each: write at least 16384",
        ),
        (
            json!({ names::GPU_COUNT: "16", names::MEM_LIMIT: "8192" }),
            "[gpustow.dev/gpu-mem-limit]: 8192 MiB over 16 GPUs is below the minimum of 1024",
        ),
    ] {
        let problem = limits(&pod(&annotations, 8192, 4096, &json!([]))).unwrap_err();
        assert!(problem.contains(expected), "{annotations}: {problem}");
    }
}

/// A pod that exists only in a file is judged before admission has written into it.
#[test]
fn a_pod_that_was_made_bears_what_the_hook_reads() {
    let literal = |name: &str, value: &str| json!({ "name": name, "value": value });
    let (limit, none) = (
        literal(names::MEMORY_LIMIT, "8192"),
        literal(names::MEMORY_REQUEST, "0"),
    );
    for (env, holds) in [
        (json!([limit, none]), true),
        (json!([literal("A", "b"), none, limit]), true),
        (json!([]), false),
        (json!([limit]), false),
        (json!([none]), false),
        (
            json!([limit, literal(names::MEMORY_REQUEST, "4096")]),
            false,
        ),
        (json!([literal(names::MEMORY_LIMIT, "9000"), none]), false),
        // The hook takes the first.
        (
            json!([literal(names::MEMORY_LIMIT, "9000"), limit, none]),
            false,
        ),
    ] {
        let mut pod = pod(&json!({ names::ENFORCE: "driver" }), 8192, 8192, &env);
        assert_eq!(limits(&pod), Ok([8192, 8192]), "planned");
        pod.metadata.resource_version = Some("1".to_owned());
        let made = limits(&pod);
        assert_eq!(made.is_ok(), holds, "{env}: {made:?}");
        if let Err(problem) = made {
            assert!(
                problem.starts_with("spec.containers[0].env: NVIDIA_GPU_MEMORY_LIMIT must be 8192"),
                "{problem}"
            );
        }
    }
}

#[test]
fn what_a_container_may_use_is_never_less_than_its_request() {
    let made = pod(&json!({ names::GPU_COUNT: "2" }), 8192, 4096, &json!([]));
    let (request, containers) = request(&made, names::GPU_MEM).unwrap();
    for (text, expected) in [
        ("max", [WHOLE, WHOLE]),
        ("16384", [Mib(8192), Mib(8192)]),
        ("6000", [Mib(4096), Mib(3000)]),
        ("x", [Mib(4096), Mib(2048)]),
    ] {
        let notes = [(names::MEM_LIMIT.to_owned(), text.to_owned())].into();
        let (enforce, allowed) = allowed(&notes, &request, &containers);
        assert_eq!(
            (enforce, allowed.as_slice()),
            (Enforce::Watch, &expected[..]),
            "{text}"
        );
    }
}

#[test]
fn every_reason_has_its_own_word_and_is_read_back() {
    for support in Support::VARIANTS {
        let word: &str = support.into();
        assert_eq!(word.parse(), Ok(*support));
        let holds = hindrance(Some(word)).is_none();
        assert_eq!(holds, *support == Support::Holds);
    }
    assert!(hindrance(None).is_some() && hindrance(Some("Later")).is_some());
}
