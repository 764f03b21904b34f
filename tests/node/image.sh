#!/bin/sh
# Checks that this machine can run containers, and makes the image that the node tests run: one
# static binary. Says what it does on stderr; the only line on stdout is the image's file.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/node"
work=$(cd "$target/node" && pwd)
examples=$here/../../manifests/examples
name=gpustow.test/workload:1

fail() { echo "node: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "containers and cgroups need root: run as root, on a machine that may be disturbed"
[ ! -e /var/lib/kubelet/pods ] ||
    fail "this machine has a kubelet of its own, which this one would disturb: use another machine"
missing=
for program in containerd ctr runc; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
[ -z "$missing" ] || fail "no$missing: apt-get install -y containerd runc"

cd "$work"
exec 9>image.lock
flock 9
# glibc's static library is part of the package that a C compiler needs anyway.
cc -static -O2 -Wall -Werror -o workload "$here/workload.c" ||
    fail "no C compiler, or no static C library: apt-get install -y gcc libc6-dev"
case $(uname -m) in
x86_64) architecture=amd64 ;;
aarch64) architecture=arm64 ;;
*) fail "no name for the architecture $(uname -m)" ;;
esac
oci() { python3 "$here/../../images/oci.py" --entrypoint /workload "$@" >&2; }
oci --output image.tar --name "$name" --arch "$architecture" --file /workload=workload
# The programs and the names of the examples, which are run with it. Like every image with CUDA it asks for all cards.
set -- --file /workload=workload
for program in $(sed -n 's/.*command: \[\([a-z-]*\),.*/\1/p' "$examples"/*.yaml | sort -u); do
    set -- "$@" --file "/bin/$program=workload"
done
for image in $(sed -n 's/^ *image: //p' "$examples"/*.yaml | sort -u); do
    case $image in
    *.*/*) ;;
    *) image=docker.io/$image ;;
    esac
    set -- --name "$image" "$@"
done
oci --output examples.tar --env NVIDIA_VISIBLE_DEVICES=all --arch "$architecture" "$@"
echo "$work/image.tar"
