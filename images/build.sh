#!/bin/sh
# Builds the images as OCI archives, without a registry and without a container: build.sh [IMAGE ...],
# all without a name. Says what it does on stderr; the only line on stdout is their folder. The same commit,
# with the same tools, gives the same bytes in any folder.
#   ARCHS     amd64, arm64 or both (the default)
#   PROFILE   release (the default), or dev: for tests, the programs of this machine's debug build with its C library
#   OUT       the folder of the archives; images/PROFILE in the target folder without it
#   TAG       of every image; the workspace's version without it
#   REVISION  what the programs tell of their build; the commit without it
#   DEBIAN    a mirror of Debian that still has the packages below, as one of snapshot.debian.org
set -eu

# The agent's C library. Debian drops it from its mirrors when there is a newer one: take that then.
release=bookworm
libc=2.36-9+deb12u14
# No symbol of a later glibc is linked, so that the programs do not depend on the machine that builds them.
glibc=2.28

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
archs=${ARCHS:-amd64 arm64}
profile=${PROFILE:-release}
mkdir -p "$target/images"
target=$(cd "$target" && pwd)
work=$target/images
out=${OUT:-$work/$profile}
mkdir -p "$out"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)
revision=${REVISION:-$(git -C "$root" rev-parse HEAD)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

say() { echo "images: $*" >&2; }
fail() { say "$*"; exit 1; }

case $profile in
dev) level=1 ;;
*) level=9 ;;
esac

# zig and cargo-zigbuild.
tools() {
    wanted=$(sha256sum <"$here/requirements.txt")
    [ "$(cat "$work/venv/stamp" 2>/dev/null)" != "$wanted" ] || return 0
    say "installing zig below $work/venv"
    rm -rf "$work/venv"
    { python3 -m venv "$work/venv" &&
        "$work/venv/bin/pip" install --quiet --require-hashes --only-binary :all: -r "$here/requirements.txt"; } >&2 ||
        fail "needs python3 with venv and pip: apt-get install -y python3-venv"
    echo "$wanted" >"$work/venv/stamp"
}

# compile TRIPLE[.GLIBC] ARGS: paths of this machine are not in the programs, nor is what debuggers read.
compile() {
    triple=$1
    shift
    say "compiling $* for $triple, profile $profile"
    rustup target list --installed | grep -qx "${triple%%.*}" || rustup target add "${triple%%.*}" >&2
    cargo_home=${CARGO_HOME:-$HOME/.cargo}
    # shellcheck disable=SC2086
    (cd "$root" && export \
        PATH="$work/venv/bin:$PATH" \
        CARGO_TARGET_DIR="$target" \
        CARGO_ZIGBUILD_CACHE_DIR="$work/zigbuild" \
        ZIG_GLOBAL_CACHE_DIR="$work/zig" ZIG_LOCAL_CACHE_DIR="$work/zig" \
        GPUSTOW_REVISION="$revision" \
        RUSTFLAGS="--remap-path-prefix=$root=/gpustow --remap-path-prefix=$cargo_home=/cargo -Cstrip=debuginfo" \
        CFLAGS="-ffile-prefix-map=$root=/gpustow -ffile-prefix-map=$cargo_home=/cargo -g0" &&
        cargo zigbuild --locked --profile "$profile" --target "$triple" "$@" >&2)
}

