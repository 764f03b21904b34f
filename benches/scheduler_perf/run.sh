#!/bin/sh
# Runs Kubernetes' scheduler_perf with kube-scheduler alone and with gpustow's extender, in turns, and prints
# the pods per second of each run, then median and spread. Kubernetes is the version that tests/control-plane pins.
# NODES (1,000) is the number of nodes, ROUNDS (3) that of rounds, GPUSTOW the extender's binary.
# The script needs Go 1.26 and the control plane of the tests, for etcd.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
pins=$root/tests/control-plane/1.36
rounds=${ROUNDS:-3}
export NODES="${NODES:-1000}"
GPUSTOW=$(realpath "${GPUSTOW:-$root/target/release/gpustow}")
GPUNODE_CRD=$root/manifests/core/crd.yaml
export GPUSTOW GPUNODE_CRD
control_plane=$("$root/tests/control-plane/build.sh")
. "$root/tests/go-tools.sh"
who=scheduler_perf
find_go
# PyPI's Go, where the machine has none.
PATH=$PATH:$tools/go/bin
export PATH CGO_ENABLED=0 GOFLAGS='-mod=mod -trimpath' GOTOOLCHAIN=local GOWORK=off

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
trap 'exit 1' HUP INT TERM

# Two free ports, at which the extender will listen.
ports=$(python3 -c '
import socket
ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(end.getsockname()[1] for end in ends))')
export LISTEN="127.0.0.1:${ports% *}" HEALTH="127.0.0.1:${ports#* }"

config=$root/scheduler-config/gpustow-scheduler.yaml
mkdir "$temporary/perf" "$temporary/bin"
ln -s "$control_plane/server" "$temporary/bin/etcd"
PATH=$temporary/bin:$PATH
cd "$temporary/perf"
cp "$here"/*.yaml "$here"/*.go .
sed "s,urlPrefix: .*,urlPrefix: http://$LISTEN," "$config" >gpustow.yaml
sed '/^extenders:/,$d' "$config" >alone.yaml
cp "$pins/go.mod" .
version=$(sed -n 's,^.*k8s.io/kubernetes \(v[^ ]*\).*,\1,p' go.mod)
say "building Kubernetes $version's scheduler_perf; the first time takes several minutes"
module=$(go mod download -json "k8s.io/kubernetes@$version")
from=$(echo "$module" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
sort -u "$pins/go.sum" "$from/go.sum" >go.sum
go test -c -o perf.test .
# It looks for its own source there, as a build with -trimpath by Bazel does.
TEST_SRCDIR=$(go env GOMODCACHE)
export TEST_SRCDIR TEST_WORKSPACE=.

round=1
while [ "$round" -le "$rounds" ]; do
    for case in Alone Gpustow; do
        for workload in Default AsyncAPICalls; do
            say "round $round of $rounds: $case, $workload"
            if ! ./perf.test -test.run='^$' -test.benchtime=1ns \
                -test.bench="^BenchmarkPerfScheduling\$/^$case\$/^$workload\$" >output 2>log; then
                tail -n 20 output log extender.log >&2
                exit 1
            fi
            rate=$(tr '\t' '\n' <output | sed -n 's,^ *\([0-9.]*\) SchedulingThroughput/Average.*,\1,p')
            say "$rate pods/s"
            echo "$case,$workload $rate" >>rates
        done
    done
    round=$((round + 1))
done

echo "$NODES nodes of 8 GPUs, 1,000 pods, Kubernetes $version; pods/s, median (least to most)"
sort -k1,1 -k2,2g rates | awk -f "$here/../spread.awk"
