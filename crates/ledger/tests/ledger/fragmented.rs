//! Who ends for a pod that free memory is too fragmented for.

use std::sync::Arc;

use gpustow_api::PodFacts;
use gpustow_api::gpunode::Gpu;
use gpustow_ledger::{Config, Ledger};

use crate::act::Act as _;
use crate::build::{
    asking, at, card, choose, configured, holder_since as holder, joins, offer_all, pod, protect,
    report, used, waiting, waits,
};
use crate::model::Random;

/// A ledger that preempts, with these nodes and the sizes of their cards.
fn ledger(nodes: &[(&str, &[u64])]) -> Ledger {
    let config = Config {
        preempt_fragmented: true,
        ..Config::default()
    };
    configured(config, nodes)
}

pub(crate) fn leaving(pod: PodFacts) -> PodFacts {
    PodFacts {
        deleting: true,
        ..pod
    }
}

/// Who is named at `second`, which is three seconds after kube-scheduler's call and the first look.
fn due(ledger: &mut Ledger, second: u64) -> Vec<String> {
    offer_all(ledger, at(second.saturating_sub(3)));
    let first = ledger.fragmented(at(second.saturating_sub(3)));
    assert!(first.is_empty(), "named at the first look: {first:?}");
    named(&ledger.fragmented(at(second)))
}

pub(crate) fn named(pods: &[Arc<PodFacts>]) -> Vec<String> {
    pods.iter().map(|pod| pod.uid.to_string()).collect()
}

fn victims(ledger: &Ledger, uid: &str, second: u64) -> Vec<String> {
    let all = ledger.preemptions(at(second));
    let of_it = all.iter().filter(|it| *it.pod.uid == *uid);
    of_it.flat_map(|it| named(&it.victims)).collect()
}

fn is_kept(ledger: &Ledger, uid: &str) -> bool {
    let all = ledger.preemptions(at(0));
    all.iter().any(|it| *it.pod.uid == *uid)
}

/// Two cards of 100 MiB with 60 free on each: 80 fit on none, and the sum is enough.
pub(crate) fn fragmented() -> Ledger {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 40, 1, 5));
    ledger.apply_pod(holder("y", "a-1", 40, 2, 5));
    ledger.apply_pod(waits("p", 80));
    ledger
}

#[test]
fn the_lower_one_ends_and_no_pod_before_kube_scheduler_had_its_chance() {
    let mut ledger = fragmented();
    assert_eq!(due(&mut ledger, 3), ["p"]);
    assert_eq!(victims(&ledger, "p", 3), ["x"]);
    // Not twice for one shortage.
    assert!(ledger.fragmented(at(4)).is_empty());
    ledger.apply_pod(leaving(holder("x", "a-0", 40, 1, 5)));
    assert!(ledger.fragmented(at(5)).is_empty());
    assert!(victims(&ledger, "p", 5).is_empty());
    // No pod of the same or lower priority gets the room, and the pod does.
    ledger.delete_pod("x");
    let late = waits("late", 80);
    assert!(choose(&mut ledger, &late, &["a"], at(6)).is_empty());
    assert_eq!(choose(&mut ledger, &waits("p", 80), &["a"], at(6)), ["a"]);
    assert!(!is_kept(&ledger, "p"));
}

#[test]
fn what_a_later_pod_would_take_of_the_room_stays_free_while_victims_end() {
    let mut ledger = fragmented();
    due(&mut ledger, 3);
    assert_eq!(victims(&ledger, "p", 3), ["x"]);
    // 60 are free on a-0. The pod gets 40 of them, in addition to the memory that x leaves.
    assert!(choose(&mut ledger, &pod("small", 61), &["a"], at(3)).is_empty());
    assert_eq!(choose(&mut ledger, &pod("other", 20), &["a"], at(3)), ["a"]);
    assert_eq!(choose(&mut ledger, &pod("more", 60), &["a"], at(3)), ["a"]);
    assert!(choose(&mut ledger, &pod("most", 20), &["a"], at(3)).is_empty());
}

#[test]
fn it_is_off_unless_it_is_on() {
    let mut ledger = crate::build::ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 40, 1, 5));
    ledger.apply_pod(holder("y", "a-1", 40, 2, 5));
    ledger.apply_pod(waits("p", 80));
    assert!(due(&mut ledger, 3).is_empty());
}

