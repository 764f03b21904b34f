#!/bin/sh
# Writes what each image is made of beside it, in CycloneDX's form, from Cargo.lock: sbom.sh FOLDER, that of
# `build.sh`; ARCHS as there.
set -eu

version=0.5.7
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
out=$1
target=${CARGO_TARGET_DIR:-$root/target}
tool=$target/tools/cargo-cyclonedx-$version
[ -x "$tool/bin/cargo-cyclonedx" ] ||
    cargo install cargo-cyclonedx --version "$version" --locked --debug --root "$tool" >&2
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

# It writes into the sources: a copy of them, in a place whose name it may tell.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$root" && git ls-files -z | xargs -0 tar -c) | tar -x -C "$copy"
for arch in ${ARCHS:-amd64 arm64}; do
    machine=x86_64
    [ "$arch" = amd64 ] || machine=aarch64
    for image in gpustow kubectl-gpustow gpustow-agent; do
        case $image in
        gpustow) folder=. system=musl ;;
        kubectl-gpustow) folder=crates/kubectl-gpustow system=musl ;;
        gpustow-agent) folder=crates/agent system=gnu ;;
        esac
        (cd "$copy/$folder" && "$tool/bin/cargo-cyclonedx" cyclonedx --quiet --format json \
            --target "$machine-unknown-linux-$system" --override-filename sbom >&2)
        python3 - "$copy/$folder/sbom.json" "$out/$image.$arch.cdx.json" "$copy" "$here/build.sh" <<'END'
import json, re, sys

source, to, copy, build = sys.argv[1:]
text = open(source).read().replace(f"file://{copy}", "file:///gpustow").replace(copy, "/gpustow")
bom = json.loads(text)
if "agent" in to:
    pins = dict(re.findall(r"^(release|libc)=(\S+)$", open(build).read(), re.M))
    arch = to.split(".")[-3]
    bom["components"].append({
        "type": "library", "bom-ref": "libc6", "name": "libc6", "version": pins["libc"],
        "purl": f"pkg:deb/debian/libc6@{pins['libc'].replace('+', '%2B')}?arch={arch}&distro={pins['release']}",
    })
json.dump(bom, open(to, "w"), indent=1, sort_keys=True)
END
    done
done
