#!/bin/sh
# Runs what depends on the version of Kubernetes on each minor, or on those named as arguments, and ends
# with a table of what passed. Usage: run.sh [1.34 1.38 …]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
[ $# -gt 0 ] || set -- 1.34 1.35 1.36 1.37 1.38
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# What is shown, and the case that shows it; where one cannot be, the first minor that has it.
cat >"$out/cases" <<'LIST'
pods are changed as they are created|policies::an_asking_pod_gets_scheduler_label_and_device_variables
good requests pass|policies::good_requests_pass
bad requests are refused|policies::bad_requests_are_refused_in_the_extenders_words
other pods are left alone|policies::a_pod_that_asks_for_nothing_is_created_as_ever
no client forges an assignment|attack::extender::only_the_extender_writes_its_keys_through_any_door_that_there_is
bound with annotations in one write|main_path::one_pod_is_bound_with_its_gpu_in_the_same_write
a Binding needs its resourceVersion|takeover::a_binding_that_arrives_after_a_takeover_fails
the Lease is taken again|takeover::a_lease_that_is_deleted_is_taken_again
a condition wakes a waiting pod|waiting::a_waiting_pod_is_bound_though_the_extenders_watch_is_late
preemption frees a GPU|preemption::the_schedulers_own_victim_frees_the_card
webhook: others do not notice it|webhook::pods_that_ask_for_nothing_do_not_notice_that_the_webhook_is_down
webhook: certificate replaced|webhook::no_pod_is_refused_while_the_webhooks_certificate_is_replaced
webhook: certificate of its own|webhook_certificate::no_pod_is_refused_while_the_extenders_renew_their_certificate
webhook: extender held to caBundle|webhook_certificate::the_extender_changes_nothing_of_the_webhook_but_the_authority_it_trusts
pods are queued, and some never|attack::queue::pods_are_queued_while_the_status_says_so_and_some_never
the gate comes off in turn|attack::queue::the_gate_comes_off_in_turn_or_by_who_has_the_right
all gates come off before gpustow goes|attack::queue::before_gpustow_goes_one_command_takes_every_gate_off
the next in the queue is bound|queue::the_next_in_turn_is_bound_when_one_leaves
victims by the switches alone|fragmented::kube_scheduler_that_asks_about_fragmented_memory_gets_victims_by_the_switches
from 1.38 on kube-scheduler evicts|fragmented::kube_scheduler_that_can_evict_for_fragmented_memory_does_once_the_pod_is_old_enough
preemption for fragmented memory|fragmented::one_of_lower_priority_ends_and_the_pod_gets_its_card
none where it is off|fragmented::no_pod_ends_unless_the_operator_wants_it_nor_for_a_pod_that_may_not_preempt
what preempts deletes no other pod|attack::fragmented::a_fallen_extender_deletes_no_pod_but_a_marked_one_and_that_by_its_copy
plugin and webhook say the same|webhook::plugin_and_webhook_say_the_same_of_every_pod
other sharers' requests are translated|adopt::requests_of_hami_volcano_and_whole_gpus_keep_their_number_of_gpus
gpushare's too, with its variables|adopt::gpushare_requests_become_mib_and_programs_find_the_old_units
those that cannot be are refused|adopt::requests_that_cannot_be_translated_are_refused_and_others_pass
a pod of gpushare is bound|adopted_pods::pod_of_gpushare_is_bound_to_a_gpu_with_room
helm test places a pod|helm::helm_test_ends_well_once_its_pod_has_a_gpu
installed, upgraded, removed by Helm|helm::helm_installs_upgrades_rolls_back_and_uninstalls_and_pods_stay_as_they_are
the same by Helm 3|helm3::helm_installs_upgrades_rolls_back_and_uninstalls_and_pods_stay_as_they_are
upgraded from an earlier chart|helm::an_earlier_chart_is_upgraded_while_pods_run_and_wait
the same by Helm 3|helm3::an_earlier_chart_is_upgraded_while_pods_run_and_wait
a gang that does not fit holds nothing|gang_binding::single_pod_is_bound_at_once_beside_a_gang_that_does_not_fit|1.37
a gang is bound as a whole|gang_binding::gang_is_bound_once_all_of_it_fits|1.37
50 gangs beside 200 single pods|gang_binding::fifty_gangs_and_two_hundred_single_pods_are_all_bound_and_no_gang_in_part|1.37
a gang preempts for all of its pods|gang_preemption::gang_of_higher_priority_preempts_for_all_of_its_pods|1.37
a gang spares all or none of them|gang_preemption::budget_that_protects_one_victim_spares_all_victims_of_a_gang|1.37
a successor deletes the rest of them|gang_preemption::successor_goes_on_between_two_deletes_for_a_gang|1.37
a gang on two kinds of node|gang_binding::gang_for_two_kinds_of_node_is_bound_once_its_largest_pod_fits|1.37
a pod of a gang goes before its bind|gang_faults::gang_goes_on_with_another_pod_if_one_is_deleted_before_its_bind|1.37
a successor binds the rest of a gang|gang_faults::successor_binds_the_rest_of_a_gang|1.37
Kubernetes' own table: groups preempt|gang_tables::pods_are_preempted_for_groups_as_in_kubernetes_own_table|1.37
Kubernetes' own table: groups are bound|gang_tables::groups_are_scheduled_as_in_kubernetes_own_table|1.37
a recreated group is another|gang_binding::group_created_again_under_its_name_is_bound|1.37
the simulated world's gangs are real|control_plane::gangs_are_asked_about_as_by_the_real_scheduler|1.37
a GPU goes to a claim and back|claims::a_whole_gpu_is_released_to_a_claim_that_waits_and_returns_to_the_pods|1.36
claims are kept off GPUs of pods|claims::rules_outlive_their_deletion_by_hand_and_their_leader|1.36
schedulers' configurations load|manifests::every_scheduler_configuration_is_loaded
LIST

for minor; do
    echo "versions: Kubernetes $minor" >&2
    KUBERNETES=$minor tests/control-plane/build.sh >/dev/null
    names=$(awk -F'|' -v minor="$minor" '$2 !~ /^helm3/ && ($3 == "" || minor >= $3) { print $2 }' "$out/cases")
    # Word splitting is meant: names have no blanks.
    KUBERNETES=$minor RUST_BACKTRACE=0 GPUSTOW_ROUNDS=3 cargo test --workspace --locked --test integration --test simulate -- \
        --exact $names >"$out/$minor" 2>&1 || sed 's/^/    /' "$out/$minor" >&2
    # The same cases with the older Helm, under names of their own.
    KUBERNETES=$minor HELM=3 RUST_BACKTRACE=0 cargo test --workspace --locked --test integration -- \
        helm:: >"$out/helm3" 2>&1 || sed 's/^/    /' "$out/helm3" >&2
    sed 's/^test helm::/test helm3::/' "$out/helm3" >>"$out/$minor"
done

printf '%-40s' ''
printf '%8s' "$@"
echo
failed=0
while IFS='|' read -r what name since; do
    printf '%-40s' "$what"
    for minor; do
        case $since in
        '') is=$(sed -n "s/^test $name \\.\\.\\. //p" "$out/$minor") ;;
        *) is=$(awk -v a="$minor" -v b="$since" 'BEGIN { if (a < b) print "-" }')
            is=${is:-$(sed -n "s/^test $name \\.\\.\\. //p" "$out/$minor")} ;;
        esac
        case $is in
        ok | -) ;;
        *) failed=1 is=FAILED ;;
        esac
        printf '%8s' "$is"
    done
    echo
done <"$out/cases"
exit "$failed"
