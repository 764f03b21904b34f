#!/bin/sh
# Gets the etcd and the Kubernetes that the tests run: the minor in KUBERNETES, 1.36 without it. It fetches the release's
# programs if the minor's folder has their sums, and else compiles them. Says what it does on stderr; the only line on
# stdout is the folder of the programs. With KUBELET=1.34 that folder has that minor's kubelet too.
#   GPUSTOW_DOWNLOADS  fetch from this address instead of dl.k8s.io and GitHub; empty: compile
set -eu

here=$(cd "$(dirname "$0")" && pwd)
. "$here/../go-tools.sh"

# get MINOR SET PROGRAM ...: sets $out to the folder of these programs.
get() {
    minor=$1
    who=control-plane-$minor$2
    shift 2
    pins=$here/$minor
    if [ ! -f "$pins/go.mod" ]; then
        echo "control-plane: Kubernetes $minor is none of" "$(cd "$here" && echo [0-9]*)" >&2
        exit 1
    fi
    version=$(sed -n 's,^.*k8s.io/kubernetes \(v[^ ]*\).*,\1,p' "$pins/go.mod")
    packages=
    for program; do
        packages="$packages $(sed -n "s|^\t\([^ ]*/$program\(/v3\)*\)\$|\1|p" "$pins/go.mod")"
    done
    if [ -f "$pins/sums" ] && [ -n "${GPUSTOW_DOWNLOADS-default}" ]; then
        out=$tools/$who/$(sha256sum <"$pins/sums" | cut -c1-16)
        [ ! -e "$out/done" ] || return 0
        mkdir -p "$out"
        exec 9>"$out/lock"
        flock 9
        [ ! -e "$out/done" ] || return 0
        say "fetching $* of Kubernetes $version, up to five minutes"
        if python3 "$here/fetch.py" get "$pins/sums" "$out" "$@" >&2; then
            : >"$out/done"
            return 0
        fi
        say "compiling instead, up to ten minutes"
    fi
    ldflags="-X k8s.io/component-base/version.gitVersion=$version"
    # Word splitting is meant: names of packages have no blanks.
    # shellcheck disable=SC2086
    go_tools "$pins" "$who" $packages
}

control_plane() {
    # The main package of etcd is called server.
    set -- server kube-apiserver kube-controller-manager kube-scheduler kubectl
    get "${KUBERNETES:-1.36}" "" "$@"
    ! grep -q /kube-apiserver "$pins/go.mod" || return 0
    # This minor pins only some of them: the others are those of the minor before.
    some=$out
    get "1.$((${KUBERNETES#1.} - 1))" "" "$@"
    mkdir -p "$some/with-others"
    ln -sf "$out"/server "$out"/kube* "$some/with-others"
    ln -sf "$some"/kube-* "$some/with-others"
    out=$some/with-others
}

control_plane
if [ -z "${KUBELET:-}" ]; then
    echo "$out"
    exit
fi
programs=$out
get "$KUBELET" -kubelet kubelet
both=$programs/with-kubelet-$KUBELET
mkdir -p "$both"
ln -sf "$programs"/server "$programs"/kube* "$out/kubelet" "$both"
found=$("$both/kubelet" --version)
case $found in
"Kubernetes v$KUBELET."*) ;;
*) say "the kubelet is $found, not $KUBELET" && exit 1 ;;
esac
echo "$both"
