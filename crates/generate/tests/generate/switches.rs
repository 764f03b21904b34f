//! Each field of the GpustowConfig has a case for each way by which its effect can come.

use std::collections::BTreeSet;

use anyhow::Result;
use gpustow_api::config::GpustowConfigSpec;

use crate::generated::fields;
use crate::root;
use crate::targets::cases;

/// The test programs whose cases are named.
const PROGRAMS: [&str; 4] = [
    "crates/ledger/tests/ledger",
    "crates/admission/tests/admission",
    "crates/pack/tests/pack",
    "tests/integration",
];

/// Fields, and cases of the ways of each, `way: case`.
const WAYS: &str = "
scheduling.policy
    filter: cases::each_policy_has_its_own_card
scheduling.maxComputePercent
    filter: compute::administrator_decides_how_much_of_a_gpu_its_pods_may_hold_together
scheduling.schedulers
    admission: created::pod_may_name_a_scheduler_of_the_administrators_list
scheduling.staleAfter
    filter: reports::a_report_is_stale_when_it_has_not_changed_for_too_long
    loop: silence::a_node_whose_agent_falls_silent_has_an_event
scheduling.startTimeout
    filter: starts::start_timeout_of_zero_turns_the_annotation_off
    loop: starts::pod_that_waits_for_a_start_is_told_who_starts_and_a_start_that_takes_too_long_ends_the_wait
requests.runtimeClassName
    admission: created::pod_gets_what_the_administrator_has_and_it_does_not_say
requests.driverCapabilities
    admission: created::pod_gets_what_the_administrator_has_and_it_does_not_say
requests.enforce
    admission: created::pod_gets_what_the_administrator_has_and_it_does_not_say
requests.startAlone
    admission: created::pods_of_named_namespaces_start_alone_unless_they_say_how_they_start
requests.leastMiBPerGpu
    admission: refused::request_below_the_least_is_refused_and_a_percentage_counts_as_its_share
requests.leastMiBPerExclusiveGpu
    admission: refused::request_below_the_least_is_refused_and_a_percentage_counts_as_its_share
queue.mode
    admission: created::pod_is_queued_by_the_entries_that_apply_to_it
    loop: queued::queue_that_is_off_ungates_all_pods
    takeover: queue::the_next_extender_lets_them_out_when_one_is_dead
reclaim.action
    filter and loop: switches::setting_that_says_when_or_never_holds_at_each_way
    takeover: reclaim::a_successor_goes_on_between_two_victims_and_evicts_no_other_pod
reclaim.after
    filter and loop: switches::setting_that_says_when_or_never_holds_at_each_way
reclaim.podsMaySoften
    loop: borrowers::the_pod_that_may_be_evicted_is_asked_before_one_whose_owner_softens_that
reclaim.overLimitAfter
    loop: reclaim::a_pod_that_stays_over_its_limit_is_asked_though_no_other_wants_it_and_not_if_none_watches
reclaim.timeout
    loop: reclaim::what_does_not_come_is_given_up_and_another_card_is_tried
preempt.fragmented
    verb, loop and gangs: switches::setting_that_says_when_or_never_holds_at_each_way
    verb by kube-scheduler: fragmented::kube_scheduler_that_asks_about_fragmented_memory_gets_victims_by_the_switches
    takeover: fragmented::a_successor_goes_on_between_two_deletes_and_deletes_no_other_pod
preempt.after
    verb, loop and gangs: switches::setting_that_says_when_or_never_holds_at_each_way
    verb by kube-scheduler: fragmented::kube_scheduler_that_asks_about_fragmented_memory_gets_victims_by_the_switches
reserve.after
    loop: switches::setting_that_says_when_or_never_holds_at_each_way
    takeover: reservations::an_extender_that_restarts_keeps_a_place_for_the_pod_that_waits
reserve.giveUpAfter
    loop: reservations::what_does_not_come_free_in_time_is_given_up_for_other_cards
reserve.max
    loop: reservations::places_are_few_and_the_first_in_turn_have_them
reserve.maxPercent
    loop: reservations::places_are_a_small_part_of_the_cluster_but_for_the_first
reserve.markNodes
    loop: reservations::autoscalers_are_told_to_let_a_node_be_while_a_place_is_kept_there
    off: reservations::marks_are_removed_without_mark_nodes
    takeover: reservations::mark_that_arrives_after_a_takeover_is_taken_off
defragment.evictionsPerHour
    loop: emptying::no_node_is_emptied_beyond_the_rate_or_against_a_budget
    takeover: moving::a_successor_goes_on_where_the_eviction_was_not_sent
defragment.emptyNodes
    loop: emptying::no_node_is_emptied_if_the_feature_is_off
provision.max
    loop: provision::there_are_no_more_than_the_administrator_allows
    off: provision::there_is_none_unless_the_administrator_wants_it
    takeover: provision::the_next_leader_keeps_the_placeholder_and_deletes_it_in_the_end
claims.fence
    filter: claims::fence_lets_pods_have_only_gpus_that_were_opened
    loop: claims::a_whole_gpu_is_released_to_a_claim_that_waits_and_returns_to_the_pods
    off: claims::a_cluster_without_device_taint_rules_says_so_and_places_pods
    takeover: claims::rules_outlive_their_deletion_by_hand_and_their_leader
disruptions.perMinute
    loop: fragmented::when_the_preemptor_is_deleted_half_way_the_next_victim_stays
disruptions.perNodePerMinute
    loop: fragmented::a_victim_that_ends_by_itself_spares_the_next_one
";

#[test]
fn each_field_has_a_case_for_each_way() -> Result<()> {
    let mut known = BTreeSet::new();
    for program in PROGRAMS {
        known.extend(cases(&root().join(program), "")?);
    }
    let (mut named, mut ways) = (Vec::new(), 0);
    for line in WAYS.lines().filter(|line| !line.is_empty()) {
        match line.trim_start().split_once(": ") {
            None => named.push(line.to_owned()),
            Some((_, case)) => {
                ways += 1;
                assert!(known.contains(case), "there is no case {case}");
            }
        }
    }
    named.sort();
    let spec = serde_json::to_value(GpustowConfigSpec::default())?;
    let mut all = fields(&spec);
    all.sort();
    assert_eq!(named, all);
    assert!(ways > named.len(), "{ways}");
    Ok(())
}
