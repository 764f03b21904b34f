#!/bin/sh
# Builds the extender and the agent of an earlier commit, beside which today's must be able to run. Says
# what it does on stderr; the only line on stdout is the folder of both programs.
set -eu

# The release before this one, or, as long as there is none, a commit whose formats in the cluster every
# later build must get along with.
commit=bcbd900aac7d74d209049194d65b0ed8f2baf6e9

here=$(cd "$(dirname "$0")" && pwd)
. "$here/../go-tools.sh"
who=previous
out=$tools/$who
mkdir -p "$out"
programs=$out/$commit

build() {
    if ! git -C "$here" cat-file -e "$commit^{commit}" 2>/dev/null; then
        say "this clone lacks commit $commit: git fetch --unshallow"
        return 1
    fi
    say "building extender and agent of $commit; this happens once and takes some minutes"
    rm -rf "$out/source" "$out/target" "$programs.new"
    mkdir -p "$out/source" "$programs.new"
    git -C "$here/../.." archive "$commit" | tar -x -C "$out/source"
    # Its own folder: the two builds must not push each other out. Its programs are all that stays.
    (cd "$out/source" && CARGO_TARGET_DIR="$out/target" cargo build --locked --bin gpustow --bin gpustow-agent \
        --package gpustow --package gpustow-agent >&2)
    cp "$out/target/debug/gpustow" "$out/target/debug/gpustow-agent" "$programs.new"
    mv "$programs.new" "$programs"
    rm -rf "$out/source" "$out/target"
}

# Two test runs may want it at once; the lock ends with the process.
if [ ! -d "$programs" ]; then
    exec 9>"$out/lock"
    flock 9
    [ -d "$programs" ] || build
fi
echo "$programs"