# debian ARCH: the folder of what the agent needs beside itself. Nothing of this machine's apt is used or changed
# but the keys of Debian.
debian() {
    folder=$work/debian/$libc-$1
    [ ! -d "$folder" ] || { echo "$folder"; return; }
    say "fetching libc6 $libc for $1"
    apt=$work/apt-$1
    rm -rf "$apt" "$folder.new"
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$folder.new" "$apt/etc/preferences.d" "$apt/none"
    signed="signed-by=/usr/share/keyrings/debian-archive-keyring.gpg check-valid-until=no"
    mirror=${DEBIAN:-http://deb.debian.org/debian}
    echo "deb [$signed] $mirror $release main" >"$apt/etc/sources.list"
    [ -n "${DEBIAN:-}" ] ||
        echo "deb [$signed] $mirror-security $release-security main" >>"$apt/etc/sources.list"
    : >"$apt/status"
    cat >"$apt/apt.conf" <<END
Dir::Etc "$apt/etc";
Dir::Etc::main "none";
Dir::Etc::parts "$apt/none";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
Dir::Cache::archives "$apt/archives";
APT::Architecture "$1";
APT::Architectures { "$1"; };
APT::Sandbox::User "root";
Acquire::Languages "none";
END
    (cd "$apt" && export APT_CONFIG="$apt/apt.conf" && apt-get -qq update >&2 &&
        apt-get -qq download "libc6=$libc" >&2) ||
        fail "no libc6 $libc for $1: take the newest of $release in images/build.sh, or name a mirror in DEBIAN"
    dpkg-deb -x "$apt"/libc6_*.deb "$folder.new"
    mkdir -p "$folder.new/var/lib/dpkg/status.d"
    { dpkg-deb -f "$apt"/libc6_*.deb; echo "Status: install ok installed"; } >"$folder.new/var/lib/dpkg/status.d/libc6"
    mv "$folder.new" "$folder"
    rm -rf "$apt"
    echo "$folder"
}

# image NAME USER TITLE CONTENT, the last as `content` below prints it for an architecture.
image() {
    name=$1 user=$2 title=$3
    set -- --output "$out/$name.tar" --name "ghcr.io/gpustow/$name:${TAG:-v$version}" \
        --user "$user" --entrypoint "/$name" --epoch "$SOURCE_DATE_EPOCH" --level $level \
        --label "org.opencontainers.image.title=$name" \
        --label "org.opencontainers.image.description=$title" \
        --label "org.opencontainers.image.version=$version" \
        --label "org.opencontainers.image.revision=$revision" \
        --label "org.opencontainers.image.source=https://github.com/gpustow/gpustow" \
        --label "org.opencontainers.image.licenses=Apache-2.0"
    for arch in $archs; do
        set -- "$@" --arch "$arch"
        for file in $(content "$name" "$arch"); do
            set -- "$@" --file "$file"
        done
    done
    python3 "$here/oci.py" "$@" >&2
}

machine() {
    case $1 in
    amd64) echo x86_64 ;;
    arm64) echo aarch64 ;;
    *) fail "ARCHS: $1 is neither amd64 nor arm64" ;;
    esac
}

# What is in an image: PATH=SOURCE, one a line.
content() {
    machine=$(machine "$2")
    case $profile:$1 in
    dev:*)
        echo "/$1=$target/debug/$1"
        ldd "$target/debug/$1" | sed -n 's,^.*[[:space:]]\(/[^ ]*\) (.*,\1,p' | while read -r library; do
            echo "$library=$(realpath "$library")"
        done
        ;;
    *:gpustow-agent)
        libraries=$(debian "$2")
        echo "/$1=$target/$machine-unknown-linux-gnu/$profile/$1"
        (cd "$libraries" && find . -type f -o -type l | LC_ALL=C sort | while read -r file; do
            case $file in
            */copyright) ;;
            # Character sets of iconv, and notes for people.
            */gconv/* | ./usr/share/*) continue ;;
            esac
            echo "${file#.}=$libraries/${file#./}"
        done)
        ;;
    *) echo "/$1=$target/$machine-unknown-linux-musl/$profile/$1" ;;
    esac
}

images=${*:-gpustow kubectl-gpustow gpustow-agent}
# Word splitting is meant: names of images have no blanks.
# shellcheck disable=SC2086
[ "$profile" != dev ] || GPUSTOW_REVISION=$revision "$root/tests/programs.sh" $images >&2
[ "$profile" = dev ] || tools
for arch in $archs; do
    [ "$profile" != dev ] || break
    machine=$(machine "$arch")
    packages=
    for image in $images; do
        case $image in
        gpustow | kubectl-gpustow) packages="$packages --package $image" ;;
        gpustow-agent) compile "$machine-unknown-linux-gnu.$glibc" --package gpustow-agent ;;
        *) fail "no image $image" ;;
        esac
    done
    # shellcheck disable=SC2086
    [ -z "$packages" ] || compile "$machine-unknown-linux-musl" $packages --bins
done
for image in $images; do
    case $image in
    gpustow) image "$image" 65532:65532 "kube-scheduler extender that packs pods onto physical GPUs by memory" ;;
    kubectl-gpustow) image "$image" 65532:65532 "The page that shows which pod is on which GPU" ;;
    # Root, for the kubelet's socket; see manifests/agent.
    gpustow-agent) image "$image" 0:0 "Reports the GPUs of a node and who uses them" ;;
    esac
done
echo "$out"
