#!/bin/sh
# Pins the Kubernetes that the tests run for one minor: writes go.mod, go.sum and the sums of that patch, with the
# etcd that this Kubernetes is itself tested with. Needs the Go that this Kubernetes needs. Usage:
# pin.sh 1.37.1, or pin.sh 1.38.0-beta.0 kube-scheduler, where the other programs are those of the minor before
set -eu

patch=$1
shift
[ $# -gt 0 ] || set -- kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet
here=$(cd "$(dirname "$0")" && pwd)
minor=$(echo "$patch" | cut -d. -f1,2)
libraries=v0.${patch#1.}
upstream=$(GOTOOLCHAIN=local GOWORK=off go mod download -json "k8s.io/kubernetes@v$patch" |
    sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
go=$(sed -n 's/^go //p' "$upstream")
etcd=$(sed -n 's,^\tgo.etcd.io/etcd/client/v3 \(v[^ ]*\).*,\1,p' "$upstream")

mkdir -p "$here/$minor"
cd "$here/$minor"
rm -f go.sum
{
    cat <<TEXT
// The real Kubernetes that the tests run: binaries only, no Go source of ours.
module gpustow.dev/tests/control-plane

go $go

require (
	go.etcd.io/etcd/server/v3 $etcd
	k8s.io/kubernetes v$patch
)

tool (
	go.etcd.io/etcd/server/v3
$(printf '\tk8s.io/kubernetes/cmd/%s\n' "$@")
)

replace (
TEXT
    # Kubernetes builds its libraries from its own tree; here they are the published ones.
    sed -n "s,^\t\(k8s.io/[^ ]*\) => ./staging/.*,\t\1 => \1 $libraries,p" "$upstream"
    echo ")"
} >go.mod
GOFLAGS=-mod=mod GOTOOLCHAIN=local GOWORK=off go list -deps tool >/dev/null
# By these build.sh fetches the release instead of compiling it.
if python3 "$here/fetch.py" sums "v$patch" "$etcd" >sums.new; then
    mv sums.new sums
else
    rm -f sums sums.new
    echo "pin: no sums of v$patch and etcd $etcd: build.sh will compile them" >&2
fi
echo "$here/$minor"
