#!/bin/sh
# Builds the parts of NVIDIA's container toolkit that the tests run: the runtime and its hooks. Says what it
# does on stderr; the only line on stdout is the folder of the binaries. Up to date is decided by go.mod and go.sum.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/toolkit"
out=$(cd "$target/toolkit" && pwd)
wanted=$(cat "$here/go.mod" "$here/go.sum" | sha256sum | cut -d' ' -f1)

built() { [ "$(cat "$out/stamp" 2>/dev/null)" = "$wanted" ]; }

build() {
    go=go
    # The control plane's build fetches Go where there is none.
    command -v go >/dev/null || go=$out/../control-plane/venv/bin/go
    command -v "$go" >/dev/null || {
        echo "toolkit: needs Go 1.26 or later: https://go.dev/dl, or tests/control-plane/build.sh" >&2
        exit 1
    }
    echo "toolkit: building NVIDIA's container toolkit" >&2
    rm -f "$out/stamp"
    cd "$here"
    # It loads the driver's library by C's dlopen; what that has is looked up when it is called.
    CGO_ENABLED=1 CGO_LDFLAGS=-Wl,--unresolved-symbols=ignore-in-object-files CGO_LDFLAGS_ALLOW='-Wl,.*' \
        GOBIN=$out/bin GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" install -trimpath \
        -ldflags='-s -w' tool >&2
    echo "$wanted" >"$out/stamp"
}

if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
echo "$out/bin"
