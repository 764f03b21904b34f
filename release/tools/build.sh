#!/bin/sh
# Builds a program that a release needs: build.sh NAME, one of the folders beside this file. Says what it
# does on stderr; the only line on stdout is the program's path. Up to date is decided by its go.mod and go.sum.
set -eu

name=$1
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/release-tools/$name"
out=$(cd "$target/release-tools/$name" && pwd)
wanted=$(cat "$here/$name/go.mod" "$here/$name/go.sum" | sha256sum | cut -d' ' -f1)

built() { [ "$(cat "$out/stamp" 2>/dev/null)" = "$wanted" ]; }

build() {
    go=go
    # The control plane's build fetches Go where there is none.
    command -v go >/dev/null || go=$out/../../control-plane/venv/bin/go
    command -v "$go" >/dev/null || {
        echo "release: needs Go 1.26 or later: https://go.dev/dl, or tests/control-plane/build.sh" >&2
        exit 1
    }
    echo "release: building $name" >&2
    rm -f "$out/stamp"
    cd "$here/$name"
    CGO_ENABLED=0 GOBIN=$out GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" install -trimpath \
        -ldflags='-s -w' tool >&2
    echo "$wanted" >"$out/stamp"
}

if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
echo "$out/$name"
