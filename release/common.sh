# What the steps of a release share; they source it. By environment:
#   TAG         the version's tag; without it that of the tree
#   REGISTRY    where images and chart go; ghcr.io/gpustow without it
#   IMAGES      folder of the images' archives; that of `make images` without it
#   COSIGN_KEY  a private key to sign with; without it signatures are keyless, by the runner's identity
# What a release attaches lies in $dist when the steps are done, and what was pushed is in $pushed: a line
# with name and digest for each.

set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
mkdir -p "$target/dist"
dist=$(cd "$target/dist" && pwd)
pushed=$target/pushed
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)
tag=${TAG:-v$version}
registry=${REGISTRY:-ghcr.io/gpustow}
images=${IMAGES:-$target/images/release}
names="gpustow gpustow-agent kubectl-gpustow"
repository=https://github.com/gpustow/gpustow

say() { echo "release: $*" >&2; }
fail() { say "$*"; exit 1; }
tool() { "$root/release/tools/build.sh" "$1"; }

# Only a registry on this machine is spoken to without TLS.
plain_http() {
    case $registry in
    localhost:*) echo "$1" ;;
    esac
}

# digest NAME: of what was pushed under it.
digest() {
    awk -v name="$1" '$1 == name { print $2 }' "$pushed" | grep . || fail "$1 was not pushed: $pushed"
}

# bill NAME ARCH: the bill of materials that lies beside the image's archive.
bill() {
    [ -f "$images/$1.$2.cdx.json" ] || fail "no $images/$1.$2.cdx.json: make images"
    echo "$images/$1.$2.cdx.json"
}
