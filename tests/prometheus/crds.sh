#!/bin/sh
# Fetches the resource definitions of the Prometheus operator, which are in its Go module. The only line on stdout is
# their folder.
set -eu

operator=github.com/prometheus-operator/prometheus-operator@v0.86.1
operator_sum=h1:pHUuiRErcFb3nFDox7RxoxpEN0FyT24GtYOkr2GBu04=

. "$(dirname "$0")/../go-tools.sh"
who=prometheus
mkdir -p "$tools/$who"
out=$tools/$who/crds-${operator#*@}

fetch() {
    find_go
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
    exec 9>"$tools/$who/lock"
    flock 9
    [ -d "$out" ] || fetch
fi
echo "$out"
