#!/bin/sh
# Pins the Kubernetes that the tests run for one minor: writes go.mod, go.sum and the sums of that patch, with the
# etcd that this Kubernetes is itself tested with. Usage: pin.sh 1.37.1
set -eu

patch=$1
here=$(cd "$(dirname "$0")" && pwd)
minor=${patch%.*}
libraries=v0.${patch#1.}
upstream=$(GOTOOLCHAIN=local GOWORK=off go mod download -json "k8s.io/kubernetes@v$patch" |
    sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
etcd=$(sed -n 's,^\tgo.etcd.io/etcd/client/v3 \(v[^ ]*\).*,\1,p' "$upstream")

mkdir -p "$here/$minor"
cd "$here/$minor"
rm -f go.sum
{
    cat <<TEXT
// The real Kubernetes that the tests run: binaries only, no Go source of ours.
module gpustow.dev/tests/control-plane

go 1.26.0

require (
	go.etcd.io/etcd/server/v3 $etcd
	k8s.io/kubernetes v$patch
)

tool (
	go.etcd.io/etcd/server/v3
	k8s.io/kubernetes/cmd/kube-apiserver
	k8s.io/kubernetes/cmd/kube-controller-manager
	k8s.io/kubernetes/cmd/kube-scheduler
	k8s.io/kubernetes/cmd/kubectl
	k8s.io/kubernetes/cmd/kubelet
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
