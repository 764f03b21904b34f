//! The sums of CPU, host memory and pods are kube-scheduler's own, to the last byte: its filter comes
//! before ours, and a pod that it would accept must not sleep on for a sum that is ours alone.

use gpustow_api::{Asks, NodeFacts, PodFacts, names};
use gpustow_ledger::{Config, Ledger};
use gpustow_pack::{Claim, ClaimKind, Mib, Request};
use serde_json::{Value, json};

use crate::act::Act as _;
use crate::build::{at, bound, card, choose, exclusive, offer_all, pod, report};
use crate::model::Random;

fn of_pod(value: Value) -> PodFacts {
    let read = serde_json::from_value(value).unwrap_or_default();
    let facts = PodFacts::from_pod(&read, names::GPU_MEM);
    assert!(facts.is_some(), "no pod: {read:?}");
    facts.unwrap_or_else(|| pod("none", 1))
}

fn of_node(cpu: &str, memory: &str, pods: u64) -> NodeFacts {
    let allocatable = json!({"cpu": cpu, "memory": memory, "pods": pods.to_string()});
    let node = json!({"metadata": {"name": "n"}, "status": {"allocatable": allocatable}});
    NodeFacts::from_node(&serde_json::from_value(node).unwrap_or_default())
}

fn needs(uid: &str, node: Option<&str>, resources: Value) -> Value {
    json!({
        "metadata": {"uid": uid, "namespace": "default", "name": uid, "resourceVersion": "1"},
        "spec": {
            "nodeName": node, "schedulerName": names::SCHEDULER,
            "containers": [{"name": "c", "resources": resources}],
        },
    })
}

/// A node with one unhealthy card, three pods that need the stated memory, and a fourth that waits for the card. Is the
/// fourth woken when the card is healthy again?
fn fourth_is_woken(memory: &str, node: &str) -> bool {
    let mut ledger = Ledger::new(Config::default());
    ledger.apply_node(of_node("64", node, 110));
    let mut gpu = card("n-0", 100);
    gpu.healthy = false;
    ledger.apply_gpunode("n", report(&[gpu.clone()]), at(0));
    for uid in ["a", "b", "c"] {
        let requests = json!({"requests": {"memory": memory}});
        ledger.apply_pod(of_pod(needs(uid, Some("n"), requests)));
    }
    let resources = json!({"requests": {"memory": memory}, "limits": {names::GPU_MEM: "60"}});
    let waiting = of_pod(needs("p", None, resources));
    ledger.apply_pod(waiting.clone());
    assert!(choose(&mut ledger, &waiting, &["n"], at(0)).is_empty());
    gpu.healthy = true;
    ledger.apply_gpunode("n", report(&[gpu]), at(1));
    !ledger.wake(9, at(1)).is_empty()
}

#[test]
fn pods_that_fill_a_node_to_the_byte_are_woken() {
    for (memory, node) in [
        ("1G", "4000M"),
        ("50Mi", "201Mi"),
        ("51456Ki", "205824Ki"),
        ("1000001", "4000004"),
        ("1500m", "8"),
    ] {
        assert!(fourth_is_woken(memory, node), "{memory} on {node}");
    }
    for (memory, node) in [
        ("1G", "3999999999"),
        ("51456Ki", "205823Ki"),
        ("1500m", "7"),
    ] {
        assert!(!fourth_is_woken(memory, node), "{memory} on {node}");
    }
}

#[test]
fn a_resize_that_the_kubelet_calls_infeasible_keeps_no_pod_asleep() {
    let cpu = |amount: &str| json!({"requests": {"cpu": amount}});
    let neighbour = |reason: &str| {
        let mut pod = needs("a", Some("n"), cpu("63"));
        pod["status"] = json!({
            "containerStatuses": [{
                "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "resources": cpu("1"), "allocatedResources": {"cpu": "1"},
            }],
            "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason}],
        });
        of_pod(pod)
    };
    for (reason, expected) in [("Infeasible", None), ("Deferred", Some("not enough CPU"))] {
        let mut ledger = Ledger::new(Config::default());
        ledger.apply_node(of_node("64", "1Gi", 110));
        ledger.apply_pod(neighbour(reason));
        let waits = of_pod(needs("p", None, cpu("2")));
        assert_eq!(ledger.refused_in_tree("n", &waits), expected, "{reason}");
    }
}

