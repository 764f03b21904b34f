#!/bin/bash
# Takes mends out again, one by one, in a copy of the tree, and says whether the ledger's model finds that, and after
# how many histories; for those in worlds/, whether the simulated world does, and at which seed; for those in cases/,
# whether the test does that they name. Arguments are names of patches; without any, all are tried. HISTORIES and SEEDS
# are how many histories and worlds are looked at, PROFILE how both are compiled: dev (the default for histories) is sooner
# compiled than simulate (for worlds), and slower.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
copy=$root/target/teeth/tree
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -f "$file" ] || printf '%s\0' "$file"
done | xargs -0 cp --parents -t "$copy"
[ $# -gt 0 ] || set -- $(ls tests/teeth/*.patch tests/teeth/*/*.patch)
missed=0
for patch; do
    name=$(basename "$patch" .patch)
    log=$root/target/teeth/$name.log
    apply() { GIT_CEILING_DIRECTORIES=$root/target git -C "$copy" apply "$@" "$root/$patch"; }
    case $patch in
    *worlds/*) set_of="GPUSTOW_SEEDS=${SEEDS:-100000}" profile=${PROFILE:-simulate} test="--test simulate every" ;;
    *cases/*) set_of=GPUSTOW_ROUNDS=3 profile=dev test=$(sed -n 's/^Found by //p' "$patch") ;;
    *) set_of=GPUSTOW_HISTORIES=${HISTORIES:-200000} profile=${PROFILE:-dev} test="--test ledger no_history" ;;
    esac
    apply
    # shellcheck disable=SC2086 # The target and the filter are several words.
    if (cd "$copy" && env CARGO_TARGET_DIR="$root/target/teeth/build" RUST_BACKTRACE=0 "$set_of" \
        cargo test --profile $profile --workspace --locked $test) >"$log" 2>&1; then
        echo "NOT FOUND  $name: $(head -n 1 "$patch")"
        missed=1
    elif seed=$(sed -n 's/.*make simulate SEED=\([0-9]*\).*/\1/p' "$log") && [ -n "$seed" ]; then
        echo "found      $name, by the world of seed $seed: $(sed -n 's/^Error: //p' "$log" | tail -n 1 | cut -c 1-90)"
    elif seed=$(sed -n 's/^seed \([0-9]*\): .*/\1/p' "$log") && [ -n "$seed" ]; then
        echo "found      $name, at history $seed: $(sed -n 's/^seed [0-9]*: //p' "$log" | cut -c 1-90)"
    elif case=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$log") && [ -n "$case" ]; then
        echo "found      $name, by the test $case"
    else
        echo "NOT BUILT  $name: see $log"
        missed=1
    fi
    apply --reverse
done
exit $missed
