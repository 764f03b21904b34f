//! Gangs of any size: a tenant states the number of pods, and the number is never a depth of recursion.

use std::thread;
use std::time::Duration;

use gpustow_api::PodFacts;
use gpustow_ledger::{Ask, Config, Extent, Ledger, MOST_PODS};

use crate::act::Act as _;
use crate::build::{at, choose, configured, ledger, pod};
use crate::pod_groups::gang;

/// Twenty nodes of eight GPUs.
fn nodes() -> Ledger {
    let names: Vec<String> = (0..20).map(|number| format!("n{number}")).collect();
    let all: Vec<(&str, &[u64])> = names.iter().map(|it| (&**it, &[80_000; 8][..])).collect();
    let config = Config {
        preempt_fragmented: true,
        ..Config::default()
    };
    configured(config, &all)
}

/// How far the search for a gang that is refused went, or how the thread ended.
type Answer = thread::Result<Option<Extent>>;

/// The answer to kube-scheduler about the first pod of such a gang, on a thread like the threads of the extender.
fn first_answer(pods: usize, min_count: usize, mib: impl Fn(usize) -> u64) -> Answer {
    let sizes: Vec<u64> = (0..pods).map(mib).collect();
    let ask = move || {
        let mut ledger = nodes();
        let made = sizes.iter().enumerate();
        let made = made.map(|(number, mib)| PodFacts {
            waiting: true,
            ..pod(&format!("g{number}"), *mib)
        });
        let pods = gang(&mut ledger, "g", min_count, made.collect());
        let names: Vec<String> = (0..20).map(|number| format!("n{number}")).collect();
        let names: Vec<&str> = names.iter().map(|name| &**name).collect();
        let answer = ledger.filter(&Ask::of(&pods[0]), &names, at(0));
        assert_eq!(answer.nodes.is_empty(), answer.shortfall.is_some());
        // Preemption for the gang looks at all of the pods, too, or reports that it does not.
        for second in 0..3 {
            ledger.fragmented(at(second));
        }
        let refused = answer.shortfall.is_some() && min_count <= pods.len();
        assert!(!refused || pods.len() <= 256 || !ledger.searches_cut().is_empty());
        answer.shortfall.map(|it| it.search)
    };
    // The runtime's default.
    let thread = thread::Builder::new().stack_size(2 << 20);
    match thread.spawn(ask) {
        Ok(thread) => thread.join(),
        Err(error) => Err(Box::new(error)),
    }
}

#[test]
fn gang_of_any_size_is_placed_or_refused_on_a_thread_of_two_mib() {
    for pods in [10, 300, 2_000, 2_500, 50_000] {
        let different = |number: usize| 1 + number as u64 % 1_000;
        let placed = (pods > MOST_PODS).then_some(Extent::TooMany);
        assert_eq!(first_answer(pods, pods, |_| 100).unwrap(), placed, "{pods}");
        assert_eq!(
            first_answer(pods, pods, different).unwrap(),
            placed,
            "{pods}"
        );
        // Two are enough.
        assert_eq!(first_answer(pods, 2, different).unwrap(), None, "{pods}");
        // All are too large but one.
        let too_large = |number: usize| if number == 0 { 10 } else { 500_000 };
        let refused = first_answer(pods, 2, too_large).unwrap();
        assert_eq!(refused, Some(Extent::Whole), "{pods}");
        let halves = |number: usize| 60_000 + number as u64 % 1_000;
        let refused = first_answer(pods, pods.min(MOST_PODS), halves).unwrap();
        assert_eq!(refused.is_none(), pods <= 160, "{pods}: {refused:?}");
    }
}

/// kube-scheduler asks about one pod after the other, and its volumes or plugins may take their time.
#[test]
fn each_pod_of_a_gang_holds_its_room_until_the_last_has_its_own() {
    let apart = Duration::from_millis(1500);
    for size in 2..=8_u32 {
        let count = usize::try_from(size).unwrap();
        let mut ledger = ledger(&[("n", &vec![100; count])]);
        let pods = (0..size).map(|index| pod(&format!("g{index}"), 100));
        let pods = gang(&mut ledger, "g", count, pods.collect());
        for (index, member) in (0..).zip(&pods) {
            let nodes = choose(&mut ledger, member, &["n"], apart * index);
            assert_eq!(nodes, ["n"], "{index} of {size}");
        }
        let late = apart * size;
        assert!(choose(&mut ledger, &pod("lone", 100), &["n"], late).is_empty());
        for member in &pods {
            let begun = ledger.begin_bind(member, "n", late);
            assert!(begun.is_ok(), "{size}: {begun:?}");
        }
    }
}
