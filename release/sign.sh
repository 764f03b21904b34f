#!/bin/sh
# Signs what push.sh pushed, by digest, and says of each image what is in it and where it comes from; signs
# the sums of what is attached.
. "$(dirname "$0")/common.sh"
cosign=$(tool cosign)
oras=$(tool oras)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -n "${COSIGN_KEY:-}" ]; then
    # No transparency log: the key is what is trusted.
    set -- --key "$COSIGN_KEY" --tlog-upload=false --use-signing-config=false
else
    set --
fi
set -- "$@" --yes

# https://slsa.dev/spec/v1.0/provenance
revision=$(git -C "$root" rev-parse HEAD)
cat >"$work/provenance.json" <<JSON
{
  "buildDefinition": {
    "buildType": "$repository/blob/$tag/docs/releasing.md",
    "externalParameters": { "repository": "$repository", "tag": "$tag", "target": "make images" },
    "resolvedDependencies": [
      { "uri": "git+$repository@refs/tags/$tag", "digest": { "gitCommit": "$revision" } }
    ]
  },
  "runDetails": {
    "builder": { "id": "${BUILDER:-$repository/blob/$tag/release/dry-run.sh}" },
    "metadata": { "invocationId": "${INVOCATION:-none}" }
  }
}
JSON

while read -r name digest; do
    "$cosign" sign "$@" "$registry/$name@$digest" >&2
done <"$pushed"
for name in $names; do
    digest=$(digest "$name")
    "$cosign" attest "$@" --type slsaprovenance1 --predicate "$work/provenance.json" "$registry/$name@$digest" >&2
    for arch in amd64 arm64; do
        one=$("$oras" resolve --platform "linux/$arch" "$registry/$name@$digest")
        "$cosign" attest "$@" --type cyclonedx --predicate "$(bill "$name" "$arch")" "$registry/$name@$one" >&2
    done
done
"$cosign" sign-blob "$@" --bundle "$dist/checksums.txt.sigstore.json" "$dist/checksums.txt" >/dev/null
say "signed $(wc -l <"$pushed") in $registry, and checksums.txt"
