#!/bin/sh
# Builds the extender of an earlier commit, beside which today's must be able to run. Says what it
# does on stderr; the only line on stdout is the binary.
set -eu

# The formats in the cluster that every later build must get along with.
commit=8a73bf4ac119a9942f8d946edc2430bd931f1e0e

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/previous"
out=$(cd "$target/previous" && pwd)
binary=$out/gpustow-$commit

say() { echo "previous: $*" >&2; }

build() {
    if ! git -C "$here" cat-file -e "$commit^{commit}" 2>/dev/null; then
        say "this clone lacks commit $commit: git fetch --unshallow"
        return 1
    fi
    say "building the extender of $commit; this happens once and takes some minutes"
    rm -rf "$out/source" "$out/target"
    mkdir -p "$out/source"
    git -C "$here/../.." archive "$commit" | tar -x -C "$out/source"
    # Its own folder: the two builds must not push each other out. Its binary is all that stays.
    (cd "$out/source" && CARGO_TARGET_DIR="$out/target" cargo build --locked --package gpustow --bin gpustow >&2)
    cp "$out/target/debug/gpustow" "$binary.new"
    mv "$binary.new" "$binary"
    rm -rf "$out/source" "$out/target"
}

# Two test runs may want it at once; the lock ends with the process.
if [ ! -x "$binary" ]; then
    exec 9>"$out/lock"
    flock 9
    [ -x "$binary" ] || build
fi
echo "$binary"
