#!/bin/bash
# Fuzzes every target of crates/fuzz, or those that are named, by libFuzzer with coverage of our code and of what it is
# built from. MINUTES (60) is for each. An input that breaks one is left in target/fuzz/found and ends it; KEEP=1 puts
# what was found interesting into crates/fuzz/corpus. Needs a C++ compiler for libFuzzer.
set -eu
cd "$(dirname "$0")/../.."
minutes=${MINUTES:-60}
out=$PWD/target/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')
command -v "${CXX:-c++}" >/dev/null || { echo "fuzz: libFuzzer needs a C++ compiler: apt-get install g++" >&2; exit 2; }
# Overflows are found too.
flags='-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares
    -Cdebug-assertions -Coverflow-checks --cfg fuzzing'
CARGO_TARGET_DIR=$out RUSTFLAGS=$(echo $flags) \
    cargo build --locked --release --target "$host" --package gpustow-fuzz --features libfuzzer --bin fuzz
[ $# -gt 0 ] || set -- $(ls crates/fuzz/corpus)
broken=
mkdir -p "$out/found"
for target; do
    [ -d "crates/fuzz/corpus/$target" ] || { echo "fuzz: no target $target: $(echo $(ls crates/fuzz/corpus))" >&2; exit 2; }
    found=$out/corpus/$target
    mkdir -p "$found"
    export GPUSTOW_TARGET=$target
    program=$out/$host/release/fuzz
    if "$program" "$found" "crates/fuzz/corpus/$target" -max_total_time=$((minutes * 60)) -max_len=65536 -timeout=20 \
        -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 -artifact_prefix="$out/found/$target-" \
        >"$out/$target.log" 2>&1; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$out/$target.log")
        echo "sound   $target: $runs inputs in $minutes min, $(ls "$found" | wc -l) of them interesting"
    else
        echo "BROKEN  $target: see $out/$target.log"
        broken=1
    fi
    if [ -n "${KEEP:-}" ]; then
        rm -rf "$out/kept"
        mkdir -p "$out/kept"
        "$program" -set_cover_merge=1 -max_len=4096 "$out/kept" "crates/fuzz/corpus/$target" "$found" >>"$out/$target.log" 2>&1
        find "$out/kept" -type f -size +0 -exec cp -t "crates/fuzz/corpus/$target" {} +
    fi
done
[ -z "$broken" ]