/// Three GPUs of 100 of which a whole one and 40 of each other are held, and who ends for this pod.
fn ends_for(claims: Vec<Claim>) -> Vec<String> {
    let mut ledger = Ledger::new(Config {
        preempt_fragmented: true,
        ..Config::default()
    });
    ledger.apply_node(of_node("64", "1Gi", 110));
    let cards = ["n-0", "n-1", "n-2"].map(|uuid| card(uuid, 100));
    ledger.apply_gpunode("n", report(&cards), at(0));
    ledger.apply_pod(bound("x", "n", "n-0", 40));
    ledger.apply_pod(bound("y", "n", "n-1", 40));
    // It asks for 10 and gets all of a GPU, by its annotations.
    let whole = bound("whole", "n", "n-2", 100);
    ledger.apply_pod(PodFacts {
        asks: exclusive(pod("whole", 10)).asks,
        priority: 10,
        ..whole
    });
    let request = Request {
        claims,
        ..Request::default()
    };
    ledger.apply_pod(PodFacts {
        priority: 10,
        waiting: true,
        asks: Asks::of(request),
        ..pod("p", 1)
    });
    offer_all(&mut ledger, at(0));
    assert!(ledger.fragmented(at(0)).is_empty());
    ledger.fragmented(at(3));
    let all = ledger.preemptions(at(3)).into_iter();
    let victims = all.flat_map(|it| it.victims);
    let mut victims: Vec<String> = victims.map(|pod| pod.uid.to_string()).collect();
    victims.sort();
    victims
}

/// Where it is enough for the pod, kube-scheduler preempts no pod: gpustow's own preemption has to.
#[test]
fn gpu_memory_in_sum_is_what_pods_ask_for() {
    let claim = |kind, gpus, mib| Claim::new(kind, gpus, Mib(mib));
    // An init container ends before the main container starts: 80 of the 120 that are free.
    let one_after_the_other = vec![claim(ClaimKind::Init, 1, 80), claim(ClaimKind::Main, 1, 80)];
    assert_eq!(ends_for(one_after_the_other).len(), 1);
    // 160 of the 210 that are left next to 40, 40 and 10.
    assert_eq!(ends_for(vec![claim(ClaimKind::Main, 2, 80)]), ["x", "y"]);
    // More than that: kube-scheduler sees the shortage itself.
    assert!(ends_for(vec![claim(ClaimKind::Main, 2, 106)]).is_empty());
}

/// The amounts that kube-scheduler's NodeResourcesFit counts, in billionths, of CPU and of memory.
type Sum = [i128; 2];

const UNIT: i128 = 1_000_000_000;

/// An amount as a Pod states it, with its value in billionths.
fn amount(random: &mut Random, of: usize) -> (String, i128) {
    let suffixes: &[(&str, i128, u64)] = match of {
        0 => &[
            ("m", UNIT / 1000, 3000),
            ("", UNIT, 3),
            ("u", UNIT / 1_000_000, 5000),
        ],
        _ => &[
            ("", UNIT, 2_000_000),
            ("m", UNIT / 1000, 5_000),
            ("k", 1000 * UNIT, 3000),
            ("M", 1_000_000 * UNIT, 3),
            ("Ki", UNIT << 10, 3000),
            ("Mi", UNIT << 20, 3),
        ],
    };
    let (suffix, unit, most) = suffixes[random.below(suffixes.len() as u64) as usize];
    let number = random.below(most);
    (format!("{number}{suffix}"), i128::from(number) * unit)
}

/// A list of resources, of which some may be missing.
fn list(random: &mut Random) -> (Value, Sum) {
    let (mut list, mut sum) = (json!({}), [0; 2]);
    for (of, key) in ["cpu", "memory"].into_iter().enumerate() {
        if random.below(4) > 0 {
            let (text, size) = amount(random, of);
            list[key] = json!(text);
            sum[of] = size;
        }
    }
    (list, sum)
}

fn most(sums: &[Sum]) -> Sum {
    [0, 1].map(|of| sums.iter().map(|sum| sum[of]).max().unwrap_or(0))
}

fn plus(one: Sum, other: Sum) -> Sum {
    [one[0] + other[0], one[1] + other[1]]
}