#[test]
fn only_pods_that_may_preempt_and_wait_have_others_end() {
    let changes: [fn(&mut PodFacts); 8] = [
        |pod| pod.preempts = false,
        |pod| pod.waiting = false,
        |pod| pod.nominated = Some("a".into()),
        |pod| pod.gated = true,
        |pod| pod.queued = true,
        |pod| pod.deleting = true,
        |pod| pod.priority = 1,
        |pod| pod.group = Some("g".into()),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut ledger = fragmented();
        let mut pod = waits("p", 80);
        change(&mut pod);
        ledger.apply_pod(pod);
        assert!(due(&mut ledger, 3).is_empty(), "change {index}");
        assert!(victims(&ledger, "p", 3).is_empty(), "change {index}");
    }
}

#[test]
fn what_kube_schedulers_own_preemption_answers_is_left_to_it() {
    let mut ledger = fragmented();
    // On b the sum is short, and kube-scheduler knows which pods to evict.
    joins(&mut ledger, "b", &[100]);
    ledger.apply_pod(holder("z", "b-0", 90, 5, 0));
    assert!(due(&mut ledger, 3).is_empty());
    // A holder that it may not evict changes that.
    ledger.apply_pod(holder("z", "b-0", 90, 10, 0));
    assert_eq!(named(&ledger.fragmented(at(4))), ["p"]);
}

#[test]
fn a_victim_that_ends_by_itself_spares_the_others() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    for (uid, started) in [("one", 1), ("two", 2), ("three", 3)] {
        ledger.apply_pod(holder(uid, "a-0", 30, 1, started));
    }
    ledger.apply_pod(holder("firm", "a-1", 40, 10, 0));
    ledger.apply_pod(waits("p", 65));
    due(&mut ledger, 3);
    assert_eq!(victims(&ledger, "p", 3), ["two", "three"]);
    // One that was not chosen goes: one of the chosen is enough.
    ledger.delete_pod("one");
    assert_eq!(victims(&ledger, "p", 4), ["three"]);
    ledger.apply_pod(leaving(holder("three", "a-0", 30, 1, 3)));
    assert!(victims(&ledger, "p", 5).is_empty());
    assert!(ledger.fragmented(at(5)).is_empty());
    assert!(is_kept(&ledger, "p"));
}

#[test]
fn of_equal_pods_the_one_that_started_last_ends() {
    let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[100, 100])]);
    for (uid, card, created, started) in [
        ("late", "a-0", 1, 9),
        ("early", "b-0", 2, 3),
        ("firm", "a-1", 0, 0),
        ("firmer", "b-1", 0, 0),
    ] {
        let priority = if uid.starts_with("firm") { 10 } else { 1 };
        ledger.apply_pod(PodFacts {
            created,
            ..holder(uid, card, 40, priority, started)
        });
    }
    ledger.apply_pod(waits("p", 80));
    due(&mut ledger, 3);
    assert_eq!(victims(&ledger, "p", 3), ["late"]);
}

