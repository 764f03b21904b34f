#!/bin/sh
# Checks that this machine can run containers, and makes the image that the node tests run: one
# static binary. Says what it does on stderr; the only line on stdout is the image's file.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/node"
work=$(cd "$target/node" && pwd)
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
tar --owner=0 --group=0 --mtime=@0 -cf layer.tar workload
layer=$(sha256sum layer.tar | cut -d' ' -f1)
cat >config.json <<END
{"architecture": "$architecture", "os": "linux", "config": {"Entrypoint": ["/workload"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
cat >manifest.json <<END
[{"Config": "config.json", "RepoTags": ["$name"], "Layers": ["layer.tar"]}]
END
tar -cf image.new manifest.json config.json layer.tar
mv image.new image.tar
echo "$work/image.tar"