/// A pod with containers of every kind, bound if `node` names a node, and its amounts by kube-scheduler's rules.
fn any_pod(random: &mut Random, uid: &str, node: Option<&str>) -> (PodFacts, Sum) {
    let infeasible = node.is_some() && random.below(3) == 0;
    let (mut statuses, mut init, mut regular) = (Vec::new(), Vec::new(), Vec::new());
    let (mut sidecars, mut peak, mut sum) = ([0; 2], [0; 2], [0; 2]);
    let mut container = |random: &mut Random, name: &str, resizes: bool| {
        let (spec, stated) = list(random);
        let container = json!({"name": name, "resources": {"requests": spec}});
        if random.below(2) == 0 {
            return (container, stated);
        }
        let (actuated, has) = list(random);
        let (allocated, may) = list(random);
        statuses.push(json!({
            "name": name, "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "resources": {"requests": actuated}, "allocatedResources": allocated,
        }));
        let counted = match (node.is_some() && resizes, infeasible) {
            (false, _) => stated,
            (true, true) => most(&[has, may]),
            (true, false) => most(&[stated, has, may]),
        };
        (container, counted)
    };
    for at in 0..random.below(4) {
        let is_sidecar = random.below(2) == 0;
        let (mut value, counted) = container(random, &format!("i{at}"), is_sidecar);
        let then = plus(sidecars, counted);
        if is_sidecar {
            value["restartPolicy"] = json!("Always");
            sidecars = then;
        }
        peak = most(&[peak, then]);
        init.push(value);
    }
    for at in 0..1 + random.below(3) {
        let (value, counted) = container(random, &format!("c{at}"), true);
        sum = plus(sum, counted);
        regular.push(value);
    }
    let mut sum = most(&[plus(sum, sidecars), peak]);
    let mut spec = json!({"nodeName": node, "initContainers": init, "containers": regular});
    if random.below(4) == 0 && !infeasible {
        let (whole, stated) = list(random);
        for (of, key) in ["cpu", "memory"].into_iter().enumerate() {
            if !whole[key].is_null() {
                sum[of] = stated[of];
            }
        }
        spec["resources"] = json!({"requests": whole});
    }
    if random.below(4) == 0 {
        let (overhead, more) = list(random);
        spec["overhead"] = overhead;
        sum = plus(sum, more);
    }
    let (init, regular): (Vec<_>, Vec<_>) = statuses.into_iter().partition(|status| {
        status["name"]
            .as_str()
            .is_some_and(|it| it.starts_with('i'))
    });
    let mut status = json!({"initContainerStatuses": init, "containerStatuses": regular});
    if infeasible {
        let pending = json!({"type": "PodResizePending", "status": "True", "reason": "Infeasible"});
        status["conditions"] = json!([pending]);
    }
    let metadata = json!({"uid": uid, "name": uid, "namespace": "default"});
    let pod = json!({"metadata": metadata, "spec": spec, "status": status});
    (of_pod(pod), sum)
}

/// Thousandths of a core and bytes, each pod's rounded up as kube-scheduler keeps them.
fn rounded(sum: Sum) -> [i128; 2] {
    let up = |amount: i128, unit: i128| (amount + unit - 1) / unit;
    [up(sum[0], UNIT / 1000), up(sum[1], UNIT)]
}

#[test]
fn what_fits_in_sum_is_what_kube_scheduler_takes_for_it() {
    let mut outcomes = [0; 2];
    for seed in 0..4_000 {
        let random = &mut Random::new(seed);
        let mut ledger = Ledger::new(Config::default());
        let bound = random.below(4);
        let mut taken = [0; 2];
        for at in 0..bound {
            let (pod, sum) = any_pod(random, &format!("b{at}"), Some("n"));
            ledger.apply_pod(pod);
            taken = [0, 1].map(|of| taken[of] + rounded(sum)[of]);
        }
        let (pod, sum) = any_pod(random, "p", None);
        let asked = rounded(sum);
        // Just enough, or one too little, or one too much.
        let mut size = |of: usize| {
            let near = i128::from(random.below(3)) - 1;
            (taken[of] + asked[of] + near).max(0)
        };
        let size = [size(0), size(1)];
        let pods = bound + random.below(8).min(1);
        ledger.apply_node(of_node(
            &format!("{}m", size[0]),
            &size[1].to_string(),
            pods,
        ));
        let fits = |of: usize| asked[of] == 0 || asked[of] <= size[of] - taken[of];
        let fits = bound < pods && fits(0) && fits(1);
        let refused = ledger.refused_in_tree("n", &pod);
        assert_eq!(refused.is_none(), fits, "seed {seed}: {refused:?}");
        outcomes[usize::from(fits)] += 1;
    }
    assert!(outcomes.iter().all(|count| *count > 300), "{outcomes:?}");
}
