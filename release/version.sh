#!/bin/sh
# Checks that everything that names the version names the tag's, and says it. With TAG set, CHANGELOG.md
# must have its section too.
. "$(dirname "$0")/common.sh"
cd "$root"

[ "$tag" = "v$version" ] || fail "the tag is $tag, Cargo.toml says $version: set version there to ${tag#v}"
# says FILE LINE: the file has the line, whatever stands before it.
says() { grep -q "^ *$2\$" "$1" || fail "$1: no line '$2'"; }
says manifests/chart/Chart.yaml "version: $version"
says manifests/chart/Chart.yaml "appVersion: $tag"
for file in $(grep -rl 'name: ghcr.io/gpustow/' manifests --include kustomization.yaml); do
    stale=$(grep -A1 'name: ghcr.io/gpustow/' "$file" | grep newTag | grep -v "newTag: $tag\$" || true)
    [ -z "$stale" ] || fail "$file: not $tag:$stale"
done
if [ -n "${TAG:-}" ]; then
    grep -q "^## $version " CHANGELOG.md ||
        fail "CHANGELOG.md: no section '## $version - DATE': name 'Unreleased' so"
    # What the release's page says.
    awk -v head="## $version " 'index($0, "## ") == 1 { inside = index($0, head) == 1; next } inside' \
        CHANGELOG.md >"$target/notes.md"
fi
echo "$tag"
