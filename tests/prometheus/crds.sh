#!/bin/sh
# Fetches the resource definitions of the Prometheus operator, which are in its Go module. The only line on stdout is
# their folder.
set -eu

operator=github.com/prometheus-operator/prometheus-operator@v0.86.1
operator_sum=h1:pHUuiRErcFb3nFDox7RxoxpEN0FyT24GtYOkr2GBu04=

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/prometheus"
out=$(cd "$target/prometheus" && pwd)/crds-${operator#*@}

fetch() {
    go=go
    # The control plane's build fetches Go where there is none.
    command -v go >/dev/null || go=$target/control-plane/venv/bin/go
    command -v "$go" >/dev/null || {
        echo "prometheus: needs Go 1.26 or later: https://go.dev/dl, or tests/control-plane/build.sh" >&2
        exit 1
    }
    # Its sum is looked at below, so that no checksum database is needed.
    fetched=$(GONOSUMDB=${operator%@*} GOTOOLCHAIN=local GOWORK=off "$go" mod download -json "$operator")
    case $fetched in
    *"$operator_sum"*) ;;
    *) echo "prometheus: $operator is not what it was: $fetched" >&2 && exit 1 ;;
    esac
    folder=$(echo "$fetched" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    rm -rf "$out.new"
    mkdir -p "$out.new"
    for kind in podmonitors prometheusrules; do
        install -m 644 "$folder/example/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml" "$out.new"
    done
    mv "$out.new" "$out"
}

if [ ! -d "$out" ]; then
    exec 9>"$target/prometheus/crds-lock"
    flock 9
    [ -d "$out" ] || fetch
fi
echo "$out"
