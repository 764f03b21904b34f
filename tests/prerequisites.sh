#!/bin/sh
# Builds programs that tests run beside ours, all at the same time, and prints how far it is. What is up to date costs
# nothing. Usage: prerequisites.sh control-plane helm prometheus previous (those that are wanted)
set -eu

here=$(cd "$(dirname "$0")" && pwd)
logs=${CARGO_TARGET_DIR:-$here/../target}/prerequisites
mkdir -p "$logs"

say() { echo "prerequisites: $*" >&2; }

# On two cores, when nothing is there yet.
minutes() {
    case $1 in
    control-plane | previous | prometheus) echo 6 ;;
    *) echo 2 ;;
    esac
}

all=$#
total=0
for name; do
    total=$((total + $(minutes "$name")))
    rm -f "$logs/$name.status"
    {
        status=0
        "$here/$name/build.sh" >"$logs/$name.log" 2>&1 </dev/null || status=$?
        echo "$status" >"$logs/$name.status"
    } &
done

# What is up to date ends at once and needs no word.
began=$(date +%s)
reported=
done=0
while [ "$done" -lt "$all" ]; do
    sleep 1
    now=$(($(date +%s) - began))
    [ "$now" -ne 2 ] || say "building $((all - done)) of $all ($*), up to $total minutes; logs are in $logs"
    for name; do
        case " $reported " in *" $name "*) continue ;; esac
        [ -s "$logs/$name.status" ] || continue
        reported="$reported $name"
        done=$((done + 1))
        if [ "$(cat "$logs/$name.status")" != 0 ]; then
            tail -n 40 "$logs/$name.log" >&2
            say "$name failed: the end of $logs/$name.log is above"
            wait
            exit 1
        fi
        [ "$now" -lt 2 ] || say "$done of $all: $name after $((now / 60)) min $((now % 60)) s"
    done
done
wait
