#!/bin/sh
# Makes the images that `install.rs` installs: gpustow's as `make images` makes them, but for speed, in the builds
# that its TAGS name, and kube-scheduler's. Says what it does on stderr; the only line on stdout is their folder.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
target=${CARGO_TARGET_DIR:-$root/target}
case $(uname -m) in
x86_64) arch=amd64 ;;
aarch64) arch=arm64 ;;
*) echo "node: no name for the architecture $(uname -m)" >&2 && exit 1 ;;
esac
[ -x /usr/lib/cni/bridge ] || {
    echo "node: no network for pods: apt-get install -y containernetworking-plugins" >&2
    exit 1
}
images=$target/images/test
for tag in v0.1.0 v0.1.1; do
    OUT=$images/$tag PROFILE=dev ARCHS=$arch TAG=$tag REVISION=build-of-$tag "$root/images/build.sh" >/dev/null
done
(cd "$root" && cargo build --locked --workspace --test node --lib >&2)
cp "$target/debug/libnvidia_ml.so" "$images/libnvidia-ml.so.1"
# Itself, where the folder with an older kubelet has a link.
scheduler=$(KUBELET='' "$here/../control-plane/build.sh")/kube-scheduler
version=$("$scheduler" --version)
python3 "$root/images/oci.py" --output "$images/kube-scheduler.tar" --level 1 \
    --name "registry.k8s.io/kube-scheduler:${version##* }" --entrypoint /usr/local/bin/kube-scheduler \
    --arch "$arch" --file "/usr/local/bin/kube-scheduler=$scheduler" >&2
# Where the tests look for it.
mkdir -p "$target/toolkit"
ln -sfn "$("$here/../toolkit/build.sh")" "$target/toolkit/bin"
echo "$images"
