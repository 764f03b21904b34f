#!/bin/sh
# Packs the plugin: on Linux the programs of the page's image, which are the plugin's, for each architecture;
# on macOS the one that this machine builds.
. "$(dirname "$0")/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# pack SYSTEM ARCH FOLDER: an archive with the program in the folder and the licence, which krew asks for.
pack() {
    cp "$root/LICENSE" "$3"
    tar -cf - -C "$3" LICENSE kubectl-gpustow | gzip -n >"$dist/kubectl-gpustow-$1-$2.tar.gz"
    say "packed kubectl-gpustow-$1-$2.tar.gz"
}

case $(uname -s) in
Darwin)
    cargo build --locked --release --package kubectl-gpustow --bin kubectl-gpustow
    cp "$target/release/kubectl-gpustow" "$work"
    pack darwin "$(uname -m | sed s/x86_64/amd64/)" "$work"
    ;;
Linux)
    oras=$(tool oras)
    archive=$images/kubectl-gpustow.tar
    [ -f "$archive" ] || fail "no $archive: make images"
    for arch in amd64 arm64; do
        mkdir "$work/$arch"
        layer=$("$oras" manifest fetch --oci-layout "$archive:$tag" --platform "linux/$arch" \
            --format go-template --template '{{(index .content.layers 0).digest}}')
        "$oras" blob fetch --no-tty --oci-layout "$archive@$layer" --output "$work/layer" >/dev/null
        tar -xzf "$work/layer" -C "$work/$arch" kubectl-gpustow
        pack linux "$arch" "$work/$arch"
    done
    ;;
*) fail "no plugin is released for $(uname -s)" ;;
esac
