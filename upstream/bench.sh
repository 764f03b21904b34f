#!/bin/sh
# Runs the benchmark of each patch without and with it, in turns, and prints both with median and spread.
# Kubernetes is the version that tests/control-plane/1.37 pins, and comes from Go's module cache.
# The script needs Go 1.26, git, and 3 GB of disk for the copy and Go's build cache.
# RUNS sets how often each side runs, six times without it.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
pins=$here/../tests/control-plane/1.37
runs=${RUNS:-6}
version=$(sed -n 's,^.*k8s.io/kubernetes \(v[^ ]*\).*,\1,p' "$pins/go.mod")
export CGO_ENABLED=0 GOFLAGS='-mod=mod -trimpath' GOTOOLCHAIN=local GOWORK=off

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
trap 'exit 1' HUP INT TERM
tree=$temporary/kubernetes
# Git must not take the copy for a part of a repository that it lies in.
export GIT_CEILING_DIRECTORIES="$temporary"

say() { echo "bench: $*" >&2; }

copy() {
    say "copying Kubernetes $version"
    module=$(cd "$temporary" && go mod download -json "k8s.io/kubernetes@$version")
    from=$(echo "$module" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    cp -R "$from" "$tree"
    chmod -R u+w "$tree"
    # Kubernetes builds its libraries from its own tree; here they are the published ones.
    sed "s,=> ./staging/src/\(.*\),=> \1 v0.${version#v1.}," "$from/go.mod" >"$tree/go.mod"
    sort -u "$from/go.sum" "$pins/go.sum" >"$tree/go.sum"
}

# Builds the benchmark of a package: program, package.
build() {
    say "building $1"
    (cd "$tree" && go test -c -o "$temporary/$1" "./$2")
}

# Runs the benchmark of a program once and writes what it printed behind the rest.
run() {
    if ! (cd "$tree/$3" && "$temporary/$1" -test.run='^$' -test.bench="^$2\$" -test.benchmem) >"$temporary/output"; then
        cat "$temporary/output" >&2
        return 1
    fi
    grep '^Benchmark' "$temporary/output" >>"$temporary/$1.txt"
}

# Prints the runs of a program, then for each benchmark the median, least and most us/op.
report() {
    echo
    echo "$1:"
    cat "$temporary/$1.txt"
    awk '{ print $1, $3 / 1000 }' "$temporary/$1.txt" | sort -k1,1 -k2,2g | awk -f "$here/../benches/spread.awk"
}

# Measures one patch: patch, package, benchmark, file of the benchmark.
measure() {
    patch=$(echo "$here/$1"-*.patch)
    # The benchmark comes first, for it compiles without the rest of the patch.
    git -C "$tree" apply --include="$2/$4" "$patch"
    build "$1-before" "$2"
    git -C "$tree" apply --exclude="$2/$4" "$patch"
    build "$1-after" "$2"
    say "running $3 $runs times on each side"
    left=$runs
    while [ "$left" -gt 0 ]; do
        run "$1-before" "$3" "$2"
        run "$1-after" "$3" "$2"
        left=$((left - 1))
    done
    git -C "$tree" apply -R "$patch"
    report "$1-before"
    report "$1-after"
}

copy
measure 0001 pkg/scheduler BenchmarkBatchingWithExtenders schedule_one_batch_test.go
measure 0002 pkg/scheduler/framework/plugins/noderesources BenchmarkFitFilter fit_benchmark_test.go
