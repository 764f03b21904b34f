#!/bin/sh
# Builds the Prometheus and promtool that the tests run. Says what it does on stderr; the only line
# on stdout is the folder of the binaries. Up to date is decided by go.mod and go.sum alone.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/prometheus"
out=$(cd "$target/prometheus" && pwd)
wanted=$(cat "$here/go.mod" "$here/go.sum" | sha256sum | cut -d' ' -f1)

built() { [ "$(cat "$out/stamp" 2>/dev/null)" = "$wanted" ]; }

build() {
    go=go
    # The control plane's build fetches Go where there is none.
    command -v go >/dev/null || go=$out/../control-plane/venv/bin/go
    command -v "$go" >/dev/null || {
        echo "prometheus: needs Go 1.26 or later: https://go.dev/dl, or tests/control-plane/build.sh" >&2
        exit 1
    }
    echo "prometheus: building; the first time takes some minutes" >&2
    rm -f "$out/stamp"
    cd "$here"
    CGO_ENABLED=0 GOBIN=$out/bin GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" install \
        -trimpath -tags remove_all_sd -ldflags='-s -w' tool >&2
    echo "$wanted" >"$out/stamp"
}

if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
echo "$out/bin"
