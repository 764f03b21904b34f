#!/bin/sh
# Builds the Prometheus and promtool that the tests run, and fetches the resource definitions of the
# Prometheus operator. Says what it does on stderr; the only line on stdout is the folder of both: bin
# and crds. Up to date is decided by go.mod, go.sum and this file alone.
set -eu

operator=github.com/prometheus-operator/prometheus-operator@v0.86.1
operator_sum=h1:pHUuiRErcFb3nFDox7RxoxpEN0FyT24GtYOkr2GBu04=

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/prometheus"
out=$(cd "$target/prometheus" && pwd)
wanted=$(cat "$here/go.mod" "$here/go.sum" "$here/build.sh" | sha256sum | cut -d' ' -f1)

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
    # Its sum is looked at below, so that no checksum database is needed.
    fetched=$(GONOSUMDB=${operator%@*} GOTOOLCHAIN=local GOWORK=off "$go" mod download -json "$operator")
    case $fetched in
    *"$operator_sum"*) ;;
    *) echo "prometheus: $operator is not what it was: $fetched" >&2 && exit 1 ;;
    esac
    folder=$(echo "$fetched" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    mkdir -p "$out/crds"
    for kind in podmonitors prometheusrules; do
        install -m 644 "$folder/example/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml" "$out/crds"
    done
    echo "$wanted" >"$out/stamp"
}

if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
echo "$out"
