#!/bin/sh
# Builds the Helm that the tests run: the major version in HELM, 4 without it. Says what it does on
# stderr; the only line on stdout is the program's path. Up to date is decided by its go.mod and go.sum.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
pins=$here/${HELM:-4}
mkdir -p "$target/helm/${HELM:-4}"
out=$(cd "$target/helm/${HELM:-4}" && pwd)
wanted=$(cat "$pins/go.mod" "$pins/go.sum" | sha256sum | cut -d' ' -f1)

built() { [ "$(cat "$out/stamp" 2>/dev/null)" = "$wanted" ]; }

build() {
    go=go
    # The control plane's build fetches Go where there is none.
    command -v go >/dev/null || go=$out/../../control-plane/venv/bin/go
    command -v "$go" >/dev/null || {
        echo "helm: needs Go 1.26 or later: https://go.dev/dl, or tests/control-plane/build.sh" >&2
        exit 1
    }
    echo "helm: building Helm ${HELM:-4}" >&2
    rm -f "$out/stamp"
    cd "$pins"
    CGO_ENABLED=0 GOBIN=$out GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" install -trimpath \
        -ldflags='-s -w' tool >&2
    echo "$wanted" >"$out/stamp"
}

if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
echo "$out/helm"