#[test]
fn two_pods_and_one_card_one_gets_it_and_no_pod_ends_for_the_other() {
    let mut ledger = ledger(&[("a", &[100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 40, 1, 5));
    ledger.apply_pod(holder("firm", "a-1", 40, 10, 0));
    ledger.apply_pod(waits("p", 80));
    ledger.apply_pod(PodFacts {
        created: 1,
        ..waits("q", 80)
    });
    assert_eq!(due(&mut ledger, 3), ["p"]);
    assert_eq!(victims(&ledger, "p", 3), ["x"]);
    for second in [4, 8, 12] {
        assert!(ledger.fragmented(at(second)).is_empty());
    }
    assert!(victims(&ledger, "q", 12).is_empty());
    // The first one goes: the room is the second one's, if it is still to be made.
    ledger.delete_pod("p");
    assert!(!is_kept(&ledger, "p"));
    assert_eq!(named(&ledger.fragmented(at(20))), ["q"]);
    assert_eq!(victims(&ledger, "q", 20), ["x"]);
}

#[test]
fn room_that_does_not_come_or_is_of_no_use_is_given_up_and_not_made_again_there() {
    let mut ledger = fragmented();
    due(&mut ledger, 3);
    assert_eq!(victims(&ledger, "p", 3), ["x"]);
    ledger.apply_gpunode("a", report(&[card("a-0", 100), card("a-1", 100)]), at(62));
    assert!(ledger.fragmented(at(62)).is_empty());
    assert!(is_kept(&ledger, "p"));
    ledger.fragmented(at(63));
    assert!(!is_kept(&ledger, "p"));
    assert!(ledger.fragmented(at(70)).is_empty());
    assert!(victims(&ledger, "p", 70).is_empty());
}

#[test]
fn room_is_reserved_until_the_agent_reports_that_pods_which_terminated_use_none_of_it() {
    let in_use = |mib| {
        let pods = vec![used("x", mib)];
        let first = card("a-0", 100);
        report(&[Gpu { pods, ..first }, card("a-1", 100)])
    };
    for ends in [true, false] {
        let mut ledger = fragmented();
        ledger.apply_gpunode("a", in_use(70), at(1));
        due(&mut ledger, 3);
        assert_eq!(victims(&ledger, "p", 3), ["x"]);
        ledger.delete_pod("x");
        ledger.apply_gpunode("a", in_use(if ends { 0 } else { 70 }), at(62));
        ledger.fragmented(at(62));
        assert!(victims(&ledger, "p", 62).is_empty());
        assert!(choose(&mut ledger, &pod("late", 70), &["a"], at(62)).is_empty());
        // Not for longer, if processes outlive their pod.
        ledger.fragmented(at(if ends { 62 } else { 63 }));
        assert_eq!(is_kept(&ledger, "p"), ends);
    }
}

#[test]
fn preempt_pauses_twice_as_long_after_each_failure_and_returns_to_a_node_once_all_were_tried() {
    let nodes = ["a", "b", "c"];
    let mut ledger = ledger(&nodes.map(|node| (node, &[100, 100][..])));
    for (node, priority) in nodes.iter().zip(1..) {
        for card in 0..2 {
            let (uid, on) = (format!("{node}{card}"), format!("{node}-{card}"));
            ledger.apply_pod(holder(&uid, &on, 40, 2 * priority + card, 5));
        }
    }
    ledger.apply_pod(waits("p", 80));
    due(&mut ledger, 3);
    let mut chosen = vec![(3, victims(&ledger, "p", 3))];
    for second in 4..700 {
        for node in nodes {
            let cards = [0, 1].map(|at| card(&format!("{node}-{at}"), 100));
            let mut status = report(&cards);
            status.heartbeat = Some(second.to_string());
            ledger.apply_gpunode(node, status, at(second));
        }
        if second % 30 == 0 {
            offer_all(&mut ledger, at(second));
        }
        if !ledger.fragmented(at(second)).is_empty() {
            chosen.push((second, victims(&ledger, "p", second)));
        }
    }
    // Each is given up after 60 s; then come pauses of 60, 120 and 240 s, and a second in which kube-scheduler has its chance.
    let chosen: Vec<_> = chosen
        .iter()
        .map(|(second, uids)| (*second, uids.join(" ")))
        .collect();
    let expected = [(3, "a0"), (124, "b0"), (305, "c0"), (607, "a0")];
    assert_eq!(chosen, expected.map(|(at, uid)| (at, uid.to_owned())));
}

#[test]
fn no_pod_ends_by_a_stale_report() {
    let mut ledger = fragmented();
    assert!(due(&mut ledger, 1000).is_empty());
    assert!(victims(&ledger, "p", 1000).is_empty());
    let mut ledger = fragmented();
    due(&mut ledger, 3);
    assert_eq!(victims(&ledger, "p", 3), ["x"]);
    assert!(victims(&ledger, "p", 1000).is_empty());
}

#[test]
fn the_report_of_a_node_that_is_gone_is_no_room_and_no_pod_ends_there() {
    let mut ledger = fragmented();
    offer_all(&mut ledger, at(0));
    ledger.apply_gpunode("gone", report(&[card("gone-0", 100)]), at(0));
    ledger.fragmented(at(0));
    assert_eq!(named(&ledger.fragmented(at(3))), ["p"]);
    assert_eq!(victims(&ledger, "p", 3), ["x"]);
}

#[test]
fn those_who_leave_already_are_waited_for() {
    let mut ledger = fragmented();
    ledger.apply_pod(leaving(holder("y", "a-1", 40, 2, 5)));
    assert!(due(&mut ledger, 3).is_empty());
    assert!(victims(&ledger, "p", 3).is_empty());
    assert!(!is_kept(&ledger, "p"));
}

#[test]
fn a_successor_goes_on_where_room_was_kept() {
    let mut ledger = fragmented();
    ledger.apply_pod(leaving(holder("y", "a-1", 40, 2, 5)));
    ledger.apply_pod(PodFacts {
        reserved_on: Some("a".into()),
        ..waits("p", 80)
    });
    assert_eq!(due(&mut ledger, 3), ["p"]);
    assert!(victims(&ledger, "p", 3).is_empty());
    assert!(is_kept(&ledger, "p"));
    ledger.delete_pod("y");
    assert!(choose(&mut ledger, &waits("late", 80), &["a"], at(4)).is_empty());
    assert_eq!(choose(&mut ledger, &waits("p", 80), &["a"], at(4)), ["a"]);
}

#[test]
fn a_pod_that_asks_for_several_cards_gets_them_on_one_node() {
    let mut ledger = ledger(&[("a", &[100, 100, 100])]);
    ledger.apply_pod(holder("x", "a-0", 40, 1, 5));
    ledger.apply_pod(holder("y", "a-1", 40, 2, 5));
    ledger.apply_pod(holder("z", "a-2", 40, 3, 5));
    let asks = waiting(10, asking("p", &[(2, 80)]));
    ledger.apply_pod(asks);
    assert_eq!(due(&mut ledger, 3), ["p"]);
    assert_eq!(victims(&ledger, "p", 3), ["y", "x"]);
}

#[test]
fn of_two_cards_the_budgets_decide_first_then_priorities_then_ages() {
    let first = |pods: &[PodFacts], protected: &[&str]| {
        let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[100])]);
        pods.iter().for_each(|pod| ledger.apply_pod(pod.clone()));
        ledger.apply_pod(holder("firm", "b-0", 95, 10, 0));
        ledger.apply_pod(waits("p", 80));
        protect(&mut ledger, protected, 0);
        due(&mut ledger, 3);
        victims(&ledger, "p", 3)
    };
    let x = |priority, created| holder("x", "a-0", 40, priority, created);
    let y = |priority, created| holder("y", "a-1", 40, priority, created);
    assert_eq!(first(&[x(1, 0), y(5, 0)], &["x"]), ["y"]);
    assert_eq!(first(&[x(1, 0), y(5, 0)], &["x", "y"]), ["x"]);
    assert_eq!(first(&[x(1, 0), y(1, 7)], &[]), ["y"]);
    // Two low ones rather than one high one.
    let two = [
        holder("x", "a-0", 30, 1, 0),
        holder("w", "a-0", 30, 1, 0),
        y(2, 0),
    ];
    assert_eq!(first(&two, &[]), ["w", "x"]);
    // One pod rather than two pods of equal priority.
    let two = [
        holder("x", "a-0", 30, 2, 9),
        holder("w", "a-0", 30, 2, 9),
        y(2, 0),
    ];
    assert_eq!(first(&two, &[]), ["y"]);
}

/// A pod of the property: its card, the memory that it holds, its priority and age.
type Held = (usize, u64, i32, i64);

fn order(victims: &[&Held]) -> impl Ord + use<> {
    let highest = victims.iter().map(|it| it.2).max();
    let sum: i64 = victims.iter().map(|it| i64::from(it.2) + (1 << 31)).sum();
    let tops = victims.iter().filter(|it| Some(it.2) == highest);
    let created = tops.map(|it| it.3).min();
    (highest, sum, victims.len(), std::cmp::Reverse(created))
}

/// Against every set of pods of lower priority, one by one.
#[test]
fn the_chosen_suffice_all_are_needed_and_no_set_has_a_lower_highest_priority() {
    let mut preempted = 0;
    for seed in 0..6000 {
        preempted += usize::from(against_every_set(&mut Random::new(seed)));
    }
    assert!(preempted > 200, "only {preempted} worlds had anybody end");
}

/// One world. True if a pod ends there.
fn against_every_set(random: &mut Random) -> bool {
    let mut ledger = ledger(&[("a", &[100, 100]), ("b", &[100, 100])]);
    let cards = ["a-0", "a-1", "b-0", "b-1"];
    let mut free = [10u64; 4];
    let mut taken: Vec<Held> = Vec::new();
    for _ in 0..3 + random.below(8) {
        let (card, mib) = (random.below(4) as usize, 1 + random.below(5));
        let (priority, created) = (random.below(12) as i32, random.below(3) as i64);
        if free[card] >= mib {
            free[card] -= mib;
            let uid = format!("v{}", taken.len());
            ledger.apply_pod(holder(&uid, cards[card], mib * 10, priority, created));
            taken.push((card, mib, priority, created));
        }
    }
    let asked = 3 + random.below(8);
    let p = waits("p", asked * 10);
    ledger.apply_pod(p.clone());
    offer_all(&mut ledger, at(0));
    // From Kubernetes 1.38 on kube-scheduler asks this, and takes the best node by its order.
    let asked_for =
        ["a", "b"].map(|node| ledger.preempt(&p, node, &[], &mut ledger.budget(), at(0)));
    ledger.fragmented(at(0));
    ledger.fragmented(at(3));
    let chosen = victims(&ledger, "p", 3);
    let of_uid = |uid: &str| taken.get(uid.trim_start_matches('v').parse::<usize>().ok()?);
    let count = chosen.len();
    let chosen: Vec<&Held> = chosen.iter().filter_map(|uid| of_uid(uid)).collect();
    assert_eq!(chosen.len(), count, "all are ours");
    let room = |gone: &[&Held]| {
        (0..4).any(|card| {
            let left = gone.iter().filter(|it| it.0 == card).map(|it| it.1);
            free[card] + left.sum::<u64>() >= asked
        })
    };
    // By each node's sum: does kube-scheduler see room, or could it make some?
    let lower: Vec<&Held> = taken.iter().filter(|it| it.2 < 10).collect();
    let short = |node: usize| free[node * 2] + free[node * 2 + 1] < asked;
    let helps = |node: usize| {
        let there = lower.iter().copied().filter(|it| it.0 / 2 == node);
        short(node) && room(&there.collect::<Vec<_>>())
    };
    let ours = lower.iter().copied().filter(|it| !short(it.0 / 2));
    let ours: Vec<&Held> = ours.collect();
    if room(&[]) || helps(0) || helps(1) || !room(&ours) {
        assert!(chosen.is_empty(), "no pod must end: {chosen:?}");
        return false;
    }
    let of_node = asked_for
        .into_iter()
        .enumerate()
        .filter(|(node, _)| !short(*node));
    let of_node = of_node.filter_map(|(_, it)| it);
    let of_node = of_node.map(|it| it.uids.iter().filter_map(|uid| of_uid(uid)).collect());
    let by_scheduler: Vec<&Held> = of_node
        .min_by_key(|it: &Vec<_>| order(it))
        .unwrap_or_default();
    for chosen in [chosen, by_scheduler] {
        assert!(room(&chosen), "too few: {chosen:?} of {taken:?}");
        assert!(chosen.iter().all(|it| it.2 < 10 && !short(it.0 / 2)));
        for spared in 0..chosen.len() {
            let mut rest = chosen.clone();
            rest.remove(spared);
            assert!(!room(&rest), "{:?} is not needed", chosen[spared]);
        }
        let highest = chosen.iter().map(|it| it.2).max();
        for set in 0..1u32 << ours.len() {
            let of_set = ours.iter().enumerate();
            let of_set = of_set.filter(|(at, _)| set & (1 << at) != 0);
            let set: Vec<&Held> = of_set.map(|(_, it)| *it).collect();
            if room(&set) {
                let other = set.iter().map(|it| it.2).max();
                assert!(highest <= other, "{set:?} is better than {chosen:?}");
                // Where one pod is enough, no other is better by the whole order.
                if set.len() == 1 && chosen.len() == 1 {
                    let better = order(&set) < order(&chosen);
                    assert!(!better, "{set:?} is better than {chosen:?}");
                }
            }
        }
    }
    true
}
